#include "model_ops.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

namespace tc {

static size_t whole(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
static bool quantised(const Matrix& w) { return w.format == Q8_0 || w.format == Q4_0 || w.format == SIGNS; }  // x is, then

// Work handed out in pieces that shrink: a thread whose core is busy elsewhere simply takes fewer, and the long first
// pieces let prefetching run on. `unit`: pieces are multiples of it.
class Pieces {
public:
    Pieces(size_t n, size_t unit, int threads) : n_(n), unit_(unit), threads_(size_t(threads)) {}
    bool take(size_t* begin, size_t* end) {
        size_t at = next_.load(std::memory_order_relaxed), size;
        do {
            if (at >= n_) return false;
            size = std::max<size_t>(1, (n_ - at) / (threads_ == 1 ? 1 : 2 * threads_) / unit_) * unit_;
        } while (!next_.compare_exchange_weak(at, at + size, std::memory_order_relaxed));
        *begin = at, *end = std::min(n_, at + size);
        return true;
    }

private:
    const size_t n_, unit_, threads_;
    std::atomic<size_t> next_{0};
};

// Columns [begin, end) of thread t when `cols` are split in units of 32.
static void column_range(size_t cols, int threads, int t, size_t* begin, size_t* end) {
    const size_t units = (cols + 31) / 32;
    *begin = std::min(cols, units * size_t(t) / size_t(threads) * 32);
    *end = std::min(cols, units * size_t(t + 1) / size_t(threads) * 32);
}

// f(t) for the tokens of one thread: all of every threads'th tile.
template <class Fn>
static void own_tokens(size_t tokens, size_t tile, int thread, int threads, Fn f) {
    for (size_t t0 = size_t(thread) * tile; t0 < tokens; t0 += size_t(threads) * tile)
        for (size_t t = t0; t < std::min(tokens, t0 + tile); t++) f(t);
}

// f(t) for every token, over the threads; one token stays here, where a hand-off would cost more than the work.
template <class Fn>
static void each_token(Pool& pool, size_t tokens, size_t tile, Fn f) {
    auto some = [&](int thread) { own_tokens(tokens, tile, thread, pool.threads(), f); };
    if (tokens > 1) pool.run(some);
    else if (tokens) f(0);
}

uint8_t* Context::panels(size_t bytes) {
    panel_stride_ = (bytes + 63) / 64 * 64;
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(grown(panels_, panel_stride_ * size_t(pool.threads()) + 64)) + 63) & ~uintptr_t(63));
}

void Context::embed(const Matrix& table, const int32_t* ids, size_t tokens, float* out) {
    each_token(pool, tokens, 1, [&](size_t t) { k.decode_row(table, size_t(ids[t]), out + t * table.cols); });
}

void Context::norm(const Norm& norm, const float* x, size_t tokens, size_t dim, float* out) {
    each_token(pool, tokens, 1, [&](size_t t) {
        k.norm(x + t * dim, norm.weight, norm.bias, norm.eps, norm.layer, dim, out + t * dim);
    });
}

// norm(x) in the form w's kernels take, made once for all rows of w.
Input Context::input(const Matrix& w, const Norm& norm, const float* x, size_t tokens, std::vector<uint8_t>& buffer) {
    const size_t cols = w.cols;
    const bool lanes = tokens > kFewTokens, copy = quantised(w) || lanes;
    const size_t bytes = copy ? k.input_bytes(w.format, cols) : 4 * cols, tile = lanes ? k.tile_tokens(w.format) : 1;
    uint8_t* to = copy ? grown(buffer, bytes * whole(tokens, tile)) : nullptr;
    float* normed = norm.weight ? grown(normed_, tokens * cols) : nullptr;
    each_token(pool, copy || normed ? tokens : 0, tile, [&](size_t t) {
        const float* from = x + t * cols;
        if (normed) {
            k.norm(from, norm.weight, norm.bias, norm.eps, norm.layer, cols, normed + t * cols);
            from = normed + t * cols;
        }
        if (copy) k.quantize(w.format, from, cols, 0, cols, lanes, bytes, t, to);
    });
    return {copy ? to : reinterpret_cast<const uint8_t*>(normed ? normed : x), bytes, tokens, lanes};
}

