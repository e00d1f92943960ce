#include "slots.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

#include "store.h"

namespace tc {

static constexpr float kPrior = 16, kHalfLife = 64;
// Two reads are one where at most this many bytes lie between: an operation costs as much as 40 KiB (45,000 a
// second, 2.2 GB/s).
static constexpr uint64_t kGap = 32 << 10;

// ---- slots
SlotPool::SlotPool(uint8_t* data, size_t stride, size_t slots)
    : data(data), stride(stride), slots(slots), lent(slots - kStreamSlots) {
    for (size_t i = lent; i < slots; i++) passing.push_back({int32_t(i), -1, false, false});
    for (size_t i = passing.size(); i-- > 0;) idle.push_back(int32_t(i));
}

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
DiskRows::DiskRows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot,
                   size_t quota, const uint32_t* crc, const float* likely, std::string name, int disabled)
    : reader(reader),
      file_offset(file_offset),
      neurons(neurons),
      hot(hot),
      first_slot(pool.take(hot)),
      crc(crc, crc + neurons),
      pool_(pool),
      name_(std::move(name)),
      disabled_(disabled),
      prior_(neurons - hot),
      uses_(neurons - hot),
      where_(neurons - hot, -1) {
    if (first_slot < 0) throw std::length_error("the pool has too few slots");
    for (size_t i = hot; likely && i < neurons; i++) prior_[i - hot] = kPrior * likely[i];
    if (quota > pool_.free()) {
        for (size_t i = 0; i < hot; i++) pool_.give_back(first_slot + int32_t(i));
        throw std::length_error("the pool has too few slots");
    }
    cold_.reserve(quota);
    while (cold_.size() < quota) cold_.push_back({pool_.take_one(), -1, false, false});
}

DiskRows::~DiskRows() {
    reader.early.reset();  // they may be of these
    for (const Entry& e : cold_) pool_.give_back(e.slot);
    for (size_t i = 0; i < hot; i++) pool_.give_back(first_slot + int32_t(i));
}

// Debug builds make sure that nobody reads what is gone: a NaN in every format.
void DiskRows::clear(Entry& e) {
    if (e.neuron >= 0) where_[size_t(e.neuron) - hot] = -1;
    e.neuron = -1, e.ready = false;
#ifndef NDEBUG
    memset(pool_.at(e.slot), 0xff, pool_.stride);
#endif
}

void DiskRows::fill(int32_t at, int32_t neuron) {
    Entry& e = entry_at(at);
    e.neuron = neuron, e.owner = this;
    where_[size_t(neuron) - hot] = at;
}

