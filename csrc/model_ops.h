// The ops of one decoder layer over a thread pool: what Python calls, a few per layer. Shapes as in kernels.h;
// arguments are validated by bindings.cpp. Nothing here knows a model.
#pragma once
#include <mutex>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace tc {

struct AttentionArgs {
    float* qkv;                        // [tokens, (heads + 2 kv_heads) * head_dim]; q and k are rotated in place
    const float *cos, *sin;            // [tokens, head_dim/2], or null
    uint16_t *k, *v;                   // [pages, kv_heads, block, head_dim] f16
    const int32_t *positions, *sequence, *table;  // [tokens], [tokens], [sequences, table_width]
    size_t tokens, heads, kv_heads, head_dim, block, table_width, window;  // window 0: all positions
    float* out;                        // [tokens, heads * head_dim]
};

struct FFNArgs {
    float* x;        // [tokens, dim], the result is added
    const float* h;  // [tokens, dim], the input
    Matrix gate, up, down;  // up.data null when ungated
    const float *gate_bias, *down_bias;
    Activation activation;
    float threshold;
    bool up_relu, exact;
    size_t tokens;
};
struct FFNCounts {
    size_t active, rows, rows_dense;
};

class Context {
public:
    explicit Context(int threads, const Kernels* kernels) : pool(threads), k(*kernels) {}

    void embed(const Matrix& table, const int32_t* ids, size_t tokens, float* out);
    void norm(const float* x, const float* weight, const float* bias, float eps, bool layer, size_t tokens, size_t dim,
              float* out);
    // out = x wT + bias, or out += when `add`.
    void matmul(const Matrix& w, const float* x, size_t tokens, const float* bias, float* out, bool add);
    void attention(const AttentionArgs& a);
    FFNCounts ffn_add(const FFNArgs& a);

    Pool pool;
    const Kernels& k;
    std::mutex one_call;  // held by whoever calls an op: the scratch below belongs to one call at a time

private:
    Input input(const Matrix& w, const float* x, size_t tokens);
    FFNCounts ffn_block(const FFNArgs& a, size_t first, size_t tokens);

    // Scratch that grows to the largest step seen and is reused; one call at a time, so one set is enough.
    std::vector<uint8_t> input_;
    std::vector<float> temp_, gate_, hidden_, partial_, sums_, scores_, tiles_, factors_;
    std::vector<int32_t> ids_;
    std::vector<size_t> counts_;
};

}  // namespace tc
