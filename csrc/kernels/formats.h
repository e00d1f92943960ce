// The weight formats, a row each. The enumeration, the facts that bindings check, `_native.FORMATS` and the
// kernels' dispatch are made from these rows. To add a format: a row here, its struct in formats.inl, and its
// row in thermocline/model/formats.py (a test compares the two tables).
#pragma once
#include <stddef.h>
#include <stdint.h>

// For what is called in the innermost loops with constants that must arrive there.
// TC_INLINED: the same of a lambda, behind its parameters.
#ifdef _MSC_VER
#include <intrin.h>  // _BitScanForward64

#define TC_INLINE __forceinline
#define TC_INLINED
#else
#define TC_INLINE inline __attribute__((always_inline))
#define TC_INLINED __attribute__((always_inline))
#endif

namespace tc {

// ROW(enumerator, name, weights of a block, bytes of a block, alignment of a row, are activations int8?,
//     bytes of 256 weights in each plane of a row of blocks, and of the units of which rows are interleaved)
#define TC_WEIGHT_FORMATS(ROW)                                                      \
    ROW(F32, "f32", 1, 4, 4, false, {}, {})                                         \
    ROW(F16, "f16", 1, 2, 2, false, {}, {})                                         \
    ROW(BF16, "bf16", 1, 2, 2, false, {}, {})                                       \
    ROW(Q8_0, "q8_0", 32, 34, 2, true, {256, 16}, {4, 2})                           \
    ROW(Q4_0, "q4_0", 32, 18, 2, true, {128, 16}, {4, 2})                           \
    ROW(Q4_1, "q4_1", 32, 20, 2, true, {128, 16, 16}, {4, 2, 2})                    \
    ROW(Q5_0, "q5_0", 32, 22, 2, true, {128, 32, 16}, {4, 4, 2})                    \
    ROW(Q5_1, "q5_1", 32, 24, 2, true, {128, 32, 16, 16}, {4, 4, 2, 2})             \
    ROW(Q4_K, "q4_k", 256, 144, 2, true, {128, 8, 4, 2, 2}, {4, 1, 1, 2, 2})        \
    ROW(Q5_K, "q5_k", 256, 176, 2, true, {128, 32, 8, 4, 2, 2}, {4, 4, 1, 1, 2, 2}) \
    ROW(Q6_K, "q6_k", 256, 210, 2, true, {128, 64, 16, 2}, {4, 4, 1, 2})            \
    ROW(Q3_K, "q3_k", 256, 110, 2, true, {64, 32, 8, 4, 2}, {4, 4, 1, 1, 2})        \
    ROW(Q2_K, "q2_k", 256, 84, 2, true, {64, 16, 2, 2}, {4, 1, 2, 2})               \
    ROW(IQ4_NL, "iq4_nl", 32, 18, 2, true, {128, 16}, {4, 2})                       \
    ROW(IQ4_XS, "iq4_xs", 256, 136, 2, true, {128, 4, 2, 2}, {4, 1, 1, 2})          \
    ROW(MXFP4, "mxfp4", 32, 17, 1, true, {128, 8}, {4, 1})                          \
    ROW(TQ2_0, "tq2_0", 256, 66, 2, true, {64, 2}, {4, 2})
// SIGNS, a bit a weight, is for predictors: only `matmul` of few tokens reads it, and a last byte may be
// incomplete.
#define TC_FORMATS(ROW) TC_WEIGHT_FORMATS(ROW) ROW(SIGNS, "signs", 8, 1, 1, true, {}, {})

enum Format : int32_t {
#define TC_ROW(id, ...) id,
    TC_FORMATS(TC_ROW)
#undef TC_ROW
        N_FORMATS
};

constexpr int kMostPlanes = 6;
struct FormatFacts {
    const char* name;
    size_t block, block_bytes, alignment;
    bool quantised;                                  // x is copied for it, as int8 or as signs
    size_t planes[kMostPlanes], units[kMostPlanes];  // 0 behind the last
};
constexpr FormatFacts kFormats[] = {
#define TC_ROW(id, ...) {__VA_ARGS__},
    TC_FORMATS(TC_ROW)
#undef TC_ROW
};
constexpr bool planes_add_up() {
    for (const FormatFacts& f : kFormats) {
        size_t bytes = 0;
        for (size_t plane : f.planes) bytes += plane;
        if (bytes && bytes * f.block != f.block_bytes * 256) return false;
    }
    return true;
}
static_assert(planes_add_up(), "planes of a row of blocks");
constexpr size_t row_bytes(Format f, size_t cols) {
    return (cols + kFormats[f].block - 1) / kFormats[f].block * kFormats[f].block_bytes;
}

}  // namespace tc
