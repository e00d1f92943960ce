// Experts on disk: whose slabs of a file they are (DiskExperts), and the reads of one call (ExpertReads).
//
// A record is an expert: the rows of its matrices, each a slab of a file, that are arranged on their way to a
// slot as they lie in memory. A slab is read in pieces, so that the disk is kept busy by one expert. Whoever
// takes a piece checks it and puts its rows into their slot; an expert is ready when it has all of them.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "fetches.h"
#include "row_load.h"

namespace tc {

constexpr int kNotFinite = -3;        // DiskError::error: a scale that is no finite number
constexpr unsigned kLayersAhead = 2;  // that are guessed beside a call

class DiskExperts;

// The files of a model, as they were when their headers were read, behind one queue of reads.
struct ExpertFiles {
    ExpertFiles(std::vector<SourceFile> files, unsigned depth, size_t piece_bytes, Method method,
                bool direct);
    // Is a file no longer the one whose header was read?
    bool changed(unsigned file) const;

    const std::vector<SourceFile> files;
    Reader reader;
    std::vector<uint8_t> scratch;  // of the call there is

    // Bytes that were asked for before a call that may need them, and that lie in a buffer as they were read
    // until it does. A call drops what neither it nor the next kLayersAhead layers need; what is under way
    // then keeps its buffer meanwhile.
    struct Early {
        size_t layer;  // of an expert
        int32_t expert;
        size_t piece;
        unsigned ahead;  // DiskExperts::Likely's
        unsigned buffer;
        bool come;
    };
    std::vector<Early> early;
    // Buffers that may have such bytes when more are asked for, so many layers ahead: the others are for a
    // call's own. What is read for the layer behind the next one leaves as many as the next may have under
    // way.
    unsigned most_early(unsigned ahead) const { return reader.depth() / 4 * (ahead < 2 ? 3 : 2); }
    // A virtual disk ends together what it found waiting together: what has come is put away meanwhile. What
    // the next layer asks for waits for what is under way for the one behind it: that is half as much.
    unsigned most_under_way(unsigned ahead = 0) const { return reader.depth() / (ahead < 2 ? 2 : 4); }
    size_t early_under_way() const;
    std::vector<Early>::iterator find_early(size_t layer, int32_t expert, size_t piece);
    std::vector<unsigned> free_buffers() const;  // without what was read ahead
    // If it was one of them. true: it has failed, and is forgotten with its buffer: who needs it reads it
    // again.
    bool early_came(const ReadDone& done);
    // Forgets those that have come, but for those of layer `first` and the kLayersAhead - 1 behind it: no
    // others can have been guessed when it is next. Returns their buffers.
    std::vector<unsigned> drop_early(size_t first);

    // A step begins whose calls read at most so many bytes: what they would read beyond is left out.
    // `read_only`: it leaves all caches as they are.
    static constexpr uint64_t kUnbounded = UINT64_MAX;
    void begin_step(uint64_t most_bytes, bool read_only);
    bool bounded() const { return most_bytes_ != kUnbounded; }
    bool read_only() const { return read_only_; }
    // How much more the layer may read, which is number `layer` of `layers`. Each has an equal part, and what
    // those before it left of theirs: where a part is less than an expert, some layers still read one.
    uint64_t may_read(size_t layer) const;
    void pay(uint64_t bytes) { paid_bytes_ += bytes; }
    size_t layers = 0;

 private:
    uint64_t most_bytes_ = kUnbounded, paid_bytes_ = 0;
    bool read_only_ = false;
};

// The experts of one layer, and which of them are in memory. The pool and the files outlive it.
class DiskExperts : public RowCache<ExpertPolicy> {
 public:
    // runs[e]: the slabs of expert e, `to` within its slot; slab s of every expert has one shape. names: of
    // each slab, for DiskError. disabled: of DiskRows::Disabled, added up.
    // std::length_error: too few slots in the pool.
    DiskExperts(SlotPool& pool, ExpertFiles& files, const std::vector<std::vector<RowRun>>& runs,
                size_t quota, const float* likely, std::vector<std::string> names, int disabled);

