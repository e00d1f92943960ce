#include "model_ops.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "work.h"

namespace tc {

// Bytes to multiply between two looks at the disk, whose queue lasts for a millisecond: a tenth of that.
static constexpr size_t kBetweenReads = 1 << 20;

uint8_t* Context::panels(size_t bytes) {
    panel_stride_ = (bytes + 63) / 64 * 64;
    return grown(panels_, panel_stride_ * size_t(pool.threads()));
}

size_t Context::scratch_bytes() const {
    size_t total = 0;
    auto add = [&](const auto&... each) { ((total += each.capacity() * sizeof(*each.data())), ...); };
    for (const auto& each : inputs_) add(each);
    add(hidden_input_, panels_, guess_input_, code_input_, marks_, expert_input_);
    add(code_, normed_, gate_, hidden_, partial_, sums_, scores_, tiles_, factors_, qkv_, attended_, branch_,
        scales_, products_, open_, rings_, lower_, queries_, absorbed_, found_);
    add(ids_, slots_, entries_, places_, gate_slots_, gate_entries_, wanted_, gate_wanted_, counts_);
    for (const RouterAnswer* each : {&routed_.own, &routed_.next}) add(each->normed, each->weights);
    add(routed_.logits, routed_.kept, routed_.in, routed_.out, routed_.sum, routed_.record, routed_.shares,
        routed_.shared, routed_.tokens, routed_.visits);
    return total;
}

Matrix Context::interleaved(const Matrix& w, uint8_t* to) {
    const size_t group = size_t(k.panel_rows), bytes = group * w.stride;
    uint8_t* scratch = panels(bytes);
    Pieces pieces(w.rows, group, pool.threads());
    auto region = [&](int thread) {
        uint8_t* const rows = scratch + size_t(thread) * panel_stride_;
        std::vector<LaneOfGroup> lanes;
        for (size_t i = 0; i < group; i++) lanes.push_back({rows + i * w.stride, i});
        for (size_t begin, end; pieces.take(&begin, &end);)
            for (size_t r = begin; r < end; r += group) {
                memcpy(rows, to + r * w.stride, bytes);
                interleave_rows(w.format, w.cols, group, lanes.data(), group, to + r * w.stride);
            }
    };
    pool.run(region);
    Matrix made = w;
    made.group = group;
    return made;
}

void Context::embed(const Matrix& table, const int32_t* ids, size_t tokens, float* out) {
    each_token(pool, tokens, 1, [&](size_t t) { k.decode_row(table, size_t(ids[t]), out + t * table.cols); });
}

void Context::norm(const Norm& norm, const float* x, size_t tokens, size_t dim, float* out) {
    each_token(pool, tokens, 1, [&](size_t t) {
        k.norm(x + t * dim, norm.weight, norm.bias, norm.eps, norm.layer, dim, out + t * dim);
    });
}

// Up to how many tokens n matrices of one input are multiplied as they lie; float ones do not matter beside
// others.
size_t Context::as_they_lie(const Matrix* w, size_t n) const {
    bool some = false;
    for (size_t i = 0; i < n; i++) {
        if (!quantised(w[i])) continue;
        if (w[i].group == 1) return kFewTokens;
        some = true;
    }
    return some ? k.grouped_tokens : kFewTokens;
}

// norm(x) in the form w's kernels take, made once for all rows of w.
Input Context::input(const Matrix& w, const Norm& norm, const float* x, size_t tokens,
                     Scratch<uint8_t>& buffer) {
    Input made;
    inputs(&w, 1, norm, x, tokens, &buffer, &made);
    return made;
}

// The same for n matrices of one width, n buffers; those whose kernels take the same form share it. Many
// tokens of float matrices beside others stay rows: the memory plan counts one input of f32, which has place
// for several quantised ones.
void Context::inputs(const Matrix* w, size_t n, const Norm& norm, const float* x, size_t tokens,
                     Scratch<uint8_t>* buffers, Input* out) {
    const size_t cols = w[0].cols, few = as_they_lie(w, n);
    const bool some_quantised = std::any_of(w, w + n, quantised);
    float* normed = norm.weight ? grown(normed_, tokens * cols) : nullptr;
    const uint8_t* rows = reinterpret_cast<const uint8_t*>(normed ? normed : x);
    struct Form {
        Format format;
        uint8_t* to;
        Input made;
    } forms[kStacked];
    size_t made = 0, most_tile = 1;
    for (size_t i = 0; i < n; i++) {
        const Format format = w[i].format;
        size_t f = 0;
        while (f < made && !same_input(forms[f].format, format)) f++;
        if (f == made) {
            const bool lanes = tokens > few && (quantised(w[i]) || !some_quantised);
            const bool copy = quantised(w[i]) || lanes;
            const size_t bytes = copy ? k.input_bytes(format, cols) : 4 * cols,
                         tile = lanes ? k.tile_tokens(format) : 1;
            uint8_t* to = copy ? grown(buffers[made], bytes * whole(tokens, tile)) : nullptr;
            most_tile = std::max(most_tile, tile);
            forms[made++] = {format, to, {copy ? to : rows, bytes, tokens, lanes}};
        }
        out[i] = forms[f].made;
    }
    const bool copies = std::any_of(forms, forms + made, [](const Form& f) { return f.to != nullptr; });
    each_token(pool, copies || normed ? tokens : 0, most_tile, [&](size_t t) {
        const float* from = x + t * cols;
        if (normed) {
            k.norm(from, norm.weight, norm.bias, norm.eps, norm.layer, cols, normed + t * cols);
            from = normed + t * cols;
        }
        for (size_t f = 0; f < made; f++)
            if (forms[f].to)
                k.quantize(forms[f].format, from, cols, 0, cols, forms[f].made.lanes, forms[f].made.row_bytes,
                           t, forms[f].to);
    });
}

// Rows of n matrices, one under the other, are one piece of work: no thread waits at the end of each.
void Context::linear(const Matrix* w, const Input* in, size_t n, const float* bias, float* out, bool add) {
    size_t rows = 0, panel = 0, stride = 0, group = 1;
    for (size_t i = 0; i < n; i++) {
        rows += w[i].rows, stride = std::max(stride, w[i].stride), group = std::max(group, w[i].group);
        if (in[i].lanes) panel = std::max(panel, k.panel_bytes(w[i].format, w[i].cols, in[i].tokens));
    }
    uint8_t* scratch = panel ? panels(panel) : nullptr;
    const std::shared_ptr<Fetches> reads = early_.lock();
    // Few tokens take rows one by one, or by the group: a router's are few and long, and for every thread.
    Pieces pieces(rows, panel ? size_t(k.panel_rows) : piece_rows(stride, group, pool.threads()),
                  pool.threads(), reads ? kBetweenReads / stride : rows);
    auto row_at = [&](size_t row) {
        size_t i = 0;
        for (; row >= w[i].rows; i++) row -= w[i].rows;
        return row_of(w[i], row);
    };
    auto region = [&](int thread) {
        PiecesAhead mine(pieces, !panel);
        for (size_t begin, end; mine.take(&begin, &end);) {
            for (size_t i = 0, first = 0; i < n && first < end; first += w[i].rows, i++) {
                const size_t from = std::max(begin, first), to = std::min(end, first + w[i].rows);
                const uint8_t* then = to < end ? w[i + 1].data : mine.next(row_at);
                if (from < to)
                    k.matmul(w[i], nullptr, from - first, to - first, in[i], bias ? bias + first : nullptr,
                             add, out + from, rows, scratch + size_t(thread) * panel_stride_, then);
            }
            if (reads) reads->take_in_passing();
        }
    };
    pool.run(region);
}

void Context::matmul(const Linear& w, const Norm& norm, const float* x, size_t tokens, float* out, bool add) {
    const Input in = input(w.weight, norm, x, tokens, inputs_[0]);
    linear(&w.weight, &in, 1, w.bias, out, add);
}

void Context::matmul(const Stack& w, const Norm& norm, const float* x, size_t tokens, float* out) {
    Input in[kStacked];
    inputs(w.parts.data(), w.parts.size(), norm, x, tokens, inputs_, in);
    linear(w.parts.data(), in, w.parts.size(), w.bias, out, false);
}

// ---- attention

// Queries that are worked on together: of consecutive tokens of one sequence, and of some heads [head, head +
// heads) that share keys.
struct Context::Queries {
    size_t first, tokens, begin, end;  // tokens of the batch; the positions any of them attends to
    size_t head, heads;
    size_t rows() const { return tokens * heads; }
};

// All queries of a call, `heads` (a part of a group) at a time.
std::vector<Context::Queries> Context::queries(const AttentionArgs& a, size_t heads) const {
    const size_t most = std::max<size_t>(1, kQueryRows / heads);
    std::vector<Queries> runs, all;
    for (size_t t = 0; t < a.step.tokens; t++) {
        const size_t end = a.step.end(t), begin = a.heads.first(end);
        if (runs.empty() || runs.back().tokens == most || a.step.sequence[t] != a.step.sequence[t - 1])
            runs.push_back({t, 0, begin, end, 0, heads});
        Queries& q = runs.back();
        q.tokens++;
        q.begin = std::min(q.begin, begin), q.end = std::max(q.end, end);
    }
    const size_t group = a.heads.group();
    for (Queries q : runs)
        for (size_t first = 0; first < a.heads.n; first += group)
            for (q.head = first; q.head < first + group; q.head += heads) {
                all.push_back(q);
                all.back().heads = std::min(heads, first + group - q.head);
            }
    return all;
}

// Joins what the queries find at positions [begin, end) into `into`: [tokens * heads][values + 2].
void Context::attend(const AttentionArgs& a, const Queries& q, size_t begin, size_t end, float* scores,
                     float* into) {
    const size_t hd = a.heads.dim, vd = a.heads.values(), width = a.heads.width(), rows = q.rows();
    Span span = {a.k,
                 a.v,
                 a.step.table + size_t(a.step.sequence[q.first]) * a.step.table_width,
                 q.head / a.heads.group(),
                 a.step.block,
                 hd,
                 0,
                 0,
                 0,
                 a.heads.scale,
                 a.heads.softcap,
                 vd,
                 a.heads.value_dim != 0};
    float* partial = scores + 4 * kSpan;
    const void* query[kQueryRows];
    int32_t first[kQueryRows], last[kQueryRows];
    for (size_t r = 0; r < rows; r++) {
        const size_t t = q.first + r / q.heads;
        query[r] = a.qkv + t * width + (q.head + r % q.heads) * hd;
        last[r] = int32_t(a.step.end(t));
        first[r] = int32_t(a.heads.first(size_t(last[r])));
        into[r * (vd + 2) + vd + 1] = 0;
    }
    for (size_t s = begin / kSpan * kSpan; s < end; s += kSpan) {
        span.begin = s, span.end = std::min(s + kSpan, end), span.following = std::min(s + 2 * kSpan, end);
        k.attend(span, query, first, last, rows, scores, partial);
        for (size_t r = 0; r < rows; r++) k.merge(into + r * (vd + 2), partial + r * (vd + 2), vd);
    }
}

// Turns a token's queries and key, and writes its key and value into their pages. scratch: [head_dim].
void Context::store(const AttentionArgs& a, size_t t, float* scratch) {
    const Heads& heads = a.heads;
    const size_t hd = heads.dim, rotary = a.step.rotary, p = size_t(a.step.positions[t]);
    const int32_t* table = a.step.table + size_t(a.step.sequence[t]) * a.step.table_width;
    const size_t block = a.step.block, page = size_t(table[p / block]);
    const size_t own_kv = heads.shares ? 0 : heads.n_kv;
    float *q = a.qkv + t * heads.width(), *key = q + heads.n * hd, *value = key + own_kv * hd;
    if (heads.value_dim) return k.store_value(CACHE_F16, key, hd, block, p % block, a.k.at(0, page));
    if (heads.whole_norms) {
        k.norm(q, heads.q_norm, nullptr, heads.norm_eps, false, heads.n * hd, q);
        if (own_kv) k.norm(key, heads.k_norm, nullptr, heads.norm_eps, false, own_kv * hd, key);
    }
    for (size_t h = 0; h < heads.n + own_kv; h++) {
        float* x = q + h * hd;
        const float* weight = heads.whole_norms ? nullptr : h < heads.n ? heads.q_norm : heads.k_norm;
        if (heads.own_norms) weight += (h < heads.n ? h : h - heads.n) * hd;
        if (weight && !heads.norms_last) k.norm(x, weight, nullptr, heads.norm_eps, heads.own_norms, hd, x);
        if (rotary) k.rope(x, a.step.cos + t * (rotary / 2), a.step.sin + t * (rotary / 2), rotary);
        if (weight && heads.norms_last) k.norm(x, weight, nullptr, heads.norm_eps, false, hd, x);
        if (heads.temperature != 0 && h < heads.n) {
            const float by = 1 + heads.temperature * log1pf(floorf(float(p + 1) / heads.temperature_span));
            for (size_t i = 0; i < hd; i++) x[i] *= by;
        }
        if (a.k.rotated()) k.rotate(x, hd, scratch);
        if (a.k.rotated() && h < heads.n) k.code_query(x, hd);
    }
    for (size_t h = 0; h < own_kv; h++) {
        if (heads.v_norm)
            k.norm(value + h * hd, heads.v_norm, nullptr, heads.norm_eps, false, hd, value + h * hd);
        if (a.v.rotated()) k.rotate(value + h * hd, hd, scratch);
        k.store_key(a.k.type, key + h * hd, hd, block, p % block, a.k.at(h, page));
        k.store_value(a.v.type, value + h * hd, hd, block, p % block, a.v.at(h, page));
    }
}

// `from`, as `attend` leaves it, is the output of these queries. scratch: [head_dim].
void Context::finish(const AttentionArgs& a, const Queries& q, const float* from, float* scratch) {
    const size_t vd = a.heads.values();
    for (size_t r = 0; r < q.rows(); r++, from += vd + 2) {
        const size_t head = q.head + r % q.heads;
        float* out = a.out + ((q.first + r / q.heads) * a.heads.n + head) * vd;
        float inverse = 1.0f / from[vd + 1];
        if (a.heads.sinks) {  // joined as a span whose only value is 0; how much that leaves of the others
            float left[3] = {1, from[vd], from[vd + 1]};
            const float sink[3] = {0, a.heads.sinks[head], 1};
            k.merge(left, sink, 1);
            inverse = left[0] / left[2];
        }
        for (size_t i = 0; i < vd; i++) out[i] = from[i] * inverse;
        if (a.v.rotated()) k.rotate(out, vd, scratch);  // back
    }
}

static size_t spans_of(size_t begin, size_t end) { return (end + kSpan - 1) / kSpan - begin / kSpan; }

void Context::attention(const AttentionArgs& a) {
    const size_t hd = a.heads.dim, vd = a.heads.values(), threads = size_t(pool.threads());
    std::vector<Queries> all = queries(a, std::min(a.heads.group(), kQueryRows));
    if (a.heads.value_dim && all.size() < 2 * threads) {  // all heads share keys: few tasks of many rows
        size_t tasks = 0;
        for (const Queries& q : all) tasks += spans_of(q.begin, q.end);
        if (tasks < 2 * threads) all = queries(a, std::min(a.heads.group(), kQueryTile));
    }
    const size_t tasks = all.size();
    size_t rows = 0, spans = 1;  // few tasks: each span of positions is one of its own
    for (const Queries& q : all) rows = std::max(rows, q.rows());
    if (tasks < 4 * threads)
        for (const Queries& q : all) spans = std::max(spans, spans_of(q.begin, q.end));
    const size_t stride = rows * (vd + 2), own = 4 * kSpan + kQueryRows * (vd + 2) + hd;
    float* partial = grown(partial_, (spans > 1 ? tasks * spans : threads) * stride);
    float* scores = grown(scores_, threads * own);
    std::atomic<size_t> next{0}, next_sum{0};
    const std::shared_ptr<Fetches> reads = early_.lock();

    auto region = [&](int thread) {
        float *mine = scores + size_t(thread) * own, *head_scratch = mine + own - hd;
        for (size_t t = size_t(thread); t < a.step.tokens; t += threads) store(a, t, head_scratch);
        pool.barrier();
        for (size_t task; (task = next.fetch_add(1)) < tasks * spans;) {
            const Queries& q = all[tasks - 1 - task / spans];  // the last, and longest, first
            const size_t s = q.begin / kSpan + task % spans;
            float* into = partial + (spans > 1 ? task : size_t(thread)) * stride;
            if (spans == 1)
                attend(a, q, q.begin, q.end, mine, into), finish(a, q, into, head_scratch);
            else
                attend(a, q, std::max(q.begin, s * kSpan), std::min(q.end, (s + 1) * kSpan), mine, into);
            if (reads) reads->take_in_passing();
        }
        if (spans == 1) return;
        pool.barrier();
        for (size_t task; (task = next_sum.fetch_add(1)) < tasks;) {
            const Queries& q = all[tasks - 1 - task];
            float* into = partial + task * spans * stride;
            for (size_t s = 1; s < spans; s++)
                for (size_t r = 0; r < q.rows(); r++)
                    k.merge(into + r * (vd + 2), into + s * stride + r * (vd + 2), vd);
            finish(a, q, into, head_scratch);
        }
    };
    pool.run(region);
}

void Context::attention_add(float* x, const float* h, const Attention& layer, const Step& step,
                            const CachePages& k, const CachePages& v) {
    if (layer.latent.k_b.data) return latent_add(x, h, layer, step, k);
    float* qkv = grown(qkv_, step.tokens * layer.qkv.rows());
    float* out = grown(attended_, step.tokens * layer.out.weight.cols);
    matmul(layer.qkv, layer.norm, h, step.tokens, qkv);
    attention({layer.heads, step, k, v, qkv, out});
    if (layer.gate.data) {
        const size_t wide = layer.gate.rows;
        float* gate = grown(open_, step.tokens * wide);
        matmul({layer.gate, nullptr}, layer.norm, h, step.tokens, gate, false);
        each_token(pool, step.tokens, 1,
                   [&](size_t t) { this->k.open_gate(out + t * wide, gate + t * wide, wide); });
    }
    attention_out(layer, out, step.tokens, x);
}

void Context::attention_out(const Attention& layer, const float* from, size_t tokens, float* x) {
    const bool plain = layer.join.plain();
    const size_t dim = layer.out.weight.rows;
    float* y = plain ? x : grown(branch_, tokens * dim);
    matmul(layer.out, layer.sub_norm, from, tokens, y, plain);
    if (!plain) join(layer.join, y, tokens, dim, x);
}

void Context::join(const Join& how, float* y, size_t tokens, size_t dim, float* x) {
    each_token(pool, tokens, 1, [&](size_t t) {
        float *from = y + t * dim, *to = x + t * dim;
        if (how.norm.weight)
            k.norm(from, how.norm.weight, how.norm.bias, how.norm.eps, how.norm.layer, dim, from);
        if (how.after == 1)
            for (size_t i = 0; i < dim; i++) to[i] += how.scale * from[i];
        else
            for (size_t i = 0; i < dim; i++) to[i] = how.after * (to[i] + how.scale * from[i]);
    });
}

}  // namespace tc
