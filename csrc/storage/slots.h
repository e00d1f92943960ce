// Records of a file that are in memory for now: places for them (SlotPool), which of one layer's are where
// (DiskRows), and their reads on the way (Fetches). Nothing here knows what a record means.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "reader.h"

namespace tc {

// A slot is `stride` bytes of memory, from data + slot * stride on. Slots below `lent` belong to whoever took
// them; the others, kStreamSlots, are for the one call there is: few tokens' records that are not worth
// keeping, many tokens' all.
constexpr size_t kStreamSlots = 1024;
class DiskRows;
class SlotPool {
 public:
    SlotPool(uint8_t* data, size_t stride, size_t slots);
    uint8_t* at(int32_t slot) const { return data + size_t(slot) * stride; }
    int32_t take(size_t n);  // n slots in a row: the first; -1: there are not so many
    int32_t take_one();
    void give_back(int32_t slot) {
        returned_.push_back(slot);
        if (returned_.size() == next_) returned_.clear(), next_ = 0;  // all of them: rows of slots again
    }
    size_t free() const { return lent - next_ + returned_.size(); }

    uint8_t* const data;
    const size_t stride, slots, lent;
    // What a slot holds. neuron -1: nothing. ready: its record is there; else it may be on its way.
    struct Entry {
        int32_t slot, neuron;
        bool pinned, ready;
        bool early = false;         // asked for before anybody needed it
        DiskRows* owner = nullptr;  // of the call's slots: whose record it is
    };
    std::vector<Entry> passing;  // of slot lent + i
    std::vector<int32_t> idle;   // of those, the ones that nothing is in

 private:
    size_t next_ = 0;
    std::vector<int32_t> returned_;
};

struct DiskError : std::exception {
    DiskError(int error, std::string name, int64_t neuron, bool changed = false)
        : error(error), name(std::move(name)), neuron(neuron), changed(changed) {}
    const char* what() const noexcept override { return "a read failed"; }
    int error;  // an errno; -1: the file ends early; 0: a wrong checksum
    std::string name;
    int64_t neuron;
    bool changed;  // Reader::changed, asked only here
};

using Interrupted = bool (*)();  // should what waits for a disk end at once? Asked by the calling thread,
constexpr auto kAsk = std::chrono::milliseconds(50);  // not more often: who asks may have to wait for Python

// Of records on the way: where one goes. entry: of the DiskRows it belongs to, or -1.
struct Wanted {
    int32_t neuron, slot, entry;
};

// Which of a layer's records are in memory. Records [0, hot) always are, in slots first_slot + i; the others
// share `quota` slots: pinned while somebody works with them, and kept by score, which is kPrior times how
// likely a token needs the record, and how often one did, halved every kHalfLife calls. A record with a lower
// score than all that are there passes through: it gets a slot of the call's. Traces say so: 3 to 6 points
// more hits than LRU, 1 to 3 more than S3-FIFO (LOG). One call at a time uses it, under the lock of its
// Fetches. Entries: [0, quota) are kept, those from `quota` on the pool's passing ones.
class Fetches;
class DiskRows {
 public:
    enum Disabled { NO_BUNDLE = 1, NO_CACHE = 2, NO_PIPELINE = 4 };
    // std::length_error where the pool has too few slots.
    DiskRows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot, size_t quota,
             const uint32_t* crc, const float* likely, std::string name, int disabled);
    ~DiskRows();
    DiskRows(const DiskRows&) = delete;
    DiskRows& operator=(const DiskRows&) = delete;

    void load(Interrupted interrupted =
                  nullptr);  // the hot ones, and as many of the next as there are slots for. DiskError
    // A call of so many steps, which for a few tokens it is one of; before it, if some of its reads are begun
    // early (`expect`).
    void begin(size_t steps);

    // As many of ids [0, n) as there are slots for, in order: their slots; their entries, pinned until
    // `unpin` (kHot: of a hot one); those that must be read. What is expected may be on its way still. -> how
    // many.
    size_t pin(const int32_t* ids, size_t n, int32_t* slots, int32_t* entries, Wanted* wanted,
               size_t* n_wanted);
    void unpin(const int32_t* entries, size_t n);
    // The record was needed in some of the call's steps: `uses`, halved for every kHalfLife steps before the
    // last.
    void used(int32_t id, float uses) {
        if (size_t(id) >= hot) uses_[size_t(id) - hot] += unit_ * uses;
    }
    static float aged(size_t steps);  // what a use is worth so many steps later
    // Of ids [0, n), which a call is expected to need: those that must be read, as far as there are slots for
    // them beside the call's own. They, and those that are there, stay until it is over.
    size_t expect(const int32_t* ids, size_t n, Wanted* wanted);
    // How far below its threshold a gate may be for its record to be expected. What was late and what was in
    // vain move it, call by call, in steps of `unit`: to where a record that is late costs kLate times one
    // that is read in vain.
    float slack() const { return slack_; }
    void adapt(float unit);
    bool hold(int32_t id);  // is it in memory (or on its way)? Then it stays until the call is over
    // Where the record is, or -1: it is not in memory (yet).
    int32_t slot_of(int32_t id) const;
    // Records [begin, end): those in memory are pinned where they are, the others wanted in stream slots from
    // `free` on.
    size_t stream(size_t begin, size_t end, int32_t free, int32_t* slots, int32_t* entries, Wanted* wanted);
    // Likewise of ids [0, n), which are needed (`used` has said so): those that score better than what is
    // kept take its place. `slots` is by neuron.
    size_t stream(const int32_t* ids, size_t n, int32_t free, int32_t* slots, Wanted* wanted);
    void arrived(int32_t entry) {
        if (entry >= 0) entry_at(entry).ready = true;
    }
    void settle();  // a call's end, when nothing is on its way any more: no pins, nothing half read, nothing
                    // in passing

