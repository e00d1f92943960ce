#include "disk_experts.h"

#include <errno.h>

#include <algorithm>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "round.h"
#include "store.h"

namespace tc {

static std::vector<std::string> paths_of(const std::vector<SourceFile>& files) {
    std::vector<std::string> paths;
    for (const SourceFile& f : files) paths.push_back(f.path);
    return paths;
}

ExpertFiles::ExpertFiles(std::vector<SourceFile> given, unsigned depth, size_t piece_bytes, Method method,
                         bool direct)
    : files(std::move(given)), reader(paths_of(files), depth, piece_bytes, method, direct) {}

bool ExpertFiles::changed(unsigned file) const {
    return !(reader.state(file) == files[file].state) || reader.changed(file);
}

size_t ExpertFiles::early_under_way() const {
    return size_t(std::count_if(early.begin(), early.end(), [](const Early& e) { return !e.come; }));
}

// Nobody is told of an error: this may never be asked for.
bool ExpertFiles::early_came(const ReadDone& done) {
    const auto e =
        std::find_if(early.begin(), early.end(), [&](const Early& x) { return x.buffer == done.tag; });
    if (e == early.end()) return false;
    e->come = true;
    if (done.error) early.erase(e);
    return done.error != 0;
}

std::vector<ExpertFiles::Early>::iterator ExpertFiles::find_early(size_t layer, int32_t expert,
                                                                  size_t piece) {
    return std::find_if(early.begin(), early.end(), [&](const Early& e) {
        return e.layer == layer && e.expert == expert && e.piece == piece;
    });
}

std::vector<unsigned> ExpertFiles::free_buffers() const {
    std::vector<unsigned> buffers;
    for (unsigned i = reader.depth(); i-- > 0;)
        if (std::none_of(early.begin(), early.end(), [i](const Early& e) { return e.buffer == i; }))
            buffers.push_back(i);
    return buffers;
}

std::vector<unsigned> ExpertFiles::drop_early(size_t first) {
    const auto kept = [first](const Early& e) {
        return !e.come || (e.layer >= first && e.layer < first + kLayersAhead);
    };
    const auto dropped = std::partition(early.begin(), early.end(), kept);
    std::vector<unsigned> buffers;
    for (auto e = dropped; e != early.end(); e++) buffers.push_back(e->buffer);
    early.erase(dropped, early.end());
    return buffers;
}

void ExpertFiles::begin_step(uint64_t most_bytes, bool read_only) {
    most_bytes_ = most_bytes, paid_bytes_ = 0, read_only_ = read_only;
}

uint64_t ExpertFiles::may_read(size_t layer) const {
    const uint64_t so_far =
        most_bytes_ / layers * (layer + 1) + most_bytes_ % layers * (layer + 1) / layers;  // no overflow
    return so_far - std::min(so_far, paid_bytes_);
}

// ---- a layer
static std::vector<RowRun> flat(const std::vector<std::vector<RowRun>>& runs) {
    std::vector<RowRun> all;
    for (const std::vector<RowRun>& each : runs) all.insert(all.end(), each.begin(), each.end());
    return all;
}

DiskExperts::DiskExperts(SlotPool& pool, ExpertFiles& files, const std::vector<std::vector<RowRun>>& runs,
                         size_t quota, const float* likely, std::vector<std::string> given, int disabled)
    : RowCache(pool, runs.size(), 0, quota, likely),
      files(files),
      layer(files.layers++),
      names(std::move(given)),
      runs_(flat(runs)),
      disabled_(disabled) {
    // A read begins and ends at a multiple of the alignment.
    const size_t room = files.reader.buffer_bytes() - 2 * files.reader.alignment();
    for (size_t s = 0; s < names.size(); s++) {
        const RowRun& r = run(0, s);
        size_t some = std::max(size_t(1), room / r.row_bytes());
        if (some > r.group) some -= some % r.group;  // whole groups: each is written once
        for (size_t at = 0; at < r.rows; at += some) pieces.push_back({s, at, std::min(some, r.rows - at)});
        if (r.group > 1 && !r.planar) scratch_bytes = std::max(scratch_bytes, r.group * r.row_bytes());
    }
    crc.resize(neurons * pieces.size());
    known.resize(neurons * pieces.size());
}

void DiskExperts::load(int threads, Interrupted interrupted) {
    ExpertReads reads(*this, initial(), threads, interrupted);
    reads.begin_wave();
    auto work = [&](int thread) {
        for (ExpertReads::Work nothing; reads.take(nothing, thread);) {
        }
    };
    std::vector<std::thread> crew;
    try {
        for (int i = 1; i < threads; i++) crew.emplace_back(work, i);
    } catch (const std::system_error&) {
    }  // the system has no more threads for us
    work(0);
    for (std::thread& t : crew) t.join();
    reads.end_wave();
}

// A piece in whole blocks of the alignment.
ReadRequest DiskExperts::request(size_t expert, size_t piece, unsigned buffer) const {
    const uint64_t align = files.reader.alignment();
    const Piece& p = pieces[piece];
    const RowRun& r = run(expert, p.slab);
    const uint64_t at = r.at + p.first * r.row_bytes(), begin = at / align * align,
                   end = at + p.n * r.row_bytes();
    return {begin,
            uint32_t(whole(end, align) - begin),
            files.reader.buffer(buffer),
            buffer,
            r.file,
            uint32_t(end - begin)};
}

bool DiskExperts::guesses_well(unsigned ahead) {
    Guesses& g = guesses_[ahead];
    if (g.begun) g.right += (float(g.used) / float(g.begun) - g.right) / 4;
    g.begun = g.used = 0;
    return g.right >= 0.5f || ++g.not_asked % 16 == 0;
}

// Counts an expert with its first piece. What is there, or has been asked for, is passed over.
bool DiskExperts::next_early(Likely& likely, unsigned buffer, ReadRequest* read) {
    std::vector<ExpertFiles::Early>& early = files.early;
    size_t &i = likely.i, &piece = likely.piece;
    while (i < likely.experts.size()) {
        if (in_memory(likely.experts[i]))
            piece = 0, i++;
        else if (files.find_early(layer, likely.experts[i], piece) == early.end())
            break;
        else if (++piece == pieces.size())
            piece = 0, i++;
    }
    if (i == likely.experts.size() || early.size() >= files.most_early(likely.ahead)) return false;
    const int32_t expert = likely.experts[i];
    if (!piece) guesses_[likely.ahead].begun++, stats.early++;
    *read = request(size_t(expert), piece, buffer);
    early.push_back({layer, expert, piece, likely.ahead, buffer, false});
    stats.reads++, stats.bytes += read->bytes;
    if (++piece == pieces.size()) piece = 0, i++;
    return true;
}

size_t DiskExperts::pieces_missing(const std::vector<int32_t>& some) const {
    const auto missing = [this](int32_t expert) { return !in_memory(expert); };
    return size_t(std::count_if(some.begin(), some.end(), missing)) * pieces.size();
}

void DiskExperts::read_ahead(Likely likely) {
    Reader& reader = files.reader;
    if (reader.forked() || reader.left_behind) return;
    std::vector<ExpertFiles::Early>& early = files.early;
    ReadDone done[64];
    for (size_t n; files.early_under_way() && (n = reader.take(done, 64, false));)
        for (size_t i = 0; i < n; i++) files.early_came(done[i]);
    files.drop_early(layer);
    std::vector<ReadRequest> reads;
    const size_t before = early.size();
    for (std::vector<unsigned> buffers = files.free_buffers(); !buffers.empty(); buffers.pop_back()) {
        ReadRequest read;
        if (files.early_under_way() >= files.most_under_way()) break;
        if (!next_early(likely, buffers.back(), &read)) break;
        reads.push_back(read);
    }
    if (!reads.empty() && !reader.submit(reads.data(), reads.size()))
        early.erase(early.begin() + ptrdiff_t(before), early.end());
}

uint64_t DiskExperts::read_bytes(size_t expert) const {
    uint64_t bytes = 0;
    for (size_t p = 0; p < pieces.size(); p++) bytes += request(expert, p, 0).bytes;
    return bytes;
}

size_t DiskExperts::keep_affordable(std::vector<int32_t>& wanted) {
    read_only = files.read_only();  // the step before may have been
    const uint64_t most = files.may_read(layer);
    uint64_t cost = 0;
    std::vector<int32_t> kept, left_out;
    for (const int32_t e : wanted) {
        const uint64_t bytes = in_memory(e) ? 0 : read_bytes(size_t(e));
        // Once one is too much, no lighter one is read in its place, though it may be a few bytes smaller.
        const bool affordable = !bytes || (left_out.empty() && bytes <= most - cost);
        cost += affordable ? bytes : 0;
        (affordable ? kept : left_out).push_back(e);
    }
    const size_t n = kept.size();
    kept.insert(kept.end(), left_out.begin(), left_out.end());
    wanted = std::move(kept);
    files.pay(cost);
    stats.left_out += left_out.size();
    // It counts as used: an expert that is often left out takes a slot when it is read at last.
    for (const int32_t e : left_out) used(e, 1);
    return n;
}

// ---- a call
ExpertReads::ExpertReads(DiskExperts& experts, std::vector<Task> tasks, size_t steps, size_t most,
                         int threads, Interrupted interrupted)
    : rows_(experts),
      reader_(experts.files.reader),
      most_(most),
      threads_(size_t(threads)),
      interrupted_(interrupted),
      tasks_(std::move(tasks)),
      bytes_before_(experts.stats.bytes),
      many_(steps > 1),
      reads_(reader_.depth()) {
    take_buffers();
    rows_.read_only = rows_.files.read_only();
    rows_.begin(steps, rows_.disabled(DiskRows::NO_CACHE));
    // Of a few tokens all that is needed and in memory stays: no expert makes room for another of the same
    // call. A prompt, which may need all experts, leaves those that it used most, at the price of as many
    // reads; a bounded step has not paid for these.
    for (const Task& t : tasks_) {
        with_columns_ |= t.columns > 0;
        if (t.expert < 0) continue;
        rows_.used(t.expert, t.uses);
        if (!many_ || rows_.files.bounded()) rows_.hold(t.expert);
    }
}

ExpertReads::ExpertReads(DiskExperts& experts, const std::vector<Wanted>& wanted, int threads,
                         Interrupted interrupted)
    : rows_(experts),
      reader_(experts.files.reader),
      most_(0),
      threads_(size_t(threads)),
      interrupted_(interrupted),
      bytes_before_(experts.stats.bytes),
      loads_(true),
      reads_(reader_.depth()) {
    take_buffers();
    for (const Wanted& w : wanted) {
        tasks_.push_back({w.neuron, 0, 0, 1});
        tasks_.back().slot = w.slot, tasks_.back().entry = w.entry;
        request(tasks_.size() - 1);
    }
    pinned_ = tasks_.size();
}

// Reads in flight after a failure are awaited, but not where somebody wants the call to end. Those that
// nobody asked for are not awaited.
ExpertReads::~ExpertReads() {
    ExpertFiles& files = rows_.files;
    const bool given_up = failed() && error_.error == ECANCELED;
    for (ReadDone done[64]; under_way_ > files.early_under_way() && !given_up && !reader_.forked();) {
        const size_t n = reader_.take(done, 64, true);
        under_way_ -= n;
        for (size_t i = 0; i < n; i++) files.early_came(done[i]);
        if (under_way_ > files.early_under_way() && interrupted_ && interrupted_()) break;
    }
    files.drop_early(rows_.layer + 1);
    if (under_way_ > files.early_under_way()) {
        reader_.left_behind += under_way_;
        files.early.clear();
    }
    rows_.settle();
    if (many_) rows_.stats.streamed += rows_.stats.bytes - bytes_before_;
}

// An earlier call may have ended while its reads were under way: they fill the buffers. Reads ahead have
// theirs.
void ExpertReads::take_buffers() {
    if (reader_.forked()) throw std::runtime_error(kForked);
    std::vector<uint8_t>& scratch = rows_.files.scratch;
    scratch.resize(std::max(scratch.size(), threads_ * rows_.scratch_bytes));
    rows_.files.drop_early(rows_.layer);
    buffers_ = rows_.files.free_buffers();
    under_way_ = rows_.files.early_under_way();
    for (ReadDone done[64]; reader_.left_behind;) {
        reader_.left_behind -= reader_.take(done, 64, true);
        if (reader_.left_behind && interrupted_ && interrupted_()) throw DiskError(ECANCELED, "", -1);
    }
}

// ---- waves
void ExpertReads::request(size_t task) {
    Task& t = tasks_[task];
    t.left = rows_.pieces.size();
    const uint8_t* known = rows_.known.data() + size_t(t.expert) * t.left;
    t.is_new = std::find(known, known + t.left, 0) != known + t.left;
    queue_.push_back({task, 0});
}

// Finds slots for the tasks of a wave. It is over where half of the passing slots are taken, so that the next
// one finds the other half while this one is computed.
void ExpertReads::pin_wave() {
    const size_t most = std::max<size_t>(1, rows_.pool().passing.size() / 2);
    for (size_t missing = 0; pinned_ < tasks_.size(); pinned_++) {
        Task& t = tasks_[pinned_];
        if (t.expert < 0) continue;
        if (missing == most && rows_.slot_of(t.expert) < 0) return;
        Wanted wanted;
        size_t n;
        if (!rows_.pin(&t.expert, 1, &t.slot, &t.entry, &wanted, &n, 0)) return;
        if (n) request(pinned_), missing++;
    }
}

size_t ExpertReads::begin_wave() {
    std::unique_lock<std::mutex> held(lock_);
    begin_ = end_;
    whole_.clear();
    if (pinned_ == begin_) pin_wave();
    end_ = pinned_;
    if (!rows_.disabled(DiskRows::NO_PIPELINE)) pin_wave();
    for (size_t i = begin_; i < end_; i++) tasks_[i].left ? waiting_++ : (ready_.push_back(i), size_t(0));
    submit(held);
    return end_ - begin_;
}

void ExpertReads::end_wave() {
    std::lock_guard<std::mutex> held(lock_);
    if (failed()) throw error_;
    for (size_t i = begin_; i < end_ && !loads_; i++)
        if (tasks_[i].expert >= 0) rows_.unpin(&tasks_[i].entry, 1);
}

// ---- work
bool ExpertReads::take(Work& work, int thread) {
    std::unique_lock<std::mutex> held(lock_);
    for (finish(work); !failed();) {
        if (under_way_ && !taking_) look(false, held);
        if (!arrived_.empty()) {  // first: the disk waits for the buffer
            put_away(held, thread);
            continue;
        }
        if (take_rows(work)) return true;
        if (!waiting_ || failed()) return false;  // a read that was just taken: nobody would wake this thread
        if (take_columns(work)) return true;
        if (working_ && with_columns_) {  // soon there may be columns: nobody could wake it from the reader
            held.unlock();
            std::this_thread::yield();
            held.lock();
            continue;
        }
        wait(held, thread);
    }
    return false;
}

bool ExpertReads::take_rows(Work& work) {
    while (!ready_.empty()) {
        Task& t = tasks_[ready_.front()];
        work = {ready_.front(), t.next, 0, false};
        t.next += next_piece(t.rows - t.next, most_, t.unit, threads_);
        work.end = std::min(t.next, t.rows);
        if (t.next >= t.rows) ready_.pop_front();
        if (work.begin < work.end) return working_++, true;
    }
    return false;
}

bool ExpertReads::take_columns(Work& work) {
    if (whole_.empty()) return false;
    Task& t = tasks_[whole_.front()];
    work = {whole_.front(), t.given, 0, true};
    t.given = std::min(t.columns, t.given + next_piece(t.columns - t.given, most_, t.column_unit, threads_));
    work.end = t.given;
    if (t.given == t.columns) whole_.pop_front();
    return true;
}

void ExpertReads::finish(const Work& work) {
    if (work.columns || work.begin == work.end) return;
    working_--;
    Task& t = tasks_[work.task];
    t.done += work.end - work.begin;
    if (t.done == t.rows && t.columns) whole_.push_back(work.task);
}

void ExpertReads::help(int thread) {
    std::unique_lock<std::mutex> held(lock_, std::try_to_lock);
    if (!held || failed()) return;
    if (under_way_ && !taking_) look(false, held);
    if (!arrived_.empty()) put_away(held, thread);
}

// Sleeps until something has changed. One thread at a time sleeps in the reader, and nobody takes reads
// beside it: it would sleep for what another has taken, 100 ms where that was the last one. The others wait
// for that thread.
void ExpertReads::wait(std::unique_lock<std::mutex>& held, int thread) {
    const auto now = std::chrono::steady_clock::now();
    if (thread == 0 && interrupted_ && now - asked_ > kAsk) {
        asked_ = now;
        held.unlock();
        const bool enough = interrupted_();
        held.lock();
        if (enough) give_up();
        return;  // what is waited for may have come, and been announced, while the lock was free
    }
    // What was read ahead may take the place that this call's reads wait for.
    const bool reading = under_way_ > (queue_.empty() ? rows_.files.early_under_way() : 0);
    if (reading && !taking_) {
        look(true, held);
        changed_.notify_all();
    } else {
        changed_.wait(held);
    }
    if (reading)
        rows_.stats.waited_ns +=
            uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - now).count());
}

