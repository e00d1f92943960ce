#include "bundles.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace tc {

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

Context::Guess Context::guess(const FFNArgs& a, const Input& in) {
    const Predictor& p = a.ffn.predictor;
    if (a.named) return {p, in, in, nullptr, a.named};
    const Matrix& taker = p.first.data ? p.first : p.second;
    const float* x = a.ffn.norm.weight ? normed_.data() : a.h;
    const bool shared = same_input(taker.format, a.ffn.gate.weight.format);
    const Input own = shared ? in : input(taker, {}, x, a.tokens, guess_input_);
    if (!p.first.data) return {p, own, own, nullptr};
    float* values = grown(code_, a.tokens * p.first.rows);
    const bool copy = quantised(p.second);
    const size_t bytes = copy ? k.input_bytes(p.second.format, p.first.rows) : 4 * p.first.rows;
    const uint8_t* code = copy ? grown(code_input_, bytes * a.tokens) : reinterpret_cast<uint8_t*>(values);
    return {p, own, {code, bytes, a.tokens, false}, values};
}

static bool skips(const FFNArgs& a) {
    return a.sparsity != OFF &&
           (a.ffn.activation == RELU || a.ffn.activation == FATRELU || a.ffn.activation == RELU2);
}
static bool is_guessed(const FFNArgs& a) {
    return a.sparsity == PREDICT && skips(a) && (a.named || a.ffn.predictor.second.data);
}

Context::Walk::Walk(Context& context, const FFNArgs& args, size_t cell_size, size_t which, size_t of,
                    const GateUpInputs* given)
    : ctx(context),
      k(context.k),
      a(args),
      n(args.ffn.neurons()),
      dim(args.dim),
      tokens(args.tokens),
      cell(cell_size),
      cells((n + cell - 1) / cell),
      chunks((n + kChunk - 1) / kChunk),
      threads(context.pool.threads()),
      skip(skips(args)),
      normed(args.ffn.sub_norm.weight != nullptr),
      few(tokens <= kFewTokens && !normed && !a.record),
      in(given ? *given : context.gate_up_inputs(args)),
      guessed(is_guessed(args) ? std::optional<Guess>(context.guess(args, in.gate)) : std::nullopt),
      code_rows(guessed ? guessed->rank() : 0, 32, threads) {
    gate = grown(ctx.gate_, of * tokens * n) + which * tokens * n;
    hidden = grown(ctx.hidden_, of * tokens * n) + which * tokens * n;
    ids = rows = grown(ctx.ids_, of * n) + which * n;
    marks = grown(ctx.marks_, of * (n + 8)) + which * (n + 8);
    counts = grown(ctx.counts_, of * cells) + which * cells;
    const size_t sums = few ? chunks * tokens * dim : size_t(threads) * tokens * kTileColumns;
    partial = grown(ctx.partial_, of * sums) + which * sums;
    tiles = grown(ctx.tiles_, size_t(threads) * kTileRows * kTileColumns);
    factors = grown(ctx.factors_, size_t(threads) * bundle_factors(dim));
    scratch = ctx.panels(ctx.gate_up_panel_bytes(a, in));
    squares = grown(ctx.scales_, (cells + 1) * tokens);
    scale = squares + cells * tokens;
}

// f(first . x), as `second` takes it.
void Context::Walk::encode() {
    if (!guessed || !guessed->rank()) return;
    const Guess& g = *guessed;
    const size_t rank = g.rank();
    for (size_t begin, end; code_rows.take(&begin, &end);) {
        k.matmul(g.p.first, nullptr, begin, end, g.x, nullptr, false, g.values + begin, rank, nullptr,
                 nullptr);
        for (size_t t = 0; t < tokens; t++) {
            if (g.p.relu) k.activate(g.values + t * rank + begin, end - begin, {RELU, 0, false, 1, 0});
            if (quantised(g.p.second))
                k.quantize(g.p.second.format, g.values + t * rank + begin, rank, begin, end, false,
                           g.code.row_bytes, t, ctx.code_input_.data());
        }
    }
    ctx.pool.barrier();
}