void Context::linear(const Linear& w, const Input& in, float* out, bool add) {
    const Matrix& m = w.weight;
    uint8_t* scratch = in.lanes ? panels(k.panel_bytes(m.format, m.cols, in.tokens)) : nullptr;
    Pieces pieces(m.rows, in.lanes ? size_t(k.panel_rows) : 16, pool.threads());
    auto region = [&](int thread) {
        for (size_t begin, end; pieces.take(&begin, &end);)
            k.matmul(m, nullptr, begin, end, in, w.bias, add, out + begin, m.rows, scratch + size_t(thread) * panel_stride_);
    };
    pool.run(region);
}

void Context::matmul(const Linear& w, const Norm& norm, const float* x, size_t tokens, float* out, bool add) {
    linear(w, input(w.weight, norm, x, tokens, input_), out, add);
}

// ---- attention

// Consecutive tokens of one sequence, whose queries of one group of heads are worked on together.
struct Context::Queries {
    size_t first, tokens, begin, end;  // tokens of the batch; the positions any of them attends to
};
static constexpr size_t kQueryRows = 16;  // queries at a time: their scores of a span are 32 KiB

std::vector<Context::Queries> Context::queries(const AttentionArgs& a) const {
    const size_t most = std::max<size_t>(1, kQueryRows / (a.heads.n / a.heads.n_kv));
    std::vector<Queries> all;
    for (size_t t = 0; t < a.step.tokens; t++) {
        const size_t end = size_t(a.step.positions[t]) + 1, begin = a.heads.window && end > a.heads.window ? end - a.heads.window : 0;
        if (all.empty() || all.back().tokens == most || a.step.sequence[t] != a.step.sequence[t - 1]) all.push_back({t, 0, begin, end});
        Queries& q = all.back();
        q.tokens++;
        q.begin = std::min(q.begin, begin), q.end = std::max(q.end, end);
    }
    return all;
}

// Joins what the queries find at positions [begin, end) into `into`: [tokens * group][head_dim + 2].
void Context::attend(const AttentionArgs& a, const Queries& q, size_t head, size_t begin, size_t end, float* scores,
                     float* into) {
    const size_t hd = a.heads.dim, group = a.heads.n / a.heads.n_kv, width = (a.heads.n + 2 * a.heads.n_kv) * hd;
    const size_t rows = q.tokens * group, at = head * a.step.block * hd;
    Span span = {a.k + at, a.v + at, a.step.table + size_t(a.step.sequence[q.first]) * a.step.table_width,
                 a.heads.n_kv * a.step.block * hd, a.step.block, hd, 0, 0, a.heads.scale, a.heads.softcap};
    float* partial = scores + 4 * kSpan;
    for (size_t r = 0; r < rows; r++) into[r * (hd + 2) + hd + 1] = 0;
    for (size_t s = begin / kSpan * kSpan; s < end; s += kSpan) {
        span.begin = s, span.end = std::min(s + kSpan, end);
        for (size_t r0 = 0; r0 < rows; r0 += kQueryRows) {  // more than one turn only for very large groups
            const size_t n = std::min(kQueryRows, rows - r0);
            const float* query[kQueryRows];
            int32_t first[kQueryRows], last[kQueryRows];
            for (size_t r = 0; r < n; r++) {
                const size_t t = q.first + (r0 + r) / group;
                query[r] = a.qkv + t * width + (head * group + (r0 + r) % group) * hd;
                last[r] = a.step.positions[t] + 1;
                first[r] = a.heads.window && last[r] > int32_t(a.heads.window) ? last[r] - int32_t(a.heads.window) : 0;
            }
            k.attend(span, query, first, last, n, scores, partial);
            for (size_t r = 0; r < n; r++) k.merge(into + (r0 + r) * (hd + 2), partial + r * (hd + 2), hd);
        }
    }
}

