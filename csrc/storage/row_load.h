// Rows of GGUF files, straight into an arena: read in large pieces, rearranged into planar rows, each put in
// its place, by as many threads as hide the disk.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "crew.h"
#include "kernels/arrange.h"
#include "store.h"
#include "system.h"

namespace tc {

struct SourceFile {
    std::string path;  // UTF-8
    FileState state;   // when its header was read
};

// `rows` rows of a file from byte `at` on, one behind the other. Row r goes to byte to + stride * order[r] of
// the arena, with order[r] = r if there is no `order`, and nowhere if it is negative. Or, in groups
// (arrange.h), to its lane: `to` is then where the row before which there are `lane` others of its group
// would be, if they came in turn.
struct RowRun {
    const Arrangement* form;
    size_t blocks;  // of a row
    unsigned file;
    uint64_t at;
    size_t rows, to, stride;
    const int32_t* order;
    size_t group = 1, lane = 0;
    bool planar = false;  // as in a pack: there is nothing to rearrange but groups

    size_t row_bytes() const { return blocks * form->block_bytes; }
};

// Puts rows [first, first + n) of a run, which are at `from`, where they belong; `arena` is byte 0 of `to`.
// scratch: `group` rows, where there are groups. Returns the first with a scale that is no number, or the row
// behind the last.
size_t put_rows(const RowRun& run, uint8_t* arena, size_t first, size_t n, const uint8_t* from,
                uint8_t* scratch);

// A failure's `where` is run << kRowBits | row, and its error 0 for a scale that is not a finite number; or,
// with kChanged, the file that is no longer as it was when its header was read.
constexpr int kRowBits = 40, kChanged = -2;

// Begin to load the runs, in their order. Arena and orders stay until the crew has gone. Buffers take 32 MiB,
// or 64 rows where those are larger, and a group of rows each where there are groups.
std::unique_ptr<Crew> begin_rows(Arena& arena, const std::vector<SourceFile>& files,
                                 const std::vector<RowRun>& runs);

}  // namespace tc