// Of [begin, end), into ids: those to compute the gates of.
size_t Context::Walk::predicted_neurons(size_t begin, size_t end) {
    const Predictor& p = guessed->p;
    if (guessed->named) {
        for (size_t i = begin; i < end; i++) marks[i] = 0;
        for (size_t t = 0; t < tokens; t++) {
            const uint8_t* bits = guessed->named + t * ((n + 7) / 8);
            for (size_t i = begin; i < end; i++) marks[i] |= bits[i / 8] >> (i % 8) & 1;
        }
        return marked(marks, begin, end, ids + begin);
    }
    const size_t cold = std::clamp(p.hot, begin, end);
    size_t found = 0;
    for (size_t i = begin; i < cold; i++) ids[begin + found++] = int32_t(i);
    if (cold < end)
        k.matmul(p.second, nullptr, cold, end, guessed->code, nullptr, false, gate + cold, n, nullptr,
                 nullptr);
    uint8_t* some = marks;  // locals: a store of a byte could change any member
    std::fill(some + cold, some + end, uint8_t(0));
    for (size_t t = 0; t < tokens; t++) {  // a NaN is marked: it must show
        const float *score = gate + t * n, *threshold = p.threshold;
        for (size_t i = cold; i < end; i++) some[i] |= !(score[i] < threshold[i]);
    }
    return found + marked(marks, cold, end, ids + begin + found);
}

void Context::Walk::activations(size_t begin, size_t end, const int32_t* gate_rows, int thread) {
    float* h = guessed ? hidden : gate;
    const bool elsewhere = gate_rows && gate_rows != ids;  // rows are no neurons: their biases are added here
    k.matmul(a.ffn.gate.weight, gate_rows, begin, end, in.gate, elsewhere ? nullptr : a.ffn.gate.bias, false,
             h + begin, n, scratch + size_t(thread) * ctx.panel_stride_, nullptr);
    Gating how = a.ffn.gating();
    if (open_above) how.activation = FATRELU, how.threshold = *open_above;
    for (size_t t = 0; t < tokens; t++) {
        for (size_t i = begin; elsewhere && a.ffn.gate.bias && i < end; i++)
            h[t * n + i] += a.ffn.gate.bias[guessed ? size_t(ids[i]) : i];
        k.activate(h + t * n + begin, end - begin, how);
    }
    gates.fetch_add(end - begin, std::memory_order_relaxed);
}

size_t Context::Walk::keep_needed(size_t begin, size_t size, const float* h) {
    size_t at = begin;
    for (size_t i = begin; i < begin + size; i++) {
        const int32_t id = ids[i];
        bool needed = false;
        for (size_t t = 0; t < tokens; t++) {
            needed |= h[t * n + i] != 0;
            gate[t * n + size_t(id)] = h[t * n + i];
        }
        ids[at] = id;
        rows[at] = rows[i];
        at += needed;
    }
    return at - begin;
}

void Context::Walk::count_by_cell(size_t first, size_t last, size_t listed) {
    std::fill(counts + first, counts + last, size_t(0));
    for (size_t i = first * cell; i < first * cell + listed; i++) counts[size_t(ids[i]) / cell]++;
}

size_t Context::Walk::needed_neurons(size_t first, size_t last, int thread) {
    const size_t begin = first * cell, end = std::min(n, last * cell);
    const size_t some = guessed ? predicted_neurons(begin, end) : end - begin;
    for (size_t i = begin; guessed && gate_place && i < begin + some; i++) rows[i] = gate_place[ids[i]];
    activations(begin, begin + some, guessed ? (gate_place ? rows : ids) : gate_place, thread);
    if (guessed) {
        const size_t needed = keep_needed(begin, some, hidden);
        return count_by_cell(first, last, needed), needed;
    }
    return list_active(first, last);
}

