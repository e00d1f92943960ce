#include "model_ops.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <vector>

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

// Neurons are worked on, and summed, in chunks of kChunk: sum_c (sum_{i in c} h_i d_i), both in ascending order.
// That order is fixed by the layer alone, so threads can take chunks as they come and the bits stay the same.
// A smaller chunk balances better; a larger one spends less on its partial sum (dim floats, in the L2 cache).
static constexpr size_t kChunk = 256;
// Up to this many tokens each chunk does everything and leaves a partial sum per token; beyond, the partial sums
// would outgrow the caches, and threads divide the columns of the sum instead.
static constexpr size_t kFewTokens = 8;

// Gate first (design 2.3): all gate rows of the chunk, then up and down rows only of the neurons some token needs.
FFNCounts Context::ffn_block(const FFNArgs& a, size_t first, size_t tokens) {
    const size_t n = a.gate.rows, dim = a.down.cols, chunks = (n + kChunk - 1) / kChunk;
    const int threads = pool.threads();
    const bool skip = a.exact && (a.activation == RELU || a.activation == FATRELU || a.activation == RELU2);
    const bool few = tokens <= kFewTokens;
    const Input in = input(a.gate, a.h + first * dim, tokens);

    float* gate = grown(gate_, tokens * n);      // [tokens, n] activations
    float* hidden = grown(hidden_, tokens * n);  // [tokens, n], of chunk c: counts[c] values from c * kChunk on
    int32_t* ids = grown(ids_, n);               // likewise: the needed neurons, ascending
    size_t* counts = grown(counts_, chunks);
    // few: [chunks, tokens, dim]; many: one tile per thread, [threads, tokens, kTileColumns]
    float* partial = grown(partial_, few ? chunks * tokens * dim : size_t(threads) * tokens * kTileColumns);
    float* sums = grown(sums_, size_t(threads) * tokens * kTileColumns);
    float* tiles = grown(tiles_, size_t(threads) * kTileRows * kTileColumns);
    float* factors = grown(factors_, size_t(threads) * 4 * ((dim + 31) / 32));
    std::atomic<size_t> next{0}, rows{0}, active{0};

    auto needed_neurons = [&](size_t c) {
        const size_t begin = c * kChunk, end = std::min(n, begin + kChunk);
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
        rows.fetch_add(found, std::memory_order_relaxed);
    };
    auto hidden_values = [&](size_t begin, size_t end) {  // h = act(gate) * up, for list entries [begin, end)
        size_t live = 0;
        if (a.up.data) k.matmul(a.up, ids, begin, end, in, nullptr, hidden + begin, n);
        for (size_t t = 0; t < tokens; t++) {
            for (size_t i = begin; i < end; i++) {
                const float g = gate[t * n + size_t(ids[i])];
                float& h = hidden[t * n + i];
                h = !a.up.data ? g : a.up_relu && !(h > 0) ? 0.0f : g * h;
                live += h != 0;
            }
        }
        active.fetch_add(live, std::memory_order_relaxed);
    };
    auto few_tokens = [&](int thread) {
        for (size_t c; (c = next.fetch_add(1)) < chunks;) {
            needed_neurons(c);
            if (!counts[c] && c) continue;
            float* y = partial + c * tokens * dim;
            std::fill(y, y + tokens * dim, 0.0f);
            const Bundles w = {a.up, a.down, ids + c * kChunk, counts[c], a.up_relu};
            const size_t live = k.bundles(w, in, gate, n, y, factors + size_t(thread) * 4 * ((dim + 31) / 32));
            active.fetch_add(live, std::memory_order_relaxed);
        }
        pool.barrier();
        size_t begin, end;
        column_range(dim, threads, thread, &begin, &end);
        for (size_t t = 0; t < tokens; t++) {
            float *x = a.x + (first + t) * dim, *sum = partial + t * dim;  // chunk 0's partial becomes the sum
            for (size_t c = 1; c < chunks; c++) {
                const float* y = partial + (c * tokens + t) * dim;
                for (size_t i = begin; counts[c] && i < end; i++) sum[i] += y[i];
            }
            for (size_t i = begin; i < end; i++) x[i] += sum[i] + (a.down_bias ? a.down_bias[i] : 0.0f);
        }
    };
    auto many_tokens = [&](int thread) {
        for (size_t c; (c = next.fetch_add(1)) < chunks;) {
            needed_neurons(c);
            hidden_values(c * kChunk, c * kChunk + counts[c]);
        }
        pool.barrier();
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
                k.accumulate(a.down, ids + c * kChunk, counts[c], hidden + c * kChunk, n, tokens, c0, c1, y,
                             kTileColumns, tile);
                for (size_t i = 0; i < tokens * kTileColumns; i++) sum[i] += y[i];
            }
            for (size_t t = 0; t < tokens; t++)
                for (size_t i = 0; i < width; i++)
                    a.x[(first + t) * dim + c0 + i] += sum[t * kTileColumns + i] + (a.down_bias ? a.down_bias[c0 + i] : 0.0f);
        }
    };
    if (few) pool.run(few_tokens);
    else pool.run(many_tokens);
    return {active.load(), rows.load(), n};
}

}  // namespace tc
