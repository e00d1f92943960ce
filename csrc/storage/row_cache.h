// Which of one layer's records are in memory, and in which slots. It reads nothing: it says what must be
// read, and is told when that has come. So a replay of a trace runs this very code without a disk.
//
// Records [0, hot) are always there, in slots first_slot + i. The others share `quota` slots of the pool by
// the policy's scores. A record that deserves none of them passes through one of the call's slots. A record
// is pinned from `pin`, `expect`, `hold` or `stream` until `unpin` or `settle`.
//
// Calls of one RowCache come one at a time; a lock (that of Fetches) is held for each, but in `load`.
// ids are neuron numbers in [0, neurons). Entries: [0, quota) are kept from call to call, those from `quota`
// on are the pool's passing ones, kHot stands for a hot record.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "slots.h"

namespace tc {

template <class Policy>
class RowCache {
 public:
    // likely [neurons], or null: as the policy takes it. std::length_error where the pool has too few slots.
    RowCache(SlotPool& pool, size_t neurons, size_t hot, size_t quota, const float* likely);
    ~RowCache();
    RowCache(const RowCache&) = delete;
    RowCache& operator=(const RowCache&) = delete;

    // What has to be read before the first call: the hot records, and those that score highest into all other
    // slots; of equals the first.
    std::vector<Wanted> initial();
    // A call begins that counts as so many steps. Of a call whose reads begin early: before `expect`.
    // `forget`: it finds nothing but hot records.
    void begin(size_t steps, bool forget);

    // Finds slots for ids [0, n), ascending: for all, or for as many of the first as there are slots for.
    // Returns how many; of those, writes slots, entries and, into wanted [0, *n_wanted), what must be read.
    // What was expected is not wanted again, though it may be on its way still.
    // `uses`: what each counts, as Policy::use.
    size_t pin(const int32_t* ids, size_t n, int32_t* slots, int32_t* entries, Wanted* wanted,
               size_t* n_wanted, float uses = 1);
    void unpin(const int32_t* entries, size_t n);
    void used(int32_t id, float uses) {  // as Policy::use
        if (size_t(id) >= hot && !read_only) policy_.use(size_t(id) - hot, uses);
    }
    // Before a call that probably needs ids [0, n): writes into wanted what must be read, as far as there are
    // slots that the call itself does not need, and returns how many. Those, and the ids that are in memory,
    // stay until the call is over.
    size_t expect(const int32_t* ids, size_t n, Wanted* wanted);
    // How far below its threshold a gate may be for its record to be expected. After each call, what came too
    // late raises it and what was read in vain lowers it, in steps of a twentieth of `unit` (the layer's mean
    // gate), until a late record costs kLate times one that was read in vain.
    float slack() const { return slack_; }
    void adapt(float unit) { step_ = unit < 1e30f ? 0.05f * unit : 0, late_ = vain_ = 0; }  // else: no unit
    // Whether a record is in memory, or on its way. Then it stays until the call is over.
    bool hold(int32_t id);
    // Where a record is that can be used now, or -1.
    int32_t slot_of(int32_t id) const;
    // Many tokens, which need all records [begin, end): those in memory are pinned where they are, the others
    // are wanted in stream slots from `free` on. slots, entries and wanted are of [end - begin].
    size_t stream(size_t begin, size_t end, int32_t free, int32_t* slots, int32_t* entries, Wanted* wanted);
    // The same for ids [0, n) alone, of which `used` has been told: those that score higher than a kept
    // record take its place. `slots` is indexed by neuron.
    size_t stream(const int32_t* ids, size_t n, int32_t free, int32_t* slots, Wanted* wanted);
    void arrived(int32_t entry) {
        if (entry >= 0) entry_at(entry).ready = true;
    }
    // A call is over and none of its reads is under way: nothing is pinned, half read or passing any more.
    void settle();

    const SlotPool& pool() const { return pool_; }

