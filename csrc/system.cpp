#include "system.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>

#include "round.h"

#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <io.h>
#include <windows.h>

#include <string>
#else
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <sys/vfs.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif
#endif

namespace tc {

// ---- memory
static constexpr size_t kHuge = size_t(2)
                                << 20;  // decode streams gigabytes: with 4-KiB pages it would thrash the TLB
static constexpr size_t kSpare = size_t(64) << 10;  // no page of any system is larger

#ifdef _WIN32

Pages map_pages(size_t bytes) {
    if (bytes > SIZE_MAX - kSpare) return {nullptr, nullptr, 0};
    void* p = VirtualAlloc(nullptr, bytes + kSpare, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    return {static_cast<uint8_t*>(p), p, bytes + kSpare};
}

void unmap_pages(const Pages& pages) {
    if (pages.mapping) VirtualFree(pages.mapping, 0, MEM_RELEASE);
}

void gather_huge_pages(uint8_t*, size_t) {}

bool forbid_page(uint8_t* page) {
    DWORD before;
    return VirtualProtect(page, 1, PAGE_NOACCESS, &before) != 0;
}

#else

Pages map_pages(size_t bytes) {
    if (bytes > SIZE_MAX - 3 * kHuge) return {nullptr, nullptr, 0};
    const size_t mapped = whole(bytes, kHuge) + kHuge;  // whole huge pages, wherever the mapping begins
    void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return {nullptr, nullptr, 0};
    uint8_t* data = static_cast<uint8_t*>(p) + (kHuge - reinterpret_cast<uintptr_t>(p) % kHuge) % kHuge;
#ifdef MADV_HUGEPAGE
    madvise(data, mapped - kHuge, MADV_HUGEPAGE);
#endif
    return {data, p, mapped};
}

void unmap_pages(const Pages& pages) {
    if (pages.mapping) munmap(pages.mapping, pages.mapped);
}

void gather_huge_pages(uint8_t* data, size_t bytes) {
#ifdef __linux__
    constexpr int kCollapse =
        25;  // MADV_COLLAPSE, Linux 6.1; older kernels answer EINVAL, and nothing is lost
    if (bytes >= kHuge) madvise(data, bytes / kHuge * kHuge, kCollapse);
#else
    (void)data, (void)bytes;
#endif
}

bool forbid_page(uint8_t* page) { return mprotect(page, 1, PROT_NONE) == 0; }

#endif

// ---- files
#ifdef _WIN32

static std::wstring wide(const char* path) {
    const int n =
        MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, nullptr, 0);  // with the final zero
    std::wstring out(size_t(n > 0 ? n : 1), L'\0');
    MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, path, -1, &out[0], n);
    return out;
}

File::File(const char* path, Way way) {
    if (way == THROUGH_CACHE) fd_ = _wopen(wide(path).c_str(), _O_RDONLY | _O_BINARY | _O_NOINHERIT);
    if (fd_ < 0) error_ = way == THROUGH_CACHE ? errno : EINVAL;
}

File::~File() {
    if (fd_ >= 0) _close(fd_);
}

// An OVERLAPPED gives the position, so that readers share no file pointer; on such a handle ReadFile still
// waits.
static int64_t read_some(int fd, uint8_t* to, size_t n, size_t at) {
    OVERLAPPED from = {};
    from.Offset = DWORD(at), from.OffsetHigh = DWORD(uint64_t(at) >> 32);
    DWORD got = 0;
    if (ReadFile(HANDLE(_get_osfhandle(fd)), to, DWORD(std::min(n, size_t(1) << 30)), &got, &from))
        return got;
    if (GetLastError() == ERROR_HANDLE_EOF) return 0;
    errno = EIO;
    return -1;
}

bool File::cached(size_t, size_t) const { return false; }
size_t File::direct_alignment() const { return 0; }
void File::expect_random_reads() const {}

static FileState state_of(const struct _stat64& s) {
    return {0, 0, uint64_t(s.st_size), int64_t(s.st_mtime) * 1000000000};
}

bool File::state(FileState& state) const {
    struct _stat64 s;
    return !_fstat64(fd_, &s) && (state = state_of(s), true);
}

bool file_state(const char* path, FileState& state) {
    struct _stat64 s;
    return !_wstat64(wide(path).c_str(), &s) && (state = state_of(s), true);
}

#else

File::File(const char* path, Way way) {
    int flags = O_RDONLY | O_CLOEXEC;
    if (way == DIRECT) {
#ifdef O_DIRECT
        flags |= O_DIRECT;
#else
        error_ = EINVAL;  // macOS knows only an advice (F_NOCACHE), and then to whom the cache belongs is its
                          // affair
        return;
#endif
    }
    fd_ = ::open(path, flags);
    if (fd_ < 0) error_ = errno;
}

File::~File() {
    if (fd_ >= 0) close(fd_);
}

