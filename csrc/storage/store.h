// The memory of weights: one arena of anonymous memory, filled by parallel reads that check every block as it
// arrives. The file is never mapped: a truncated file would cause a SIGBUS, and a page fault an unplanned
// stall.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "crew.h"
#include "system.h"

namespace tc {

uint32_t crc32c(const uint8_t* p, size_t n,
                uint32_t seed);  // Castagnoli; seed 0 to start, the result to continue

// A kernel may read (but never use) this many bytes past the end of an arena: an AVX-512 step reads four
// blocks of nibbles, 64 bytes, where a row of one block of mxfp4 has 17, and a panel turns over whole
// vectors.
constexpr size_t kArenaPadding = 64;

struct Arena {
    explicit Arena(
        size_t bytes);  // zeroed, huge pages where the system has them; data is null if there is no memory
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    void gather_pages();  // when filled: move the contents into huge pages (Linux 6.1; otherwise no effect)
    bool fence();         // for tests: forbid reads past the padding, which must end at a page's end
    uint8_t* data = nullptr;
    size_t bytes = 0;

 private:
    Pages pages_;
};

// Bytes [begin, end) of a file, to byte `to` of an arena. begin is a multiple of the blocks' size.
struct BlockRange {
    size_t begin, end, to;
};

// Begin to read ranges of a file into the arena, and to compare each block of `block` bytes with
// checksums[i], where i counts blocks from the start of the file. The page cache is left as it is: cached
// bytes are copied, and the others are read with direct I/O if the file system allows it. A failure's `where`
// is the block, its error 0 for a wrong checksum. Arena and checksums stay until the crew has gone.
std::unique_ptr<Crew> begin_blocks(Arena& arena, const char* path, const std::vector<BlockRange>& ranges,
                                   const uint32_t* checksums, size_t block);

// As many readers as hide the disk's answers, and how the file is read: shared with row_load.cpp.
constexpr size_t kReaders = 32;
bool reads_directly(const Arena& arena);  // a small one's file is worth its place in the page cache

}  // namespace tc