size_t Context::Walk::list_active(size_t first, size_t last) {
    const size_t begin = first * cell, end = std::min(n, last * cell);
    uint8_t* some = marks;  // locals: a store of a byte could change any member
    std::fill(some + begin, some + end, uint8_t(!skip));
    for (size_t t = 0; skip && t < tokens; t++) {
        const float* h = gate + t * n;
        for (size_t i = begin; i < end; i++) some[i] |= h[i] != 0;
    }
    size_t found = 0;
    for (size_t c = first; c < last; c++) {
        counts[c] = marked(marks, c * cell, std::min(n, (c + 1) * cell), ids + begin + found);
        found += counts[c];
    }
    return found;
}

void Context::Walk::hidden_values(size_t begin, size_t end, int thread) {
    size_t live = 0;
    if (a.ffn.up.data)
        k.matmul(a.ffn.up, rows, begin, end, in.up, nullptr, false, hidden + begin, n,
                 scratch + size_t(thread) * ctx.panel_stride_, nullptr);
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
}

// An RMS norm is a factor a token, which the sum over neurons can be given at its end, and a weight a neuron.
// Squares are added in the order of neurons within a cell: skipped ones would have added zero.
void Context::Walk::weigh(size_t c) {
    for (size_t t = 0; t < tokens; t++) {
        float sum = 0;
        for (size_t i = c * cell; i < c * cell + counts[c]; i++) {
            float& h = hidden[t * n + i];
            sum += h * h;
            h *= a.ffn.sub_norm.weight[ids[i]];
        }
        squares[c * tokens + t] = sum;
    }
}

void Context::Walk::factors_of_tokens() {
    for (size_t t = 0; t < tokens; t++) {
        float sum = 0;
        for (size_t c = 0; c < cells; c++) sum += squares[c * tokens + t];
        scale[t] = 1.0f / sqrtf(sum / float(n) + a.ffn.sub_norm.eps);
    }
}

void Context::Walk::add_bundles(size_t at, size_t count, size_t listed, float* y, int thread) {
    const bool apart = surviving_up_apart();  // then gate has up in it already
    const Bundles w = {
        apart ? Matrix{} : a.ffn.up, a.ffn.down, ids + at, rows + at, count, listed, a.ffn.up_relu};
    const size_t live = k.bundles(w, in.up, gate, n, y, factors + size_t(thread) * bundle_factors(dim));
    if (!apart) active.fetch_add(live, std::memory_order_relaxed);
}

void Context::Walk::join_partials(int thread) {
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
}

void Context::Walk::add_columns(size_t c0, size_t c1, size_t first, size_t last, float* sum, int thread) {
    const size_t width = c1 - c0;
    float* y = partial + size_t(thread) * tokens * kTileColumns;
    for (size_t chunk = first; chunk < last; chunk++) {
        bool some = false;
        for (size_t c = chunk * (kChunk / cell); c < std::min(cells, (chunk + 1) * (kChunk / cell)); c++) {
            if (!counts[c]) continue;
            if (!some) std::fill(y, y + tokens * width, 0.0f);
            some = true;
            k.accumulate(a.ffn.down, rows + c * cell, counts[c], hidden + c * cell, n, tokens, c0, c1, y,
                         width, tiles + size_t(thread) * kTileRows * kTileColumns);
        }
        for (size_t i = 0; some && i < tokens * width; i++) sum[i] += y[i];
    }
}

void Context::Walk::join_columns(size_t c0, size_t c1, const float* sum) {
    for (size_t t = 0; t < tokens; t++)
        for (size_t i = c0; i < c1; i++) {
            const float y = sum[t * (c1 - c0) + i - c0] * (normed ? scale[t] : 1.0f);
            a.x[t * dim + i] += y + (a.ffn.down_bias ? a.ffn.down_bias[i] : 0.0f);
        }
}

