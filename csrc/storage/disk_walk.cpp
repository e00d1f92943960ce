#include "disk_walk.h"

#include <algorithm>
#include <chrono>

namespace tc {

// Neurons that a thread takes at a time where several threads share a chunk. With a sub-norm a thread takes
// the whole chunk, since squares are added up chunk by chunk.
static constexpr size_t kCell = 32;
static constexpr size_t kStreamChunks = kStreamSlots / kChunk;
// A call of up to so many tokens computes all gates first, then reads the bundles that some token needs: half
// of them for 8 tokens of which each has a tenth of its neurons active. A longer prompt needs most bundles,
// so that it reads all and computes its gates meanwhile.
static constexpr size_t kListed = 64;

static bool takes_few(const FFNArgs& a) {
    return a.tokens <= kFewTokens && !a.ffn.sub_norm.weight && !a.record;
}

size_t owners_of(const FFN& ffn) { return 2 * ((ffn.neurons() + kChunk - 1) / kChunk); }

std::shared_ptr<Fetches> begin_reads(const FFN* const* ffns, size_t n, size_t tokens,
                                     Interrupted interrupted) {
    std::vector<DiskRows*> all;
    for (size_t i = 0; i < n; i++)
        for (DiskRows* rows : {ffns[i]->disk, ffns[i]->gate_disk})
            if (rows) all.push_back(rows);
    auto reads = std::make_shared<Fetches>(ffns[0]->disk->reader, std::move(all), n * owners_of(*ffns[0]),
                                           interrupted);
    for (DiskRows* rows : reads->rows) rows->begin(tokens > kFewTokens ? tokens : 1);
    return reads;
}

std::shared_ptr<Fetches> begun_reads(const FFN& first) {
    Reader& reader = first.disk->reader;
    const bool its = reader.early && reader.early->rows[0] == first.disk && !reader.forked();
    return its ? std::move(reader.early) : nullptr;
}

// The call's reads: those of its layer's call where the FFN is one expert of a mixture, those that read_ahead
// began, or new ones.
static std::shared_ptr<Fetches> reads_of(const FFNArgs& a, Interrupted interrupted) {
    if (a.reads) return a.reads;
    const FFN* ffn = &a.ffn;
    std::shared_ptr<Fetches> begun = takes_few(a) ? begun_reads(a.ffn) : nullptr;
    return begun ? begun : begin_reads(&ffn, 1, a.tokens, interrupted);
}

Context::DiskWalk::DiskWalk(Context& context, const FFNArgs& args)
    : w(context, args, takes_few(args) || args.ffn.sub_norm.weight ? kChunk : kCell),
      bundles(*args.ffn.disk),
      gates(args.ffn.gate_disk),
      reads(args.reads),
      fetches(*reads),
      owner(args.owner),
      tasks(w.chunks),
      fresh(w.chunks),
      by_list(!w.few && w.skip && w.tokens <= kListed),
      group(w.threads > int(kChunk / kCell) ? 2 : 1),
      groups((w.chunks + group - 1) / group),
      ahead(kStreamChunks / group),
      listing(by_list),
      bundle_bytes(bundles.stats.bytes),
      gate_bytes(gates ? gates->stats.bytes : 0) {
    w.rows = slots = grown(context.slots_, w.n);
    entries = grown(context.entries_, w.n);
    wanted = grown(context.wanted_, w.n);
    places = gate_slots = gate_entries = nullptr, gate_wanted = nullptr;
    if (gates && !w.few) {
        w.gate_place = gate_slots = grown(context.gate_slots_, w.n);
        gate_entries = grown(context.gate_entries_, w.n);
        gate_wanted = grown(context.gate_wanted_, w.n);
    }
    sums = w.few ? nullptr : grown(context.sums_, w.tokens * w.dim);
    for (size_t t = w.tokens; !w.few && t-- > 0;)
        age.push_back(EnginePolicy::aged(w.tokens > kFewTokens ? t : 0));
    if (!w.few)
        places = grown(context.places_, w.n),
        std::fill_n(fetches.left.begin() + std::ptrdiff_t(owner), 2 * w.chunks, size_t(1));
}

void Context::DiskWalk::end() {
    for (DiskRows* rows : {&bundles, gates})
        if (rows && !w.few)
            rows->stats.streamed += rows->stats.bytes - (rows == gates ? gate_bytes : bundle_bytes);
    bundles.settle();
    if (gates) gates->settle();
    if (fetches.failed) throw fetches.error;
}

// Sleeps until something has changed; `held` holds the lock. One thread at a time sleeps in the reader, the
// others wait for that thread. Each wakes after 100 ms at most; thread 0 then asks whether the call should
// end.
void Context::DiskWalk::wait(std::unique_lock<std::mutex>& held, int thread) {
    const auto begin = std::chrono::steady_clock::now();
    if (thread == 0 && fetches.busy() && w.ctx.interrupted && begin - asked > kAsk) {
        asked = begin;
        held.unlock();
        const bool enough = w.ctx.interrupted();
        held.lock();
        if (enough) fetches.give_up(), fetches.changed.notify_all();
        return;  // what the caller waits for may have come, and been announced, while the lock was free
    }
    fetches.submit();
    const bool reading = fetches.busy();
    if (reading && !fetches.taking) {
        fetches.taking = true;
        held.unlock();
        fetches.take(true);
        held.lock();
        fetches.taking = false;
        fetches.changed.notify_all();
    } else {
        fetches.changed.wait(held);
    }
    if (reading)
        bundles.stats.waited_ns +=
            uint64_t(std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
}

bool Context::DiskWalk::pending() const {
    if (fetches.failed || !w.few) return fetches.busy();
    for (size_t i = owner; i < owner + 2 * w.chunks; i++)
        if (fetches.left[i]) return true;
    return false;
}

// Waits until no read of this call is under way.
void Context::DiskWalk::drain(int thread) {
    std::unique_lock<std::mutex> held(fetches.lock);
    while (pending() && !fetches.gave_up) {
        if (fetches.failed) fetches.drop_queue();
        if (pending()) wait(held, thread);
    }
}

// ---- few tokens
//
// A chunk is computed when all it needs is in memory, else put aside while its reads are under way. It holds
// slots only while it waits for reads or computes, never while it waits for slots; so some chunk can always
// go on, with any number of them.

// Gives the thread a chunk to work on; false: all are done. Chunks that no thread has begun come first, the
// coldest (last) of them first: its reads begin early, and the work of the hot chunks hides them. Then come
// chunks whose reads are done, or for which slots may have become free.
bool Context::DiskWalk::next(size_t* chunk, int thread) {
    const bool serial = bundles.disabled(DiskRows::NO_PIPELINE);
    fetches.take_in_passing();
    std::unique_lock<std::mutex> held(fetches.lock);
    for (;; wait(held, thread)) {
        if (fetches.failed || done == w.chunks) return false;
        if (fresh && !(serial && fetches.busy())) return *chunk = --fresh, true;
        if (!fetches.ready.empty()) {
            *chunk = (fetches.ready.front() - owner) % w.chunks;
            return fetches.ready.pop_front(), true;
        }
    }
}

// Lists what the chunk needs next: gate rows where those are on disk and not computed yet, else bundles.
void Context::DiskWalk::list(size_t chunk, int thread) {
    const size_t begin = chunk * kChunk, end = std::min(w.n, begin + kChunk);
    Task& t = tasks[chunk];
    t.begin = t.end = 0;
    if (t.stage == Task::FRESH && gates) {
        t.stage = Task::GATES;
        t.listed = w.guessed ? w.predicted_neurons(begin, end) : end - begin;
        for (size_t i = begin; !w.guessed && i < end; i++) w.ids[i] = int32_t(i);
        return;
    }
    if (t.stage == Task::FRESH) {
        t.listed = w.needed_neurons(chunk, chunk + 1, thread);
    } else if (w.guessed) {
        t.listed = w.keep_needed(begin, t.listed, w.hidden);
        w.count_by_cell(chunk, chunk + 1, t.listed);
    } else {
        t.listed = w.list_active(chunk, chunk + 1);
    }
    t.stage = Task::BUNDLES;
    if (t.listed || !chunk) std::fill(w.partial_of(chunk), w.partial_of(chunk + 1), 0.0f);
}

// Finds slots for as much of the rest of the list as possible. True: all of that is in memory. False: the
// chunk is put aside, and any thread may take it up when its reads are done, or when slots become free.
bool Context::DiskWalk::fetch(size_t chunk) {
    Task& t = tasks[chunk];
    DiskRows& rows = t.stage == Task::GATES ? *gates : bundles;
    const size_t at = chunk * kChunk + t.begin,
                 mine = owner + (t.stage == Task::GATES ? 0 : w.chunks) + chunk;
    size_t misses;
    std::lock_guard<std::mutex> held(fetches.lock);
    if (fetches.failed) return false;
    t.end =
        t.begin + rows.pin(w.ids + at, t.listed - t.begin, slots + at, entries + at, wanted + at, &misses);
    if (t.end == t.begin) return starved.push_back(chunk), false;
    fetches.want(rows, wanted + at, misses, mine, true);
    if (!fetches.left[mine]) return true;
    fetches.awaited[mine] = 1;
    fetches.submit_some();
    return false;
}

void Context::DiskWalk::work(size_t chunk, int thread) {
    Task& t = tasks[chunk];
    const size_t at = chunk * kChunk + t.begin, n = t.end - t.begin;
    if (!n) return;
    if (t.stage == Task::GATES) {
        w.activations(at, at + n, slots, thread);
    } else {
        size_t live = n;
        if (w.surviving_up_apart()) {
            w.hidden_values(at, at + n, thread);
            live = w.keep_needed(at, n, w.hidden);
        }
        w.rows_read.fetch_add((w.a.ffn.up.data ? n : 0) + live, std::memory_order_relaxed);
        w.add_bundles(at, live, live, w.partial_of(chunk), thread);
    }
    release(chunk);
}

void Context::DiskWalk::release(size_t chunk) {
    Task& t = tasks[chunk];
    std::lock_guard<std::mutex> held(fetches.lock);
    (t.stage == Task::GATES ? *gates : bundles).unpin(entries + chunk * kChunk + t.begin, t.end - t.begin);
    t.begin = t.end;
    if (starved.empty()) return;
    for (const size_t c : starved) fetches.ready.push_back(owner + c);
    starved.clear();
    fetches.changed.notify_all();
}

void Context::DiskWalk::advance(size_t chunk, int thread) {
    Task& t = tasks[chunk];
    if (t.stage == Task::FRESH) list(chunk, thread);
    for (work(chunk, thread);; work(chunk, thread)) {
        if (t.begin == t.listed && t.stage == Task::GATES) list(chunk, thread);
        if (t.begin == t.listed) break;
        if (!fetch(chunk)) return;
    }
    std::lock_guard<std::mutex> held(fetches.lock);
    if (++done == w.chunks) fetches.changed.notify_all();
}

void Context::DiskWalk::few_tokens(int thread) {
    w.encode();
    for (size_t chunk; next(&chunk, thread);) advance(chunk, thread);
    drain(thread);
    w.ctx.pool.barrier();
    if (!fetches.failed) w.join_partials(thread);
}

// ---- many tokens
//
// Chunks pass through the pool's stream slots, read ahead of the work, hot and cached ones where they are:
// whole ones or, `by_list`, what is needed of them, after a pass over all gates. One barrier a group: behind
// it everybody has left the group before, whose slots the next reads fill, and activations are complete.

size_t Context::DiskWalk::last_cell(size_t g) const {
    return std::min(w.cells, (g + 1) * group * (kChunk / w.cell));
}

// Requests the reads of a group's chunks. The caller holds the lock.
void Context::DiskWalk::request(size_t g) {
    for (size_t chunk = g * group; chunk < std::min(w.chunks, (g + 1) * group); chunk++) {
        const size_t ring = chunk % kStreamChunks * kChunk;
        if (!listing) want_bundles(chunk, ring);
        if (gates && (listing || !by_list)) want_gates(chunk, ring);
    }
    fetches.submit();
    // `left` began as 1, so that no thread takes a group whose reads were not requested for a complete one.
    if (!fetches.gave_up) fetches.left[owner_of(g)]--;
    fetches.changed.notify_all();
}

void Context::DiskWalk::want_bundles(size_t chunk, size_t ring) {
    const size_t begin = chunk * kChunk, end = std::min(w.n, begin + kChunk);
    const int32_t free = int32_t(bundles.pool().lent + ring);
    size_t n;
    if (by_list) {
        int32_t* last = entries + begin;
        for (size_t c = begin / w.cell; c < std::min(w.cells, (chunk + 1) * (kChunk / w.cell)); c++)
            last = std::copy_n(w.ids + c * w.cell, w.counts[c], last);
        n = bundles.stream(entries + begin, size_t(last - entries) - begin, free, places, wanted + begin);
    } else {
        n = bundles.stream(begin, end, free, places + begin, entries + begin, wanted + begin);
    }
    fetches.want(bundles, wanted + begin, n, owner + w.chunks + chunk / group);
}

void Context::DiskWalk::want_gates(size_t chunk, size_t ring) {
    const size_t begin = chunk * kChunk, end = std::min(w.n, begin + kChunk);
    const int32_t free = int32_t(gates->pool().lent + ring);
    const size_t n =
        gates->stream(begin, end, free, gate_slots + begin, gate_entries + begin, gate_wanted + begin);
    fetches.want(*gates, gate_wanted + begin, n, owner_of(chunk / group));
}

void Context::DiskWalk::request_first() {
    next_cell.store(0, std::memory_order_relaxed);
    std::lock_guard<std::mutex> held(fetches.lock);
    for (size_t g = 0; g < std::min(ahead, groups); g++) request(g);
}

bool Context::DiskWalk::wait_for(size_t g, int thread) {
    std::unique_lock<std::mutex> held(fetches.lock);
    const size_t mine = owner_of(g);
    while (fetches.left[mine]) {
        if (fetches.failed) fetches.drop_queue();
        if (fetches.left[mine]) wait(held, thread);
    }
    return !fetches.bad[mine];
}

void Context::DiskWalk::list_cell(size_t c, int thread) {
    const size_t begin = c * w.cell, end = std::min(w.n, begin + w.cell);
    for (size_t t = 0; w.a.record && t < w.tokens; t++)
        std::fill(w.a.record + t * w.n + begin, w.a.record + t * w.n + end, 0.0f);
    w.needed_neurons(c, c + 1, thread);
    note(c);
}

void Context::DiskWalk::first_half(size_t c, int thread) {
    if (!by_list) list_cell(c, thread);
    const size_t begin = c * w.cell, listed = w.counts[c];
    for (size_t i = begin; i < begin + listed; i++) slots[i] = places[w.ids[i]];
    w.hidden_values(begin, begin + listed, thread);
    w.rows_read.fetch_add(listed * (w.a.ffn.up.data ? 2 : 1), std::memory_order_relaxed);
    if (w.normed) w.weigh(c);
}

// Counts the uses of a cell's neurons. A prompt says which neurons its continuation will probably need, so
// its tokens count as if they had come one by one.
void Context::DiskWalk::note(size_t c) {
    for (size_t i = c * w.cell; i < c * w.cell + w.counts[c]; i++) {
        const size_t id = size_t(w.ids[i]);
        float uses = 0;
        for (size_t t = 0; t < w.tokens; t++) uses += w.gate[t * w.n + id] != 0 ? age[t] : 0;
        bundles.used(int32_t(id), uses);
        if (gates) gates->used(int32_t(id), uses);
    }
}

// Takes the next cell below `end` that no thread has taken; false: there is none.
bool Context::DiskWalk::take_cell(size_t end, size_t* c) {
    *c = next_cell.load(std::memory_order_relaxed);
    while (*c < end)
        if (next_cell.compare_exchange_weak(*c, *c + 1, std::memory_order_relaxed)) return true;
    return false;
}

// Computes the gates of all chunks and lists the neurons that some token needs. Bundles are requested behind
// the barrier, when all lists are complete. False: a read failed.
bool Context::DiskWalk::list_all(int thread) {
    for (size_t g = 0; gates && g < groups; g++) {
        if (!wait_for(g, thread)) return false;  // the same for all threads
        for (size_t c; take_cell(last_cell(g), &c);) list_cell(c, thread);
        w.ctx.pool.barrier();
        if (thread || g + ahead >= groups) continue;
        std::lock_guard<std::mutex> held(fetches.lock);
        request(g + ahead);
    }
    for (size_t c; take_cell(w.cells, &c);) list_cell(c, thread);
    w.ctx.pool.barrier();
    if (thread == 0) listing = false, request_first();
    w.ctx.pool.barrier();
    return true;
}

bool Context::DiskWalk::work_through(size_t begin, size_t end, int thread) {
    for (size_t g = 0; g < groups; g++) {
        if (!wait_for(g, thread)) return false;  // the same for all threads
        for (size_t c; take_cell(last_cell(g), &c);) first_half(c, thread);
        w.ctx.pool.barrier();
        if (thread == 0 && g && g - 1 + ahead < groups) {
            std::lock_guard<std::mutex> held(fetches.lock);
            request(g - 1 + ahead);
        }
        for (size_t c0 = begin; c0 < end; c0 += kTileColumns)
            w.add_columns(c0, std::min(end, c0 + kTileColumns), g * group,
                          std::min(w.chunks, (g + 1) * group), sums + c0 * w.tokens, thread);
    }
    return true;
}

void Context::DiskWalk::many_tokens(int thread) {
    size_t begin, end;
    column_range(w.dim, w.threads, thread, &begin, &end);
    std::fill(sums + begin * w.tokens, sums + end * w.tokens, 0.0f);
    if (thread == 0 && (gates || !by_list)) request_first();
    w.encode();
    const bool good = (!by_list || list_all(thread)) && work_through(begin, end, thread);
    drain(thread);
    if (good && w.normed) {
        w.ctx.pool.barrier();
        if (thread == 0) w.factors_of_tokens();
    }
    w.ctx.pool.barrier();
    for (size_t c0 = begin; good && c0 < end; c0 += kTileColumns)
        w.join_columns(c0, std::min(end, c0 + kTileColumns), sums + c0 * w.tokens);
}

FFNCounts Context::disk_ffn(const FFNArgs& a) {
    FFNArgs args = a;
    args.reads = reads_of(a, interrupted);
    for (;;) {
        DiskWalk walk(*this, args);
        auto few = [&](int thread) { walk.few_tokens(thread); };
        auto many = [&](int thread) { walk.many_tokens(thread); };
        if (walk.w.few)
            pool.run(few);
        else
            pool.run(many);
        // What was read ahead and failed may be what nobody needs. Nothing has been added to x yet.
        if (walk.w.few && args.reads->begin_again()) continue;
        walk.end();
        return walk.w.totals();
    }
}

}  // namespace tc