void Context::attention(const AttentionArgs& a) {
    const size_t hd = a.heads.dim, width = (a.heads.n + 2 * a.heads.n_kv) * hd, group = a.heads.n / a.heads.n_kv;
    const size_t page_stride = a.heads.n_kv * a.step.block * hd, threads = size_t(pool.threads());
    const std::vector<Queries> all = queries(a);
    const size_t tasks = all.size() * a.heads.n_kv;
    size_t rows = 0, spans = 1;  // few tasks: each span of positions is one of its own
    for (const Queries& q : all) rows = std::max(rows, q.tokens * group);
    if (tasks < 4 * threads)
        for (const Queries& q : all) spans = std::max(spans, (q.end + kSpan - 1) / kSpan - q.begin / kSpan);
    const size_t stride = rows * (hd + 2), own = 4 * kSpan + kQueryRows * (hd + 2) + hd;
    float* partial = grown(partial_, (spans > 1 ? tasks * spans : threads) * stride);
    float* scores = grown(scores_, threads * own);
    std::atomic<size_t> next{0}, next_sum{0};

    auto store = [&](size_t t, uint16_t* half) {  // rotate, then write this token's keys and values into its page
        float *q = a.qkv + t * width, *key = q + a.heads.n * hd, *value = key + a.heads.n_kv * hd;
        const size_t rotary = a.step.rotary;
        for (size_t h = 0; h < a.heads.n + a.heads.n_kv; h++) {
            const float* weight = h < a.heads.n ? a.heads.q_norm : a.heads.k_norm;
            if (weight) k.norm(q + h * hd, weight, nullptr, a.heads.norm_eps, false, hd, q + h * hd);
            if (rotary) k.rope(q + h * hd, a.step.cos + t * (rotary / 2), a.step.sin + t * (rotary / 2), rotary);
        }
        const size_t p = size_t(a.step.positions[t]);
        const size_t page = size_t(a.step.table[size_t(a.step.sequence[t]) * a.step.table_width + p / a.step.block]);
        for (size_t h = 0; h < a.heads.n_kv; h++) {
            const size_t at = page * page_stride + h * a.step.block * hd;
            k.to_f16(key + h * hd, hd, half);
            for (size_t i = 0; i < hd; i++) a.k[at + i * a.step.block + p % a.step.block] = half[i];
            k.to_f16(value + h * hd, hd, a.v + at + p % a.step.block * hd);
        }
    };
    auto finish = [&](const Queries& q, size_t head, const float* from) {
        for (size_t r = 0; r < q.tokens * group; r++, from += hd + 2) {
            float* out = a.out + (q.first + r / group) * a.heads.n * hd + (head * group + r % group) * hd;
            const float inverse = 1.0f / from[hd + 1];
            for (size_t i = 0; i < hd; i++) out[i] = from[i] * inverse;
        }
    };
    auto region = [&](int thread) {
        float* mine = scores + size_t(thread) * own;
        for (size_t t = size_t(thread); t < a.step.tokens; t += threads) store(t, reinterpret_cast<uint16_t*>(mine));
        pool.barrier();
        for (size_t task; (task = next.fetch_add(1)) < tasks * spans;) {
            const size_t i = all.size() - 1 - task / spans / a.heads.n_kv, head = task / spans % a.heads.n_kv;
            const Queries& q = all[i];  // the last, and longest, first
            const size_t s = q.begin / kSpan + task % spans;
            float* into = partial + (spans > 1 ? task : size_t(thread)) * stride;
            if (spans == 1) attend(a, q, head, q.begin, q.end, mine, into), finish(q, head, into);
            else attend(a, q, head, std::max(q.begin, s * kSpan), std::min(q.end, (s + 1) * kSpan), mine, into);
        }
        if (spans == 1) return;
        pool.barrier();
        for (size_t task; (task = next_sum.fetch_add(1)) < tasks;) {
            const Queries& q = all[all.size() - 1 - task / a.heads.n_kv];
            float* into = partial + task * spans * stride;
            for (size_t s = 1; s < spans; s++)
                for (size_t r = 0; r < q.tokens * group; r++)
                    k.merge(into + r * (hd + 2), into + s * stride + r * (hd + 2), hd);
            finish(q, task % a.heads.n_kv, into);
        }
    };
    pool.run(region);
}

