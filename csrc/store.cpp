#include "store.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include <atomic>
#include <mutex>

#include "threads.h"

#ifdef _WIN32
#include <io.h>
#include <windows.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(THERMOCLINE_X86) && defined(__GNUC__)
#include <nmmintrin.h>
#endif

namespace tc {

// ---- CRC-32C: the SSE4.2 instruction where there is one (8 bytes per 3 cycles), else a table.
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
__attribute__((target("sse4.2"))) static uint32_t crc_sse(uint32_t crc, const uint8_t* p, size_t n) {
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

uint32_t crc32c(const uint8_t* p, size_t n, uint32_t seed) {
#if defined(THERMOCLINE_X86) && defined(__GNUC__)
    if (__builtin_cpu_supports("sse4.2")) return ~crc_sse(~seed, p, n);
#endif
    return ~crc_table(~seed, p, n);
}

// ---- arena
Arena::Arena(size_t n) : bytes(n) {
    if (n == 0) return;
#ifdef _WIN32
    data = static_cast<uint8_t*>(VirtualAlloc(nullptr, n + kArenaPadding, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE));
#else
    void* p = mmap(nullptr, n + kArenaPadding, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;
#ifdef MADV_HUGEPAGE
    madvise(p, n + kArenaPadding, MADV_HUGEPAGE);  // 2 MiB pages: decode streams gigabytes, 4-KiB pages would thrash the TLB
#endif
    data = static_cast<uint8_t*>(p);
#endif
}

Arena::~Arena() {
    if (!data) return;
#ifdef _WIN32
    VirtualFree(data, 0, MEM_RELEASE);
#else
    munmap(data, bytes + kArenaPadding);
#endif
}

// ---- loading
static int open_for_reading(const char* path) {
#ifdef _WIN32
    return _open(path, _O_RDONLY | _O_BINARY);
#else
    return open(path, O_RDONLY | O_CLOEXEC);
#endif
}
static void close_file(int fd) {
#ifdef _WIN32
    _close(fd);
#else
    close(fd);
#endif
}

// Whole range or an error: EINTR is retried, a short read continues, end of file is -1.
static int read_range(int fd, uint8_t* to, size_t n, size_t at) {
    while (n) {
#ifdef _WIN32
        static std::mutex seek;  // no pread there: seek and read belong together
        std::lock_guard<std::mutex> lock(seek);
        _lseeki64(fd, int64_t(at), SEEK_SET);
        const int64_t got = _read(fd, to, unsigned(n));
#else
        const ssize_t got = pread(fd, to, n, off_t(at));
#endif
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return -1;
        to += got, at += size_t(got), n -= size_t(got);
    }
    return 0;
}

LoadResult load(Pool& pool, Arena& arena, const char* path, size_t begin, size_t end, const uint32_t* checksums,
                size_t block) {
    const int fd = open_for_reading(path);
    if (fd < 0) return {errno, -1};
    const size_t chunk = block * 32;  // 2 MiB with 64-KiB blocks: large enough for sequential disk speed
    std::atomic<size_t> next{begin};
    std::atomic<int> error{0};
    std::atomic<int64_t> bad{-1};
    auto region = [&](int) {
        for (;;) {
            const size_t at = next.fetch_add(chunk);
            if (at >= end || error.load()) return;
            const size_t n = end - at < chunk ? end - at : chunk;
            if (const int e = read_range(fd, arena.data + at, n, at)) {
                error.store(e);
                return;
            }
            for (size_t b = at; b < at + n; b += block) {
                const size_t size = at + n - b < block ? at + n - b : block;
                const int64_t id = int64_t(b / block);
                if (crc32c(arena.data + b, size, 0) == checksums[id]) continue;
                int64_t first = bad.load();
                while ((first < 0 || id < first) && !bad.compare_exchange_weak(first, id)) {}
            }
        }
    };
    pool.run(region);
    close_file(fd);
    return {error.load(), bad.load()};
}

}  // namespace tc
