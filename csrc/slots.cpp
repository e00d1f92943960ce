#include "slots.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "store.h"

namespace tc {

static constexpr uint8_t kMostUses = 3;
// Two reads are one where at most this many bytes lie between: reading them takes as long as another operation.
static constexpr uint64_t kGap = 16 << 10;

// ---- slots
int32_t SlotPool::take(size_t n) {
    if (n > lent - next_) return -1;
    next_ += n;
    return int32_t(next_ - n);
}

int32_t SlotPool::take_one() {
    if (returned_.empty()) return take(1);
    const int32_t slot = returned_.back();
    returned_.pop_back();
    return slot;
}

// ---- one layer's records
DiskRows::DiskRows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot, size_t quota,
                   const uint32_t* crc, std::string name, int disabled)
    : reader(reader), file_offset(file_offset), neurons(neurons), hot(hot), first_slot(pool.take(hot)),
      crc(crc, crc + neurons), pool_(pool), name_(std::move(name)), disabled_(disabled), where_(neurons - hot, -1) {
    if (first_slot < 0) throw std::length_error("the pool has too few slots");
    if (set_quota(quota)) return;
    for (size_t i = 0; i < hot; i++) pool_.give_back(first_slot + int32_t(i));
    throw std::length_error("the pool has too few slots");
}

DiskRows::~DiskRows() {
    for (const Entry& e : cold_) pool_.give_back(e.slot);
    for (size_t i = 0; i < hot; i++) pool_.give_back(first_slot + int32_t(i));
}

bool DiskRows::set_quota(size_t quota) {
    if (quota > cold_.size() && quota - cold_.size() > pool_.free()) return false;
    for (; cold_.size() > quota; cold_.pop_back()) {
        clear(cold_.back());
        pool_.give_back(cold_.back().slot);
    }
    cold_.reserve(quota);
    while (cold_.size() < quota) cold_.push_back({pool_.take_one(), -1, 0, false, false});
    hand_ = 0;
    return true;
}

// Debug builds make sure that nobody reads what is gone: a NaN in every format.
void DiskRows::clear(Entry& e) {
    if (e.neuron >= 0) where_[size_t(e.neuron) - hot] = -1;
    e.neuron = -1, e.uses = 0, e.ready = false;
#ifndef NDEBUG
    memset(pool_.at(e.slot), 0xff, pool_.stride);
#endif
}

int32_t DiskRows::evict() {
    if (pinned_ == cold_.size()) return -1;
    for (;; hand_ = (hand_ + 1) % cold_.size()) {
        Entry& e = cold_[hand_];
        if (e.pinned) continue;
        if (e.neuron >= 0 && e.uses) e.uses--;
        else break;
    }
    const size_t found = hand_;
    hand_ = (hand_ + 1) % cold_.size();
    clear(cold_[found]);
    return int32_t(found);
}

size_t DiskRows::pin(const int32_t* ids, size_t n, int32_t* slots, int32_t* entries, Wanted* wanted, size_t* n_wanted) {
    size_t misses = 0, i = 0;
    for (; i < n; i++) {
        const size_t id = size_t(ids[i]);
        if (id < hot) {
            slots[i] = first_slot + ids[i], entries[i] = -1;
            continue;
        }
        int32_t at = where_[id - hot];
        if (at < 0) {
            if ((at = evict()) < 0) break;
            cold_[size_t(at)].neuron = ids[i];
            where_[id - hot] = at;
            wanted[misses++] = {ids[i], cold_[size_t(at)].slot, at};
        } else {
            cold_[size_t(at)].uses = std::min<uint8_t>(kMostUses, cold_[size_t(at)].uses + 1);
        }
        Entry& e = cold_[size_t(at)];
        e.pinned = true, pinned_++;
        slots[i] = e.slot, entries[i] = at;
    }
    stats.needed += i, stats.missed += misses;
    *n_wanted = misses;
    return i;
}

void DiskRows::unpin(const int32_t* entries, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (entries[i] < 0) continue;
        cold_[size_t(entries[i])].pinned = false;
        pinned_--;
    }
}

