#include "fetches.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "round.h"
#include "store.h"

namespace tc {

DiskRows::DiskRows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot,
                   size_t quota, const uint32_t* crc, const float* likely, std::string name, int disabled)
    : RowCache(pool, neurons, hot, quota, likely),
      reader(reader),
      file_offset(file_offset),
      crc(crc, crc + neurons),
      name_(std::move(name)),
      disabled_(disabled) {}

DiskRows::~DiskRows() {
    reader.early.reset();  // they may be of these
}

void DiskRows::load(Interrupted interrupted) {
    Fetches fetches(reader, {this}, 1, interrupted);
    const std::vector<Wanted> wanted = initial();
    fetches.want(*this, wanted.data(), wanted.size(), 0);
    fetches.submit();  // nobody else is here: no lock
    using clock = std::chrono::steady_clock;
    for (auto asked = clock::now(); fetches.busy() && !fetches.gave_up;) {
        fetches.take(true);
        if (fetches.failed) fetches.drop_queue();
        if (!interrupted || clock::now() - asked < kAsk) continue;
        asked = clock::now();
        if (interrupted()) fetches.give_up();
    }
    if (fetches.failed) throw fetches.error;
}

// ---- reads on their way
Fetches::Fetches(Reader& reader, std::vector<DiskRows*> rows, size_t owners, Interrupted interrupted)
    : left(owners, 0),
      bad(owners, 0),
      awaited(owners, 0),
      rows(std::move(rows)),
      reader_(reader),
      reads_(reader.depth()) {
    if (reader.forked()) throw std::runtime_error(kForked);
    reader.early.reset();
    for (unsigned i = reader.depth(); i-- > 0;) buffers_.push_back(i);
    for (ReadDone done[64]; reader.left_behind;) {
        reader.left_behind -= reader.take(done, 64, true);
        if (reader.left_behind && interrupted && interrupted()) throw DiskError(ECANCELED, "", -1);
    }
}

Fetches::~Fetches() {
    reader_.left_behind += under_way_;
    for (DiskRows* r : rows) r->settle();
}

void Fetches::want(DiskRows& rows, const Wanted* wanted, size_t n, size_t owner, bool urgent) {
    made_.clear();
    const uint64_t stride = rows.pool().stride, align = reader_.alignment();
    const bool halves = rows.disabled(DiskRows::NO_BUNDLE);
    auto offset = [&](const Wanted& w) { return rows.file_offset + uint64_t(w.neuron) * stride; };
    for (size_t i = 0, next; i < n; i = next) {
        const uint64_t begin = offset(wanted[i]) / align * align;
        for (next = i + 1; next < n && !halves; next++) {
            const uint64_t end = whole(offset(wanted[next]) + stride, align);
            if (offset(wanted[next]) - offset(wanted[next - 1]) - stride > kMostGapBytes ||
                end - begin > reader_.buffer_bytes())
                break;
        }
        made_.push_back({&rows, wanted + i, next - i, owner, begin, halves ? 2u : 1u, 0});
    }
    left[owner] += made_.size();
    queue_.insert(urgent ? queue_.begin() : queue_.end(), made_.begin(), made_.end());
}

// What to ask the reader for: the bytes of a read, or of each half of a record, in whole units of its
// alignment.
size_t Fetches::requests_of(Read& r, unsigned buffer, ReadRequest* out) const {
    const uint64_t stride = r.rows->pool().stride, align = reader_.alignment();
    const uint64_t first = r.rows->file_offset + uint64_t(r.wanted[0].neuron) * stride;
    const uint64_t end = r.rows->file_offset + uint64_t(r.wanted[r.n - 1].neuron + 1) * stride;
    const unsigned parts = r.requests;
    uint64_t from = r.begin;  // where the part before ended: no byte is read twice
    r.requests = 0;
    for (unsigned i = 0; i < parts; i++) {
        const uint64_t to = whole(first + (end - first) * (i + 1) / parts, align);
        if (to > from)
            out[r.requests++] = {from, uint32_t(to - from), reader_.buffer(buffer) + (from - r.begin),
                                 buffer};
        from = std::max(from, to);
    }
    return r.requests;
}

