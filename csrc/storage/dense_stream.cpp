#include "dense_stream.h"

#include <errno.h>

#include <algorithm>
#include <stdexcept>

#include "slots.h"
#include "store.h"

namespace tc {

static size_t at_line(size_t bytes) { return (bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment; }

// Where the rows of a matrix begin in a slot.
static size_t part_at(const DenseStream::Layer& layer, DenseStream::Phase phase, size_t part) {
    return part ? at_line(layer.rows[phase] * layer.parts[phase][0].run.row_bytes()) : 0;
}

size_t slot_bytes(const DenseStream::Layer& layer, DenseStream::Phase phase) {
    const std::vector<StreamedMatrix>& parts = layer.parts[phase];
    if (parts[0].held == parts[0].run.rows) return 0;
    const size_t last = layer.rows[phase] * parts.back().run.row_bytes();
    return part_at(layer, phase, parts.size() - 1) + at_line(last);
}

// Condition variables outlive a forked child's copy: to destroy one would wait for the parent's threads.
DenseStream::DenseStream(ExpertFiles& files, uint8_t* slots, size_t stride, size_t n,
                         std::vector<Layer> layers, int threads)
    : files_(files),
      reader_(files.reader),
      data_(slots),
      stride_(stride),
      layers_(std::move(layers)),
      threads_(threads),
      came_(*new std::condition_variable),
      room_(*new std::condition_variable),
      most_(std::max(1u, files.reader.depth() / 2)),
      reads_(files.reader.depth()) {
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
            for (const StreamedMatrix& part : layers_[i].parts[p])
                if (part.run.group > 1 && !part.run.planar)
                    scratch_bytes_ = std::max(scratch_bytes_, part.run.group * part.run.row_bytes());
        }
        held_.push_back(held);
    }
    first_.push_back(records_.size());
    slots_.resize(std::min(n, records_.size()));  // no record is read twice at a time
    scratch_.resize(scratch_bytes_ * (size_t(threads) + 1));
    for (unsigned i = reader_.depth(); i-- > 0;) buffers_.push_back(i);
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
    if (failed_ || done_ % records_.size() != first[0] % records_.size()) seek(held, first[0]);
    for (const Phase p : {GATE_UP, DOWN}) end_[p] = next_ + (first[p + 1] - first[0]);
    interrupted_ = interrupted;
    stats_.needed += held_[layer] + (first[N_PHASES] - first[0]);
    stats_.missed += first[N_PHASES] - first[0];
}

// A read beyond the call's own may fail: the call that needs it reads it again.
void DenseStream::end() {
    std::lock_guard<std::mutex> held(lock_);
    if (failed_ && (done_ != end_[DOWN] || error_.error == ECANCELED)) throw error_;
}

// Reads begin anew with this record. Those under way end in their buffers; whoever puts one away has a slot.
void DenseStream::seek(std::unique_lock<std::mutex>& held, size_t record) {
    turn_++;
    came_.wait(held, [&] { return !putting_; });
    done_ = next_ = asked_ = record;
    part_ = 0;
    std::fill(slots_.begin(), slots_.end(), Slot{});
    failed_ = false;
    room_.notify_all();
}

bool DenseStream::take(Phase phase, Rows* rows, int thread, bool wait) {
    std::unique_lock<std::mutex> held(lock_);
    // After a failure the next record may be one of gate and up, which has come too late for its own phase.
    if (phase == DOWN && next_ < end_[GATE_UP]) return false;
    while (next_ < end_[phase]) {
        if (has_come(next_)) {
            const Record& r = records_[next_ % records_.size()];
            const size_t slot = next_ % slots_.size();
            const uint8_t* const at = data_ + slot * stride_;
            *rows = {r.first, r.n, slot, {at, at + part_at(layers_[r.layer], phase, 1)}};
            if (++next_ == end_[phase])
                came_.notify_all();  // nobody gets more
            else if (has_come(next_))
                came_.notify_one();
            return true;
        }
        if (!wait || failed_) return false;
        this->wait(held, thread);
    }
    return false;
}

void DenseStream::done(const Rows& rows) {
    std::lock_guard<std::mutex> held(lock_);
    slots_[rows.slot].done = true;
    for (size_t slot; done_ < next_ && slots_[slot = done_ % slots_.size()].done; done_++)
        slots_[slot].done = false;
    room_.notify_one();
}

// Puts away one read, or sleeps until something has changed.
void DenseStream::wait(std::unique_lock<std::mutex>& held, int thread) {
    if (!arrived_.empty()) return put_away(held, thread);
    const auto now = std::chrono::steady_clock::now();
    if (!thread && interrupted_ && now - asked_python_ > kAsk) {
        asked_python_ = now;
        held.unlock();
        const bool enough = interrupted_();
        held.lock();
        if (enough) fail(ECANCELED, nullptr);
        return;  // what is waited for may have come, and been announced, while the lock was free
    }
    came_.wait_for(held, kAsk);  // the first thread looks at Ctrl-C
    const auto slept = std::chrono::steady_clock::now() - now;
    stats_.waited_ns += uint64_t(std::chrono::nanoseconds(slept).count());
}

// ---- reads