    const size_t neurons, hot;
    const int32_t first_slot;
    // Calls leave the cache as it was: what is missing passes through, and no use counts.
    bool read_only = false;
    struct Stats {
        uint64_t needed, missed;     // records: asked for by few tokens; of those, not in memory then
        uint64_t reads, bytes;       // of the disk, all
        uint64_t streamed;           // bytes, of calls of many tokens
        uint64_t waited_ns;          // threads that waited for the disk with nothing else to do, added up
        uint64_t early, early_used;  // records: read ahead; of those, needed
        uint64_t left_out;           // records: chosen, but neither in memory nor read
    } stats{};

 private:
    static constexpr int32_t kHot = -1;
    static constexpr float kLate = 3;
    using Entry = SlotPool::Entry;
    Entry& entry_at(int32_t at) {
        return size_t(at) < cold_.size() ? cold_[size_t(at)] : pool_.passing[size_t(at) - cold_.size()];
    }
    const Entry& entry_at(int32_t at) const { return const_cast<RowCache*>(this)->entry_at(at); }
    float score(int32_t neuron) const { return policy_.score(size_t(neuron) - hot); }
    bool deserves(int32_t neuron, int32_t at) const {  // the place of what is in that entry, or of nothing
        return at >= 0 && (cold_[size_t(at)].neuron < 0 || score(neuron) > score(cold_[size_t(at)].neuron));
    }
    int32_t place_for(int32_t neuron);  // an emptied entry; kHot: there is none now
    int32_t worst();                    // the kept entry with the lowest score; -1: all are pinned
    void list_worst();
    void clear(Entry& e);
    void release(Entry& passing);
    void fill(int32_t at, int32_t neuron);

