// Rows of GGUF's blocks, one block after the other, as planar rows: `quant.from_gguf`, natively. Bits move,
// and no value changes. What a plane holds: docs/internals/csrc.md, model/formats.py, model/block_layout.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace tc {

// One format's rows. `row` writes `blocks * block_bytes` bytes and reads as many; they must not overlap.
struct Arrangement {
    const char* format;
    size_t block, block_bytes;  // weights and bytes of GGUF's block
    size_t halves;              // f16 scales and minima of a block: the last planes of a row
    bool exponents;             // the last plane is a byte of exponent for each block
    void (*row)(size_t blocks, const uint8_t* from, uint8_t* to);  // null: rows are the same in both
};

const Arrangement* arrangement(const char* format);  // null: no such format

// Whether all scales of a planar row are numbers. A block with one that is not was damaged.
bool scales_are_finite(const Arrangement& a, size_t blocks, const uint8_t* row);

}  // namespace tc
