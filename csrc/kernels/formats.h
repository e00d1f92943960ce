// The weight formats, a row each. The enumeration, the facts that bindings check, `_native.FORMATS` and the
// kernels' dispatch are made from these rows. To add a format: a row here, its struct in formats.inl, and its
// row in thermocline/model/formats.py (a test compares the two tables).
#pragma once
#include <stddef.h>
#include <stdint.h>

// For what is called in the innermost loops with constants that must arrive there.
#ifdef _MSC_VER
#define TC_INLINE __forceinline
#else
#define TC_INLINE inline __attribute__((always_inline))
#endif

namespace tc {

// ROW(enumerator, name, weights of a block, bytes of a block, alignment of a row, are activations int8?)
#define TC_WEIGHT_FORMATS(ROW)               \
    ROW(F32, "f32", 1, 4, 4, false)          \
    ROW(F16, "f16", 1, 2, 2, false)          \
    ROW(BF16, "bf16", 1, 2, 2, false)        \
    ROW(Q8_0, "q8_0", 32, 34, 2, true)       \
    ROW(Q4_0, "q4_0", 32, 18, 2, true)       \
    ROW(Q4_1, "q4_1", 32, 20, 2, true)       \
    ROW(Q5_0, "q5_0", 32, 22, 2, true)       \
    ROW(Q5_1, "q5_1", 32, 24, 2, true)       \
    ROW(Q4_K, "q4_k", 256, 144, 2, true)     \
    ROW(Q5_K, "q5_k", 256, 176, 2, true)     \
    ROW(Q6_K, "q6_k", 256, 210, 2, true)     \
    ROW(Q3_K, "q3_k", 256, 110, 2, true)     \
    ROW(Q2_K, "q2_k", 256, 84, 2, true)      \
    ROW(IQ4_NL, "iq4_nl", 32, 18, 2, true)   \
    ROW(IQ4_XS, "iq4_xs", 256, 136, 2, true) \
    ROW(MXFP4, "mxfp4", 32, 17, 1, true)     \
    ROW(TQ2_0, "tq2_0", 256, 66, 2, true)
// SIGNS, a bit a weight, is for predictors: only `matmul` of few tokens reads it, and a last byte may be
// incomplete.
#define TC_FORMATS(ROW) TC_WEIGHT_FORMATS(ROW) ROW(SIGNS, "signs", 8, 1, 1, true)

enum Format : int32_t {
#define TC_ROW(id, ...) id,
    TC_FORMATS(TC_ROW)
#undef TC_ROW
        N_FORMATS
};

struct FormatFacts {
    const char* name;
    size_t block, block_bytes, alignment;
    bool quantised;  // x is copied for it, as int8 or as signs
};
constexpr FormatFacts kFormats[] = {
#define TC_ROW(id, ...) {__VA_ARGS__},
    TC_FORMATS(TC_ROW)
#undef TC_ROW
};
constexpr size_t row_bytes(Format f, size_t cols) {
    return (cols + kFormats[f].block - 1) / kFormats[f].block * kFormats[f].block_bytes;
}

}  // namespace tc
