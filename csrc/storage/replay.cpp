#include "replay.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "engine/bundles.h"
#include "policy.h"
#include "row_cache.h"

namespace tc {

namespace {

template <class Policy>
class Replay : public CacheReplay {
 public:
    Replay(size_t neurons, size_t hot, size_t quota, const float* likely)
        : CacheReplay(neurons),
          pool_(nullptr, 0, hot + quota + kStreamSlots),
          cache_(pool_, neurons, hot, quota, likely),
          chunks_((neurons + kChunk - 1) / kChunk) {
        for (const Wanted& w : cache_.initial()) cache_.arrived(w.entry);
    }

    size_t step(const int32_t* ids, size_t n, int32_t* missed) override {
        missed_ = missed;
        cache_.begin(1, false);
        std::vector<Task> tasks(chunks_);
        slots_.resize(n), entries_.resize(n), wanted_.resize(n);
        for (size_t i = 0, c = 0; c < chunks_; c++) {
            tasks[c].begin = tasks[c].end = i;
            while (i < n && size_t(ids[i]) < (c + 1) * kChunk) i++;
            tasks[c].listed = i;
        }
        for (size_t c = chunks_; c-- > 0;) advance(tasks, c, ids);
        while (!ready_.empty()) {
            const size_t c = ready_.front();
            ready_.pop_front();
            release(tasks[c]);
            advance(tasks, c, ids);
        }
        cache_.settle();
        return size_t(missed_ - missed);
    }

 private:
    struct Task {  // as DiskWalk's: [begin, end) of `ids` have slots, and wait for reads
        size_t begin, end, listed;
    };
    // Until the chunk is done, waits for reads, or finds no slots.
    void advance(std::vector<Task>& tasks, size_t c, const int32_t* ids) {
        Task& t = tasks[c];
        while (t.begin < t.listed) {
            size_t misses;
            t.end = t.begin + cache_.pin(ids + t.begin, t.listed - t.begin, slots_.data() + t.begin,
                                         entries_.data() + t.begin, wanted_.data() + t.begin, &misses);
            if (t.end == t.begin) return starved_.push_back(c);
            for (size_t i = 0; i < misses; i++) {
                *missed_++ = wanted_[t.begin + i].neuron;
                cache_.arrived(wanted_[t.begin + i].entry);
            }
            if (misses) return ready_.push_back(c);
            release(t);
        }
    }
    void release(Task& t) {
        if (t.begin == t.end) return;
        cache_.unpin(entries_.data() + t.begin, t.end - t.begin);
        t.begin = t.end;
        ready_.insert(ready_.end(), starved_.begin(), starved_.end());
        starved_.clear();
    }

    SlotPool pool_;
    RowCache<Policy> cache_;
    const size_t chunks_;
    std::deque<size_t> ready_;     // chunks whose reads are done, or that may find slots now
    std::vector<size_t> starved_;  // chunks that found no slots
    std::vector<int32_t> slots_, entries_;
    std::vector<Wanted> wanted_;
    int32_t* missed_ = nullptr;
};

// As ExpertReads asks, wave by wave: the next one's slots are found before those of the running one are free.
template <class Policy>
class Experts {
 public:
    Experts(size_t experts, size_t slots, size_t passing, const float* likely)
        : pool_(nullptr, 0, slots + passing, passing), cache_(pool_, experts, 0, slots, likely) {
        for (const Wanted& w : cache_.initial()) cache_.arrived(w.entry);
    }

    size_t step(const int32_t* ids, size_t n) {
        cache_.begin(1, false);
        for (size_t i = 0; i < n; i++) cache_.used(ids[i], 1), cache_.hold(ids[i]);
        entries_.resize(n);
        size_t missed = 0, pinned = 0;
        for (size_t begin = 0, end = 0; begin < n; begin = end) {
            if (pinned == begin) missed += pin_wave(ids, n, &pinned);
            end = pinned;
            missed += pin_wave(ids, n, &pinned);
            cache_.unpin(entries_.data() + begin, end - begin);
        }
        cache_.settle();
        return missed;
    }

 private:
    size_t pin_wave(const int32_t* ids, size_t n, size_t* pinned) {
        const size_t most = std::max<size_t>(1, pool_.passing.size() / 2);
        size_t missing = 0;
        for (; *pinned < n; ++*pinned) {
            if (missing == most && cache_.slot_of(ids[*pinned]) < 0) break;
            Wanted wanted;
            size_t reads;
            int32_t slot;
            if (!cache_.pin(ids + *pinned, 1, &slot, &entries_[*pinned], &wanted, &reads, 0)) break;
            if (reads) cache_.arrived(wanted.entry), missing++;
        }
        return missing;
    }

    SlotPool pool_;
    RowCache<Policy> cache_;
    std::vector<int32_t> entries_;
};

}  // namespace

bool replay_experts(const char* policy, size_t experts, size_t slots, size_t passing, const float* likely,
                    const int32_t* ids, const int64_t* ends, size_t steps, int32_t* missed) {
    return with_policy(policy, [&](auto type) {
        Experts<typename decltype(type)::type> cache(experts, slots, passing, likely);
        for (size_t s = 0; s < steps; s++) {
            const int64_t begin = s ? ends[s - 1] : 0;
            missed[s] = int32_t(cache.step(ids + begin, size_t(ends[s] - begin)));
        }
    });
}

std::unique_ptr<CacheReplay> CacheReplay::make(const char* policy, size_t neurons, size_t hot, size_t quota,
                                               const float* likely) {
    std::unique_ptr<CacheReplay> made;
    with_policy(policy, [&](auto type) {
        made = std::make_unique<Replay<typename decltype(type)::type>>(neurons, hot, quota, likely);
    });
    return made;
}

}  // namespace tc