void Fetches::submit() {
    ReadRequest requests[64];
    while (!failed) {
        size_t n = 0, reads = 0;
        for (; reads < queue_.size() && reads < buffers_.size() && n + 2 <= 64; reads++) {
            Read& r = queue_[reads];
            if (under_way_ + n + r.requests > reader_.depth()) break;
            n += requests_of(r, buffers_[buffers_.size() - 1 - reads], requests + n);
        }
        if (!n || !reader_.submit(requests, n)) return;
        under_way_ += n;
        for (; reads--; queue_.pop_front(), buffers_.pop_back()) {
            Read& r = reads_[buffers_.back()] = queue_.front();
            r.rows->stats.reads += r.requests;
        }
        for (size_t i = 0; i < n; i++) reads_[requests[i].tag].rows->stats.bytes += requests[i].bytes;
    }
}

// Checks and copies what a read brought. The records are nobody else's yet: no lock.
void Fetches::finish(Read& r, const uint8_t* buffer) {
    const DiskRows& rows = *r.rows;
    const size_t stride = rows.pool().stride;
    for (size_t i = 0; i < r.n; i++) {
        const Wanted& w = r.wanted[i];
        const uint8_t* record = buffer + (rows.file_offset + uint64_t(w.neuron) * stride - r.begin);
        if (crc32c(record, stride, 0) != rows.crc[size_t(w.neuron)]) {
            r.error = INT32_MAX;  // no errno
            r.wanted += i;        // which one it is
            return;
        }
        memcpy(rows.pool().at(w.slot), record, stride);
    }
}

void Fetches::take(bool wait) {
    ReadDone done[64];
    const size_t n = reader_.take(done, 64, wait);
    for (size_t i = 0; i < n; i++) {
        const unsigned buffer = unsigned(done[i].tag);
        Read& r = reads_[buffer];
        {
            std::lock_guard<std::mutex> held(lock);
            under_way_--;
            if (done[i].error) r.error = done[i].error;
            if (--r.requests) continue;
        }
        if (!r.error) finish(r, reader_.buffer(buffer));
        std::lock_guard<std::mutex> held(lock);
        if (r.error) bad[r.owner] = 1;
        if (r.error && !failed) {
            failed = true;
            error = {r.error == INT32_MAX ? 0 : r.error, r.rows->name(), r.wanted[0].neuron,
                     reader_.changed()};
        }
        for (size_t w = 0; !r.error && w < r.n; w++) r.rows->arrived(r.wanted[w].entry);
        if (!gave_up && !--left[r.owner] && awaited[r.owner]) ready.push_back(r.owner);
        buffers_.push_back(buffer);
    }
    std::lock_guard<std::mutex> held(lock);
    if (n && !failed) submit();
    if (n) changed.notify_all();
}

void Fetches::take_in_passing() {
    std::unique_lock<std::mutex> held(lock, std::try_to_lock);
    if (!held || taking || !busy()) return;
    taking = true;
    held.unlock();
    take(false);
    held.lock();
    taking = false;
    changed.notify_all();
}

void Fetches::give_up() {
    if (!failed) error = {ECANCELED, "", -1};
    failed = gave_up = true;
    drop_queue();
    for (size_t owner = 0; owner < left.size(); owner++)
        if (left[owner]) left[owner] = 0, bad[owner] = 1;
}

bool Fetches::begin_again() {
    if (!failed || gave_up || early.empty()) return false;
    early.clear();
    for (DiskRows* r : rows) r->settle();
    std::fill(bad.begin(), bad.end(), uint8_t(0)), std::fill(awaited.begin(), awaited.end(), uint8_t(0));
    ready.clear();
    failed = false;
    return true;
}

void Fetches::drop_queue() {
    for (const Read& r : queue_) left[r.owner]--, bad[r.owner] = 1;
    queue_.clear();
}

}  // namespace tc
