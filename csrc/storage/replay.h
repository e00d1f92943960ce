// A layer's cache without its disk: which records of a trace would have been read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace tc {

class CacheReplay {
 public:
    // A cache as DiskRows has it once it is loaded: records [0, hot) always there, the others in `quota`
    // slots by the policy of that name. likely [neurons], or null. Null where no policy has the name.
    static std::unique_ptr<CacheReplay> make(const char* policy, size_t neurons, size_t hot, size_t quota,
                                             const float* likely);
    explicit CacheReplay(size_t neurons) : neurons(neurons) {}
    virtual ~CacheReplay() = default;
    const size_t neurons;

    // A step of few tokens that needs ids [0, n), ascending: those that are not in memory go into missed
    // [at most n], in the order in which they are asked for; returns how many. One thread, chunk by chunk in
    // the order of DiskWalk::few_tokens, reads done in the order in which they were begun: the engine with
    // one thread misses the same ones. Several threads ask for chunks in an order that time decides.
    virtual size_t step(const int32_t* ids, size_t n, int32_t* missed) = 0;
};

// A layer's experts without their disk, as DiskExperts has them once they are loaded: how many each step
// reads. Step s of few tokens needs the experts ids [ends[s - 1], ends[s]), ascending. What a running call
// has beside the layer's `slots` are `passing` ones. `likely` [experts], or null. It misses what an engine of
// any number of threads misses, since one thread asks for all. False where no policy has the name.
bool replay_experts(const char* policy, size_t experts, size_t slots, size_t passing, const float* likely,
                    const int32_t* ids, const int64_t* ends, size_t steps, int32_t* missed);

}  // namespace tc
