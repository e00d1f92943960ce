// One call of an FFN whose bundles (and perhaps gate rows) are on disk: which thread works on which chunk,
// and which thread waits for the disk.
#pragma once
#include <chrono>
#include <deque>
#include <memory>
#include <vector>

#include "engine/bundles.h"
#include "fetches.h"

namespace tc {

// Makes the reads of one call over n FFNs of one layer (a mixture's experts), before any of them is
// requested. FFN i has the owners [i * owners_of, (i + 1) * owners_of). The thread that makes the call asks
// `interrupted`.
std::shared_ptr<Fetches> begin_reads(const FFN* const* ffns, size_t n, size_t tokens,
                                     Interrupted interrupted);
// Takes over the reads that read_ahead began for the call that starts now, of few tokens over `first` (and
// its fellow experts); null where it began none.
std::shared_ptr<Fetches> begun_reads(const FFN& first);
size_t owners_of(const FFN& ffn);  // two for each chunk: its gate rows, its bundles
// Whether reads can begin before a call of so many tokens.
bool can_read_ahead(const FFN& ffn, size_t tokens, Sparsity sparsity);

struct Context::DiskWalk {
    DiskWalk(Context& context, const FFNArgs& args);
    void few_tokens(int thread);
    void many_tokens(int thread);
    void end();  // by the calling thread, when all threads have left: unpins. DiskError where a read failed

    // A chunk of few tokens' work. Of its list [0, listed): [0, begin) is done, [begin, end) has slots and is
    // computed when its reads are done, the rest has no slots yet. First it lists gate rows where those are
    // on disk, then bundles.
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
    Fetches& fetches;  // its lock guards all below, and the DiskRows
    // This FFN's first owner: chunk c's gate rows are owner + c, its bundles owner + chunks + c; of many
    // tokens a group's number stands in place of c, and gate rows read with bundles count as bundles.
    const size_t owner;
    std::vector<Task> tasks;
    std::deque<size_t> starved;  // chunks that found no slots
    size_t fresh, done = 0;
    // [n] each. By place in the list: slots, entries (of the cache, few tokens) and wanted. By neuron: the
    // others.
    int32_t *slots, *entries, *places, *gate_slots, *gate_entries;
    Wanted *wanted, *gate_wanted;

    // Many tokens, first pass: the gates of all chunks; second: only those bundles that some token needs.
    const bool by_list;
    const size_t group;          // chunks that many tokens work on together
    const size_t groups, ahead;  // how many groups there are; how many fit into the stream slots
    bool listing;                // by_list's first pass is going on
    std::atomic<size_t> next_cell{0};
    std::chrono::steady_clock::time_point asked =
        std::chrono::steady_clock::now();     // when thread 0 last asked `interrupted`
    float* sums;                              // [dim / tile][tokens][tile]
    std::vector<float> age;                   // [tokens] what a use in that token counts after the call
    const uint64_t bundle_bytes, gate_bytes;  // read before this call
};

}  // namespace tc