size_t DiskRows::stream(size_t begin, size_t end, int32_t free, int32_t* slots, int32_t* entries, Wanted* wanted) {
    size_t misses = 0;
    for (size_t id = begin; id < end; id++, slots++, entries++) {
        const int32_t at = id < hot ? -1 : where_[id - hot];
        *entries = at;
        if (id < hot) {
            *slots = first_slot + int32_t(id);
        } else if (at < 0) {
            *slots = free++;
            wanted[misses++] = {int32_t(id), *slots, -1};
        } else {
            *slots = cold_[size_t(at)].slot;
            cold_[size_t(at)].pinned = true, pinned_++;
        }
    }
    return misses;
}

void DiskRows::settle() {
    pinned_ = 0;
    for (Entry& e : cold_) {
        e.pinned = false;
        if (e.neuron >= 0 && !e.ready) clear(e);
    }
}

void DiskRows::forget() {
    for (Entry& e : cold_) clear(e);
}

void DiskRows::load() {
    Fetches fetches(reader, 1);
    std::vector<Wanted> wanted(hot);
    for (size_t i = 0; i < hot; i++) wanted[i] = {int32_t(i), first_slot + int32_t(i), -1};
    {
        std::lock_guard<std::mutex> held(fetches.lock);
        fetches.want(*this, wanted.data(), hot, 0);
        fetches.submit();
    }
    while (fetches.busy()) {  // nobody else is here: no lock
        fetches.take(true);
        if (fetches.failed) fetches.drop_queue();
    }
    if (fetches.failed) throw fetches.error;
}

// ---- reads on their way
Fetches::Fetches(Reader& reader, size_t owners) : left(owners, 0), bad(owners, 0), reader_(reader), reads_(reader.depth()) {
    for (unsigned i = reader.depth(); i-- > 0;) buffers_.push_back(i);
}

void Fetches::want(DiskRows& rows, const Wanted* wanted, size_t n, size_t owner) {
    const uint64_t stride = rows.pool().stride, align = reader_.alignment();
    const bool halves = rows.disabled(DiskRows::NO_BUNDLE);
    auto offset = [&](const Wanted& w) { return rows.file_offset + uint64_t(w.neuron) * stride; };
    for (size_t i = 0, next; i < n; i = next) {
        const uint64_t begin = offset(wanted[i]) / align * align;
        for (next = i + 1; next < n && !halves; next++) {
            const uint64_t end = (offset(wanted[next]) + stride + align - 1) / align * align;
            if (offset(wanted[next]) - offset(wanted[next - 1]) - stride > kGap || end - begin > reader_.buffer_bytes()) break;
        }
        queue_.push_back({&rows, wanted + i, next - i, owner, begin, halves ? 2u : 1u, 0});
        left[owner]++;
    }
}

// What to ask the reader for: the bytes of a read, or of each half of a record, in whole units of its alignment.
size_t Fetches::requests_of(const Read& r, unsigned buffer, ReadRequest* out) const {
    const uint64_t stride = r.rows->pool().stride, align = reader_.alignment();
    const uint64_t first = r.rows->file_offset + uint64_t(r.wanted[0].neuron) * stride;
    const uint64_t end = r.rows->file_offset + uint64_t(r.wanted[r.n - 1].neuron + 1) * stride;
    for (unsigned i = 0; i < r.requests; i++) {
        const uint64_t from = (first + (end - first) * i / r.requests) / align * align;
        const uint64_t to = (first + (end - first) * (i + 1) / r.requests + align - 1) / align * align;
        out[i] = {from, uint32_t(to - from), reader_.buffer(buffer) + (from - r.begin), buffer};
    }
    return r.requests;
}

void Fetches::submit() {
    ReadRequest requests[64];
    while (!failed) {
        size_t n = 0, reads = 0;
        for (; reads < queue_.size() && reads < buffers_.size() && n + 2 <= 64; reads++) {
            const Read& r = queue_[reads];
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
            error = {r.error == INT32_MAX ? 0 : r.error, r.rows->name(), r.wanted[0].neuron};
        }
        for (size_t w = 0; !r.error && w < r.n; w++)
            if (r.wanted[w].entry >= 0) r.rows->arrived(r.wanted[w].entry);
        if (!--left[r.owner]) ready.push_back(r.owner);
        buffers_.push_back(buffer);
    }
    std::lock_guard<std::mutex> held(lock);
    if (n && !failed) submit();
    if (n) changed.notify_all();
}

void Fetches::drop_queue() {
    for (const Read& r : queue_) left[r.owner]--, bad[r.owner] = 1;
    queue_.clear();
}

}  // namespace tc
