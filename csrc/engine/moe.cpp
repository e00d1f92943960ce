// A mixture of experts: for each token the router picks some, and each of those is an FFN like any other.
//
// A token's bits depend on nothing but the token: its logits are a row of a matmul, an expert computes each
// token by itself, and what its experts give is added up in ascending order of experts.
#include <math.h>

#include <algorithm>

#include "model_ops.h"
#include "storage/disk_experts.h"
#include "storage/disk_walk.h"
#include "work.h"

namespace tc {

FFNCounts Context::moe_add(const MixtureArgs& a) {
    const Mixture& m = a.mixture;
    const size_t experts = m.experts.size();
    FFNCounts total = {};
    for (size_t t = 0; t < a.tokens; t += kPassTokens) {
        MixtureArgs part = a;
        part.x = a.x + t * a.dim, part.h = a.h + t * a.dim, part.tokens = std::min(kPassTokens, a.tokens - t);
        if (a.record) part.record = a.record + t * experts * m.neurons();
        if (a.weights) part.weights = a.weights + t * experts;
        if (a.used) part.used = a.used + t * experts;
        // An expert sees some of the tokens: that they are few must not make a prompt be guessed.
        if (a.sparsity == PREDICT && a.tokens > kFewTokens) part.sparsity = EXACT;
        total += moe_block(part);
    }
    return total;
}

// Returns how much of each expert a token gets, [tokens, experts]; *h becomes the experts' common input. Both
// may lie in `to`.
const float* Context::shares(const MixtureArgs& a, const float** h, RouterAnswer& to) {
    const Mixture& m = a.mixture;
    const size_t experts = m.experts.size();
    *h = a.h;
    if (m.norm.weight) {
        float* normed = grown(to.normed, a.tokens * a.dim);
        norm(m.norm, a.h, a.tokens, a.dim, normed);
        *h = normed;
    }
    if (a.weights) return a.weights;
    float* weights = grown(to.weights, a.tokens * experts);
    routed(m, m.router_norm.weight ? a.h : *h, a.tokens, weights);
    return weights;
}

// The experts that some token goes to, those with most weight first.
static std::vector<int32_t> heaviest_first(const MixtureArgs& a, const float* weights) {
    const size_t experts = a.mixture.experts.size();
    std::vector<float> sums(experts);
    std::vector<int32_t> chosen;
    for (size_t e = 0; e < experts; e++) {
        for (size_t t = 0; t < a.tokens; t++) sums[e] += fabsf(weights[t * experts + e]);
        if (sums[e] > 0) chosen.push_back(int32_t(e));
    }
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](int32_t x, int32_t y) { return sums[size_t(x)] > sums[size_t(y)]; });
    return chosen;
}

// The weights without the experts that a bounded step does not read. Where the router's rule gives the
// chosen ones a common sum, those that are left get it: what the router would have given them, had it chosen
// them alone. Where it does not (sigmoids, shares of all experts), a weight says nothing about the others.
const float* Context::affordable(const MixtureArgs& a, const float* weights) {
    const Mixture& m = a.mixture;
    if (!m.disk || !m.disk->files.bounded()) return weights;
    std::vector<int32_t> chosen = heaviest_first(a, weights);
    const size_t n = m.disk->keep_affordable(chosen), experts = m.experts.size();
    if (n == chosen.size()) return weights;
    float* kept = grown(routed_.kept, a.tokens * experts);
    std::copy_n(weights, a.tokens * experts, kept);
    // Of what the rule gave; a scale of an expert's own is no part of the sum.
    auto sum = [&](const float* w) {
        float all = 0;
        for (size_t e = 0; e < experts; e++)
            if (w[e] != 0) all += m.expert_scale ? w[e] / m.expert_scale[e] : w[e];
        return all;
    };
    for (size_t t = 0; t < a.tokens; t++) {
        float* mine = kept + t * experts;
        const float before = sum(mine);
        for (size_t i = n; i < chosen.size(); i++) mine[chosen[i]] = 0;
        const float left = sum(mine);
        if (!m.rule.normalises() || left == before || left == 0) continue;
        for (size_t e = 0; e < experts; e++) mine[e] *= before / left;
    }
    return kept;
}

