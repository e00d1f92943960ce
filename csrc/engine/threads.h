// A persistent thread pool. The caller is thread 0; workers 1..n-1 spin briefly between regions, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

namespace tc {

void relax();  // tens of cycles, between two looks of a thread that spins

class Pool {
 public:
    explicit Pool(
        int threads);  // throws std::system_error if the system has no more threads, and leaves none behind
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }

    // Run fn(state, thread) on every thread and wait. Callers are serialised: there is one region at a time.
    // fn must not throw. Throws std::runtime_error in a forked process, whose copy of the pool has no
    // threads.
    void run(void (*fn)(void* state, int thread), void* state);
    template <class Fn>
    void run(Fn& fn) {
        run([](void* f, int thread) { (*static_cast<Fn*>(f))(thread); }, &fn);
    }

    // Wait until all threads of a region have arrived. Every thread must call it equally often.
    void barrier();

 private:
    void work(int thread);
    void stop();

    const int threads_;
    const unsigned forks_;  // forks_so_far() when the threads were made
    std::mutex region_;     // one region at a time
    // Hand-off. The caller writes fn_ and state_, then increments epoch_ (release); a worker that sees the
    // new epoch (acquire) therefore sees them. Each worker then increments done_ (release); the caller waits
    // for threads_-1 (acquire), so it sees everything the workers wrote, and no worker can still be reading
    // fn_ when it returns.
    void (*fn_)(void*, int) = nullptr;
    void* state_ = nullptr;
    alignas(64) std::atomic<unsigned> epoch_{0};
    alignas(64) std::atomic<int> done_{0};
    // Barrier: the last to arrive resets the count and then opens the next phase; the others wait for the
    // phase to move.
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<unsigned> phase_{0};
    std::atomic<bool> stop_{false};
    std::atomic<int> asleep_{0};
    std::mutex sleep_;
    std::condition_variable&
        wake_;  // on the heap: a forked copy has sleepers that never leave, and cannot be destroyed
    std::vector<std::thread> workers_;
};

}  // namespace tc
