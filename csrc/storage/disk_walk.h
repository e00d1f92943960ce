// One call of an FFN whose bundles (and perhaps gate rows) are on disk: who works on which chunk, and who
// waits.
#pragma once
#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "engine/bundles.h"
#include "fetches.h"

namespace tc {

// The reads of one call over some FFNs of a layer, of which there are none yet; each FFN has `owners_of`
// owners there.
std::shared_ptr<Fetches> begin_reads(const FFN* const* ffns, size_t n, size_t tokens,
                                     Interrupted interrupted);
std::shared_ptr<Fetches> begun_reads(
    const FFN& first);  // for a call of few tokens over these FFNs, which has come; or null
size_t owners_of(const FFN& ffn);
bool can_read_ahead(const FFN& ffn, size_t tokens, Sparsity sparsity);

struct Context::DiskWalk {
    DiskWalk(Context& context, const FFNArgs& args);
    void few_tokens(int thread);
    void many_tokens(int thread);
    void end();  // after the region: nothing is pinned. DiskError

    // A chunk on its way: entries [begin, end) of its list have their slots; what comes before is done.
    struct Task {
        enum Stage { FRESH, GATES, BUNDLES } stage = FRESH;
        size_t begin = 0, end = 0, listed = 0;
    };

    bool next(size_t* chunk, int thread);
    void advance(size_t chunk, int thread);
    void list(size_t chunk, int thread);
    bool fetch(size_t chunk);
    void work(size_t chunk, int thread);
    void release(size_t chunk);
    void wait(std::unique_lock<std::mutex>& held, int thread);
    bool pending() const;
    void drain(int thread);

    void request(size_t group);
    void want_bundles(size_t chunk, size_t ring);
    void want_gates(size_t chunk, size_t ring);
    void request_first();
    size_t owner_of(size_t group) const { return owner + (listing ? 0 : w.chunks) + group; }
    bool wait_for(size_t group, int thread);
    void list_cell(size_t c, int thread);
    void first_half(size_t c, int thread);
    void note(size_t c);
    size_t last_cell(size_t group) const;
    bool take_cell(size_t end, size_t* c);
    bool list_all(int thread);
    bool work_through(size_t begin, size_t end, int thread);

    Walk w;
    DiskRows &bundles, *const gates;
    const std::shared_ptr<Fetches> reads;
    Fetches& fetches;    // its lock guards all below, and the DiskRows
    const size_t owner;  // from there on: chunks for their gate rows, then for their bundles; or groups
    std::vector<Task> tasks;
    std::deque<size_t> starved;  // chunks that found no slots
    size_t fresh, done = 0;
    // [n] each. Of list entries: slots, entries (in the cache) of few tokens, and what is wanted of them. Of
    // neurons: the rest.
    int32_t *slots, *entries, *places, *gate_slots, *gate_entries;
    Wanted *wanted, *gate_wanted;

    const bool
        by_list;  // many tokens: of no bundle but those some token needs, all of which are listed first
    const size_t group;          // chunks that many tokens work on together
    const size_t groups, ahead;  // of those: there are, and slots are for
    bool listing;                // the first of two passes over them: gates alone
    std::atomic<size_t> next_cell{0};
    std::chrono::steady_clock::time_point asked =
        std::chrono::steady_clock::now();     // whether to go on: thread 0's
    float* sums;                              // [dim / tile][tokens][tile]
    std::vector<float> age;                   // [tokens]
    const uint64_t bundle_bytes, gate_bytes;  // read before this call
};

}  // namespace tc
