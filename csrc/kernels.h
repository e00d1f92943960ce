// The contract between the kernels (one body, compiled once per ISA) and everything that calls them.
//
// Determinism. Each output element is computed by one thread, in one order fixed by K alone:
// never by the number of rows, tokens, threads, or by which rows are in the call. That is what makes
// `exact` bit-identical to `off`, and a batch bit-identical to its parts. Files are compiled without
// floating-point contraction, so every template instance rounds alike.
//
// Kernels never allocate, never throw, never lock, and trust their arguments: bindings.cpp validates.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tc {

enum Format : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, N_FORMATS = 5 };
enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, FATRELU = 4, RELU2 = 5, N_ACTIVATIONS = 6 };

// A stored matrix: `rows` rows of `cols` weights, row r at data + r*stride.
struct Matrix {
    const uint8_t* data;
    Format format;
    size_t rows, cols, stride;
};

// Activations as a kernel wants them: for F32/F16/BF16 weights the f32 rows themselves (`f32`, cols apart);
// for quantised weights rows of ISA-specific int8 blocks (`blocks`, `row_bytes` apart), made by `quantize`.
struct Input {
    const float* f32;
    const uint8_t* blocks;
    size_t row_bytes;
    size_t tokens;
};

// The neurons of one FFN that a call works on: rows ids[0..n) of up (data null when ungated) and down.
struct Bundles {
    Matrix up, down;
    const int32_t* ids;
    size_t n;
    bool up_relu;  // dReLU: up_act is max(0, .), else the identity
};

struct Kernels {
    const char* isa;

    // Bytes of one quantised activation row of `cols` elements.
    size_t (*input_bytes)(size_t cols);
    // x [cols] -> int8 blocks of 32 with f32 scales (max|x|/127). cols % 32 == 0.
    void (*quantize)(const float* x, size_t cols, uint8_t* out);

    // y[t*ldy + (r - begin)] = dot(w row, x_t) + bias, for r in [begin, end); the row is ids[r] where ids is given,
    // else r. bias (may be null) is indexed like the row.
    void (*matmul)(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x, const float* bias,
                   float* y, size_t ldy);

    // Up and down rows of the listed neurons, for the few tokens of x:
    //   h = gate[t*ldg + id] * up_act(up row . x_t);  y[t*cols + c] += h * down row[c], neurons in list order.
    // Returns the number of (token, neuron) pairs with h != 0. factors: scratch of 4 * ceil(cols/32) floats.
    size_t (*bundles)(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y, float* factors);
    // The down half alone, for many tokens and some columns:
    //   y[t*ldy + (c - begin)] += sum over k in [0, n), ascending, of h[t*ldh + k] * w[ids[k]][c], c in [begin, end).
    // begin is a multiple of 32; end too, or end == cols; end - begin <= kTileColumns. tile: scratch of kTileRows *
    // kTileColumns floats. The same bits as `bundles` for the same h.
    void (*accumulate)(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh, size_t tokens,
                       size_t begin, size_t end, float* y, size_t ldy, float* tile);

    void (*decode_row)(const Matrix& w, size_t row, float* out);
    // layer: subtract the mean first. bias may be null.
    void (*norm)(const float* x, const float* weight, const float* bias, float eps, bool layer, size_t n, float* y);
    void (*activate)(float* x, size_t n, Activation kind, float threshold);

    // Half-rotation RoPE in place on one head: pairs (i, i + head_dim/2).
    void (*rope)(float* x, const float* cos, const float* sin, size_t head_dim);
    void (*to_f16)(const float* x, size_t n, uint16_t* out);

    // Attention of `group` query heads that share one kv head, for one token, over positions [start, end).
    // Page p of the sequence: k_pages + table[p]*page_stride (elements), `block` positions of head_dim f16 each.
    // q, out: [group, head_dim]. scores: scratch of group*(end-start) floats.
    void (*attend)(const float* q, size_t group, size_t head_dim, float scale, const uint16_t* k_pages,
                   const uint16_t* v_pages, const int32_t* table, size_t page_stride, size_t block, size_t start,
                   size_t end, float* scores, float* out);

    // Read every byte, do next to nothing with it: the memory roof. Returns something that depends on all of it.
    uint64_t (*read_all)(const uint8_t* p, size_t n);
};

// `accumulate` unpacks tiles of this size: 8 KiB of f32.
constexpr size_t kTileRows = 16, kTileColumns = 128;

// What this CPU supports, best first; THERMOCLINE_ISA can only lower the choice.
const Kernels* chosen_kernels();                // null if THERMOCLINE_ISA names no level
const Kernels* kernels_named(const char* isa);  // null if unknown or unsupported here

const Kernels* scalar_kernels();
#ifdef THERMOCLINE_X86
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
#endif

}  // namespace tc