void Context::attention_add(float* x, const float* h, const Attention& layer, const Step& step, uint16_t* k, uint16_t* v) {
    float* qkv = grown(qkv_, step.tokens * layer.qkv.weight.rows);
    float* out = grown(attended_, step.tokens * layer.out.weight.cols);
    matmul(layer.qkv, layer.norm, h, step.tokens, qkv, false);
    attention({layer.heads, step, k, v, qkv, out});
    const bool plain = layer.join.plain();
    const size_t dim = layer.out.weight.rows;
    float* y = plain ? x : grown(branch_, step.tokens * dim);
    matmul(layer.out, layer.sub_norm, out, step.tokens, y, plain);
    if (!plain) join(layer.join, y, step.tokens, dim, x);
}

void Context::join(const Join& how, float* y, size_t tokens, size_t dim, float* x) {
    each_token(pool, tokens, 1, [&](size_t t) {
        float *from = y + t * dim, *to = x + t * dim;
        if (how.norm.weight) k.norm(from, how.norm.weight, how.norm.bias, how.norm.eps, how.norm.layer, dim, from);
        for (size_t i = 0; i < dim; i++) to[i] += how.scale * from[i];
    });
}

// ---- FFN

FFNCounts Context::ffn_add(const FFNArgs& a) {
    constexpr size_t kBlock = 256;  // tokens per pass: bounds the scratch
    FFNCounts total = {};
    for (size_t t = 0; t < a.tokens; t += kBlock) {
        FFNArgs part = a;
        part.x = a.x + t * a.dim, part.h = a.h + t * a.dim, part.tokens = std::min(kBlock, a.tokens - t);
        if (a.record) part.record = a.record + t * a.ffn.gate.weight.rows;
        if (a.sparsity == PREDICT && a.tokens > kFewTokens) part.sparsity = EXACT;
        const bool plain = a.ffn.join.plain();
        if (!plain) {
            part.x = grown(branch_, part.tokens * a.dim);
            std::fill(part.x, part.x + part.tokens * a.dim, 0.0f);
        }
        const FFNCounts c = a.ffn.bundles ? bundle_ffn(part) : dense_ffn(part);
        if (!plain) join(a.ffn.join, part.x, part.tokens, a.dim, a.x + t * a.dim);
        total.active += c.active, total.rows += c.rows, total.rows_dense += c.rows_dense;
        total.gates += c.gates, total.predictor_bytes += c.predictor_bytes;
    }
    return total;
}

