#include "model_ops.h"

#include <math.h>
#include <string.h>

#include <algorithm>

namespace tc {

template <class T>
static T* grown(std::vector<T>& v, size_t n) {
    if (v.size() < n) v.resize(n);
    return v.data();
}

static bool quantised(const Matrix& w) { return w.format == Q8_0 || w.format == Q4_0; }

// Rows are handed out in chunks: a row's result does not depend on who computes it, so threads that are
// slowed down (a busy core) simply take fewer. 16 rows of a 4096-wide q4_0 matrix are 37 KB, about 2 us.
static size_t chunk_rows(size_t rows, int threads) {
    const size_t fair = rows / (size_t(threads) * 8) / 4 * 4;
    return std::max<size_t>(16, std::min<size_t>(fair, 256));
}

// Columns [begin, end) of thread t when `cols` are split in units of 32.
static void column_range(size_t cols, int threads, int t, size_t* begin, size_t* end) {
    const size_t units = (cols + 31) / 32;
    *begin = std::min(cols, units * size_t(t) / size_t(threads) * 32);
    *end = std::min(cols, units * size_t(t + 1) / size_t(threads) * 32);
}

void Context::embed(const Matrix& table, const int32_t* ids, size_t tokens, float* out) {
    for (size_t t = 0; t < tokens; t++) k.decode_row(table, size_t(ids[t]), out + t * table.cols);
}

void Context::norm(const float* x, const float* weight, const float* bias, float eps, bool layer, size_t tokens,
                   size_t dim, float* out) {
    auto rows = [&](int thread) {
        const size_t n = size_t(thread < 0 ? 1 : pool.threads());
        for (size_t t = size_t(thread < 0 ? 0 : thread); t < tokens; t += n)
            k.norm(x + t * dim, weight, bias, eps, layer, dim, out + t * dim);
    };
    if (tokens == 1) rows(-1);  // a hand-off costs more than one row
    else pool.run(rows);
}

// The activations in the form w's kernels take. Quantised here, once per call, for all rows of w.
Input Context::input(const Matrix& w, const float* x, size_t tokens) {
    if (!quantised(w)) return {x, nullptr, 0, tokens};
    const size_t bytes = (k.input_bytes(w.cols) + 63) / 64 * 64;
    uint8_t* to = grown(input_, bytes * tokens);
    auto rows = [&](int thread) {
        const size_t n = size_t(thread < 0 ? 1 : pool.threads());
        for (size_t t = size_t(thread < 0 ? 0 : thread); t < tokens; t += n) k.quantize(x + t * w.cols, w.cols, to + t * bytes);
    };
    if (tokens == 1) rows(-1);
    else pool.run(rows);
    return {x, to, bytes, tokens};
}

void Context::matmul(const Matrix& w, const float* x, size_t tokens, const float* bias, float* out, bool add) {
    const Input in = input(w, x, tokens);
    const size_t chunk = chunk_rows(w.rows, pool.threads());
    float* temp = add ? grown(temp_, tokens * w.rows) : out;
    std::atomic<size_t> next{0};
    auto region = [&](int) {
        for (;;) {
            const size_t begin = next.fetch_add(chunk);
            if (begin >= w.rows) return;
            const size_t end = std::min(w.rows, begin + chunk);
            k.matmul(w, nullptr, begin, end, in, bias, temp + begin, w.rows);
            if (!add) continue;
            for (size_t t = 0; t < tokens; t++)
                for (size_t r = begin; r < end; r++) out[t * w.rows + r] += temp[t * w.rows + r];
        }
    };
    pool.run(region);
}

void Context::attention(const AttentionArgs& a) {
    const size_t hd = a.head_dim, width = (a.heads + 2 * a.kv_heads) * hd, group = a.heads / a.kv_heads;
    const size_t page_stride = a.kv_heads * a.block * hd;
    size_t longest = 0;
    for (size_t t = 0; t < a.tokens; t++) longest = std::max(longest, size_t(a.positions[t]) + 1);
    float* scores = grown(scores_, size_t(pool.threads()) * group * longest);
    const float scale = 1.0f / sqrtf(float(hd));
    std::atomic<size_t> next{0};

    auto store = [&](size_t t) {  // rotate, then write this token's keys and values into its page
        float *q = a.qkv + t * width, *key = q + a.heads * hd, *value = key + a.kv_heads * hd;
        if (a.cos)
            for (size_t h = 0; h < a.heads + a.kv_heads; h++)
                k.rope(q + h * hd, a.cos + t * (hd / 2), a.sin + t * (hd / 2), hd);
        const size_t p = size_t(a.positions[t]);
        const size_t page = size_t(a.table[size_t(a.sequence[t]) * a.table_width + p / a.block]);
        for (size_t h = 0; h < a.kv_heads; h++) {
            const size_t at = page * page_stride + (h * a.block + p % a.block) * hd;
            k.to_f16(key + h * hd, hd, a.k + at);
            k.to_f16(value + h * hd, hd, a.v + at);
        }
    };
    auto region = [&](int thread) {
        for (size_t t = size_t(thread); t < a.tokens; t += size_t(pool.threads())) store(t);
        pool.barrier();
        for (;;) {
            const size_t task = next.fetch_add(1);
            if (task >= a.tokens * a.kv_heads) return;
            const size_t t = task / a.kv_heads, h = task % a.kv_heads;
            const size_t end = size_t(a.positions[t]) + 1;
            const size_t start = a.window && end > a.window ? end - a.window : 0;
            k.attend(a.qkv + t * width + h * group * hd, group, hd, scale, a.k + h * a.block * hd, a.v + h * a.block * hd,
                     a.table + size_t(a.sequence[t]) * a.table_width, page_stride, a.block, start, end,
                     scores + size_t(thread) * group * longest, a.out + t * a.heads * hd + h * group * hd);
        }
    };
    pool.run(region);
}

FFNCounts Context::ffn_add(const FFNArgs& a) {
    constexpr size_t kBlock = 64;  // tokens per pass: bounds the scratch, and 64 inputs stay in the L2 cache
    FFNCounts total = {0, 0, 0};
    for (size_t t = 0; t < a.tokens; t += kBlock) {
        const FFNCounts c = ffn_block(a, t, std::min(kBlock, a.tokens - t));
        total.active += c.active, total.rows += c.rows, total.rows_dense += c.rows_dense;
    }
    return total;
}

// Gate first (design 2.3): gate rows for everyone, then up and down rows only of neurons that some token of the block
// needs. Four phases, a barrier between them: gate + per-chunk lists, one list, up, down.
FFNCounts Context::ffn_block(const FFNArgs& a, size_t first, size_t tokens) {
    const size_t n = a.gate.rows, dim = a.down.cols;
    const int threads = pool.threads();
    const bool skip = a.exact && (a.activation == RELU || a.activation == FATRELU || a.activation == RELU2);
    const Input in = input(a.gate, a.h + first * dim, tokens);

    float* gate = grown(gate_, tokens * n);      // [tokens, n] activations
    float* hidden = grown(hidden_, tokens * n);  // [tokens, active]
    float* sum = grown(sum_, tokens * dim);
    float* tiles = grown(tiles_, size_t(threads) * kAccumulateScratch);
    int32_t* ids = grown(ids_, n);        // chunk c's list starts at c * chunk
    int32_t* active = grown(active_, n);  // all lists, in neuron order
    const size_t chunk = chunk_rows(n, threads), chunks = (n + chunk - 1) / chunk;
    size_t* counts = grown(counts_, chunks);
    std::atomic<size_t> next_gate{0}, next_up{0}, n_active{0}, pairs{0};

    auto gate_chunk = [&](size_t c) {
        const size_t begin = c * chunk, end = std::min(n, begin + chunk);
        k.matmul(a.gate, nullptr, begin, end, in, a.gate_bias, gate + begin, n);
        for (size_t t = 0; t < tokens; t++) k.activate(gate + t * n + begin, end - begin, a.activation, a.threshold);
        size_t found = 0;
        for (size_t i = begin; i < end; i++) {
            bool needed = !skip;
            for (size_t t = 0; t < tokens && !needed; t++) needed = gate[t * n + i] != 0;
            ids[begin + found] = int32_t(i);
            found += needed;
        }
        counts[c] = found;
    };
    auto up_chunk = [&](size_t begin, size_t end, size_t total) {
        size_t live = 0;
        if (a.up.data) k.matmul(a.up, active, begin, end, in, nullptr, hidden + begin, total);
        for (size_t t = 0; t < tokens; t++) {
            for (size_t i = begin; i < end; i++) {
                const float g = gate[t * n + size_t(active[i])];
                float* h = hidden + t * total + i;
                if (!a.up.data) *h = g;
                else *h = g * (a.up_relu && !(*h > 0) ? 0.0f : *h);
                live += *h != 0;
            }
        }
        pairs.fetch_add(live, std::memory_order_relaxed);
    };
    auto region = [&](int thread) {
        for (size_t c; (c = next_gate.fetch_add(1)) < chunks;) gate_chunk(c);
        pool.barrier();
        size_t total = 0;
        for (size_t c = 0; c < chunks; c++) {  // every thread adds up all counts, and copies its share of the lists
            if (c % size_t(threads) == size_t(thread)) memcpy(active + total, ids + c * chunk, counts[c] * sizeof *ids);
            total += counts[c];
        }
        pool.barrier();
        const size_t step = chunk_rows(total, threads);
        for (size_t i; (i = next_up.fetch_add(step)) < total;) up_chunk(i, std::min(total, i + step), total);
        size_t begin, end;
        column_range(dim, threads, thread, &begin, &end);
        for (size_t t = 0; t < tokens; t++) std::fill(sum + t * dim + begin, sum + t * dim + end, 0.0f);
        pool.barrier();
        k.accumulate(a.down, active, total, hidden, total, tokens, begin, end, sum, dim,
                     tiles + size_t(thread) * kAccumulateScratch);
        for (size_t t = 0; t < tokens; t++) {
            float* x = a.x + (first + t) * dim;
            for (size_t c = begin; c < end; c++) x[c] += sum[t * dim + c] + (a.down_bias ? a.down_bias[c] : 0.0f);
        }
        if (thread == 0) n_active.store(total, std::memory_order_relaxed);
    };
    pool.run(region);
    return {pairs.load(), n_active.load(), n};
}

}  // namespace tc
