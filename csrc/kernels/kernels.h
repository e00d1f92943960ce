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

#include <atomic>

#include "arrange.h"

namespace tc {

enum Activation : int32_t {
    SILU = 0,
    GELU = 1,
    GELU_TANH = 2,
    RELU = 3,
    FATRELU = 4,
    RELU2 = 5,
    SWIGLU_OAI = 6,
    N_ACTIVATIONS = 7
};

// What becomes of a gate's value g and of up's value u beside it: h = act(g) * up_act(u).
struct Gating {
    Activation activation;
    float threshold;     // FATRELU: g counts above it
    bool up_relu;        // dReLU: up_act is max(0, .), else the identity
    float alpha, limit;  // SWIGLU_OAI: act is g * sigmoid(alpha * g) of min(g, limit); up_act is 1 + u, where
                         // u is kept within +-limit
};

// A stored matrix: `rows` rows of `cols` weights, row r at data + r*stride. Rows of blocks are planar: the
// quants of all blocks, then their scales; formats.inl says how a block lies there, and numpy's side is
// thermocline/model/quant.py. SIGNS is for predictors, which only `matmul` of few tokens reads: bit i % 8 of
// byte i / 8 says that weight i is positive, and the product with the signs of x is +1 for each pair that
// agrees, -1 for the others.
//
// Of a matrix that is only multiplied, rows of blocks may lie in groups, interleaved (arrange.h): a number of
// rows that is a multiple of `group`, one behind the other, no ids, begin and end at groups.
struct Matrix {
    const uint8_t* data;
    Format format;
    size_t rows, cols, stride;
    size_t group = 1;  // 1: not interleaved; else Kernels::panel_rows
};

// Activations as matmul wants them, made by `quantize`: `row_bytes` per token. Two arrangements: rows for few
// tokens (kernels.inl; for float formats the f32 row itself), and `lanes` for many (gemm.inl, amx.inl): tiles
// of tile_tokens, so that memory for whole tiles is needed. The results are the same bits. Up to kFewTokens a
// row is multiplied with all of them as it is stored; from more on, unpacking rows into panels pays.
constexpr size_t kFewTokens = 4;
struct Input {
    const uint8_t* data;
    size_t row_bytes, tokens;
    bool lanes;
};
// Do matrices of both formats take activations in the same form, so that one copy serves both?
constexpr bool same_input(Format a, Format b) {
    return a == b || (!kFormats[a].quantised && !kFormats[b].quantised);
}

// The neurons of one FFN that a call works on, ids[0..n): rows rows[0..n) of up (data null when ungated) and
// down, which may differ in format. Later calls work on rows[n..listed).
struct Bundles {
    Matrix up, down;
    const int32_t *ids, *rows;
    size_t n, listed;
    bool up_relu;  // dReLU: up_act is max(0, .), else the identity
};

// How keys, or values, are stored: as they are, or as GGUF's blocks of 32 elements of one position with an
// f16 scale each. Quantised ones are rotated (`rotate`) first, so that no element stands out of its block.
enum CacheType : int32_t { CACHE_F16 = 0, CACHE_Q8_0 = 1, CACHE_Q4_0 = 2, N_CACHE_TYPES };

// A page holds `block` positions of a kv head:
//   f16   keys [head_dim][block]; values [block][head_dim]
//   q8_0  keys [head_dim / 4][block][4] int8: 4 elements of a position; values [block / 4][head_dim][4] int8:
//         an element of 4 positions
//   q4_0  keys [head_dim / 8][block][4]: byte i of dword g has element 8g + i, plus 8, in its low nibble,
//         8g + 4 + i in its high one; values [block / 4][head_dim / 32][16][4]: byte i of dword e has, of
//         position i, element e of 32, plus 8, in its low nibble, 16 + e in its high one
// and of quantised ones, behind that, the scales [head_dim / 32][block] f16. block % 4 == 0 for values.
//   f16   latents [block][head_dim]: keys whose first elements are the values
constexpr size_t cache_page_bytes(CacheType type, size_t head_dim, size_t block) {
    return block * (type == CACHE_F16    ? 2 * head_dim
                    : type == CACHE_Q8_0 ? head_dim / 32 * 34
                                         : head_dim / 32 * 18);
}

// The keys, or the values, of a layer. Pages of blocks that follow each other are side by side for each head,
// in runs of kPageRun: one stream from memory. Longer runs would spread a short text's pages over all of the
// cache's memory, and each huge page that is touched has to be cleared first (7B: 2 GiB for one token).
constexpr size_t kPageRun = 8;
struct CachePages {
    uint8_t* data;
    CacheType type;
    size_t pages, heads, page_bytes;  // pages: of each head
    uint8_t* at(size_t head, size_t page) const {
        const size_t first = page / kPageRun * kPageRun, left = pages - first,
                     run = left < kPageRun ? left : kPageRun;
        return data + (first * heads + head * run + page - first) * page_bytes;
    }
    bool rotated() const { return type != CACHE_F16; }
};

// Elements of a head that are rotated together: the largest power of two that divides head_dim.
constexpr size_t rotated(size_t head_dim) { return head_dim & (~head_dim + 1); }

// 32 elements of a query for quantised keys: int8 with an f32 scale (max|x| / 127), and their sum.
struct QueryBlock {
    int8_t q[32];
    float d;
    int32_t sum;
};

// Attention over positions [begin, end) of one sequence and one kv head. Its keys from position p * block on
// are page table[p]. end - begin <= kSpan. The caller reads [end, following) next, if that is more.
struct Span {
    CachePages k, v;
    const int32_t* table;
    size_t head, block, head_dim, begin, end, following;
    float scale, softcap;  // softcap > 0: scores become cap * tanh(score / cap)
    size_t value_dim;      // elements of a value; less than head_dim of latents only
    bool latents;  // v is k: f16 rows of head_dim elements, of which the first value_dim are the value
};
constexpr size_t kSpan = 512;

// One token of a state [rows, cols] of a recurrent layer, or of some of its columns:
//   u = write * (v - decay * k.from), or write * v without `delta`
//   to = decay * from + k (x) u
//   out = q.to
// (gated DeltaNet: arXiv 2412.06464; Mamba-2, whose B, C and x are k, q and v: arXiv 2405.21060). from may be
// to; a from_stride of 0 reads one row again and again: zeros, where there is no state yet.
struct StateStep {
    const float* from;
    float* to;
    size_t from_stride, to_stride, rows, cols;
    const float *k, *q;  // [rows]
    const float* v;      // [cols]
    float decay, write;
    bool delta;
    float* out;  // [cols]; may be v
};

// Columns of a float format that are added up before the sum over chunks (kernels.inl says in which order).
constexpr size_t kFloatChunk = 2048;
constexpr int kMostPanelRows = 32;      // `panel_rows` of no instruction set is larger
constexpr size_t kMostTileTokens = 16;  // nor `tile_tokens`
constexpr size_t kMostPanelBytes = 14;  // of 8 weights in a panel: int8, and up to six f32 for each 32 (q2_k)

struct Kernels {
    const char* isa;
    int panel_rows;         // matmul is fastest on multiples of this; rows of a group
    bool interleaves;       // Are matrices multiplied faster in groups of rows?
    size_t grouped_tokens;  // Up to so many, groups are multiplied as they lie; panels of them with more.

