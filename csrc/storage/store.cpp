#include "store.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <optional>

#if defined(THERMOCLINE_X86) && defined(__GNUC__)
#include <nmmintrin.h>
#endif

namespace tc {

// ---- CRC-32C: SSE4.2's or ARM's instruction where there is one, else a table.
static uint32_t crc_table(uint32_t crc, const uint8_t* p, size_t n) {
    static const struct Table {
        uint32_t t[256];
        Table() {
            for (uint32_t i = 0; i < 256; i++) {
                uint32_t c = i;
                for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ 0x82f63b78u : c >> 1;
                t[i] = c;
            }
        }
    } table;
    for (size_t i = 0; i < n; i++) crc = table.t[(crc ^ p[i]) & 255] ^ (crc >> 8);
    return crc;
}

#if defined(THERMOCLINE_X86) && defined(__GNUC__)
// The instruction answers after 3 cycles, and another can begin in each of them: three streams of so many
// bytes at a time, the later two begun at 0. To join them the first must be what it would be after as many
// zeros, which is linear in its bits.
constexpr size_t kStream = 512;
// Ahead of them, lines are asked for: three short streams are none to a processor that looks for long ones.
// Of what a disk brought, a core of Zen 3 checks 8 GB/s so, and 4.8 without.
constexpr size_t kAhead = 6 * kStream;
static uint32_t after_zeros(uint32_t crc) {
    static const struct Table {
        uint32_t t[4][256] = {};
        Table() {
            const uint8_t zeros[kStream] = {};
            for (uint32_t bit = 0; bit < 32; bit++) {
                const uint32_t moved = crc_table(1u << bit, zeros, kStream);
                for (uint32_t i = 0; i < 256; i++)
                    if (i >> bit % 8 & 1) t[bit / 8][i] ^= moved;
            }
        }
    } table;
    return table.t[0][crc & 255] ^ table.t[1][crc >> 8 & 255] ^ table.t[2][crc >> 16 & 255] ^
           table.t[3][crc >> 24];
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse(uint32_t crc, const uint8_t* p, size_t n) {
    for (; n >= 3 * kStream; p += 3 * kStream, n -= 3 * kStream) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < kStream; i += 8) {
            uint64_t v[3];
            if (i % 64 == 0)
                for (size_t s = 0; s < 3; s++)
                    _mm_prefetch(reinterpret_cast<const char*>(p + kAhead + s * kStream + i), _MM_HINT_T0);
            for (size_t s = 0; s < 3; s++) memcpy(&v[s], p + s * kStream + i, 8);
            a = _mm_crc32_u64(a, v[0]), b = _mm_crc32_u64(b, v[1]), c = _mm_crc32_u64(c, v[2]);
        }
        crc = after_zeros(after_zeros(uint32_t(a)) ^ uint32_t(b)) ^ uint32_t(c);
    }
    uint64_t c = crc;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        c = _mm_crc32_u64(c, v);
    }
    for (; n; p++, n--) c = _mm_crc32_u8(uint32_t(c), *p);
    return uint32_t(c);
}
#endif

#if defined(THERMOCLINE_ARM) && defined(__GNUC__)
// As instructions, not intrinsics: compilers disagree on how to allow those for one function.
static uint32_t crc_arm(uint32_t crc, const uint8_t* p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t v;
        memcpy(&v, p, 8);
        asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(v));
    }
    for (; n; p++, n--) asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t(*p)));
    return crc;
}
#endif

uint32_t crc32c(const uint8_t* p, size_t n, uint32_t seed) {
#if defined(THERMOCLINE_X86) && defined(__GNUC__)
    if (__builtin_cpu_supports("sse4.2")) return ~crc_sse(~seed, p, n);
#endif
#if defined(THERMOCLINE_ARM) && defined(__GNUC__)
    static const bool crc32 = arm_has_crc32();
    if (crc32) return ~crc_arm(~seed, p, n);
#endif
    return ~crc_table(~seed, p, n);
}

// ---- arena
Arena::Arena(size_t n) : bytes(n), pages_{nullptr, nullptr, 0} {
    if (n && n <= SIZE_MAX - kArenaPadding) pages_ = map_pages(n + kArenaPadding);
    data = pages_.data;
}