// Rows of gate and up, then, when all are done, rows of down.
FFNCounts Context::dense_ffn(const FFNArgs& a) {
    const size_t n = a.ffn.gate.weight.rows, tokens = a.tokens, threads = size_t(pool.threads());
    const Format f = a.ffn.down.format;
    const Input in = input(a.ffn.gate.weight, a.ffn.norm, a.h, tokens, input_);
    const bool copy = quantised(a.ffn.down) || in.lanes;
    const size_t bytes = copy ? k.input_bytes(f, n) : 4 * n, tile = in.lanes ? k.tile_tokens(f) : 1;
    float* gate = grown(gate_, tokens * n);
    float* up = a.ffn.up.data ? grown(hidden_, tokens * n) : nullptr;
    uint8_t* hidden = copy ? grown(hidden_input_, bytes * whole(tokens, tile)) : reinterpret_cast<uint8_t*>(gate);
    uint8_t* scratch = panels(in.lanes ? std::max(k.panel_bytes(a.ffn.gate.weight.format, a.dim, tokens), k.panel_bytes(f, n, tokens)) : 0);
    const size_t unit = in.lanes ? size_t(k.panel_rows) : 32;  // 32: a block of the next input
    Pieces neurons(n, unit, int(threads)), rows(a.dim, in.lanes ? unit : 16, int(threads));
    std::atomic<size_t> active{0};
    const bool whole_rows = in.lanes || a.ffn.sub_norm.weight;  // down's input is made when a token's row is complete

    auto region = [&](int thread) {
        uint8_t* mine = scratch + size_t(thread) * panel_stride_;
        size_t live = 0;
        for (size_t begin, end; neurons.take(&begin, &end);) {
            k.matmul(a.ffn.gate.weight, nullptr, begin, end, in, a.ffn.gate.bias, false, gate + begin, n, mine);
            if (up) k.matmul(a.ffn.up, nullptr, begin, end, in, nullptr, false, up + begin, n, mine);
            for (size_t t = 0; t < tokens; t++) {
                float* h = gate + t * n;
                k.activate(h + begin, end - begin, a.ffn.activation, a.ffn.threshold);
                for (size_t i = begin; i < end && up; i++) {
                    const float u = up[t * n + i];
                    h[i] = a.ffn.up_relu && u <= 0 ? 0.0f : h[i] * u;
                }
                for (size_t i = begin; i < end; i++) live += h[i] != 0;
                if (a.record) std::copy(h + begin, h + end, a.record + t * n + begin);
                if (!whole_rows && copy) k.quantize(f, h, n, begin, end, false, bytes, t, hidden);
            }
        }
        active.fetch_add(live, std::memory_order_relaxed);
        pool.barrier();
        if (whole_rows) {
            own_tokens(tokens, tile, thread, int(threads), [&](size_t t) {
                const Norm& sub = a.ffn.sub_norm;
                if (sub.weight) k.norm(gate + t * n, sub.weight, sub.bias, sub.eps, sub.layer, n, gate + t * n);
                if (copy) k.quantize(f, gate + t * n, n, 0, n, in.lanes, bytes, t, hidden);
            });
            pool.barrier();
        }
        const Input h = {hidden, bytes, tokens, in.lanes};
        for (size_t begin, end; rows.take(&begin, &end);)
            k.matmul(a.ffn.down, nullptr, begin, end, h, a.ffn.down_bias, true, a.x + begin, a.dim, mine);
    };
    pool.run(region);
    const size_t all = n * (up ? 2 : 1);
    return {active.load(), all, all, n, 0};
}

// Neurons are worked on, and summed, in chunks of kChunk: sum_c (sum_{i in c} h_i d_i), both in ascending order.
// That order is fixed by the layer alone, so threads can take chunks as they come and the bits stay the same.
// A smaller chunk balances better; a larger one spends less on its partial sum (dim floats, in the L2 cache).
static constexpr size_t kChunk = 256;

// The positions of [begin, end) that are marked, ascending. Eight marks at a time: most are 0.
static size_t marked(const uint8_t* marks, size_t begin, size_t end, int32_t* out) {
    size_t found = 0;
    for (size_t i = begin; i < end; i += 8) {
        uint64_t some;
        memcpy(&some, marks + i, 8);
        if (!some) continue;
        for (size_t k = i; k < std::min(end, i + 8); k++) {
            out[found] = int32_t(k);
            found += marks[k] != 0;
        }
    }
    return found;
}

// A predictor at work on some tokens. All of a layer's codes are there before the first chunk asks for scores.
struct Context::Guess {
    const Predictor& p;
    Input x, code;  // what `first` and `second` take
    float* values;  // [tokens, rank], code as floats
    size_t rank() const { return p.first.data ? p.first.rows : 0; }
    size_t bytes() const {
        return rank() * p.first.stride + (p.second.rows - p.hot) * (p.second.stride + sizeof(float));
    }
};

Context::Guess Context::guess(const FFNArgs& a, const Input& in) {
    const Predictor& p = a.ffn.predictor;
    const Matrix& taker = p.first.data ? p.first : p.second;
    const float* x = a.ffn.norm.weight ? normed_.data() : a.h;
    const Input own = taker.format == a.ffn.gate.weight.format ? in : input(taker, {}, x, a.tokens, guess_input_);
    if (!p.first.data) return {p, own, own, nullptr};
    float* values = grown(code_, a.tokens * p.first.rows);
    const bool copy = quantised(p.second);
    const size_t bytes = copy ? k.input_bytes(p.second.format, p.first.rows) : 4 * p.first.rows;
    const uint8_t* code = copy ? grown(code_input_, bytes * a.tokens) : reinterpret_cast<uint8_t*>(values);
    return {p, own, {code, bytes, a.tokens, false}, values};
}