    const SlotPool& pool() const { return pool_; }
    const std::string& name() const { return name_; }
    bool disabled(Disabled what) const { return disabled_ & what; }

    Reader& reader;
    const uint64_t file_offset;
    const size_t neurons, hot;
    const int32_t first_slot;
    struct Stats {
        uint64_t needed, missed, reads, bytes, streamed, waited_ns;
        uint64_t early, early_used;  // asked for before anybody needed them; of those, needed
    } stats{};
    const std::vector<uint32_t> crc;

 private:
    static constexpr int32_t kHot = -1;
    using Entry = SlotPool::Entry;
    Entry& entry_at(int32_t at) {
        return size_t(at) < cold_.size() ? cold_[size_t(at)] : pool_.passing[size_t(at) - cold_.size()];
    }
    const Entry& entry_at(int32_t at) const { return const_cast<DiskRows*>(this)->entry_at(at); }
    float score(int32_t neuron) const {
        return unit_ * prior_[size_t(neuron) - hot] + uses_[size_t(neuron) - hot];
    }
    int32_t place_for(int32_t neuron);                // an entry for it, emptied; or kHot: there is none now
    bool deserves(int32_t neuron, int32_t at) const;  // the place of what is in that entry
    int32_t worst();  // the entry with the lowest score, or -1: all are pinned
    void list_worst();
    void clear(Entry& e);
    void release(Entry& passing);
    void fill(int32_t at, int32_t neuron);

    SlotPool& pool_;
    const std::string name_;
    const int disabled_;
    static constexpr float kLate = 3;
    float slack_ = 0, step_ = 0;  // step_ 0: this call's early reads say nothing about it
    size_t late_ = 0, vain_ = 0;  // of this call
    float unit_ = 1;              // what a use is worth now: more and more, instead of halving all others
    std::vector<float> prior_, uses_;  // [neurons - hot]
    std::vector<int32_t> where_;       // [neurons - hot]: entry, or -1
    std::vector<Entry> cold_;
    std::vector<int32_t>
        worst_;              // some entries, the lowest scores last; as they were, so each is looked at again
    float worst_below_ = 0;  // what is not among them scores at least this (or came later)
};

// The reads of one call: a queue, at most as many under way as the reader has buffers, and whose turn it is
// when they are done. Records are checked, then copied from the buffers to their slots by whoever takes a
// finished read, and are there for others when `left` of their owner has reached 0 under the lock.
class Fetches {
 public:
    // Of a call over `rows`, which it settles in the end. DiskError: while it waits for what was left behind.
    // A forked process is refused, with a std::runtime_error.
    Fetches(Reader& reader, std::vector<DiskRows*> rows, size_t owners, Interrupted interrupted);
    ~Fetches();
    Fetches(const Fetches&) = delete;
    Fetches& operator=(const Fetches&) = delete;

    // The caller holds `lock`. Records, ascending, for `owner`; reads of neighbours are one where the gap
    // costs less. `urgent`: before all that are not under way yet.
    void want(DiskRows& rows, const Wanted* wanted, size_t n, size_t owner, bool urgent = false);
    void submit();
    void drop_queue();  // after a failure
    void
    give_up();  // at once: what is under way is left behind, and the next Fetches of this reader waits for it
    void submit_some() {  // one system call for several reads: 4 microseconds a read instead of 25
        if (queue_.size() >= kBatch || !under_way_) submit();
    }
    bool busy() const { return under_way_ || !queue_.empty(); }

    // The caller does not hold it; one thread at a time, `taking`. Takes what is done; with `wait`, sleeps
    // until something is (100 ms at most).
    void take(bool wait);
    void take_in_passing();  // unless somebody does

    std::mutex lock;
    std::condition_variable changed;  // something was taken, or became ready
    std::vector<size_t> left;         // [owners] reads on their way
    std::vector<uint8_t> bad;         // [owners] one of them failed
    std::vector<uint8_t> awaited;     // [owners] it is put aside until its reads are done
    std::deque<size_t> ready;         // of those, the ones that are
    bool failed = false, gave_up = false;
    DiskError error{0, "", 0};
    const std::vector<DiskRows*> rows;
    bool taking = false;  // somebody is in `take`: what it reaps, a second one would sleep for
    std::vector<std::vector<Wanted>> early;  // what was wanted before the call

 private:
    static constexpr size_t kBatch = 8;
    struct Read {
        DiskRows* rows;
        const Wanted* wanted;
        size_t n, owner;
        uint64_t begin;     // where the buffer's first byte is in the file
        unsigned requests;  // 2: each half on its own; then those still under way
        int error;
    };
    std::vector<Read> made_;  // of one `want`
    size_t requests_of(Read& r, unsigned buffer, ReadRequest* out) const;
    void finish(Read& r, const uint8_t* buffer);

    Reader& reader_;
    std::deque<Read> queue_;
    std::vector<Read> reads_;        // by buffer
    std::vector<unsigned> buffers_;  // idle ones
    size_t under_way_ = 0;           // requests
};

}  // namespace tc
