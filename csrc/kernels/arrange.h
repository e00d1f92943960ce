// Rows of GGUF's blocks, one block after the other, as planar rows: `quant.from_gguf`, natively. Bits move,
// and no value changes. What a plane holds: docs/internals/csrc.md, model/formats.py, model/block_layout.py.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "formats.h"

namespace tc {

// One format's rows. `row` writes `blocks * block_bytes` bytes and reads as many; they must not overlap.
struct Arrangement {
    Format format;
    size_t block, block_bytes;  // weights and bytes of GGUF's block
    size_t halves;              // f16 scales and minima of a block: the last planes of a row
    bool exponents;             // the last plane is a byte of exponent for each block
    void (*row)(size_t blocks, const uint8_t* from, uint8_t* to);  // null: rows are the same in both
};

const Arrangement* arrangement(const char* format);  // null: no such format

// Whether all scales of a planar row are numbers. A block with one that is not was damaged.
bool scales_are_finite(const Arrangement& a, size_t blocks, const uint8_t* row);

// ---- rows in groups
//
// `group` rows of blocks, interleaved: slab after slab of kSlab * 32 columns. In a slab come the scales,
// plane after plane, then the numbers, 32 columns after the other, of these plane after plane; of each, a
// unit (kFormats) of each row in turn. The bytes of a group are those of its rows.
constexpr size_t kSlab = 8;                    // blocks of 32 weights
constexpr size_t kMostSlabBytes = 34 * kSlab;  // of a row

struct LaneOfGroup {
    const uint8_t* row;
    size_t lane;
};

// Rows to their lanes of the group that begins at `to`. Of many at once, the lines of a slab stay in the
// first cache.
void interleave_rows(Format format, size_t cols, size_t group, const LaneOfGroup* rows, size_t count,
                     uint8_t* to);
// What the slab at `from` has of a row: `cols` columns, at most kSlab * 32.
void slab_row(Format format, size_t cols, size_t group, size_t lane, const uint8_t* from, uint8_t* row);

}  // namespace tc