void DenseStream::run() {
    ReadDone ended[64];
    for (std::unique_lock<std::mutex> held(lock_); !stop_;) {
        submit(held);
        if (!arrived_.empty()) {
            put_away(held, threads_);
        } else if (under_way_) {
            held.unlock();
            const size_t n = reader_.take(ended, 64, true);
            held.lock();
            accept(ended, n);
        } else {
            room_.wait(held);
        }
    }
}

// Begins as many reads as there may be, without the lock: each may take the system 30 microseconds.
void DenseStream::submit(std::unique_lock<std::mutex>& held) {
    while (!failed_) {
        ReadRequest requests[16];
        size_t n = 0;
        for (; n < 16 && under_way_ + n < most_ && !buffers_.empty() && asked_ - done_ < slots_.size(); n++)
            requests[n] = request();
        if (!n) return;
        stats_.reads += n, under_way_ += n;
        held.unlock();
        const bool begun = reader_.submit(requests, n);
        held.lock();
        if (begun) continue;
        under_way_ -= n;
        for (size_t i = 0; i < n; i++) buffers_.push_back(unsigned(requests[i].tag));
        fail(EBUSY, &reads_[requests[0].tag]);
    }
}

ReadRequest DenseStream::request() {
    const uint64_t align = reader_.alignment();
    const size_t number = size_t(asked_ % records_.size()), slot = size_t(asked_ % slots_.size());
    const Record& r = records_[number];
    const std::vector<StreamedMatrix>& parts = layers_[r.layer].parts[r.phase];
    const RowRun& run = parts[part_].run;
    if (!part_) slots_[slot] = {parts.size(), false};
    const uint64_t at = run.at + uint64_t(r.first) * run.row_bytes(), begin = at / align * align;
    const size_t bytes = r.n * run.row_bytes();
    const uint64_t end = (at + bytes + align - 1) / align * align;
    const unsigned buffer = buffers_.back();
    buffers_.pop_back();
    reads_[buffer] = {number, part_, slot, turn_, at, begin, bytes};
    stats_.bytes += end - begin;
    if (++part_ == parts.size()) part_ = 0, asked_++;
    return {begin,    uint32_t(end - begin),       reader_.buffer(buffer), buffer,
            run.file, uint32_t(at + bytes - begin)};
}

void DenseStream::accept(const ReadDone* ended, size_t n) {
    under_way_ -= n;
    for (size_t i = 0; i < n; i++) {
        const unsigned buffer = unsigned(ended[i].tag);
        const Read& r = reads_[buffer];
        if (!ended[i].error && r.turn == turn_) {
            arrived_.push_back(buffer);
            continue;
        }
        buffers_.push_back(buffer);
        if (r.turn == turn_) fail(ended[i].error, &r);
    }
    if (arrived_.size() > 1) came_.notify_one();
}

// Checks what a read brought, and puts its rows into their slot. Nobody else knows of that yet: no lock.
// Where bytes are read for the first time, the file must still be the one whose header was read: nothing else
// vouches for it.
int DenseStream::put(const Read& r, const uint8_t* buffer, int thread) {
    Record& record = records_[r.record];
    const RowRun& run = matrix(record, r.part).run;
    const uint8_t* const from = buffer + (r.at - r.begin);
    const uint32_t crc = crc32c(from, r.bytes, 0);
    if (record.known[r.part] && crc != record.crc[r.part]) return INT32_MAX;  // no errno
    if (!record.known[r.part] && files_.changed(run.file)) return kChanged;
    record.crc[r.part] = crc, record.known[r.part] = 1;
    RowRun here = run;
    here.to = part_at(layers_[record.layer], Phase(record.phase), r.part);
    uint8_t* const scratch = scratch_.data() + size_t(thread) * scratch_bytes_;
    return put_rows(here, data_ + r.slot * stride_, 0, record.n, from, scratch) == record.n ? 0 : kNotFinite;
}

void DenseStream::put_away(std::unique_lock<std::mutex>& held, int thread) {
    const unsigned buffer = arrived_.front();
    arrived_.pop_front();
    const Read r = reads_[buffer];
    if (r.turn != turn_) return buffers_.push_back(buffer);
    putting_++;
    held.unlock();
    const int error = put(r, reader_.buffer(buffer), thread);
    held.lock();
    putting_--;
    buffers_.push_back(buffer);
    if (r.turn == turn_ && error) fail(error, &r);
    if (r.turn != turn_)
        came_.notify_all();  // whoever seeks waits for it
    else if (!error && !--slots_[r.slot].left)
        came_.notify_one();  // who takes this record wakes the next one, if another has come before it
    room_.notify_one();
}

void DenseStream::fail(int error, const Read* r) {
    if (!failed_) {
        std::string where;
        bool changed = false;
        if (r) {
            const Record& record = records_[r->record];
            const StreamedMatrix& m = matrix(record, r->part);
            where = files_.files[m.run.file].path + ": " + m.name;
            changed = files_.changed(m.run.file);
        }
        error_ = {error == INT32_MAX ? 0 : error, where, -1, changed};
        failed_ = true;
    }
    came_.notify_all();
}

}  // namespace tc
