// Contract of the search for the bytes of weights. It allocates nothing, throws nothing and knows no threads.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tc {

// SEARCH(enumerator, name, weights that are searched together, their bytes)
#define TC_SEARCHES(SEARCH)            \
    SEARCH(Q8_0, "q8_0", 32, 34)       \
    SEARCH(Q4_0, "q4_0", 32, 18)       \
    SEARCH(Q4_1, "q4_1", 32, 20)       \
    SEARCH(Q5_0, "q5_0", 32, 22)       \
    SEARCH(Q5_1, "q5_1", 32, 24)       \
    SEARCH(Q4_K, "q4_k", 256, 144)     \
    SEARCH(Q5_K, "q5_k", 256, 176)     \
    SEARCH(Q6_K, "q6_k", 256, 210)     \
    SEARCH(Q3_K, "q3_k", 256, 110)     \
    SEARCH(Q2_K, "q2_k", 256, 84)      \
    SEARCH(IQ4_NL, "iq4_nl", 32, 18)   \
    SEARCH(IQ4_XS, "iq4_xs", 256, 136) \
    SEARCH(MXFP4, "mxfp4", 32, 17)     \
    SEARCH(TQ2_0, "tq2_0", 256, 66)

enum class Search : int32_t {
#define TC_ROW(id, ...) id,
    TC_SEARCHES(TC_ROW)
#undef TC_ROW
        COUNT
};

// The numbers of one block of one row, as the format's own arithmetic takes them.
struct BlockNumbers {
    uint8_t quants[256];
    uint8_t scales[16], minima[16];  // of parts; signed scales as the format stores them
    uint16_t super, super_minimum;   // f16; or scale and minimum of a block of 32, or an exponent
};

// What is searched: rows of weights, and what an error costs.
struct SearchInput {
    Search format;
    const float* x;  // [rows, columns]
    size_t rows, columns;
    const float* importance;  // [columns], of the square of an error; null: all ones
    // Columns correlate within windows of `window` of them. Null, or for each window [window, window] the
    // upper triangular U with U'U = (the inverse of the inputs' covariance): an error of column j is evened
    // out by the later columns of its window.
    const float* feedback;
    size_t window;
};

constexpr size_t kPanelRows = 16;  // a multiple of every width

struct SearchKernels {
    const char* isa;
    // Rows [first, first + kPanelRows), as far as there are. `scratch`: kPanelRows * columns floats, aligned
    // to 64 bytes. `blocks`: [kPanelRows][columns / weights searched together].
    void (*search)(const SearchInput& in, size_t first, float* scratch, BlockNumbers* blocks);
};

size_t searched_together(Search s);
size_t stored_bytes(Search s, size_t columns);
const SearchKernels* search_kernels_named(const char* isa);  // of an instruction set of the kernels

// Writes a row's blocks where the planes of a pack's row have them.
void store_row(Search format, const BlockNumbers* blocks, size_t columns, uint8_t* out);

}  // namespace tc
