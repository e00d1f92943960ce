// Cache policies: which records of a layer deserve a slot. The engine runs `EnginePolicy`; `bench --replay`
// runs any of them, through the same RowCache. To add one, write a struct and name it in `with_policy`.
//
// A policy gives each of its records (numbers [0, records)) a score of at least 0. When a slot is needed, the
// record with the lowest score leaves, of equals the one with the higher number; but the new record gets no
// slot where its own score is not higher than that. A policy's members:
//
//   name                   as `--policy` has it
//   P(records, likely)     likely [records]: how likely a token needs each, by a profile; null: nobody knows
//   begin(steps)           a call begins that counts as so many steps (tokens, of a prompt). True: all scores
//                          were rescaled, and scores that the caller kept are worth nothing
//   use(i, uses)           the record was needed in some of the call's steps; `uses` is how many, each aged
//                          by the steps after it
//   aged(steps)            what a use is worth that many steps later: a prompt's tokens count as if they had
//                          come one by one
//   state(i), undo(i, s)   take a use back: the record has the state that it had before
//   score(i)               between two calls of `begin`, a score falls by `undo` alone
//
// Nothing here is thread-safe: whoever owns a RowCache has a lock for it.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

namespace tc {

// Least frequently used, of uses that count less the older they are, on top of what a profile expects. Traces
// say so: 3 to 6 points more hits than LRU, 1 to 3 more than S3-FIFO (LOG, "Cache policies"). HALF: the steps
// after which a use counts half.
template <int HALF>
struct DecayedUses {
    static constexpr const char* name = HALF == 64 ? "lfu" : "experts";
    // Steps that a profile's word counts as. Of experts, profiled by a trace's first half and played in the
    // second, a tenth of them held: .600, .599 and .691 of the requests are hits at 8; .591, .595 and .676 at
    // 16; .597, .592 and .688 at 4; .583, .575 and .673 without.
    static constexpr float kPrior = HALF == 64 ? 16 : 8, kHalfLife = HALF;

    DecayedUses(size_t records, const float* likely) : prior_(records), uses_(records) {
        for (size_t i = 0; likely && i < records; i++) prior_[i] = kPrior * likely[i];
    }
    static float aged(size_t steps) { return std::exp2(-float(steps) / kHalfLife); }
    bool begin(size_t steps) {
        unit_ /= aged(steps);
        if (!(unit_ > 1e18f)) return false;
        for (float& u : uses_) u /= unit_;
        unit_ = 1;
        return true;
    }
    void use(size_t i, float uses) { uses_[i] += unit_ * uses; }
    float state(size_t i) const { return uses_[i]; }
    void undo(size_t i, float before) { uses_[i] = before; }
    float score(size_t i) const { return unit_ * prior_[i] + uses_[i]; }

 private:
    float unit_ = 1;  // one use of the present step: it grows, so that no older use has to be halved
    std::vector<float> prior_, uses_;
};

// Least recently used. Records of one step are equally recent.
struct LRU {
    static constexpr const char* name = "lru";

    LRU(size_t records, const float*) : last_(records) {}
    static float aged(size_t) { return 1; }
    bool begin(size_t steps) { return now_ += float(steps), false; }
    void use(size_t i, float) { last_[i] = now_; }
    float state(size_t i) const { return last_[i]; }
    void undo(size_t i, float before) { last_[i] = before; }
    float score(size_t i) const { return last_[i]; }

 private:
    float now_ = 0;  // exact below 2^24 steps
    std::vector<float> last_;
};

// Nothing is ever replaced.
struct Pinned {
    static constexpr const char* name = "pinned";

    Pinned(size_t, const float*) {}
    static float aged(size_t) { return 1; }
    bool begin(size_t) { return false; }
    void use(size_t, float) {}
    float state(size_t) const { return 0; }
    void undo(size_t, float) {}
    float score(size_t) const { return 0; }
};

using LFU = DecayedUses<64>;
using EnginePolicy = LFU;
// Experts of traced mixtures (Qwen3-30B-A3B, gpt-oss, Gemma 4), a tenth, a fifth and two fifths of them held:
// after 8 tokens .541 to .580, .711 to .745 and .811 to .896 of the requests are hits; after 64 .507 to .547,
// .687 to .732 and .812 to .893; LRU is between.
using ExpertPolicy = DecayedUses<8>;

// f(PolicyType<P>()) for the policy P of that name; false: there is none.
template <class Policy>
struct PolicyType {
    using type = Policy;
};
template <class Fn>
bool with_policy(const char* name, Fn f) {
    auto is = [&](auto policy) {
        if (std::strcmp(name, decltype(policy)::type::name)) return false;
        return f(policy), true;
    };
    return is(PolicyType<LFU>()) || is(PolicyType<ExpertPolicy>()) || is(PolicyType<LRU>()) ||
           is(PolicyType<Pinned>());
}

}  // namespace tc