// The eighth of the entries with the lowest scores: selected once for as many evictions.
void DiskRows::list_worst() {
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

int32_t DiskRows::worst() {
    for (int turn = 0; turn < 2; turn++) {
        for (; !worst_.empty(); worst_.pop_back()) {
            const Entry& e = cold_[size_t(worst_.back())];
            if (!e.pinned && (e.neuron < 0 || turn || score(e.neuron) <= worst_below_)) return worst_.back();
        }
        if (!turn) list_worst();
    }
    return -1;
}

bool DiskRows::deserves(int32_t neuron, int32_t at) const {
    return at >= 0 && (cold_[size_t(at)].neuron < 0 || score(neuron) > score(cold_[size_t(at)].neuron));
}

int32_t DiskRows::place_for(int32_t neuron) {
    const int32_t at = worst();
    if (!deserves(neuron, at) && !pool_.idle.empty()) {
        const int32_t passing = pool_.idle.back();
        return pool_.idle.pop_back(), int32_t(cold_.size()) + passing;
    }
    if (at < 0) return kHot;
    worst_.pop_back();
    clear(cold_[size_t(at)]);
    return at;
}

float DiskRows::aged(size_t steps) { return exp2f(-float(steps) / kHalfLife); }

void DiskRows::begin(size_t steps) {
    unit_ /= aged(steps);
    if (unit_ > 1e18f) {
        for (float& u : uses_) u /= unit_;
        unit_ = 1, worst_.clear();
    }
    if (!disabled(NO_CACHE)) return;
    for (Entry& e : cold_) clear(e);
    worst_.clear();
}

size_t DiskRows::pin(const int32_t* ids, size_t n, int32_t* slots, int32_t* entries, Wanted* wanted,
                     size_t* n_wanted) {
    size_t reads = 0, i = 0;
    for (; i < n; i++) {
        const size_t id = size_t(ids[i]);
        if (id < hot) {
            slots[i] = first_slot + ids[i], entries[i] = kHot;
            continue;
        }
        const float before = uses_[id - hot];
        uses_[id - hot] += unit_;
        int32_t at = where_[id - hot];
        const bool absent = at < 0;
        if (absent && (at = place_for(ids[i])) == kHot) {
            uses_[id - hot] = before;
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

void DiskRows::unpin(const int32_t* entries, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (entries[i] < 0) continue;
        Entry& e = entry_at(entries[i]);
        e.pinned = false;
        if (size_t(entries[i]) >= cold_.size()) release(e);
    }
}

void DiskRows::release(Entry& passing) {
    clear(passing);
    passing.pinned = passing.early = false, passing.owner = nullptr;
    pool_.idle.push_back(int32_t(&passing - pool_.passing.data()));
}

size_t DiskRows::expect(const int32_t* ids, size_t n, Wanted* wanted) {
    size_t reads = 0;
    for (size_t i = 0; i < n && pool_.idle.size() > kStreamSlots / 2; i++) {
        if (hold(ids[i])) continue;
        const size_t id = size_t(ids[i]);
        const float before = uses_[id - hot];
        uses_[id - hot] += unit_;  // as if it were used: so `pin` would judge
        const int32_t at = place_for(ids[i]);
        uses_[id - hot] = before;
        if (at == kHot) break;
        fill(at, ids[i]);
        Entry& e = entry_at(at);
        e.pinned = e.early = true;
        wanted[reads++] = {ids[i], e.slot, at};
    }
    stats.early += reads;
    return reads;
}

void DiskRows::adapt(float unit) {
    step_ = unit < 1e30f ? 0.05f * unit : 0, late_ = vain_ = 0;
}  // damaged gates have none

bool DiskRows::hold(int32_t id) {
    if (size_t(id) < hot) return true;
    const int32_t at = where_[size_t(id) - hot];
    if (at >= 0) entry_at(at).pinned = true;
    return at >= 0;
}

int32_t DiskRows::slot_of(int32_t id) const {
    if (size_t(id) < hot) return first_slot + id;
    const int32_t at = where_[size_t(id) - hot];
    return at >= 0 && entry_at(at).ready ? entry_at(at).slot : -1;
}

size_t DiskRows::stream(size_t begin, size_t end, int32_t free, int32_t* slots, int32_t* entries,
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

size_t DiskRows::stream(const int32_t* ids, size_t n, int32_t free, int32_t* slots, Wanted* wanted) {
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

void DiskRows::settle() {
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

void DiskRows::load(Interrupted interrupted) {
    Fetches fetches(reader, {this}, 1, interrupted);
    std::vector<Wanted> wanted;
    for (size_t i = 0; i < hot; i++) wanted.push_back({int32_t(i), first_slot + int32_t(i), kHot});
    for (size_t i = 0; i < cold_.size(); i++) {
        fill(int32_t(i), int32_t(hot + i));
        wanted.push_back({int32_t(hot + i), cold_[i].slot, int32_t(i)});
    }
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
            const uint64_t end = (offset(wanted[next]) + stride + align - 1) / align * align;
            if (offset(wanted[next]) - offset(wanted[next - 1]) - stride > kGap ||
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
        const uint64_t to = (first + (end - first) * (i + 1) / parts + align - 1) / align * align;
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

void Fetches::drop_queue() {
    for (const Read& r : queue_) left[r.owner]--, bad[r.owner] = 1;
    queue_.clear();
}

}  // namespace tc