FFNCounts Context::Walk::totals() const {
    return {active.load(), rows_read.load(), n * (a.ffn.up.data ? 2 : 1), gates.load(),
            guessed ? guessed->bytes() : 0};
}

// ---- through memory

void add_chunks(Context::Walk& w, size_t first, size_t last, int thread) {
    size_t listed = w.needed_neurons(first, last, thread), ups = w.a.ffn.up.data ? listed : 0;
    size_t at = first * kChunk;
    // dReLU kills half of what gate leaves: up first, and down rows only of what then lives (a third of
    // the bytes).
    if (ups && w.surviving_up_apart()) {
        w.hidden_values(at, at + listed, thread);
        listed = w.keep_needed(at, listed, w.hidden);
        w.count_by_cell(first, last, listed);
    }
    w.rows_read.fetch_add(ups + listed, std::memory_order_relaxed);
    for (size_t c = first; c < last; at += w.counts[c], listed -= w.counts[c], c++) {
        if (!w.counts[c] && c) continue;
        std::fill(w.partial_of(c), w.partial_of(c + 1), 0.0f);
        w.add_bundles(at, w.counts[c], listed, w.partial_of(c), thread);
    }
}

static void few_tokens(Context::Walk& w, Pieces& pieces, int thread) {
    w.encode();
    for (size_t first, last; pieces.take(&first, &last);) add_chunks(w, first, last, thread);
    w.ctx.pool.barrier();
    w.join_partials(thread);
}

// Partial sums of a chunk each would outgrow the caches: threads divide the columns of the sum instead.
static void many_tokens(Context::Walk& w, std::atomic<size_t>& next, float* sums, int thread) {
    w.encode();
    for (size_t c; (c = next.fetch_add(1)) < w.chunks;) {
        const size_t begin = c * kChunk, end = std::min(w.n, begin + kChunk);
        for (size_t t = 0; w.a.record && t < w.tokens; t++)
            std::fill(w.a.record + t * w.n + begin, w.a.record + t * w.n + end, 0.0f);
        w.needed_neurons(c, c + 1, thread);
        w.hidden_values(begin, begin + w.counts[c], thread);
        w.rows_read.fetch_add(w.counts[c] * (w.a.ffn.up.data ? 2 : 1), std::memory_order_relaxed);
        if (w.normed) w.weigh(c);
    }
    w.ctx.pool.barrier();
    if (w.normed) {
        if (thread == 0) w.factors_of_tokens();
        w.ctx.pool.barrier();
    }
    float* sum = sums + size_t(thread) * w.tokens * kTileColumns;
    size_t begin, end;
    column_range(w.dim, w.threads, thread, &begin, &end);
    for (size_t c0 = begin; c0 < end; c0 += kTileColumns) {
        const size_t c1 = std::min(end, c0 + kTileColumns);
        std::fill(sum, sum + w.tokens * kTileColumns, 0.0f);
        w.add_columns(c0, c1, 0, w.chunks, sum, thread);
        w.join_columns(c0, c1, sum);
    }
}

// Gate first (design 2.3): all gate rows of the chunk, then up and down rows only of the neurons some token
// needs.
FFNCounts Context::bundle_ffn(const FFNArgs& a) {
    if (a.ffn.disk) return disk_ffn(a);
    Walk w(*this, a, kChunk);
    float* sums = grown(sums_, size_t(w.threads) * w.tokens * kTileColumns);
    std::atomic<size_t> next{0};
    Pieces pieces(w.chunks, 1, w.threads);
    auto few = [&](int thread) { few_tokens(w, pieces, thread); };
    auto many = [&](int thread) { many_tokens(w, next, sums, thread); };
    if (w.few)
        pool.run(few);
    else
        pool.run(many);
    return w.totals();
}

}  // namespace tc
