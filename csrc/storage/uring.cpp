#include "uring.h"

#include <errno.h>

#ifdef __linux__

#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace tc {

// ---- the kernel's interface (io_uring_setup(2)), said here: building must not depend on how old
// <linux/io_uring.h> is
namespace {

constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // of every architecture but Alpha
constexpr off_t kRingsAt = 0, kEntriesAt = 0x10000000;
constexpr uint32_t kSingleMmap = 1, kNoDrop = 2, kExtArg = 256;  // features; the last is Linux 5.11
constexpr unsigned kGetEvents = 1, kWithArg = 8;
constexpr unsigned kRegisterBuffers = 0, kRegisterFiles = 2;
constexpr uint8_t kNop = 0, kReadFixed = 4, kRead = 22;
constexpr uint8_t kFixedFile = 1, kAsync = 16;
constexpr uint64_t kNobody = UINT64_MAX;  // the user_data of no flight

struct Parameters {
    uint32_t sq_entries, cq_entries, flags, thread_cpu, thread_idle, features, workers, reserved[3];
    uint32_t sq_head, sq_tail, sq_mask, sq_size, sq_flags, sq_dropped, sq_array, sq_reserved;
    uint64_t sq_address;
    uint32_t cq_head, cq_tail, cq_mask, cq_size, cq_overflow, cq_entries_at, cq_flags, cq_reserved;
    uint64_t cq_address;
};
struct Entry {
    uint8_t operation, flags;
    uint16_t priority;
    int32_t file;
    uint64_t offset, address;
    uint32_t bytes, read_flags;
    uint64_t user_data;
    uint16_t buffer, personality;
    int32_t unused;
    uint64_t unused2[2];
};
struct Completion {
    uint64_t user_data;
    int32_t result;
    uint32_t flags;
};
struct WaitArgument {
    uint64_t signals;
    uint32_t signals_bytes, unused;
    uint64_t timeout;  // address of seconds and nanoseconds
};
static_assert(sizeof(Parameters) == 120 && sizeof(Entry) == 64 && sizeof(Completion) == 16 &&
                  sizeof(WaitArgument) == 24,
              "the kernel's");

constexpr int64_t kWait[2] = {
    0, 100000000};  // a signal's handler may be another thread's: look up ten times a second

template <class T>
T* at(void* base, uint32_t offset) {
    return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
}
uint32_t acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void release(uint32_t* p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

}  // namespace

// ---- begin and end
Ring::Ring(const std::vector<const File*>& files, unsigned depth, uint8_t* fixed, size_t fixed_bytes,
           size_t alignment)
    : fixed_(fixed), fixed_bytes_(fixed_bytes), alignment_(alignment), flights_(depth) {
    for (uint32_t i = 0; i < depth; i++) free_.push_back(depth - 1 - i);
    failed_.reserve(depth);
    error_ = begin(files, depth);
    if (!error_) error_ = answers();
}

Ring::~Ring() {
    if (rings_) munmap(rings_, rings_bytes_);
    if (entries_) munmap(entries_, entries_bytes_);
    if (fd_ >= 0) close(fd_);
}

int Ring::begin(const std::vector<const File*>& files, unsigned entries) {
    Parameters p = {};
    fd_ = int(syscall(kSetup, entries, &p));
    if (fd_ < 0) return errno;
    constexpr uint32_t kNeeded = kSingleMmap | kNoDrop | kExtArg;
    if ((p.features & kNeeded) != kNeeded) return ENOSYS;
    const auto map = [&](size_t bytes, off_t where) {
        void* m = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, where);
        return m == MAP_FAILED ? nullptr : m;
    };
    rings_bytes_ = std::max(p.sq_array + p.sq_entries * sizeof(uint32_t),
                            p.cq_entries_at + p.cq_entries * sizeof(Completion));
    entries_bytes_ = p.sq_entries * sizeof(Entry);
    if (!(rings_ = map(rings_bytes_, kRingsAt)) || !(entries_ = map(entries_bytes_, kEntriesAt)))
        return errno;
    sq_head_ = at<uint32_t>(rings_, p.sq_head), sq_tail_ = at<uint32_t>(rings_, p.sq_tail);
    cq_head_ = at<uint32_t>(rings_, p.cq_head), cq_tail_ = at<uint32_t>(rings_, p.cq_tail);
    sq_mask_ = p.sq_entries - 1, cq_mask_ = p.cq_entries - 1;
    completions_ = at<Completion>(rings_, p.cq_entries_at);
    for (uint32_t i = 0; i < p.sq_entries; i++) at<uint32_t>(rings_, p.sq_array)[i] = i;
    std::vector<int> descriptors;
    for (const File* file : files) descriptors.push_back(file->descriptor());
    if (syscall(kRegister, fd_, kRegisterFiles, descriptors.data(), descriptors.size())) return errno;
    const iovec memory = {fixed_, fixed_bytes_};
    if (syscall(kRegister, fd_, kRegisterBuffers, &memory, 1))
        not_registered_ = errno;  // RLIMIT_MEMLOCK, mostly
    return 0;
}

// A filter of system calls may have let us come this far.
int Ring::answers() {
    Entry nothing = {};
    nothing.operation = kNop, nothing.user_data = kNobody;
    *static_cast<Entry*>(entries_) = nothing;
    release(sq_tail_, 1);
    if (enter(1, 1) < 0) return errno;
    return acquire(cq_tail_) == 1 ? 0 : EIO;
}