    // Bytes of one activation row for weights of this format, in either arrangement.
    size_t (*input_bytes)(Format format, size_t cols);
    size_t (*tile_tokens)(Format format);
    // Columns [begin, end) of token t's row of `cols`, which are at x, into their places in all tokens'
    // `out`; begin is a multiple of 32, end too, or end == cols. For formats of blocks: int8 blocks of 32
    // with f32 scales (max|x|/127). Signs: of all columns.
    void (*quantize)(Format format, const float* x, size_t cols, size_t begin, size_t end, bool lanes,
                     size_t row_bytes, size_t t, uint8_t* out);

    // In the lanes arrangement: token `from` of `all` becomes token `to` of `out`.
    void (*copy_lanes)(Format format, size_t cols, const uint8_t* all, size_t from, uint8_t* out, size_t to);

    // Scratch of a matmul in the lanes arrangement.
    size_t (*panel_bytes)(Format format, size_t cols, size_t tokens);
    // y[t*ldy + (r - begin)] = dot(w row, x_t) + bias, for r in [begin, end), or += with `add`; the row is
    // ids[r] where ids is given, else r. bias: [rows of w], or null; null with ids. then: where the caller
    // reads on, or null: rows in groups are followed by a request for the first bytes there.
    void (*matmul)(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                   const float* bias, bool add, float* y, size_t ldy, uint8_t* scratch, const uint8_t* then);