static int64_t read_some(int fd, uint8_t* to, size_t n, size_t at) {
    return pread(fd, to, std::min(n, size_t(1) << 30), off_t(at));  // macOS refuses 2^31 bytes
}

// Asked of the kernel (cachestat, Linux 6.5) rather than tried: preadv2 with RWF_NOWAIT says no and reads the
// range into the cache all the same.
bool File::cached(size_t at, size_t n) const {
#ifdef __linux__
    constexpr long kCachestat = 451;  // <sys/syscall.h> has it only since glibc 2.39
    const uint64_t range[2] = {at, n};
    uint64_t pages[5] = {};  // cached, dirty, written back, evicted, recently evicted
    if (syscall(kCachestat, fd_, range, pages, 0)) return false;
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    return pages[0] >= (n + page - 1) / page;
#else
    (void)at, (void)n;
    return false;
#endif
}

static FileState state_of(const struct stat& s) {
#ifdef __APPLE__
    const struct timespec& modified = s.st_mtimespec;
#else
    const struct timespec& modified = s.st_mtim;
#endif
    return {uint64_t(s.st_dev), uint64_t(s.st_ino), uint64_t(s.st_size),
            int64_t(modified.tv_sec) * 1000000000 + modified.tv_nsec};
}

bool File::state(FileState& state) const {
    struct stat s;
    return !fstat(fd_, &s) && (state = state_of(s), true);
}

bool file_state(const char* path, FileState& state) {
    struct stat s;
    return !stat(path, &s) && (state = state_of(s), true);
}

void File::expect_random_reads() const {
#ifdef POSIX_FADV_RANDOM
    posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);
#endif
}

#ifdef __linux__

// Tried, where the system does not say: the smallest read that is not refused.
static size_t tried_alignment(const File& file) {
    alignas(4096) uint8_t bytes[4096];
    int why;
    for (const size_t n : {size_t(512), size_t(4096)}) {
        file.read(bytes, n, n, why);
        if (!why) return n;
    }
    return 0;
}

size_t File::direct_alignment() const {
    struct statfs fs;
    constexpr unsigned kTmpfs = 0x01021994,
                       kRamfs = 0x858458f6;  // they allow it (Linux 6.6) and are nothing but cache
    if (fstatfs(fd_, &fs) || unsigned(fs.f_type) == kTmpfs || unsigned(fs.f_type) == kRamfs) return 0;
    uint32_t words[64] = {};  // struct statx, whose field for this (Linux 6.1) glibc's headers may lack
    constexpr unsigned kAlignment =
        0x2000;  // STATX_DIOALIGN; words[0]: what was filled in, [38]: memory's, [39]: offsets'
    if (syscall(SYS_statx, fd_, "", AT_EMPTY_PATH, kAlignment, words) || !(words[0] & kAlignment))
        return tried_alignment(*this);
    if (!words[39] || words[38] > 4096 || words[39] > 4096) return 0;
    return std::max({size_t(512), size_t(words[38]), size_t(words[39])});
}

#else
size_t File::direct_alignment() const { return 0; }
#endif

#endif

size_t File::read(uint8_t* to, size_t n, size_t at, int& error) const {
    size_t done = 0;
    for (error = 0; done < n;) {
        const int64_t got = read_some(fd_, to + done, n - done, at + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) error = errno;
        if (got <= 0) break;
        done += size_t(got);
    }
    return done;
}

// ---- processes
#ifdef _WIN32
unsigned forks_so_far() { return 0; }
#else
static std::atomic<unsigned> forks{0};
unsigned forks_so_far() {
    static const bool counted = (pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); }), true);
    (void)counted;
    return forks.load(std::memory_order_relaxed);
}
#endif

// ---- the CPU
#if defined(__x86_64__) && defined(__linux__)
bool may_use_tiles() {
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}
#else
bool may_use_tiles() { return false; }
#endif

#if defined(__aarch64__) && defined(__linux__)

bool arm_has_dot_products() {
    return getauxval(AT_HWCAP) & (1 << 20);
}  // HWCAP_ASIMDDP, which old headers lack
bool arm_has_crc32() { return getauxval(AT_HWCAP) & (1 << 7); }

#elif defined(__aarch64__) && defined(__APPLE__)  // every Mac has both

bool arm_has_dot_products() { return true; }
bool arm_has_crc32() { return true; }

#elif defined(_M_ARM64) || (defined(_WIN32) && defined(__aarch64__))

bool arm_has_dot_products() { return IsProcessorFeaturePresent(43); }  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
bool arm_has_crc32() { return IsProcessorFeaturePresent(31); }  // PF_ARM_V8_CRC32_INSTRUCTIONS_AVAILABLE

#else

bool arm_has_dot_products() { return false; }
bool arm_has_crc32() { return false; }

#endif

}  // namespace tc
