// Experts in bundles: a token's in one region, and those that come from disk, in waves.
#include <algorithm>
#include <deque>

#include "bundles.h"
#include "storage/disk_experts.h"

namespace tc {

struct Context::Chosen {
    std::vector<size_t> experts;   // ascending
    std::vector<const FFN*> ffns;  // of each
    ExpertReads* reads = nullptr;  // of experts on disk: who works on which says the running wave
    size_t first_task = 0;         // of it
};

// Whether a call's experts can share a region: a token's that no predictor is asked about.
bool Context::shares_region(const MixtureArgs& a, const float* weights) const {
    const std::vector<const FFN*>& experts = a.mixture.experts;
    const FFN& f = *experts[0];
    if (a.tokens != 1 || a.record || !f.bundles || f.disk || f.sub_norm.weight) return false;
    if (a.sparsity == PREDICT && f.predictor.second.data) return false;
    size_t chosen = 0;
    for (size_t e = 0; e < experts.size(); e++) chosen += weights[e] != 0;
    return chosen > 1 && chosen <= std::min(a.mixture.active, kPassTokens);
}

FFNCounts Context::token_experts(const MixtureArgs& a, const float* h, const float* weights, float* sum) {
    Chosen c;
    for (size_t e = 0; e < a.mixture.experts.size(); e++)
        if (weights[e] != 0) c.experts.push_back(e), c.ffns.push_back(a.mixture.experts[e]);
    return chosen_add(a, c, h, weights, sum);
}

// sum += a token's experts, by their shares, in ascending order. Their chunks are one list, of which threads
// take some as they come; then each adds up columns of what all of them give. The same bits as one by one.
FFNCounts Context::chosen_add(const MixtureArgs& a, const Chosen& c, const float* h, const float* weights,
                              float* sum) {
    const size_t of = c.experts.size(), dim = a.dim;
    float* out = grown(routed_.out, of * dim);
    std::fill(out, out + of * dim, 0.0f);
    std::deque<FFNArgs> args;
    std::deque<Walk> walks;
    for (size_t v = 0; v < of; v++) {
        args.push_back({*c.ffns[v], out + v * dim, h, 1, dim, a.sparsity, nullptr});
        walks.emplace_back(*this, args[v], kChunk, v, of, v ? &walks[0].in : nullptr);
    }
    const size_t chunks = walks[0].chunks;
    Pieces pieces(of * chunks, 1, pool.threads());
    auto region = [&](int thread) {
        if (c.reads)
            for (ExpertReads::Work work; c.reads->take(work, thread);)
                add_chunks(walks[work.task - c.first_task], work.begin, work.end, thread);
        else
            for (size_t first, last; pieces.take(&first, &last);)
                for (size_t v = first / chunks; first < last; v++) {
                    const size_t end = std::min(last, (v + 1) * chunks);
                    add_chunks(walks[v], first - v * chunks, end - v * chunks, thread);
                    first = end;
                }
        pool.barrier();
        if (c.reads && c.reads->failed()) return;
        size_t begin, end;
        column_range(dim, pool.threads(), thread, &begin, &end);
        for (size_t v = 0; v < of; v++) {
            walks[v].join_partials(thread);
            const float w = weights[c.experts[v]], *from = out + v * dim;
            for (size_t i = begin; i < end; i++) sum[i] += w * from[i];
        }
    };
    pool.run(region);
    FFNCounts total;
    for (const Walk& w : walks) total += w.totals();
    return total;
}

// ---- from disk

float uses_of(const float* weights, size_t experts, size_t tokens) {
    float uses = 0;
    for (size_t t = 0; t < tokens; t++)
        if (weights[t * experts] != 0) uses += ExpertPolicy::aged(tokens - 1 - t);
    return tokens <= kFewTokens && uses > 0 ? 1 : uses;
}

static FFN in_slot(FFN f, size_t shift) {
    for (Matrix* w : {&f.gate.weight, &f.up, &f.down})
        if (w->data) w->data += shift;
    return f;
}

// Experts on disk, in waves. A token's are computed in the order in which they come; those of several tokens
// when all of their wave are there. The next wave's are read meanwhile. What they give is added up in
// ascending order, as in memory.
FFNCounts Context::bundles_from_disk(const MixtureArgs& a, const float* h, const float* weights, float* sum) {
    DiskExperts& disk = *a.mixture.disk;
    const std::vector<const FFN*>& experts = a.mixture.experts;
    const bool together = shares_region(a, weights);
    const size_t chunks = (a.mixture.neurons() + kChunk - 1) / kChunk;
    std::vector<ExpertReads::Task> tasks;
    for (size_t e = 0; e < experts.size(); e++)
        if (const float uses = uses_of(weights + e, experts.size(), a.tokens); uses > 0)
            tasks.push_back({int32_t(e), uses, together ? chunks : 0, 1});
    const size_t n = tasks.size(), steps = a.tokens > kFewTokens ? a.tokens : 1;
    ExpertReads reads(disk, std::move(tasks), steps, chunks, pool.threads(), interrupted);
    auto await = [&](int thread) {
        for (ExpertReads::Work nothing; reads.take(nothing, thread);) {
        }
    };
    FFNCounts total;
    for (size_t from = 0, to; from < n; from = to) {
        to = from + reads.begin_wave();
        if (to == n) read_next_ahead(a, reads);
        std::deque<FFN> there;
        Chosen c = {{}, {}, &reads, from};
        for (size_t i = from; i < to; i++) {
            const ExpertReads::Task& t = reads.tasks()[i];
            there.push_back(in_slot(*experts[size_t(t.expert)], size_t(t.slot) * disk.pool().stride));
            c.experts.push_back(size_t(t.expert)), c.ffns.push_back(&there.back());
        }
        if (together) {
            total += chosen_add(a, c, h, weights, sum);
        } else {
            pool.run(await);
            for (size_t i = 0; i < to - from && !reads.failed(); i++)
                total += expert_add(a, c.experts[i], *c.ffns[i], h, weights, sum);
        }
        reads.end_wave();
    }
    return total;
}

}  // namespace tc
