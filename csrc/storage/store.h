// The memory of weights: one arena of anonymous memory, filled by parallel reads that check every block as it
// arrives. The file is never mapped: a truncated file would cause a SIGBUS, and a page fault an unplanned
// stall.
#pragma once
#include <cstddef>
#include <cstdint>

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

struct LoadResult {
    int error;      // errno of a failed read; -1: the file ends early; 0: nothing, or a wrong checksum
    int64_t block;  // the first bad block, numbered from the start of the file, or -1
};

// Read file bytes [begin, end) to byte `to` of the arena. Compare each block of `block` bytes with
// checksums[i], where i counts blocks from the start of the file. begin is a multiple of block. The page
// cache is left as it is: cached bytes are copied, and the others are read with direct I/O if the file system
// allows it.
LoadResult load(Arena& arena, const char* path, size_t begin, size_t end, const uint32_t* checksums,
                size_t block, size_t to);

}  // namespace tc
