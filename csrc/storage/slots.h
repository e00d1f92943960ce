// Slots: equal pieces of memory that records of a file take turns in. What a record means is not known here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tc {

// Slots at the end of a pool of neurons that no layer owns. They are for the one call there is: records of
// few tokens that are not worth keeping, all records of many tokens. Pools of experts have as many as they
// say.
constexpr size_t kStreamSlots = 1024;
// Offset and stride of a pool: a record begins at a cache line.
constexpr size_t kSlotAlignment = 64;

// `slots` slots of `stride` bytes each; slot i begins at data + i * stride. Slots below `lent` belong to the
// caches that took them; the last `n_passing` are the running call's. One thread at a time.
class SlotPool {
 public:
    // data may be null: then the pool only counts, as in a replay.
    SlotPool(uint8_t* data, size_t stride, size_t slots, size_t n_passing = kStreamSlots);
    uint8_t* at(int32_t slot) const { return data + size_t(slot) * stride; }
    int32_t take(size_t n);  // the first of n consecutive slots; -1: there are not so many
    int32_t take_one();
    void give_back(int32_t slot) {
        returned_.push_back(slot);
        if (returned_.size() == next_) returned_.clear(), next_ = 0;  // all are back: consecutive ones again
    }
    size_t free() const { return lent - next_ + returned_.size(); }

    uint8_t* const data;
    const size_t stride, slots, lent;

    // What is in a slot. neuron -1: nothing. `ready`: the record is complete; else its read may be under way.
    // A pinned record stays where it is.
    struct Entry {
        int32_t slot, neuron;
        bool pinned, ready;
        bool early = false;           // read ahead, and not needed yet
        const void* owner = nullptr;  // of the call's slots: the cache whose record it is
    };
    std::vector<Entry> passing;  // of slot lent + i
    std::vector<int32_t> idle;   // indices of passing entries that nothing is in

 private:
    size_t next_ = 0;
    std::vector<int32_t> returned_;
};

// A record that must be read, and the slot it goes to. entry: of the cache, or -1.
struct Wanted {
    int32_t neuron, slot, entry;
};

// What tables take beside the slots and records themselves, at most. Of a record: its checksum, here and in
// Python, and 4 bytes each for where it is, how likely it is needed (in Python, too) and its uses.
constexpr size_t kSlotTableBytes = 32, kRecordTableBytes = 24;
static_assert(sizeof(SlotPool::Entry) + sizeof(int32_t) <= kSlotTableBytes, "the memory plan counts less");

}  // namespace tc