// ---- reads

// Begins as many reads as there are buffers for, without the lock: each may take the system 30 microseconds.
void ExpertReads::submit(std::unique_lock<std::mutex>& held) {
    ReadRequest requests[16];
    const size_t most = rows_.files.most_under_way();
    while (!failed()) {
        size_t n = 0;
        while (n < 16 && under_way_ + n < most && !queue_.empty() && !buffers_.empty()) {
            Pending& next = queue_.front();
            const unsigned buffer = buffers_.back();
            if (!find_early(next)) {
                buffers_.pop_back();
                reads_[buffer] = {next.task, next.piece};
                requests[n] = rows_.request(size_t(tasks_[next.task].expert), next.piece, buffer);
                rows_.stats.bytes += requests[n++].bytes;
            }
            if (++next.piece == rows_.pieces.size()) queue_.pop_front();
        }
        rows_.stats.reads += n;
        const bool own = n > 0;
        if (!own) drop_early(), n = request_ahead(requests, 16);
        if (!n) return;
        under_way_ += n;
        held.unlock();
        const bool begun = reader_.submit(requests, n);
        held.lock();
        if (begun) continue;
        under_way_ -= n;
        if (own) return fail(EBUSY, &reads_[requests[0].tag]);
        ahead_.clear();  // nobody needs it
        for (size_t i = 0; i < n; i++)
            if (rows_.files.early_came({requests[i].tag, EBUSY}))
                buffers_.push_back(unsigned(requests[i].tag));
        return;
    }
}

