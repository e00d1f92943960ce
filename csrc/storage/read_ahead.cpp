// Reads of an FFN that begin before its call.
//
// A predictor that sees the residual stream before attention names mostly the neurons that it will name after
// it: all but one in fifty of synthetic neurons, all but one in four of trained ones
// (docs/internals/csrc.md). So reads begin before attention, and the disk works beside it. Only the time
// depends on them: the FFN's call asks for its records whether they were read ahead or not.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "disk_walk.h"

namespace tc {

namespace {

struct Ahead {
    Context::Walk& w;
    DiskRows &bundles, *const gates;
    Fetches& fetches;
    const size_t owner;
    std::atomic<size_t> listed{0}, judged{0};  // chunks
    Wanted* free = nullptr;                    // the unused end of fetches.early.back()

    void list(int thread);
    void judge(int thread);
    void expect(DiskRows& rows, size_t first_owner);
    float mean_gate() const;
    void keep_judgeable();
};

// Lists the predicted neurons of each chunk.
void Ahead::list(int) {
    w.encode();
    for (size_t c; (c = listed.fetch_add(1)) < w.chunks;)
        w.counts[c] = w.predicted_neurons(c * kChunk, std::min(w.n, (c + 1) * kChunk));
}

// Requests the listed records, the coldest chunk first: in the order in which the call will need them.
void Ahead::expect(DiskRows& rows, size_t first_owner) {
    std::lock_guard<std::mutex> held(fetches.lock);
    for (size_t c = w.chunks; c-- > 0;) {
        const size_t n = rows.expect(w.ids + c * kChunk, w.counts[c], free);
        fetches.want(rows, free, n, first_owner + c);
        free += n;
    }
    fetches.submit();
}

// Keeps of the lists the neurons whose gates can be computed now, and whose bundles are not in memory.
void Ahead::keep_judgeable() {
    std::lock_guard<std::mutex> held(fetches.lock);
    for (size_t c = 0; c < w.chunks; c++) {
        size_t kept = c * kChunk;
        for (size_t i = kept; i < c * kChunk + w.counts[c]; i++) {
            const int32_t id = w.ids[i], row = gates ? gates->slot_of(id) : id;
            if (bundles.hold(id) || row < 0) continue;
            w.ids[kept] = id, w.rows[kept++] = row;
        }
        w.counts[c] = kept - c * kChunk;
    }
}

// Computes the gates of the listed neurons, and keeps the neurons whose gate is open.
void Ahead::judge(int thread) {
    for (size_t c; (c = judged.fetch_add(1)) < w.chunks; fetches.take_in_passing()) {
        w.activations(c * kChunk, c * kChunk + w.counts[c], w.rows, thread);
        w.counts[c] = w.keep_needed(c * kChunk, w.counts[c], w.hidden);
    }
}

// The mean magnitude of the gates that are left: a unit, since gates differ in size between layers.
float Ahead::mean_gate() const {
    double sum = 0;
    size_t found = 0;
    for (size_t c = 0; c < w.chunks; found += w.counts[c++])
        for (size_t i = c * kChunk; i < c * kChunk + w.counts[c]; i++) sum += std::fabs(w.gate[w.ids[i]]);
    return found ? float(sum / double(found)) : 0;
}

}  // namespace

bool can_read_ahead(const FFN& ffn, size_t tokens, Sparsity sparsity) {
    return ffn.disk && ffn.predictor.second.data && !ffn.sub_norm.weight && sparsity == PREDICT &&
           tokens <= kFewTokens && !ffn.disk->disabled(DiskRows::NO_PIPELINE);
}

void Context::read_ahead(const FFNArgs& a) {
    const FFN* ffn = &a.ffn;
    if (!can_read_ahead(a.ffn, a.tokens, a.sparsity)) return;
    FFNArgs asked = a;
    early_ = asked.reads = a.ffn.disk->reader.early = begin_reads(&ffn, 1, a.tokens, interrupted);
    expect(asked);
}

// Begins the reads of one FFN that it will probably need, as part of a.reads.
void Context::expect(const FFNArgs& a) {
    Walk w(*this, a, kChunk);
    if (!w.guessed) return;
    Ahead ahead{w, *a.ffn.disk, a.ffn.gate_disk, *a.reads, a.owner};
    auto list = [&](int thread) { ahead.list(thread); };
    auto judge = [&](int thread) { ahead.judge(thread); };
    pool.run(list);
    a.reads->early.emplace_back(2 * std::accumulate(w.counts, w.counts + w.chunks, size_t(0)));
    ahead.free = a.reads->early.back().data();
    if (ahead.gates) ahead.expect(*ahead.gates, a.owner), w.rows = grown(slots_, w.n);
    ahead.keep_judgeable();
    w.open_above = (a.ffn.activation == FATRELU ? a.ffn.threshold : 0) - ahead.bundles.slack();
    pool.run(judge);
    // With gate rows on disk, a record can be late because its gate was not there: that says nothing about
    // the threshold.
    if (!ahead.gates) ahead.bundles.adapt(ahead.mean_gate());
    ahead.expect(ahead.bundles, a.owner + w.chunks);
}

}  // namespace tc