int Ring::enter(unsigned submit, unsigned wait_for) const {
    const WaitArgument wait = {0, 0, 0, reinterpret_cast<uintptr_t>(kWait)};
    return int(
        syscall(kEnter, fd_, submit, wait_for, wait_for ? kGetEvents | kWithArg : 0, &wait, sizeof wait));
}

// ---- submission
// What follows is called with mutex_ held, but for flush, submit and take.
void Ring::push(uint32_t flight) {
    const Flight& f = flights_[flight];
    const uint32_t tail = *sq_tail_;
    Entry e = {};
    e.file = int32_t(f.request.file);  // of those that are registered
    e.flags = uint8_t(kFixedFile | (f.blocking ? kAsync : 0));
    e.offset = f.request.offset + f.done;
    e.address = reinterpret_cast<uintptr_t>(f.request.to + f.done);
    e.bytes = f.request.bytes - f.done;
    e.user_data = flight;
    const size_t in_fixed =
        size_t(e.address - reinterpret_cast<uintptr_t>(fixed_));  // huge where it is before
    const bool fixed = !not_registered_ && in_fixed < fixed_bytes_ && e.bytes <= fixed_bytes_ - in_fixed;
    e.operation = fixed ? kReadFixed : kRead;
    static_cast<Entry*>(entries_)[tail & sq_mask_] = e;
    release(sq_tail_, tail + 1);  // there is room: at most `depth` are in flight
}

unsigned Ring::unsubmitted() const { return *sq_tail_ - acquire(sq_head_); }

bool Ring::submit(const ReadRequest* requests, size_t n) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (n > free_.size()) return false;
        for (size_t i = 0; i < n; i++) {
            flights_[free_.back()] = {requests[i], 0, false};
            push(free_.back());
            free_.pop_back();
        }
    }
    flush();
    return true;
}

// Tell the kernel of all that has been pushed, by whomever. Two threads may do so at once: it takes each
// entry once, in order. false: it has no memory for more at the moment; the next take tries again.
bool Ring::flush() {
    for (;;) {
        unsigned n;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            n = unsubmitted();
        }
        if (!n) return true;
        if (enter(n, 0) >= 0 || errno == EINTR) continue;
        if (errno == EAGAIN || errno == EBUSY) return false;
        give_up(errno);
        return true;
    }
}

void Ring::give_up(int error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t i = acquire(sq_head_); i != *sq_tail_; i++) {
        const uint32_t flight = uint32_t(static_cast<Entry*>(entries_)[i & sq_mask_].user_data);
        failed_.push_back({flights_[flight].request.tag, error});
        free_.push_back(flight);
    }
    release(sq_tail_, acquire(sq_head_));
}

// ---- completion
// Is it over? Else it has been pushed again: what is missing, or all of it, to be done by waiting. ECANCELED:
// the thread that submitted it is gone.
bool Ring::finished(uint32_t flight, int result, ReadDone& done) {
    Flight& f = flights_[flight];
    int error = 0;
    if (result > 0) f.done += uint32_t(result);
    if (result == 0 || f.done % alignment_)
        error = f.done < f.request.needed() ? -1 : 0;  // within a sector files end
    else if (result == -EAGAIN && !f.blocking)
        f.blocking = true;
    else if (result < 0 && result != -EINTR && result != -ECANCELED)
        error = -result;
    if (!error && f.done < f.request.needed()) return push(flight), false;
    done = {f.request.tag, error};
    free_.push_back(flight);
    return true;
}

size_t Ring::reap(ReadDone* out, size_t max) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t n = 0;
    for (; n < max && !failed_.empty(); failed_.pop_back()) out[n++] = failed_.back();
    uint32_t head = *cq_head_;
    for (const uint32_t tail = acquire(cq_tail_); n < max && head != tail; head++) {
        const Completion c = static_cast<const Completion*>(completions_)[head & cq_mask_];
        if (c.user_data != kNobody && finished(uint32_t(c.user_data), c.result, out[n])) n++;
    }
    release(cq_head_, head);
    return n;
}

size_t Ring::take(ReadDone* out, size_t max, bool wait) {
    size_t n = reap(out, max);
    const bool all_submitted = flush();
    if (n || !wait) return n;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (free_.size() == flights_.size() && failed_.empty()) return 0;
    }
    if (all_submitted)
        enter(0, 1);
    else
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    n = reap(out, max);
    flush();
    return n;
}

void Ring::drain() {
    ReadDone done[64];
    for (;;) {
        take(done, 64, true);
        std::lock_guard<std::mutex> lock(mutex_);
        if (free_.size() == flights_.size()) return;
    }
}

}  // namespace tc

#else

namespace tc {

Ring::Ring(const std::vector<const File*>&, unsigned, uint8_t* fixed, size_t fixed_bytes, size_t alignment)
    : error_(ENOSYS), fixed_(fixed), fixed_bytes_(fixed_bytes), alignment_(alignment) {}
Ring::~Ring() {}
bool Ring::submit(const ReadRequest*, size_t) { return false; }
size_t Ring::take(ReadDone*, size_t, bool) { return 0; }
void Ring::drain() {}

}  // namespace tc

#endif