// Reads of experts of the layers to come, once all that this call needs has been asked for. A layer's turn
// comes when the one before it wants no more: whatever else ends that one's ends this one's, too.
size_t ExpertReads::request_ahead(ReadRequest* requests, size_t most) {
    if (pinned_ < tasks_.size() || !queue_.empty()) return 0;
    size_t n = 0;
    for (Ahead& a : ahead_) {
        const size_t at_once = rows_.files.most_under_way(a.likely.ahead);
        for (; n < most && under_way_ + n < at_once && !buffers_.empty(); n++) {
            const unsigned buffer = buffers_.back();
            if (!a.of->next_early(a.likely, buffer, &requests[n])) break;
            buffers_.pop_back();
            reads_[buffer] = {};
        }
    }
    return n;
}

bool ExpertReads::read_ahead(DiskExperts& of, DiskExperts::Likely likely) {
    std::unique_lock<std::mutex> held(lock_);
    const unsigned behind = likely.ahead + 1;
    ahead_.push_back({&of, std::move(likely)});
    submit(held);
    size_t pieces = 0;
    for (const Ahead& a : ahead_) pieces += a.of->pieces_missing(a.likely.experts);
    return pieces < rows_.files.most_early(behind);
}

// Whether a piece was read ahead. Then it has arrived, or is under way as if it were asked for now.
bool ExpertReads::find_early(const Pending& next) {
    std::vector<ExpertFiles::Early>& early = rows_.files.early;
    const auto e = rows_.files.find_early(rows_.layer, tasks_[next.task].expert, next.piece);
    if (e == early.end()) return false;
    const ExpertFiles::Early found = *e;
    early.erase(e);
    reads_[found.buffer] = {next.task, next.piece, true};
    if (!next.piece) rows_.early_used(found.ahead);
    if (found.come) arrived_.push_back(found.buffer);
    return true;
}