    SlotPool& pool_;
    Policy policy_;               // of records hot + i
    std::vector<int32_t> where_;  // [neurons - hot]: entry, or -1
    std::vector<Entry> cold_;     // [quota]
    // Some entries, that with the lowest score last. Scores change after it was made, so that each is looked
    // at again when its turn comes.
    std::vector<int32_t> worst_;
    float worst_below_ = 0;       // every entry that is not listed scores at least this
    float slack_ = 0, step_ = 0;  // step_ 0: this call's early reads say nothing about the slack
    size_t late_ = 0, vain_ = 0;  // records of this call
};

template <class Policy>
RowCache<Policy>::RowCache(SlotPool& pool, size_t neurons, size_t hot, size_t quota, const float* likely)
    : neurons(neurons),
      hot(hot),
      first_slot(pool.take(hot)),
      pool_(pool),
      policy_(neurons - hot, likely ? likely + hot : nullptr),
      where_(neurons - hot, -1) {
    if (first_slot < 0) throw std::length_error("the pool has too few slots");
    if (quota > pool_.free()) {
        for (size_t i = 0; i < hot; i++) pool_.give_back(first_slot + int32_t(i));
        throw std::length_error("the pool has too few slots");
    }
    cold_.reserve(quota);
    while (cold_.size() < quota) cold_.push_back({pool_.take_one(), -1, false, false});
}

template <class Policy>
RowCache<Policy>::~RowCache() {
    for (const Entry& e : cold_) pool_.give_back(e.slot);
    for (size_t i = 0; i < hot; i++) pool_.give_back(first_slot + int32_t(i));
}

template <class Policy>
std::vector<Wanted> RowCache<Policy>::initial() {
    std::vector<Wanted> wanted;
    for (size_t i = 0; i < hot; i++) wanted.push_back({int32_t(i), first_slot + int32_t(i), kHot});
    std::vector<int32_t> best(where_.size());
    for (size_t i = 0; i < best.size(); i++) best[i] = int32_t(hot + i);
    std::stable_sort(best.begin(), best.end(), [this](int32_t a, int32_t b) { return score(a) > score(b); });
    std::sort(best.begin(), best.begin() + std::ptrdiff_t(cold_.size()));  // as they lie in the file
    for (size_t i = 0; i < cold_.size(); i++) {
        fill(int32_t(i), best[i]);
        wanted.push_back({best[i], cold_[i].slot, int32_t(i)});
    }
    return wanted;
}

template <class Policy>
void RowCache<Policy>::begin(size_t steps, bool forget) {
    if (!read_only && policy_.begin(steps)) worst_.clear();
    if (!forget) return;
    for (Entry& e : cold_) clear(e);
    worst_.clear();
}

// Debug builds overwrite what leaves with a NaN of every format, so that a late reader shows.
template <class Policy>
void RowCache<Policy>::clear(Entry& e) {
    if (e.neuron >= 0) where_[size_t(e.neuron) - hot] = -1;
    e.neuron = -1, e.ready = false;
#ifndef NDEBUG
    if (pool_.data) memset(pool_.at(e.slot), 0xff, pool_.stride);
#endif
}

template <class Policy>
void RowCache<Policy>::fill(int32_t at, int32_t neuron) {
    Entry& e = entry_at(at);
    e.neuron = neuron, e.owner = this;
    where_[size_t(neuron) - hot] = at;
}

// Lists the eighth of the kept entries with the lowest scores: one selection for as many evictions.
template <class Policy>
void RowCache<Policy>::list_worst() {
    worst_.clear();
    for (size_t i = 0; i < cold_.size(); i++)
        if (!cold_[i].pinned) worst_.push_back(int32_t(i));
    auto value = [this](int32_t at) {
        return cold_[size_t(at)].neuron < 0 ? -1.0f : score(cold_[size_t(at)].neuron);
    };
    auto better = [&](int32_t a, int32_t b) {  // of equals the hotter one, which has the lower number
        const float va = value(a), vb = value(b);
        return va != vb ? va > vb : cold_[size_t(a)].neuron < cold_[size_t(b)].neuron;
    };
    const size_t few = std::min(worst_.size(), cold_.size() / 8 + 16);
    if (few < worst_.size()) {
        std::nth_element(worst_.begin(), worst_.end() - std::ptrdiff_t(few), worst_.end(), better);
        worst_.erase(worst_.begin(), worst_.end() - std::ptrdiff_t(few));
    }
    std::sort(worst_.begin(), worst_.end(), better);
    worst_below_ = worst_.empty() ? 0 : value(worst_.front());
}

template <class Policy>
int32_t RowCache<Policy>::worst() {
    for (int turn = 0; turn < 2; turn++) {
        for (; !worst_.empty(); worst_.pop_back()) {
            const Entry& e = cold_[size_t(worst_.back())];
            if (!e.pinned && (e.neuron < 0 || turn || score(e.neuron) <= worst_below_)) return worst_.back();
        }
        if (!turn) list_worst();
    }
    return -1;
}

template <class Policy>
int32_t RowCache<Policy>::place_for(int32_t neuron) {
    const int32_t at = read_only ? -1 : worst();
    if (!deserves(neuron, at)) {
        if (pool_.idle.empty()) return kHot;
        const int32_t passing = pool_.idle.back();
        return pool_.idle.pop_back(), int32_t(cold_.size()) + passing;
    }
    worst_.pop_back();
    clear(cold_[size_t(at)]);
    return at;
}

template <class Policy>
size_t RowCache<Policy>::pin(const int32_t* ids, size_t n, int32_t* slots, int32_t* entries, Wanted* wanted,
                             size_t* n_wanted, float uses) {
    size_t reads = 0, i = 0;
    for (; i < n; i++) {
        const size_t id = size_t(ids[i]);
        if (id < hot) {
            slots[i] = first_slot + ids[i], entries[i] = kHot;
            continue;
        }
        const auto before = policy_.state(id - hot);
        if (!read_only) policy_.use(id - hot, uses);
        int32_t at = where_[id - hot];
        const bool absent = at < 0;
        if (absent && (at = place_for(ids[i])) == kHot) {
            policy_.undo(id - hot, before);
            break;
        }
        if (absent) fill(at, ids[i]);
        Entry& e = entry_at(at);
        stats.missed += absent || e.early;
        stats.early_used += e.early;
        late_ += absent;
        e.pinned = true, e.early = false;
        slots[i] = e.slot, entries[i] = at;
        if (absent) wanted[reads++] = {ids[i], e.slot, at};
    }
    stats.needed += i;
    *n_wanted = reads;
    return i;
}

template <class Policy>
void RowCache<Policy>::unpin(const int32_t* entries, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (entries[i] < 0) continue;
        Entry& e = entry_at(entries[i]);
        e.pinned = false;
        if (size_t(entries[i]) >= cold_.size()) release(e);
    }
}