// Inside a region, by every thread: f(first . x), as `second` takes it.
void Context::encode(const Guess& g, Pieces& rows) {
    const size_t rank = g.rank();
    for (size_t begin, end; rows.take(&begin, &end);) {
        k.matmul(g.p.first, nullptr, begin, end, g.x, nullptr, false, g.values + begin, rank, nullptr);
        for (size_t t = 0; t < g.x.tokens; t++) {
            if (g.p.relu) k.activate(g.values + t * rank + begin, end - begin, RELU, 0);
            if (quantised(g.p.second))
                k.quantize(g.p.second.format, g.values + t * rank, rank, begin, end, false, g.code.row_bytes, t, code_input_.data());
        }
    }
    pool.barrier();
}

// Gate first (design 2.3): all gate rows of the chunk, then up and down rows only of the neurons some token needs.
// Few tokens: each chunk does everything and leaves a partial sum per token; many: the partial sums would outgrow the
// caches, and threads divide the columns of the sum instead.
FFNCounts Context::bundle_ffn(const FFNArgs& a) {
    const size_t n = a.ffn.gate.weight.rows, dim = a.dim, tokens = a.tokens, chunks = (n + kChunk - 1) / kChunk;
    const int threads = pool.threads();
    const bool skip = a.sparsity != OFF && (a.ffn.activation == RELU || a.ffn.activation == FATRELU || a.ffn.activation == RELU2);
    const bool normed = a.ffn.sub_norm.weight != nullptr;  // then all activations are known before down begins
    const bool few = tokens <= kFewTokens && !normed && !a.record;  // the kernel of few tokens keeps h to itself
    const Input in = input(a.ffn.gate.weight, a.ffn.norm, a.h, tokens, input_);
    std::optional<Guess> guessed;
    if (a.sparsity == PREDICT && skip && a.ffn.predictor.second.data) guessed.emplace(guess(a, in));
    Pieces code_rows(guessed ? guessed->rank() : 0, 32, threads);

    float* gate = grown(gate_, tokens * n);      // [tokens, n] activations
    float* hidden = grown(hidden_, tokens * n);  // [tokens, n], of chunk c: counts[c] values from c * kChunk on
    int32_t* ids = grown(ids_, n);               // likewise: the needed neurons, ascending
    uint8_t* marks = grown(marks_, n + 8);       // which neurons go into such a list
    size_t* counts = grown(counts_, chunks);
    // few: [chunks, tokens, dim]; many: one tile per thread, [threads, tokens, kTileColumns]
    float* partial = grown(partial_, few ? chunks * tokens * dim : size_t(threads) * tokens * kTileColumns);
    float* sums = grown(sums_, size_t(threads) * tokens * kTileColumns);
    float* tiles = grown(tiles_, size_t(threads) * kTileRows * kTileColumns);
    float* factors = grown(factors_, size_t(threads) * 4 * ((dim + 31) / 32));
    uint8_t* scratch = panels(!in.lanes ? 0 : k.panel_bytes(a.ffn.gate.weight.format, dim, tokens));
    float* squares = grown(scales_, (chunks + 1) * tokens);  // [chunks, tokens], then the norm's factor of each token
    float* scale = squares + chunks * tokens;
    std::atomic<size_t> next{0}, rows{0}, active{0}, gates{0};
    Pieces pieces(chunks, 1, threads);  // few: of several chunks, so that each row in it knows what memory to ask for next

    auto predicted_neurons = [&](size_t begin, size_t end) {  // of [begin, end), into ids: those to compute the gates of
        const Predictor& p = guessed->p;
        const size_t cold = std::clamp(p.hot, begin, end);
        size_t found = 0;
        for (size_t i = begin; i < cold; i++) ids[begin + found++] = int32_t(i);
        if (cold < end) k.matmul(p.second, nullptr, cold, end, guessed->code, nullptr, false, gate + cold, n, nullptr);
        std::fill(marks + cold, marks + end, uint8_t(0));
        for (size_t t = 0; t < tokens; t++)  // a NaN is marked: it must show
            for (size_t i = cold; i < end; i++) marks[i] |= !(gate[t * n + i] < p.threshold[i]);
        return found + marked(marks, cold, end, ids + begin + found);
    };
    // Of chunks [first, last): the neurons some token needs, into ids from first * kChunk on, and counts of each chunk.
    // `h`: the values of the listed candidates, one after the other, which go to their places in gate.
    auto list_needed = [&](size_t first, size_t last, size_t candidates, const float* h) {
        std::fill(counts + first, counts + last, size_t(0));
        size_t at = first * kChunk;
        for (size_t i = first * kChunk; i < first * kChunk + candidates; i++) {
            const int32_t id = ids[i];
            bool needed = false;
            for (size_t t = 0; t < tokens; t++) {
                needed |= h[t * n + i] != 0;
                gate[t * n + size_t(id)] = h[t * n + i];
            }
            ids[at] = id;
            at += needed;
            counts[size_t(id) / kChunk] += needed;
        }
        return at - first * kChunk;
    };
    auto needed_neurons = [&](size_t first, size_t last, int thread) {
        const size_t begin = first * kChunk, end = std::min(n, last * kChunk);
        const size_t some = guessed ? predicted_neurons(begin, end) : end - begin;
        float* h = guessed ? hidden : gate;
        k.matmul(a.ffn.gate.weight, guessed ? ids : nullptr, begin, begin + some, in, a.ffn.gate.bias, false, h + begin, n,
                 scratch + size_t(thread) * panel_stride_);
        for (size_t t = 0; t < tokens; t++) k.activate(h + t * n + begin, some, a.ffn.activation, a.ffn.threshold);
        gates.fetch_add(some, std::memory_order_relaxed);
        if (guessed) return list_needed(first, last, some, h);
        std::fill(marks + begin, marks + end, uint8_t(!skip));
        for (size_t t = 0; skip && t < tokens; t++)
            for (size_t i = begin; i < end; i++) marks[i] |= gate[t * n + i] != 0;
        size_t found = 0;
        for (size_t c = first; c < last; c++) {
            counts[c] = marked(marks, c * kChunk, std::min(n, (c + 1) * kChunk), ids + begin + found);
            found += counts[c];
        }
        return found;
    };
    auto hidden_values = [&](size_t begin, size_t end, int thread) {  // h = act(gate) * up, for list entries [begin, end)
        size_t live = 0;
        if (a.ffn.up.data)
            k.matmul(a.ffn.up, ids, begin, end, in, nullptr, false, hidden + begin, n, scratch + size_t(thread) * panel_stride_);
        for (size_t t = 0; t < tokens; t++) {
            for (size_t i = begin; i < end; i++) {
                const float g = gate[t * n + size_t(ids[i])];
                float& h = hidden[t * n + i];
                h = !a.ffn.up.data ? g : a.ffn.up_relu && h <= 0 ? 0.0f : g * h;
                live += h != 0;
                if (a.record) a.record[t * n + size_t(ids[i])] = h;
            }
        }
        active.fetch_add(live, std::memory_order_relaxed);
    };
    // dReLU kills half of what gate leaves: up first, and down rows only of what then lives (a third of the bytes).
    auto surviving_up = [&](size_t first, size_t last, size_t needed, int thread) {
        hidden_values(first * kChunk, first * kChunk + needed, thread);
        return list_needed(first, last, needed, hidden);
    };
    // An RMS norm is a factor a token, which the sum over neurons can be given at its end, and a weight a neuron. Squares
    // are added in the order of neurons within a chunk: skipped ones would have added zero.
    auto weigh = [&](size_t c) {
        for (size_t t = 0; t < tokens; t++) {
            float sum = 0;
            for (size_t i = c * kChunk; i < c * kChunk + counts[c]; i++) {
                float& h = hidden[t * n + i];
                sum += h * h;
                h *= a.ffn.sub_norm.weight[ids[i]];
            }
            squares[c * tokens + t] = sum;
        }
    };
    auto factors_of_tokens = [&] {
        for (size_t t = 0; t < tokens; t++) {
            float sum = 0;
            for (size_t c = 0; c < chunks; c++) sum += squares[c * tokens + t];
            scale[t] = 1.0f / sqrtf(sum / float(n) + a.ffn.sub_norm.eps);
        }
    };
    auto few_tokens = [&](int thread) {
        if (guessed && guessed->rank()) encode(*guessed, code_rows);
        for (size_t first, last; pieces.take(&first, &last);) {
            size_t listed = needed_neurons(first, last, thread), ups = a.ffn.up.data ? listed : 0;
            const bool apart = skip && a.ffn.up_relu && ups;
            if (apart) listed = surviving_up(first, last, listed, thread);
            rows.fetch_add(ups + listed, std::memory_order_relaxed);
            const int32_t* list = ids + first * kChunk;
            for (size_t c = first; c < last; list += counts[c], listed -= counts[c], c++) {
                if (!counts[c] && c) continue;
                float* y = partial + c * tokens * dim;
                std::fill(y, y + tokens * dim, 0.0f);
                const Bundles w = {apart ? Matrix{} : a.ffn.up, a.ffn.down, list, counts[c], listed, a.ffn.up_relu};
                const size_t live = k.bundles(w, in, gate, n, y, factors + size_t(thread) * 4 * ((dim + 31) / 32));
                if (!apart) active.fetch_add(live, std::memory_order_relaxed);
            }
        }
        pool.barrier();
        size_t begin, end;
        column_range(dim, threads, thread, &begin, &end);
        for (size_t t = 0; t < tokens; t++) {
            float *x = a.x + t * dim, *sum = partial + t * dim;  // chunk 0's partial becomes the sum
            for (size_t c = 1; c < chunks; c++) {
                const float* y = partial + (c * tokens + t) * dim;
                for (size_t i = begin; counts[c] && i < end; i++) sum[i] += y[i];
            }
            for (size_t i = begin; i < end; i++) x[i] += sum[i] + (a.ffn.down_bias ? a.ffn.down_bias[i] : 0.0f);
        }
    };
    auto many_tokens = [&](int thread) {
        if (guessed && guessed->rank()) encode(*guessed, code_rows);
        for (size_t c; (c = next.fetch_add(1)) < chunks;) {
            const size_t begin = c * kChunk, end = std::min(n, begin + kChunk);
            for (size_t t = 0; a.record && t < tokens; t++) std::fill(a.record + t * n + begin, a.record + t * n + end, 0.0f);
            needed_neurons(c, c + 1, thread);
            hidden_values(begin, begin + counts[c], thread);
            rows.fetch_add(counts[c] * (a.ffn.up.data ? 2 : 1), std::memory_order_relaxed);
            if (normed) weigh(c);
        }
        pool.barrier();
        if (normed) {
            if (thread == 0) factors_of_tokens();
            pool.barrier();
        }
        float* y = partial + size_t(thread) * tokens * kTileColumns;
        float* sum = sums + size_t(thread) * tokens * kTileColumns;
        float* tile = tiles + size_t(thread) * kTileRows * kTileColumns;
        size_t begin, end;
        column_range(dim, threads, thread, &begin, &end);
        for (size_t c0 = begin; c0 < end; c0 += kTileColumns) {
            const size_t c1 = std::min(end, c0 + kTileColumns), width = c1 - c0;
            std::fill(sum, sum + tokens * kTileColumns, 0.0f);
            for (size_t c = 0; c < chunks; c++) {
                if (!counts[c]) continue;
                std::fill(y, y + tokens * kTileColumns, 0.0f);
                k.accumulate(a.ffn.down, ids + c * kChunk, counts[c], hidden + c * kChunk, n, tokens, c0, c1, y,
                             kTileColumns, tile);
                for (size_t i = 0; i < tokens * kTileColumns; i++) sum[i] += y[i];
            }
            for (size_t t = 0; t < tokens; t++)
                for (size_t i = 0; i < width; i++) {
                    const float y = sum[t * kTileColumns + i] * (normed ? scale[t] : 1.0f);
                    a.x[t * dim + c0 + i] += y + (a.ffn.down_bias ? a.ffn.down_bias[c0 + i] : 0.0f);
                }
        }
    };
    if (few) pool.run(few_tokens);
    else pool.run(many_tokens);
    return {active.load(), rows.load(), n * (a.ffn.up.data ? 2 : 1), gates.load(), guessed ? guessed->bytes() : 0};
}

}  // namespace tc