// Gives back the buffers of what has been read ahead and is not needed, once that is known.
void ExpertReads::drop_early() {
    if (pinned_ < tasks_.size() || !queue_.empty()) return;
    for (const unsigned buffer : rows_.files.drop_early(rows_.layer + 1)) buffers_.push_back(buffer);
}

// Asks once more for what was read ahead and has failed: perhaps long before this call.
bool ExpertReads::again(unsigned buffer) {
    Read& r = reads_[buffer];
    r.early = false;
    const ReadRequest read = rows_.request(size_t(tasks_[r.task].expert), r.piece, buffer);
    if (failed() || !reader_.submit(&read, 1)) return false;
    rows_.stats.reads++, rows_.stats.bytes += read.bytes, under_way_++;
    return true;
}

// Takes the reads that are done; with `wait`, sleeps for one, 100 ms at most.
void ExpertReads::look(bool wait, std::unique_lock<std::mutex>& held) {
    ReadDone done[64];
    if (!wait) {
        const size_t n = reader_.take(done, 64, false);
        accept(done, n);
        if (n) submit(held);
        return;
    }
    taking_ = true;
    held.unlock();
    const size_t n = reader_.take(done, 64, true);
    held.lock();
    taking_ = false;
    accept(done, n);
    if (n) submit(held);
}