    // Up and down rows of the listed neurons, for the few tokens of x, as up takes them:
    //   h = gate[t*ldg + id] * up_act(up row . x_t);  y[t*cols + c] += h * down row[c], neurons in list
    //   order.
    // Returns the number of (token, neuron) pairs with h != 0. factors: scratch of
    //   bundle_factors(cols) floats.
    size_t (*bundles)(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y,
                      float* factors);
    // The down half alone, for many tokens and some columns:
    //   y[t*ldy + (c - begin)] += sum over k in [0, n), ascending, of h[t*ldh + k] * w[ids[k]][c], c in
    //   [begin, end).
    // begin is a multiple of 32; end too, or end == cols; end - begin <= kTileColumns. tile: scratch of
    // kTileRows * kTileColumns floats. Where h is 0 nothing is added. The same bits as `bundles` for the same
    // h.
    void (*accumulate)(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh,
                       size_t tokens, size_t begin, size_t end, float* y, size_t ldy, float* tile);

    void (*decode_row)(const Matrix& w, size_t row, float* out);
    // layer: subtract the mean first. bias may be null.
    void (*norm)(const float* x, const float* weight, const float* bias, float eps, bool layer, size_t n,
                 float* y);
    void (*activate)(float* x, size_t n, const Gating& how);
    // h = act(h) * up_act(up), n numbers in place. up null: act(h).
    void (*combine)(float* h, const float* up, size_t n, const Gating& how);

    // Half-rotation RoPE in place on one head: pairs (i, i + head_dim/2).
    void (*rope)(float* x, const float* cos, const float* sin, size_t head_dim);

    // In place, the normalised Hadamard transform of each `rotated(head_dim)` elements: its own inverse.
    // scratch: head_dim floats.
    void (*rotate)(float* x, size_t head_dim, float* scratch);
    // Position p's key or value [head_dim] into its page, quantised in the same blocks whatever else is
    // there. head_dim % 32 == 0 and, for values, block % 4 == 0, unless the type is f16.
    void (*store_key)(CacheType type, const float* x, size_t head_dim, size_t block, size_t p, uint8_t* page);
    void (*store_value)(CacheType type, const float* x, size_t head_dim, size_t block, size_t p,
                        uint8_t* page);
    // A query [head_dim], in place, as QueryBlocks.
    void (*code_query)(float* q, size_t head_dim);

    // For each query q[r] (f32 [head_dim], or QueryBlocks where keys are quantised), over the positions of
    // the span in [first[r], last[r]): partial[r], value_dim + 2 floats: the sum of e^(s - top) * value, top
    // = max s, the sum of e^(s - top). scores: scratch of 4 * kSpan floats.
    void (*attend)(const Span& a, const void* const* q, const int32_t* first, const int32_t* last,
                   size_t rows, float* scores, float* partial);
    // into := into joined with the partial of a later span. A total of 0 means no positions.
    void (*merge)(float* into, const float* partial, size_t value_dim);

    void (*recur)(const StateStep& s);
    // A causal convolution of each channel by itself, at one token: y[c] = bias[c] + the sum over j,
    // ascending, of w[j * stride + c] * x[j][c], x[j] being the inputs of the token width - 1 - j before.
    // bias may be null. y is none of x.
    void (*convolve)(const float* const* x, size_t width, const float* w, size_t stride, const float* bias,
                     size_t n, float* y);
    // x *= sigmoid(gate).
    void (*open_gate)(float* x, const float* gate, size_t n);

    // Read every byte, do next to nothing with it: the memory roof. Returns something that depends on all of
    // it.
    uint64_t (*read_all)(const uint8_t* p, size_t n);
};

// The floats of `bundles`' scratch: of each of 4 rows, up to 4 for each 32 columns.
constexpr size_t bundle_factors(size_t cols) { return 16 * ((cols + 31) / 32); }
// `accumulate` unpacks tiles of this size: 32 KiB of f32.
constexpr size_t kTileRows = 64, kTileColumns = 128;

// How many bytes ahead of its use a group of rows is asked for; 0: it is left to the processor. Begins with
// what is best for this one.
extern std::atomic<size_t> group_ahead;
// Whether rows are asked for into the first-level cache, and not into the second.
extern std::atomic<bool> rows_near;

// What this CPU supports; THERMOCLINE_ISA can only lower the choice.
const Kernels* chosen_kernels();                // null if THERMOCLINE_ISA names no level
const Kernels* kernels_named(const char* isa);  // null if unknown or unsupported here
const char* isa_level(size_t i);  // the names there are for this kind of CPU, best first, then null

const Kernels* scalar_kernels();
#ifdef THERMOCLINE_X86
const Kernels* avx2_kernels();
#ifdef THERMOCLINE_AVXVNNI
const Kernels* avxvnni_kernels();
#endif
const Kernels* avx512_kernels();
#ifdef THERMOCLINE_AMX
const Kernels* amx_kernels();
#endif
#endif
#ifdef THERMOCLINE_ARM
const Kernels* neon_kernels();
#endif

}  // namespace tc