Arena::~Arena() { unmap_pages(pages_); }

void Arena::gather_pages() { gather_huge_pages(data, bytes); }

bool Arena::fence() { return forbid_page(data + bytes + kArenaPadding); }

// ---- loading
// Readers wait for the disk more than they compute: while some wait, others check. So there are more than
// cores. On two busy cores 4 readers with 2 MiB each get 2.8 GB/s of the disk's 3.4, 8 3.1, 16 3.2, 32 3.3
// (LOG 2026-11-21).
static constexpr size_t kChunk = size_t(2) << 20;  // a huge page: one segment of a disk request, not 512
static constexpr size_t kDirectFrom = size_t(64)
                                      << 20;  // smaller files are worth their place in the page cache

bool reads_directly(const Arena& arena) { return arena.bytes >= kDirectFrom; }

namespace {

struct Blocks {
    uint8_t* const arena;
    const std::vector<BlockRange> ranges;
    const size_t block, chunk;  // bytes
    const uint32_t* const checksums;
    std::vector<size_t> first;  // the chunk that each range begins with; then the number of all
    File through_cache;
    std::optional<File> direct;

    Blocks(Arena& to, const char* path, const std::vector<BlockRange>& ranges, const uint32_t* checksums,
           size_t block)
        : arena(to.data),
          ranges(ranges),
          block(block),
          chunk(std::max(block, kChunk / block * block)),
          checksums(checksums),
          first{0},
          through_cache(path, File::THROUGH_CACHE) {
        for (const BlockRange& r : ranges)
            first.push_back(first.back() + (r.end - r.begin + chunk - 1) / chunk);
        if (reads_directly(to)) direct.emplace(path, File::DIRECT);
    }

    // Direct unless it is refused (EINVAL: an offset, a length, a file system) or the cache has it already.
    size_t read(uint8_t* to, size_t at, size_t n, int& why) const {
        size_t done = 0;
        if (direct && direct->open() && !direct->cached(at, n)) {
            done = direct->read(to, n, at, why);
            if (done == n || (why && why != EINVAL)) return done;
        }
        return done + through_cache.read(to + done, n - done, at + done, why);
    }

    // A read that fails may give nothing of what it covers. Block by block, the first that cannot be read is
    // known.
    size_t read_to_the_failure(uint8_t* to, size_t at, size_t n, int& why) const {
        size_t done = read(to, at, n, why);
        if (!why) return done;
        for (done = 0; done < n;) {
            const size_t size = std::min(block, n - done), got = read(to + done, at + done, size, why);
            done += got;
            if (got < size) break;
        }
        return done;
    }

    ChunkDone read_and_check(size_t c) const {
        if (!through_cache.open()) return {0, Failure{through_cache.error(), ranges[0].begin / block}};
        const size_t i = size_t(std::upper_bound(first.begin(), first.end(), c) - first.begin()) - 1;
        const size_t at = ranges[i].begin + (c - first[i]) * chunk, n = std::min(chunk, ranges[i].end - at);
        uint8_t* const to = arena + ranges[i].to + (at - ranges[i].begin);
        int why = 0;
        const size_t done = read_to_the_failure(to, at, n, why);
        for (size_t b = 0; b < n; b += block) {
            const size_t size = std::min(block, n - b), number = (at + b) / block;
            if (b + size > done) return {b, Failure{why ? why : -1, number}};
            if (crc32c(to + b, size, 0) != checksums[number]) return {b, Failure{0, number}};
        }
        return {n, {}};
    }
};

}  // namespace

std::unique_ptr<Crew> begin_blocks(Arena& arena, const char* path, const std::vector<BlockRange>& ranges,
                                   const uint32_t* checksums, size_t block) {
    const auto blocks = std::make_shared<const Blocks>(arena, path, ranges, checksums, block);
    return std::make_unique<Crew>(blocks->first.back(), kReaders, 0,
                                  [blocks](size_t c, uint8_t*) { return blocks->read_and_check(c); });
}

}  // namespace tc