void ExpertReads::accept(const ReadDone* done, size_t n) {
    under_way_ -= n;
    for (size_t i = 0; i < n; i++) {
        const unsigned buffer = unsigned(done[i].tag);
        if (reads_[buffer].task == kNobody) {
            if (rows_.files.early_came(done[i])) buffers_.push_back(buffer);
        } else if (!done[i].error) {
            arrived_.push_back(buffer);
        } else if (!reads_[buffer].early || !again(buffer)) {
            fail(done[i].error, &reads_[buffer]);
        }
    }
    drop_early();
    if (n > 1) changed_.notify_all();
}

// Checks what a read brought, and puts its rows into their slot. Nobody else knows of that yet: no lock.
int ExpertReads::put(const Read& r, const uint8_t* buffer, int thread) {
    const Task& t = tasks_[r.task];
    const DiskExperts::Piece& p = rows_.pieces[r.piece];
    const size_t number = size_t(t.expert) * rows_.pieces.size() + r.piece;
    const RowRun& run = rows_.run(size_t(t.expert), p.slab);
    const uint8_t* from = buffer + (run.at + p.first * run.row_bytes()) % reader_.alignment();
    const uint32_t crc = crc32c(from, p.n * run.row_bytes(), 0);
    if (rows_.known[number] && crc != rows_.crc[number]) return INT32_MAX;  // no errno
    rows_.crc[number] = crc;
    const size_t end = p.first + p.n;
    uint8_t* const scratch = rows_.files.scratch.data() + size_t(thread) * rows_.scratch_bytes;
    return put_rows(run, rows_.pool().at(t.slot), p.first, p.n, from, scratch) == end ? 0 : kNotFinite;
}

