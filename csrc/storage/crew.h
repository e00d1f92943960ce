// The threads of one load. They take numbered chunks in ascending order while their owner does other things,
// waits for them, or goes. What a chunk is, its load knows.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "system.h"

namespace tc {

struct Failure {
    int error;       // an errno; -1: a file ends early; others are the load's own
    uint64_t where;  // as the load counts
};

struct ChunkDone {
    size_t bytes = 0;
    std::optional<Failure> failure{};
};

class Crew {
 public:
    using Work =
        std::function<ChunkDone(size_t chunk, uint8_t* buffer)>;  // called by several threads at once
    using Last = std::function<std::optional<Failure>()>;

    // Begin. `buffer_bytes`: of each thread; 0: none. `last` is asked once, when all chunks are done: a
    // failure of it takes the place of others. Without memory for threads, `wait` does the work.
    Crew(size_t chunks, size_t threads, size_t buffer_bytes, Work work, Last last = {});
    ~Crew();  // chunks that were begun are finished, no others are
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    bool wait(unsigned ms);  // for so long at most; whether all is over
    void stop();             // begin no more chunks, and wait for those that were begun
    uint64_t done() const { return done_.load(); }  // bytes
    // Once it is over: the failure of the lowest chunk that failed. Chunks below it were taken before it, and
    // each was finished.
    std::optional<Failure> failure();
    bool forked() const { return forks_ != forks_so_far(); }  // its threads are another process's

 private:
    bool take_one(uint8_t* buffer);
    void take_all(uint8_t* buffer);

    const size_t chunks_, buffer_bytes_;
    const Work work_;
    Last last_;
    Pages buffers_{nullptr, nullptr, 0};
    std::vector<std::thread> threads_;
    std::atomic<size_t> next_{0};
    std::atomic<size_t> failed_{SIZE_MAX};  // the lowest chunk that failed; written under `mutex_`
    std::atomic<uint64_t> done_{0};
    std::optional<Failure> failure_;  // of that chunk; guarded by `mutex_`
    size_t active_ = 0;               // threads at work; guarded by `mutex_`
    std::mutex mutex_;
    std::condition_variable over_;
    const unsigned forks_ = forks_so_far();
};

}  // namespace tc