void Context::routed(const Mixture& m, const float* h, size_t tokens, float* out) {
    const size_t experts = m.experts.size(), dim = m.router.weight.cols;
    float* logits = grown(routed_.logits, std::min(kPassTokens, tokens) * experts);
    for (size_t t = 0; t < tokens; t += kPassTokens) {
        const size_t n = std::min(kPassTokens, tokens - t);
        matmul(m.router, m.router_norm, h + t * dim, n, logits, false);
        each_token(pool, n, 1, [&](size_t i) {
            float* mine = out + (t + i) * experts;
            route(m.rule, logits + i * experts, m.selection_bias, experts, m.active, mine);
            for (size_t e = 0; m.expert_scale && e < experts; e++) mine[e] *= m.expert_scale[e];
        });
    }
}

// Returns how many tokens go to expert e; puts their numbers into routed_.tokens, their inputs into
// routed_.in.
size_t Context::tokens_of(const MixtureArgs& a, size_t e, const float* h, const float* weights) {
    size_t *mine = grown(routed_.tokens, a.tokens), n = 0;
    for (size_t t = 0; t < a.tokens; t++)
        if (weights[t * a.mixture.experts.size() + e] != 0) mine[n++] = t;
    float* in = grown(routed_.in, a.tokens * a.dim);
    for (size_t k = 0; k < n; k++) std::copy_n(h + mine[k] * a.dim, a.dim, in + k * a.dim);
    return n;
}

// Experts on disk share the reads of a call. What was read ahead for an expert that no token goes to is
// dropped when the call is over. A step makes the records of all experts a step older, chosen or not: a use
// is forgotten as the text goes on, however often its expert is chosen.
static std::shared_ptr<Fetches> reads_of(const MixtureArgs& a, Interrupted interrupted) {
    const std::vector<const FFN*>& experts = a.mixture.experts;
    if (!experts[0]->disk) return nullptr;
    const bool few = a.tokens <= kFewTokens && !a.record;  // what is recorded goes the prompts' way
    std::shared_ptr<Fetches> begun = few ? begun_reads(*experts[0]) : nullptr;
    return begun ? begun : begin_reads(experts.data(), experts.size(), a.tokens, interrupted);
}

FFNCounts Context::moe_block(const MixtureArgs& a) {
    const size_t experts = a.mixture.experts.size(), all = a.tokens * a.dim;
    const float *h, *weights = affordable(a, shares(a, &h, routed_.own));
    float* sum = grown(routed_.sum, all);
    std::fill(sum, sum + all, 0.0f);
    if (a.used) std::copy_n(weights, a.tokens * experts, a.used);
    if (a.record) std::fill(a.record, a.record + a.tokens * experts * a.mixture.neurons(), 0.0f);
    FFNCounts total;
    if (a.mixture.disk && a.mixture.experts[0]->bundles) {
        total += bundles_from_disk(a, h, weights, sum);
    } else if (shares_region(a, weights)) {
        total += token_experts(a, h, weights, sum);
    } else if (a.mixture.experts[0]->bundles) {
        const std::shared_ptr<Fetches> reads = reads_of(a, interrupted);
        for (size_t e = 0; e < experts; e++)
            total += expert_add(a, e, *a.mixture.experts[e], h, weights, sum, reads);
    }
    total += experts_add(a, h, weights, sum);
    if (a.mixture.apart()) {
        const Norm& n = a.mixture.experts_norm;
        each_token(pool, a.tokens, 1, [&](size_t t) {
            k.norm(sum + t * a.dim, n.weight, n.bias, n.eps, n.layer, a.dim, sum + t * a.dim);
        });
        ffn_add({*a.mixture.shared, sum, a.h, a.tokens, a.dim, OFF, nullptr});
    }
    join(a.mixture.join, sum, a.tokens, a.dim, a.x);
    // Without skipping, every expert would be read.
    total.rows_dense = experts * a.mixture.neurons() * (a.mixture.experts[0]->up.data ? 2 : 1);
    return total;
}

