// Multi-head latent attention, absorbed: matrices of each head turn queries into queries for latents, and
// what these find into the heads' outputs (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#include <string.h>

#include <algorithm>

#include "work.h"

namespace tc {

// y of token t and head h, at y + t * y_token + h * y_head, = w_h x: rows [h * rows, (h + 1) * rows) of w,
// and x + t * x_token + h * x_head.
struct Context::HeadProducts {
    const Matrix& w;
    size_t heads, tokens;
    const float* x;
    size_t x_token, x_head;
    float* y;
    size_t y_token, y_head;
};

void Context::head_products(const HeadProducts& a) {
    const Matrix& w = a.w;
    const size_t rows = w.rows / a.heads, cols = w.cols, unit = size_t(k.panel_rows);
    const bool lanes = a.tokens > kFewTokens, copy = quantised(w) || lanes;
    const size_t bytes = copy ? k.input_bytes(w.format, cols) : sizeof(float) * a.x_token,
                 tile = lanes ? k.tile_tokens(w.format) : 1, head = bytes * whole(a.tokens, tile),
                 panel = lanes ? k.panel_bytes(w.format, cols, a.tokens) : 0;
    uint8_t* inputs = copy ? grown(inputs_[0], head * a.heads) : nullptr;
    uint8_t* scratch = panel ? panels(panel) : nullptr;
    Pieces pieces(w.rows, lanes ? unit : piece_rows(w.stride, unit, pool.threads()), pool.threads());
    const auto copy_head = [&](size_t h, size_t t) {
        k.quantize(w.format, a.x + t * a.x_token + h * a.x_head, cols, 0, cols, lanes, bytes, t,
                   inputs + h * head);
    };
    auto region = [&](int thread) {
        if (copy) {
            for (size_t h = size_t(thread); h < a.heads; h += size_t(pool.threads()))
                for (size_t t = 0; t < a.tokens; t++) copy_head(h, t);
            pool.barrier();
        }
        for (size_t begin, end; pieces.take(&begin, &end);)
            for (size_t h = begin / rows; h * rows < end; h++) {
                const size_t from = std::max(begin, h * rows), to = std::min(end, (h + 1) * rows);
                const uint8_t* in =
                    copy ? inputs + h * head : reinterpret_cast<const uint8_t*>(a.x + h * a.x_head);
                k.matmul(w, nullptr, from, to, {in, bytes, a.tokens, lanes}, nullptr, false,
                         a.y + h * a.y_head + (from - h * rows), a.y_token,
                         scratch + size_t(thread) * panel_stride_, nullptr);
            }
    };
    pool.run(region);
}

// Each head's query for latents, and the latent itself: out [tokens, (heads + 1) * (rank + rope)].
void Context::latent_queries(const Attention& layer, const float* h, const Step& step, float* out) {
    const Latent& l = layer.latent;
    const size_t n = layer.heads.n, hd = layer.heads.dim, width = layer.qkv.rows(), lower = width - hd,
                 tokens = step.tokens;
    float* x = grown(qkv_, tokens * width);
    matmul(layer.qkv, layer.norm, h, tokens, x);
    const float* q = x;
    size_t ldq = width;
    if (l.q_b.data) {
        float* a = grown(lower_, tokens * lower);
        each_token(pool, tokens, 1, [&](size_t t) {
            k.norm(x + t * width, l.q_norm.weight, nullptr, l.q_norm.eps, false, lower, a + t * lower);
        });
        q = grown(queries_, tokens * l.q_b.rows), ldq = l.q_b.rows;
        matmul({l.q_b, nullptr}, {}, a, tokens, queries_.data(), false);
    }
    const size_t each = l.nope + l.rope, half = l.rope / 2;
    each_token(pool, tokens, 1, [&](size_t t) {
        const float *cos = step.cos + t * half, *sin = step.sin + t * half, *key = x + t * width + lower;
        float *to = out + t * (n + 1) * hd, *latent = to + n * hd;
        for (size_t i = 0; i < n; i++, to += hd) {
            memcpy(to + l.rank, q + t * ldq + i * each + l.nope, sizeof(float) * l.rope);
            k.rope(to + l.rank, cos, sin, l.rope);
        }
        k.norm(key, l.kv_norm.weight, nullptr, l.kv_norm.eps, false, l.rank, latent);
        memcpy(latent + l.rank, key + l.rank, sizeof(float) * l.rope);
        k.rope(latent + l.rank, cos, sin, l.rope);
    });
    head_products({l.k_b, n, tokens, q, ldq, each, out, (n + 1) * hd, hd});
}

// A pass of at most kPassTokens bounds the scratch: V3's queries for latents are 300 KB a token.
void Context::latent_add(float* x, const float* h, const Attention& layer, const Step& step,
                         const CachePages& pages) {
    const Latent& l = layer.latent;
    const Heads& heads = layer.heads;
    const size_t dim = layer.out.weight.rows, out = layer.out.weight.cols;
    for (size_t t0 = 0; t0 < step.tokens; t0 += kPassTokens) {
        Step some = step;
        some.tokens = std::min(kPassTokens, step.tokens - t0);
        some.positions += t0, some.sequence += t0;
        some.cos += t0 * (l.rope / 2), some.sin += t0 * (l.rope / 2);
        float* queries = grown(absorbed_, some.tokens * heads.width());
        latent_queries(layer, h + t0 * dim, some, queries);
        float* found = grown(found_, some.tokens * heads.n * l.rank);
        attention({heads, some, pages, pages, queries, found});
        float* joined = grown(attended_, some.tokens * out);
        head_products({l.v_b, heads.n, some.tokens, found, heads.n * l.rank, l.rank, joined, out, l.value});
        attention_out(layer, joined, some.tokens, x + t0 * dim);
    }
}

}  // namespace tc
