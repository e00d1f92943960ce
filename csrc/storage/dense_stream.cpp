#include "dense_stream.h"

#include <errno.h>

#include <algorithm>
#include <stdexcept>

#include "round.h"
#include "slots.h"
#include "store.h"

namespace tc {

// Rows that are arranged at a time: whole groups. Those of gate and up, or of down, of a 7B in 4 bits are 150
// to 200 KB.
constexpr size_t kRowsAtATime = kMostPanelRows;
constexpr size_t kAround = 4096;  // a multiple of every alignment of reads
constexpr uint64_t kParts = 2;    // of a record at most

// Where the bytes of a matrix begin in a record's buffer, or a little behind that: a read begins before them.
static size_t part_at(const DenseStream::Layer& layer, DenseStream::Phase phase, size_t part) {
    const size_t bytes = layer.rows[phase] * layer.parts[phase][0].run.row_bytes();
    return part ? whole(bytes, kAround) + 2 * kAround : 0;
}

size_t record_bytes(const DenseStream::Layer& layer, DenseStream::Phase phase) {
    const std::vector<StreamedMatrix>& parts = layer.parts[phase];
    if (parts[0].held == parts[0].run.rows) return 0;
    const size_t last = layer.rows[phase] * parts.back().run.row_bytes();
    return part_at(layer, phase, parts.size() - 1) + whole(last, kAround) + 2 * kAround;
}

// Where arranged rows of a matrix begin in a thread's memory.
static size_t arranged_at(const DenseStream::Layer& layer, DenseStream::Phase phase, size_t part) {
    return part ? whole(kRowsAtATime * layer.parts[phase][0].run.row_bytes(), kSlotAlignment) : 0;
}

// Condition variables outlive a forked child's copy: to destroy one would wait for the parent's threads.
DenseStream::DenseStream(ExpertFiles& files, std::vector<Layer> layers, int threads)
    : files_(files),
      reader_(files.reader),
      layers_(std::move(layers)),
      threads_(threads),
      came_(*new std::condition_variable),
      room_(*new std::condition_variable),
      most_(std::max(1u, files.reader.depth() / 2)),
      buffers_(files.reader.depth()) {
    size_t rows_bytes = 0, group_bytes = 0;
    for (size_t i = 0; i < layers_.size(); i++) {
        size_t held = 0;
        for (const Phase p : {GATE_UP, DOWN}) {
            const StreamedMatrix& m = layers_[i].parts[p][0];
            const size_t rows = layers_[i].rows[p];
            first_.push_back(records_.size());
            held += (m.held + rows - 1) / rows;
            for (size_t at = m.held; at < m.run.rows; at += rows)
                records_.push_back(
                    {uint32_t(i), uint32_t(at), uint32_t(std::min(rows, m.run.rows - at)), uint8_t(p)});
            const std::vector<StreamedMatrix>& parts = layers_[i].parts[p];
            rows_bytes = std::max(rows_bytes, arranged_at(layers_[i], p, parts.size() - 1) +
                                                  kRowsAtATime * parts.back().run.row_bytes());
            for (const StreamedMatrix& part : parts)
                if (part.run.group > 1 && !part.run.planar)
                    group_bytes = std::max(group_bytes, part.run.group * part.run.row_bytes());
        }
        held_.push_back(held);
    }
    first_.push_back(records_.size());
    slots_.resize(std::min(buffers_.size(), records_.size()));  // no record is read twice at a time
    group_at_ = whole(rows_bytes, kSlotAlignment);
    arranged_bytes_ = whole(group_at_ + group_bytes + kArenaPadding, kSlotAlignment);
    arranged_memory_.resize(arranged_bytes_ * size_t(threads) + kSlotAlignment);
    arranged_ = arranged_memory_.data();
    arranged_ += (kSlotAlignment - reinterpret_cast<uintptr_t>(arranged_) % kSlotAlignment) % kSlotAlignment;
    for (unsigned i = reader_.depth(); i-- > 0;) free_.push_back(i);
    thread_ = std::thread([this] { run(); });
}

DenseStream::~DenseStream() {
    if (reader_.forked()) {
        thread_.detach();  // the parent's
        return;
    }
    {
        std::lock_guard<std::mutex> held(lock_);
        stop_ = true;
    }
    room_.notify_all();
    thread_.join();
    reader_.left_behind += under_way_;
    delete &came_;
    delete &room_;
}

DenseStream::Stats DenseStream::stats() const {
    std::lock_guard<std::mutex> held(lock_);
    return stats_;
}

// ---- a call

void DenseStream::begin(size_t layer, int threads, Interrupted interrupted) {
    if (reader_.forked()) throw std::runtime_error(kForked);
    if (threads > threads_) throw std::invalid_argument("more threads than the stream was made for");
    std::unique_lock<std::mutex> held(lock_);
    const size_t* const first = first_.data() + layer * N_PHASES;
    if (failed_at_ != kNone || done_ % records_.size() != first[0] % records_.size()) seek(first[0]);
    for (const Phase p : {GATE_UP, DOWN}) end_[p] = next_ + (first[p + 1] - first[0]);
    interrupted_ = interrupted;
    stats_.needed += held_[layer] + (first[N_PHASES] - first[0]);
    stats_.missed += first[N_PHASES] - first[0];
}

void DenseStream::end() {
    std::lock_guard<std::mutex> held(lock_);
    if (call_failed()) throw error_;
}

// Reads begin anew with this record. Those under way end in their buffers, which then are free.
void DenseStream::seek(size_t record) {
    turn_++;
    for (uint64_t i = done_; i < asked_ + (part_ ? 1 : 0); i++)
        if (!buffers_[slot(i).buffer].under_way) free_.push_back(slot(i).buffer);
    done_ = next_ = asked_ = record;
    part_ = 0;
    std::fill(slots_.begin(), slots_.end(), Slot{});
    failed_at_ = kNone;
    room_.notify_all();
}

bool DenseStream::take(Phase phase, Taken* taken, int thread, bool wait) {
    std::unique_lock<std::mutex> held(lock_);
    // After a failure the next record may be one of gate and up, which has come too late for its own phase.
    if (phase == DOWN && next_ < end_[GATE_UP]) return false;
    while (next_ < end_[phase]) {
        if (has_come(next_)) {
            *taken = {next_, 0, {0, 0}};
            if (++next_ == end_[phase])
                came_.notify_all();  // nobody gets more
            else if (has_come(next_))
                came_.notify_one();
            return true;
        }
        if (!wait || call_failed()) return false;
        this->wait(held, thread);
    }
    return false;
}

// Nobody else has the record: no lock, but to tell how it ended.
bool DenseStream::next(Taken* taken, Rows* rows, int thread) {
    Record& r = record(taken->number);
    const size_t parts = layers_[r.layer].parts[r.phase].size();
    int error = 0;
    size_t part = 0;
    if (taken->arranged < r.n) {
        *rows = {
            r.first + taken->arranged, std::min(kRowsAtATime, r.n - taken->arranged), {nullptr, nullptr}};
        for (; part < parts && !(error = arrange(taken, rows, part, thread));) part++;
        taken->arranged += rows->n;
        if (!error) return true;
    }
    for (; part < parts && !error;) {
        if (r.known[part] && taken->crc[part] != r.crc[part]) {
            error = INT32_MAX;  // no errno
            break;
        }
        r.crc[part] = taken->crc[part], r.known[part] = 1, part++;
    }
    std::lock_guard<std::mutex> held(lock_);
    if (error) {
        fail(taken->number, error, &r, part);
        return false;
    }
    slot(taken->number).done = true;
    for (; done_ < next_ && slot(done_).done; done_++) {
        slot(done_).done = false;
        free_.push_back(slot(done_).buffer);
    }
    room_.notify_one();
    return false;
}

// Arranges the rows of one matrix. Where bytes are read for the first time, the file must still be the one
// whose header was read: nothing else vouches for it.
int DenseStream::arrange(Taken* taken, Rows* rows, size_t part, int thread) {
    const Record& r = record(taken->number);
    const Layer& layer = layers_[r.layer];
    const Phase phase = Phase(r.phase);
    RowRun run = layer.parts[phase][part].run;
    if (!r.known[part] && !taken->arranged && files_.changed(run.file)) return kChanged;
    const uint64_t at = run.at + uint64_t(r.first) * run.row_bytes();
    const uint8_t* const from = reader_.buffer(slot(taken->number).buffer) + part_at(layer, phase, part) +
                                at % reader_.alignment() + taken->arranged * run.row_bytes();
    taken->crc[part] = crc32c(from, rows->n * run.row_bytes(), taken->crc[part]);
    uint8_t* const mine = arranged_ + size_t(thread) * arranged_bytes_;
    run.to = arranged_at(layer, phase, part);
    rows->data[part] = mine + run.to;
    return put_rows(run, mine, 0, rows->n, from, mine + group_at_) == rows->n ? 0 : kNotFinite;
}

// Sleeps until something has changed.
void DenseStream::wait(std::unique_lock<std::mutex>& held, int thread) {
    const auto now = std::chrono::steady_clock::now();
    if (!thread && interrupted_ && now - asked_python_ > kAsk) {
        asked_python_ = now;
        held.unlock();
        const bool enough = interrupted_();
        held.lock();
        if (enough) fail(0, ECANCELED, nullptr, 0);
        return;  // what is waited for may have come, and been announced, while the lock was free
    }
    came_.wait_for(held, kAsk);  // the first thread looks at Ctrl-C
    const auto slept = std::chrono::steady_clock::now() - now;
    stats_.waited_ns += uint64_t(std::chrono::nanoseconds(slept).count());
}

// ---- reads

void DenseStream::run() {
    ReadDone done[64];
    for (std::unique_lock<std::mutex> held(lock_); !stop_;) {
        submit(held);
        if (under_way_) {
            held.unlock();
            const size_t n = reader_.take(done, 64, true);
            held.lock();
            for (size_t i = 0; i < n; i++) ended(done[i].tag, done[i].error);
        } else {
            room_.wait(held);
        }
    }
}

// Begins as many reads as there may be, without the lock: each may take the system 30 microseconds.
void DenseStream::submit(std::unique_lock<std::mutex>& held) {
    while (failed_at_ == kNone) {
        ReadRequest requests[16];
        size_t n = 0;
        while (n < 16 && under_way_ < most_ && (part_ || (asked_ - done_ < slots_.size() && !free_.empty())))
            requests[n++] = request();
        if (!n) return;
        held.unlock();
        const bool begun = reader_.submit(requests, n);
        held.lock();
        if (!begun)
            for (size_t i = 0; i < n; i++) ended(requests[i].tag, EBUSY);
    }
}

ReadRequest DenseStream::request() {
    const uint64_t align = reader_.alignment();
    const Record& r = record(asked_);
    const Layer& layer = layers_[r.layer];
    const RowRun& run = layer.parts[r.phase][part_].run;
    if (!part_) {
        slot(asked_) = {free_.back(), layer.parts[r.phase].size(), false};
        buffers_[free_.back()] = {turn_, asked_, 0};
        free_.pop_back();
    }
    const unsigned buffer = slot(asked_).buffer;
    const uint64_t at = run.at + uint64_t(r.first) * run.row_bytes(), begin = at / align * align;
    const size_t bytes = r.n * run.row_bytes();
    const uint64_t end = whole(at + bytes, align);
    uint8_t* const to = reader_.buffer(buffer) + part_at(layer, Phase(r.phase), part_);
    const uint64_t tag = buffer * kParts + part_;
    buffers_[buffer].under_way++, under_way_++;
    stats_.reads++, stats_.bytes += end - begin;
    if (++part_ == layer.parts[r.phase].size()) part_ = 0, asked_++;
    return {begin, uint32_t(end - begin), to, tag, run.file, uint32_t(at + bytes - begin)};
}

void DenseStream::ended(uint64_t tag, int error) {
    const unsigned buffer = unsigned(tag / kParts);
    Buffer& b = buffers_[buffer];
    under_way_--, b.under_way--;
    if (b.turn != turn_) {
        if (!b.under_way) free_.push_back(buffer);
    } else if (error) {
        fail(b.number, error, &record(b.number), size_t(tag % kParts));
    } else if (!--slot(b.number).left && has_come(next_)) {
        came_.notify_one();  // who takes this record wakes the next one, if another has come before it
    }
}

void DenseStream::fail(uint64_t number, int error, const Record* r, size_t part) {
    if (number < failed_at_) {
        std::string where;
        bool changed = false;
        if (r) {
            const StreamedMatrix& m = layers_[r->layer].parts[r->phase][part];
            where = files_.files[m.run.file].path + ": " + m.name;
            changed = files_.changed(m.run.file);
        }
        error_ = {error == INT32_MAX ? 0 : error, where, -1, changed};
        failed_at_ = number;
    }
    came_.notify_all();
}

}  // namespace tc
