// The FFNs of a model that is larger than its memory, as plain matrices: the first rows of each are in
// memory, the others come from disk in the order in which a step multiplies with them, step after step.
//
// A record is what one thread computes at a time: rows of gate and the same of up, or rows of down. A thread
// of its own reads records into a ring of buffers, beyond the end of a step into the next one's first layer,
// so that the disk reads on during attention and the head. Whoever takes a record checks and arranges some of
// its rows at a time just before they are multiplied, in memory of its own that stays in its core's cache: a
// byte passes memory twice, from the disk and to be arranged. Nothing is kept: what comes round last is what
// leaves first, so every cache of it would miss.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "disk_experts.h"
#include "kernels/kernels.h"

namespace tc {

// Some rows of a matrix, or all, in a file: `run`, of which the first `held` are in memory.
struct StreamedMatrix {
    RowRun run;
    size_t held;
    std::string name;  // for DiskError
};

class DenseStream {
 public:
    enum Phase { GATE_UP, DOWN, N_PHASES };
    struct Layer {
        std::vector<StreamedMatrix> parts[N_PHASES];  // gate, perhaps up, of one shape; down
        size_t rows[N_PHASES];                        // of a record, a multiple of a group
    };
    // Rows [first, first + n) of the matrices of a record, arranged.
    struct Rows {
        size_t first, n;
        const uint8_t* data[2];  // of each matrix
        // Return a matrix of which row 0 is row `first` of the whole.
        Matrix of(Matrix w, size_t part) const {
            w.data = data[part], w.rows = n;
            return w;
        }
    };
    // A record that a thread has taken.
    struct Taken {
        uint64_t number;
        size_t arranged;  // of its rows
        uint32_t crc[2];  // of those, by matrix
    };
    struct Stats {
        uint64_t needed = 0, missed = 0, reads = 0, bytes = 0, waited_ns = 0;  // needed: in records
    };

    // Each buffer of `files` has room for a record. threads: of a call. Some rows of some matrix are not
    // held. Begins to read; std::system_error where there are no more threads. What is given outlives it.
    DenseStream(ExpertFiles& files, std::vector<Layer> layers, int threads);
    ~DenseStream();
    DenseStream(const DenseStream&) = delete;
    DenseStream& operator=(const DenseStream&) = delete;

    // ---- the thread that makes a call; one call at a time

    // Begins an FFN. Where that is not the next one in turn, or a read has failed since, reading begins
    // there. std::runtime_error in a forked process.
    void begin(size_t layer, int threads, Interrupted interrupted);
    void end();  // DiskError where a read failed

    // ---- all threads of its region

    // Gives the next record of a phase; false: there is none, or without `wait` none yet, or a read failed.
    // Phases come in turn.
    bool take(Phase phase, Taken* taken, int thread, bool wait);
    // Gives its next rows, which stay until this thread asks again. false: there are no more, and its buffer
    // is the disk's again; or they are wrong, and `end` says so.
    bool next(Taken* taken, Rows* rows, int thread);

    Stats stats() const;
    const std::vector<Layer>& layers() const { return layers_; }

 private:
    struct Record {
        uint32_t layer, first, n;
        uint8_t phase, known[2] = {0, 0};
        uint32_t crc[2] = {0, 0};  // CRC-32C of the bytes in the file, made when they are read first
    };
    struct Slot {
        unsigned buffer = 0;
        size_t left = 0;  // reads that have not brought their bytes
        bool done = false;
    };
    struct Buffer {
        uint64_t turn = 0;    // of `turn_`, when it was taken
        uint64_t number = 0;  // of its record
        size_t under_way = 0;
    };
    void run();
    void seek(size_t record);
    void submit(std::unique_lock<std::mutex>& held);
    ReadRequest request();
    void ended(uint64_t tag, int error);
    int arrange(Taken* taken, Rows* rows, size_t part, int thread);
    void wait(std::unique_lock<std::mutex>& held, int thread);
    // `number`: of the record that cannot be had; 0: the call ends whatever it has.
    void fail(uint64_t number, int error, const Record* r, size_t part);
    // A read beyond the call's own may fail. All of its own were asked for before, and the call that needs
    // that one reads it again.
    bool call_failed() const { return failed_at_ < end_[DOWN]; }
    Record& record(uint64_t number) { return records_[size_t(number % records_.size())]; }
    Slot& slot(uint64_t number) { return slots_[size_t(number % slots_.size())]; }
    // Is a record there? Its slot alone does not say: it may be of what came a turn of the ring before.
    bool has_come(uint64_t number) { return number < asked_ && !slot(number).left; }

    ExpertFiles& files_;
    Reader& reader_;
    const std::vector<Layer> layers_;
    const int threads_;
    std::vector<Record> records_;  // of a step, in order
    std::vector<size_t> first_;    // [layers * N_PHASES + 1]: the records of each phase
    std::vector<size_t> held_;     // [layers]: as many records are in memory
    std::vector<uint8_t> arranged_memory_;
    uint8_t* arranged_ = nullptr;
    size_t arranged_bytes_ = 0, group_at_ = 0;  // of a thread; behind its rows: planar ones of a group

    // Records are numbered through all steps: number % records_.size() is the record, % slots_.size() its
    // slot. done_ <= next_ <= asked_ <= done_ + slots_.size(): what is finished, given to a thread, asked
    // for.
    mutable std::mutex lock_;                // guards all that follows
    std::condition_variable &came_, &room_;  // for those that compute; for the thread that reads
    uint64_t done_ = 0, next_ = 0, asked_ = 0;
    size_t part_ = 0;                  // of record asked_: the next to ask for
    uint64_t end_[N_PHASES] = {0, 0};  // of the running call
    uint64_t turn_ = 0;                // goes up when reading begins elsewhere
    std::vector<Slot> slots_;
    // Reads under way at most, half as many as buffers. A virtual disk ends all that it found waiting at
    // once, so with all under way it has nothing to do until some are multiplied.
    const size_t most_;
    std::vector<Buffer> buffers_;
    std::vector<unsigned> free_;
    size_t under_way_ = 0;
    static constexpr uint64_t kNone = UINT64_MAX;
    uint64_t failed_at_ = kNone;  // the first record that failed; no more are asked for then
    bool stop_ = false;
    DiskError error_{0, "", 0};
    Stats stats_;
    Interrupted interrupted_ = nullptr;
    std::chrono::steady_clock::time_point asked_python_;
    std::thread thread_;
};

// Return the bytes of a record in its buffer, with what is read around its rows; 0: all rows are held.
size_t record_bytes(const DenseStream::Layer& layer, DenseStream::Phase phase);

// A layer's part of a stream, as an FFN has it.
struct StreamedLayer {
    DenseStream* stream = nullptr;
    size_t layer = 0;
};

}  // namespace tc