template <class Policy>
void RowCache<Policy>::release(Entry& passing) {
    clear(passing);
    passing.pinned = passing.early = false, passing.owner = nullptr;
    pool_.idle.push_back(int32_t(&passing - pool_.passing.data()));
}

template <class Policy>
size_t RowCache<Policy>::expect(const int32_t* ids, size_t n, Wanted* wanted) {
    size_t reads = 0;
    for (size_t i = 0; i < n && pool_.idle.size() > pool_.passing.size() / 2; i++) {
        if (hold(ids[i])) continue;
        const size_t id = size_t(ids[i]);
        const auto before = policy_.state(id - hot);
        policy_.use(id - hot, 1);  // as if it were needed now: `pin` would judge it so
        const int32_t at = place_for(ids[i]);
        policy_.undo(id - hot, before);
        if (at == kHot) break;
        fill(at, ids[i]);
        Entry& e = entry_at(at);
        e.pinned = e.early = true;
        wanted[reads++] = {ids[i], e.slot, at};
    }
    stats.early += reads;
    return reads;
}

template <class Policy>
bool RowCache<Policy>::hold(int32_t id) {
    if (size_t(id) < hot) return true;
    const int32_t at = where_[size_t(id) - hot];
    if (at >= 0) entry_at(at).pinned = true;
    return at >= 0;
}

template <class Policy>
int32_t RowCache<Policy>::slot_of(int32_t id) const {
    if (size_t(id) < hot) return first_slot + id;
    const int32_t at = where_[size_t(id) - hot];
    return at >= 0 && entry_at(at).ready ? entry_at(at).slot : -1;
}

template <class Policy>
size_t RowCache<Policy>::stream(size_t begin, size_t end, int32_t free, int32_t* slots, int32_t* entries,
                                Wanted* wanted) {
    size_t misses = 0;
    for (size_t id = begin; id < end; id++, slots++, entries++) {
        const int32_t at = *entries = id < hot ? kHot : where_[id - hot];
        if (id >= hot && at < 0) wanted[misses++] = {int32_t(id), free, kHot};
        *slots = id < hot ? first_slot + int32_t(id) : at < 0 ? free++ : cold_[size_t(at)].slot;
        if (at >= 0) cold_[size_t(at)].pinned = true;
    }
    return misses;
}

template <class Policy>
size_t RowCache<Policy>::stream(const int32_t* ids, size_t n, int32_t free, int32_t* slots, Wanted* wanted) {
    size_t misses = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t id = size_t(ids[i]);
        int32_t at = id < hot ? kHot : where_[id - hot];
        const bool absent = id >= hot && at < 0;
        if (absent && deserves(ids[i], worst())) {
            at = worst_.back(), worst_.pop_back();
            clear(cold_[size_t(at)]);
            fill(at, ids[i]);
        }
        slots[id] = id < hot ? first_slot + ids[i] : at < 0 ? free++ : cold_[size_t(at)].slot;
        if (at >= 0) cold_[size_t(at)].pinned = true;
        if (absent) wanted[misses++] = {ids[i], slots[id], at};
    }
    stats.needed += n, stats.missed += misses;
    return misses;
}

template <class Policy>
void RowCache<Policy>::settle() {
    for (Entry& e : cold_) {
        vain_ += e.early;
        e.pinned = e.early = false;
        if (e.neuron >= 0 && !e.ready) clear(e);
    }
    for (Entry& e : pool_.passing) {
        vain_ += e.owner == this && e.early;
        if (e.owner == this) release(e);
    }
    const float late = kLate * float(late_), vain = float(vain_), far = 40 * step_;
    if (step_ > 0 && late + vain > 0)
        slack_ = std::clamp(slack_ + step_ * (late - vain) / (late + vain), -far, far);
    step_ = 0;
}

}  // namespace tc