// Puts away what one read brought. With the last piece of an expert, it is there. Where some of its bytes
// were read for the first time, the file must still be the one whose header was read: nothing else vouches
// for it.
void ExpertReads::put_away(std::unique_lock<std::mutex>& held, int thread) {
    const unsigned buffer = arrived_.back();
    arrived_.pop_back();
    const Read r = reads_[buffer];
    Task& t = tasks_[r.task];
    held.unlock();
    const int error = put(r, reader_.buffer(buffer), thread);
    held.lock();
    buffers_.push_back(buffer);
    if (error) {
        fail(error, &r);
        return;
    }
    submit(held);
    if (--t.left) return;
    if (t.is_new) {
        held.unlock();
        const bool other = changed(size_t(t.expert));
        held.lock();
        if (other) {
            fail(kChanged, &r);
            return;
        }
        std::fill_n(rows_.known.begin() + std::ptrdiff_t(size_t(t.expert) * rows_.pieces.size()),
                    rows_.pieces.size(), uint8_t(1));
    }
    rows_.arrived(t.entry);
    if (r.task < begin_ || r.task >= end_) return;
    waiting_--;
    ready_.push_back(r.task);
    changed_.notify_all();
}

void ExpertReads::fail(int error, const Read* r) {
    if (!failed()) {
        std::string where;
        bool changed = false;
        if (r) {
            const size_t e = size_t(tasks_[r->task].expert), slab = rows_.pieces[r->piece].slab;
            const unsigned file = rows_.run(e, slab).file;
            where = rows_.files.files[file].path + ": " + rows_.names[slab] + ", expert " + std::to_string(e);
            changed = rows_.files.changed(file);
        }
        error_ = {error == INT32_MAX ? 0 : error, where, -1, changed};
        failed_.store(true, std::memory_order_relaxed);
    }
    queue_.clear();
    changed_.notify_all();
}

bool ExpertReads::changed(size_t expert) const {
    for (size_t s = 0; s < rows_.names.size(); s++) {
        const unsigned file = rows_.run(expert, s).file;
        if ((!s || file != rows_.run(expert, s - 1).file) && rows_.files.changed(file)) return true;
    }
    return false;
}

void ExpertReads::give_up() { fail(ECANCELED, nullptr); }

}  // namespace tc