// sum += expert e's part, of the tokens that go to it. h, sum [tokens, dim]; weights [tokens, experts].
// expert: its matrices, which may be in a slot.
FFNCounts Context::expert_add(const MixtureArgs& a, size_t e, const FFN& expert, const float* h,
                              const float* weights, float* sum, const std::shared_ptr<Fetches>& reads) {
    const size_t experts = a.mixture.experts.size(), neurons = a.mixture.neurons(), dim = a.dim,
                 n = tokens_of(a, e, h, weights);
    if (!n) return {};
    const size_t* mine = routed_.tokens.data();
    float* out = grown(routed_.out, a.tokens * dim);
    float* record = a.record ? grown(routed_.record, a.tokens * neurons) : nullptr;
    std::fill(out, out + n * dim, 0.0f);
    const FFNCounts c =
        ffn_add({expert, out, routed_.in.data(), n, dim, a.sparsity, record, reads, e * owners_of(expert)});
    for (size_t k = 0; k < n; k++) {
        const float w = weights[mine[k] * experts + e];
        float *to = sum + mine[k] * dim, *from = out + k * dim;
        for (size_t i = 0; i < dim; i++) to[i] += w * from[i];
        if (record) std::copy_n(record + k * neurons, neurons, a.record + (mine[k] * experts + e) * neurons);
    }
    return c;
}

// Whether a layer's experts may be guessed now. A bounded step does not guess: it would read more than it
// may, or less than it could.
static bool may_guess(const Mixture& m, size_t tokens, unsigned ahead) {
    return tokens <= kFewTokens && !m.disk->disabled(DiskRows::NO_PIPELINE) && !m.disk->files.bounded() &&
           m.disk->guesses_well(ahead);
}

// The experts that the router picks for what comes before attention: a guess, but where that is what it is
// given. The likeliest come first: those with most weight.
void Context::read_experts_ahead(const MixtureArgs& a) {
    if (!may_guess(a.mixture, a.tokens, 0)) return;
    const float *h, *weights = shares(a, &h, routed_.own);
    a.mixture.disk->read_ahead({heaviest_first(a, weights), 0});
}

// What the router of a layer to come picks for what this layer's experts read: they, and what lies between,
// add to that yet.
std::vector<int32_t> Context::likely_of(const Mixture& next, const MixtureArgs& a) {
    MixtureArgs guess = {next, nullptr, a.h, a.tokens, a.dim, a.sparsity, nullptr};
    const float* h;
    if (a.weights) {  // routers read the stream, before their layers' norms
        float* weights = grown(routed_.next.weights, a.tokens * next.experts.size());
        routed(next, a.h, a.tokens, weights);
        guess.weights = weights;
    } else {
        guess.weights = shares(guess, &h, routed_.next);
    }
    return heaviest_first(guess, guess.weights);
}

// While this layer computes, the disk has nothing else to do. A router is only asked where its guess may be
// read.
void Context::read_next_ahead(const MixtureArgs& a, ExpertReads& reads) {
    const Mixture* next = a.mixture.next;
    for (unsigned ahead = 1; next && ahead <= kLayersAhead; ahead++, next = next->next)
        if (may_guess(*next, a.tokens, ahead) && !reads.read_ahead(*next->disk, {likely_of(*next, a), ahead}))
            return;
}

void Context::read_ahead(const MixtureArgs& a) {
    const Mixture& m = a.mixture;
    if (m.disk) return read_experts_ahead(a);
    if (!can_read_ahead(*m.experts[0], a.tokens, a.sparsity)) return;
    const float *h, *weights = shares(a, &h, routed_.own);
    const std::shared_ptr<Fetches> reads =
        begin_reads(m.experts.data(), m.experts.size(), a.tokens, interrupted);
    early_ = m.experts[0]->disk->reader.early = reads;
    for (size_t e = 0; e < m.experts.size(); e++)
        if (const size_t n = tokens_of(a, e, h, weights))
            expect({*m.experts[e], nullptr, routed_.in.data(), n, a.dim, a.sparsity, nullptr, reads,
                    e * owners_of(*m.experts[e])});
}

}  // namespace tc
