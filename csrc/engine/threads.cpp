#include "threads.h"

#include <stdexcept>

#include "system.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define RELAX() _mm_pause()
#elif defined(__aarch64__)
#define RELAX() asm volatile("isb")  // tens of cycles, as x86's pause; `yield` does nothing on most cores
#elif defined(_M_ARM64)
#include <intrin.h>
#define RELAX() __isb(_ARM64_BARRIER_SY)
#else
#define RELAX() std::this_thread::yield()
#endif

namespace tc {

void relax() { RELAX(); }

// Spinning between regions covers the Python time between two calls (a few microseconds); sleeping keeps an
// idle engine off the CPU. 4000 pauses are 50 to 150 microseconds on current x86.
static constexpr int kSpin = 4000;

Pool::Pool(int threads)
    : threads_(threads < 1 ? 1 : threads), forks_(forks_so_far()), wake_(*new std::condition_variable) {
    try {
        workers_.reserve(size_t(threads_));
        for (int t = 1; t < threads_; t++) workers_.emplace_back([this, t] { work(t); });
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() {
    if (forks_so_far() == forks_)
        stop();
    else
        for (std::thread& w : workers_) w.detach();  // they are the parent's
}

void Pool::stop() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_.store(true);
        epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& w : workers_) w.join();
    delete &wake_;
}

void Pool::run(void (*fn)(void*, int), void* state) {
    if (threads_ > 1 && forks_so_far() != forks_) throw std::runtime_error(kForked);
    std::lock_guard<std::mutex> region(region_);
    if (threads_ == 1) return fn(state, 0);
    fn_ = fn;
    state_ = state;
    done_.store(0, std::memory_order_relaxed);
    // Sequentially consistent with the sleeper's side below: either it sees the new epoch before it sleeps,
    // or we see it asleep and wake it.
    epoch_.fetch_add(1);
    if (asleep_.load() > 0) {
        {
            std::lock_guard<std::mutex> lock(sleep_);
        }
        wake_.notify_all();
    }
    fn(state, 0);
    for (int spins = 0; done_.load(std::memory_order_acquire) != threads_ - 1; spins++) {
        if (spins < kSpin)
            RELAX();
        else
            std::this_thread::yield();  // somebody else has our worker's core
    }
}

void Pool::barrier() {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);  // cannot move before we arrive
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        phase_.store(phase + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
        if (spins < kSpin)
            RELAX();
        else
            std::this_thread::yield();
    }
}

void Pool::work(int thread) {
    unsigned seen = 0;
    for (;;) {
        for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; spins++) {
            if (spins < kSpin) {
                RELAX();
                continue;
            }
            std::unique_lock<std::mutex> lock(sleep_);
            asleep_.fetch_add(1);
            wake_.wait(lock, [&] { return epoch_.load() != seen; });
            asleep_.fetch_sub(1);
        }
        seen++;
        if (stop_.load()) return;
        fn_(state_, thread);
        done_.fetch_add(1, std::memory_order_release);
    }
}

}  // namespace tc