    // Reads the first experts, into all slots, with so many threads. Before any call. DiskError.
    void load(int threads, Interrupted interrupted = nullptr);
    bool disabled(DiskRows::Disabled what) const { return disabled_ & what; }
    // A guess: the experts that a call will probably need, the likeliest first.
    struct Likely {
        std::vector<int32_t> experts;
        unsigned ahead;  // 0: it is made before the layer's mixer; else beside the call so many layers before
        size_t i = 0, piece = 0;  // what is asked for next
    };
    // Before a layer's mixer: begins to read those that are not in memory, into most_early() buffers at most.
    // Not where a call has left reads behind. Their slots are found when the call comes, so that a wrong
    // guess moves no expert.
    void read_ahead(Likely likely);
    // Asked once before each guess: whether those of so many layers ahead are more often right than wrong, or
    // it is time to look whether they are now.
    bool guesses_well(unsigned ahead);
    bool next_early(Likely& likely, unsigned buffer, ReadRequest* read);  // false: there is none
    size_t pieces_missing(const std::vector<int32_t>& some) const;        // not in memory
    void early_used(unsigned ahead) { guesses_[ahead].used++, stats.early_used++; }
    // Of a bounded step. `wanted`: the experts of a call, those that matter most first. Moves those to its
    // end that are missing and that the step cannot read any more, pays for the others, and returns how many
    // these are. It depends on what is in memory alone, not on when reads come.
    size_t keep_affordable(std::vector<int32_t>& wanted);
    ReadRequest request(size_t expert, size_t piece, unsigned buffer) const;

    // Rows [first, first + n) of slab `slab`.
    struct Piece {
        size_t slab, first, n;
    };
    const RowRun& run(size_t expert, size_t slab) const { return runs_[expert * names.size() + slab]; }

    ExpertFiles& files;
    const size_t layer;  // its number among those of the files, in the order of calls
    const std::vector<std::string> names;
    std::vector<Piece> pieces;  // of an expert
    size_t scratch_bytes = 0;   // of a thread that arranges
    // [experts, pieces]: CRC-32C of the bytes in the file, made when they are read for the first time, and
    // whether it is known. Each belongs to whoever has the read.
    std::vector<uint32_t> crc;
    std::vector<uint8_t> known;

 private:
    bool in_memory(int32_t expert) const { return !disabled(DiskRows::NO_CACHE) && slot_of(expert) >= 0; }
    uint64_t read_bytes(size_t expert) const;

    const std::vector<RowRun> runs_;  // [experts, slabs]
    const int disabled_;
    struct Guesses {
        float right = 1;               // the share of experts read ahead that were needed, of late
        unsigned begun = 0, used = 0;  // experts that the last guess began to read; of those, needed
        unsigned not_asked = 0;        // guesses that would have been wrong too often
    } guesses_[kLayersAhead + 1];      // those of so many layers ahead
};

// The experts that one call needs, in waves of as many as there are slots for, and who works on which.
//
// The calling thread begins and ends waves; between that, all threads `take` work of the running one until
// there is none. The reads of the next wave go on meanwhile.
class ExpertReads {
 public:
    // A task: an expert of the call, or something else that is in memory, with `rows` rows of work.
    struct Task {
        int32_t expert;  // -1: in memory
        float uses;      // as Policy::use
        size_t rows, unit;
        size_t columns = 0,
               column_unit = 1;     // of what it gives, where that may be computed while others wait
        size_t next = 0, done = 0;  // row that nobody has taken; rows whose work is over
        size_t given = 0;           // columns of what it gives that have been taken, the first ones
        int32_t slot = -1, entry = -1;
        size_t left = 0;      // pieces that are not in their slot
        bool is_new = false;  // some checksum of it is made now
    };
    // A call that counts as so many steps; experts ascend. `most`: rows of a piece of work.
    ExpertReads(DiskExperts& experts, std::vector<Task> tasks, size_t steps, size_t most, int threads,
                Interrupted interrupted);
    // Reads every expert of `wanted` to its slot: one wave, without work.
    ExpertReads(DiskExperts& experts, const std::vector<Wanted>& wanted, int threads,
                Interrupted interrupted);
    ~ExpertReads();
    ExpertReads(const ExpertReads&) = delete;
    ExpertReads& operator=(const ExpertReads&) = delete;

