// Where weights live: one arena of anonymous memory, filled by parallel reads that check every block as it
// arrives. Never a file mapping: a truncated file would be a SIGBUS, and a page fault a stall nobody planned
// (design 4).
#pragma once
#include <cstddef>
#include <cstdint>

#include "system.h"

namespace tc {

uint32_t crc32c(const uint8_t* p, size_t n,
                uint32_t seed);  // Castagnoli; seed 0 to start, the result to continue

// Bytes past the end of an arena that a kernel may read (never use): q4_0's AVX-512 step reads 64 bytes
// for 36.
constexpr size_t kArenaPadding = 64;

struct Arena {
    explicit Arena(
        size_t bytes);  // zeroed, huge pages where the system has them; data is null if there is no memory
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    void gather_pages();  // once filled: into huge pages what was not given as such (Linux 6.1; else nothing
                          // happens)
    bool fence();         // tests: past the padding, where a page must begin, nothing can be read from now on
    uint8_t* data = nullptr;
    size_t bytes = 0;

 private:
    Pages pages_;
};

struct LoadResult {
    int error;  // errno of a failed read; -1: the file ends early; 0: nothing, or a wrong checksum
    int64_t
        block;  // the first block (numbered from the start of the file) that is not as it should be, or -1
};

// Read file bytes [begin, end) to byte `to` of the arena, and compare each block of `block` bytes with
// checksums[i], i counted from the start of the file. begin is a multiple of block. Leaves the page cache as
// it is: what is there is copied, the rest is read past it where the file system allows.
LoadResult load(Arena& arena, const char* path, size_t begin, size_t end, const uint32_t* checksums,
                size_t block, size_t to);

}  // namespace tc
