// Reads of records on their way from disk to their slots: whose they are (DiskRows), and the reads of one
// call (Fetches).
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "policy.h"
#include "reader.h"
#include "row_cache.h"

namespace tc {

// Two reads are one where at most this many bytes lie between: an operation costs a disk as much as 40 KiB
// (45,000 a second, 2.2 GB/s).
constexpr size_t kMostGapBytes = 32 << 10;

struct DiskError : std::exception {
    DiskError(int error, std::string name, int64_t neuron, bool changed = false)
        : error(error), name(std::move(name)), neuron(neuron), changed(changed) {}
    const char* what() const noexcept override { return "a read failed"; }
    int error;         // an errno; -1: the file ends early; 0: a wrong checksum
    std::string name;  // of the tensor
    int64_t neuron;    // the record; -1: none in particular
    bool changed;      // Reader::changed when the read failed
};

// Whether a call that waits for the disk should end at once. Only the thread that made the call asks, and not
// more often than every kAsk: to answer, it may have to wait for Python's lock.
using Interrupted = bool (*)();
constexpr auto kAsk = std::chrono::milliseconds(50);

// The records of one layer (of one expert) in a file, and which of them are in memory. Record i is
// pool.stride bytes at file_offset + i * pool.stride. The pool and the reader outlive it.
class DiskRows : public RowCache<EnginePolicy> {
 public:
    enum Disabled { NO_BUNDLE = 1, NO_CACHE = 2, NO_PIPELINE = 4 };
    // crc [neurons]: CRC-32C of each record. likely [neurons], or null: as RowCache's. name: of the tensor,
    // for DiskError. disabled: what to do without, added up. std::length_error: too few slots in the pool.
    DiskRows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot, size_t quota,
             const uint32_t* crc, const float* likely, std::string name, int disabled);
    ~DiskRows();

    // Reads the hot records and the next ones, into all slots. Before any call. DiskError.
    void load(Interrupted interrupted = nullptr);
    void begin(size_t steps) { RowCache::begin(steps, disabled(NO_CACHE)); }

    const std::string& name() const { return name_; }
    bool disabled(Disabled what) const { return disabled_ & what; }

    Reader& reader;
    const uint64_t file_offset;
    const std::vector<uint32_t> crc;

 private:
    const std::string name_;
    const int disabled_;
};

// The reads of one call: a queue, at most as many under way as the reader has buffers, and who waits for
// what. An owner is a number in [0, owners): a part of the call that goes on when all its reads are done.
// Whoever takes a finished read checks its records and copies them from the buffer to their slots. Others may
// use a record when they have seen, under `lock`, that `left` of its owner is 0.
class Fetches {
 public:
    // For a call over `rows`, all of the one reader; they are settled when it is destroyed. DiskError: while
    // it waits for reads that an earlier call left behind. std::runtime_error in a forked process.
    Fetches(Reader& reader, std::vector<DiskRows*> rows, size_t owners, Interrupted interrupted);
    ~Fetches();
    Fetches(const Fetches&) = delete;
    Fetches& operator=(const Fetches&) = delete;

    // ---- the caller holds `lock`

    // Queues reads of wanted [0, n), in ascending order of neurons, for `owner`. Neighbours are one read
    // where the gap between costs less than another read would. `wanted` stays until they are done. `urgent`:
    // before all that are not under way yet.
    void want(DiskRows& rows, const Wanted* wanted, size_t n, size_t owner, bool urgent = false);
    void submit();      // begins as many of the queue as there are buffers for
    void drop_queue();  // after a failure: what is not under way is not read
    // Ends the call at once: what is under way is left behind, and the next Fetches of this reader waits for
    // it.
    void give_up();
    // Where a read has failed, none is under way, and some were asked for before the call: forgets what is
    // not in memory, so that the call can begin again and ask for what it needs alone. false: it cannot.
    bool begin_again();
    void submit_some() {  // one system call for several reads: 4 microseconds a read instead of 25
        if (queue_.size() >= kBatch || !under_way_) submit();
    }
    bool busy() const { return under_way_ || !queue_.empty(); }

    // ---- the caller does not hold `lock`

    // Takes the reads that are done; with `wait`, sleeps until there is one (100 ms at most). One thread at a
    // time, which has set `taking`.
    void take(bool wait);
    void take_in_passing();  // without waiting, unless another thread takes

    std::mutex lock;                  // guards the rest, and the DiskRows
    std::condition_variable changed;  // some read was taken, or some owner became ready
    std::vector<size_t> left;         // [owners] reads that are not done
    std::vector<uint8_t> bad;         // [owners] one of them failed
    std::vector<uint8_t> awaited;     // [owners] it is put aside until its reads are done
    std::deque<size_t> ready;         // the awaited owners whose reads are done
    bool failed = false, gave_up = false;
    DiskError error{0, "", 0};  // the first one, where `failed`
    const std::vector<DiskRows*> rows;
    bool taking = false;                     // some thread is in `take`
    std::vector<std::vector<Wanted>> early;  // keeps what `want` was given before the call

 private:
    static constexpr size_t kBatch = 8;
    // Records that lie next to each other in the file, wanted [0, n).
    struct Read {
        DiskRows* rows;
        const Wanted* wanted;
        size_t n, owner;
        uint64_t begin;     // the buffer's first byte, in the file
        unsigned requests;  // to the reader: two where each half is read on its own; then those under way
        int error;
    };
    std::vector<Read> made_;  // of one `want`
    size_t requests_of(Read& r, unsigned buffer, ReadRequest* out) const;
    void finish(Read& r, const uint8_t* buffer);

    Reader& reader_;
    std::deque<Read> queue_;
    std::vector<Read> reads_;        // by buffer
    std::vector<unsigned> buffers_;  // those without a read
    size_t under_way_ = 0;           // requests
};

}  // namespace tc