    // ---- the calling thread, outside of a region

    size_t begin_wave();  // the tasks of the next wave, which follow those of the last; 0: all are done
    void end_wave();      // DiskError where a read failed
    // Once all that the call needs and all that is likely of layers before this one is under way, begins to
    // read these experts of a layer to come, into buffers that the call has no use for. false: so many that
    // none will be left for the layer behind it.
    bool read_ahead(DiskExperts& of, DiskExperts::Likely likely);
    const std::vector<Task>& tasks() const { return tasks_; }

    // ---- all threads of a region

    // Rows [begin, end) of a task; or columns of what it gives, once all of its rows are done.
    struct Work {
        size_t task = 0, begin = 0, end = 0;
        bool columns = false;
    };
    // What the thread does next, after `work`, which it has done. Columns only where it would sleep till a
    // read comes: all the others are for when the whole wave is there. false: nobody will get more of it.
    bool take(Work& work, int thread);
    bool failed() const { return failed_.load(std::memory_order_relaxed); }
    // Puts away what has been read meanwhile, without waiting.
    void help(int thread);

 private:
    static constexpr size_t kNobody = SIZE_MAX;  // the task of a read that no task has asked for yet
    struct Read {
        size_t task = kNobody, piece = 0;
        bool early = false;  // it was asked for before the call
    };
    struct Pending {
        size_t task, piece;
    };
    void request(size_t task);
    void submit(std::unique_lock<std::mutex>& held);
    bool again(unsigned buffer);
    bool find_early(const Pending& next);
    void drop_early();
    size_t request_ahead(ReadRequest* requests, size_t most);
    void finish(const Work& work);
    bool take_rows(Work& work);
    bool take_columns(Work& work);
    void look(bool wait, std::unique_lock<std::mutex>& held);
    void accept(const ReadDone* done, size_t n);
    int put(const Read& r, const uint8_t* buffer, int thread);
    void put_away(std::unique_lock<std::mutex>& held, int thread);
    void wait(std::unique_lock<std::mutex>& held, int thread);
    void fail(int error, const Read* r);
    void give_up();
    void pin_wave();
    void take_buffers();
    bool changed(size_t expert) const;

    DiskExperts& rows_;
    Reader& reader_;
    const size_t most_;
    const size_t threads_;
    const Interrupted interrupted_;
    std::vector<Task> tasks_;
    const uint64_t bytes_before_;
    bool many_ = false, loads_ = false, with_columns_ = false;

    std::mutex lock_;  // guards the rest, and the RowCache
    std::condition_variable changed_;
    size_t begin_ = 0, end_ = 0, pinned_ = 0;  // tasks of the running wave; up to where they have slots
    size_t waiting_ = 0;                       // tasks of the running wave that lack pieces
    std::deque<size_t> ready_;                 // tasks of the running wave with work
    std::deque<size_t> whole_;                 // those whose rows are done, with columns
    size_t working_ = 0;                       // threads that have rows
    std::deque<Pending> queue_;                // the next piece of a task
    struct Ahead {
        DiskExperts* of;
        DiskExperts::Likely likely;
    };
    std::vector<Ahead> ahead_;                 // what is read ahead, the next layer's first
    std::vector<Read> reads_;                  // by buffer
    std::vector<unsigned> buffers_, arrived_;  // without a read; read
    size_t under_way_ = 0;
    bool taking_ = false;
    std::atomic<bool> failed_{false};
    DiskError error_{0, "", 0};
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

}  // namespace tc
