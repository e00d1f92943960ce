#include "store.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

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
static constexpr size_t kReaders = 32;
static constexpr size_t kChunk = size_t(2) << 20;  // a huge page: one segment of a disk request, not 512
static constexpr size_t kDirectFrom = size_t(64)
                                      << 20;  // smaller files are worth their place in the page cache

namespace {

// Readers claim chunks in ascending order and finish every chunk below the lowest failure known, so the
// failure that remains is the lowest of all, whoever met it: chunks below it were claimed before, and none of
// them failed.
struct Loading {
    uint8_t* const to;  // where file byte `begin` goes
    const size_t begin;
    const File& through_cache;
    const File* const direct;  // or null
    const size_t end, chunk, block;
    const uint32_t* const checksums;
    std::atomic<size_t> next;
    std::atomic<size_t> failed{SIZE_MAX};  // first byte of the lowest failing block; written under `mutex`
    int error = 0;                         // of that block: 0 is a wrong checksum; guarded by `mutex`
    std::mutex mutex{};

    void fail(size_t at, int why) {
        std::lock_guard<std::mutex> lock(mutex);
        if (at >= failed.load()) return;
        error = why;
        failed.store(at);
    }

    uint8_t* place(size_t at) const { return to + (at - begin); }

    // Direct unless it is refused (EINVAL: an offset, a length, a file system) or the cache has it already.
    size_t read(size_t at, size_t n, int& why) const {
        size_t done = 0;
        if (direct && !direct->cached(at, n)) {
            done = direct->read(place(at), n, at, why);
            if (done == n || (why && why != EINVAL)) return done;
        }
        return done + through_cache.read(place(at + done), n - done, at + done, why);
    }

    // A read that fails may give nothing of what it covers. Block by block, the first that cannot be read is
    // known.
    size_t read_to_the_failure(size_t at, size_t n, int& why) const {
        size_t done = read(at, n, why);
        if (!why) return done;
        for (done = 0; done < n;) {
            const size_t size = std::min(block, n - done), got = read(at + done, size, why);
            done += got;
            if (got < size) break;
        }
        return done;
    }

    void read_and_check() {
        for (size_t at; (at = next.fetch_add(chunk)) < end && at < failed.load();) {
            const size_t n = std::min(chunk, end - at);
            int why = 0;
            const size_t done = read_to_the_failure(at, n, why);
            for (size_t b = 0; b < n; b += block) {
                const size_t size = std::min(block, n - b);
                if (b + size > done)
                    fail(at + b, why ? why : -1);
                else if (crc32c(place(at + b), size, 0) != checksums[(at + b) / block])
                    fail(at + b, 0);
                else
                    continue;
                break;
            }
        }
    }
};

}  // namespace

LoadResult load(Arena& arena, const char* path, size_t begin, size_t end, const uint32_t* checksums,
                size_t block, size_t to) {
    const File through_cache(path, File::THROUGH_CACHE);
    if (!through_cache.open()) return {through_cache.error(), int64_t(begin / block)};
    std::optional<File> direct;
    if (arena.bytes >= kDirectFrom) direct.emplace(path, File::DIRECT);
    const size_t chunk = std::max(block, kChunk / block * block), chunks = (end - begin + chunk - 1) / chunk;
    Loading l{
        arena.data + to, begin,     through_cache, direct && direct->open() ? &*direct : nullptr, end, chunk,
        block,           checksums, {begin}};
    std::thread others[kReaders - 1];
    try {
        for (size_t i = 1; i < kReaders && i < chunks; i++)
            others[i - 1] = std::thread([&l] { l.read_and_check(); });
    } catch (const std::exception&) {
    }  // the system has no more threads for us: those there are do the work
    l.read_and_check();
    for (std::thread& t : others)
        if (t.joinable()) t.join();
    const size_t failed = l.failed.load();
    return failed == SIZE_MAX ? LoadResult{0, -1} : LoadResult{l.error, int64_t(failed / block)};
}

}  // namespace tc
