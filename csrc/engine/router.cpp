// The rule of a router, for one token. The specification is `route` of thermocline/model/activations.py.
#include "router.h"

#include <math.h>

#include <algorithm>

namespace tc {

float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static bool above(float a, float b) { return a > b || (isnan(a) && !isnan(b)); }
static float largest(const float* values, const int32_t* at, size_t n) {
    float top = values[at[0]];
    for (size_t i = 1; i < n; i++)
        if (above(values[at[i]], top)) top = values[at[i]];
    return top;
}

// best [n]: where the n largest of `count` values are, the largest first. One pass: of 128 values, most are
// compared once, with the least of those held so far (8 passes over 128 logits took a microsecond a layer).
static void find_best(const float* values, size_t count, size_t n, int32_t* best) {
    size_t held = 0;
    for (size_t i = 0; i < count; i++) {
        if (held == n && !above(values[i], values[best[n - 1]])) continue;
        size_t at = held < n ? held++ : n - 1;
        for (; at > 0 && above(values[i], values[best[at - 1]]); at--) best[at] = best[at - 1];
        best[at] = int32_t(i);
    }
}

static void score_experts(RouterRule::Score score, const float* logits, size_t experts, float* scores) {
    if (score == RouterRule::SIGMOID) {
        for (size_t e = 0; e < experts; e++) scores[e] = sigmoid(logits[e]);
        return;
    }
    std::copy_n(logits, experts, scores);
    if (score == RouterRule::LOGITS) return;
    int32_t first;
    find_best(logits, experts, 1, &first);
    float sum = 0;
    for (size_t e = 0; e < experts; e++) sum += scores[e] = expf(logits[e] - logits[first]);
    for (size_t e = 0; e < experts; e++) scores[e] /= sum;
}

// Experts of all but the best groups become the least.
static void keep_best_groups(const RouterRule& rule, size_t experts, float* wanted) {
    const size_t each = experts / rule.groups;
    float scores[kMostExperts];
    int32_t best[kMostExperts];
    for (size_t g = 0; g < rule.groups; g++) {
        const float* mine = wanted + g * each;
        find_best(mine, each, std::min<size_t>(2, each), best);
        scores[g] = mine[best[0]] + (rule.group_rule == RouterRule::SUM2 ? mine[best[1]] : 0.0f);
    }
    find_best(scores, rule.groups, rule.groups_kept, best);
    bool kept[kMostExperts] = {};
    for (size_t i = 0; i < rule.groups_kept; i++) kept[best[i]] = true;
    for (size_t g = 0; g < rule.groups; g++)
        if (!kept[g]) std::fill_n(wanted + g * each, each, -INFINITY);
}

// chosen: ascending, in which order sums are made.
static void weigh(const RouterRule& rule, const float* logits, const float* scores, const int32_t* chosen,
                  size_t active, float* weights) {
    const float top = largest(logits, chosen, active);
    float sum = 0;
    for (size_t i = 0; i < active; i++) {
        const size_t e = size_t(chosen[i]);
        weights[e] = rule.weights == RouterRule::CHOSEN ? expf(logits[e] - top) : scores[e];
        sum += weights[e];
    }
    const float by = rule.epsilon_floor ? std::max(sum, rule.epsilon) : sum + rule.epsilon;
    for (size_t i = 0; i < active; i++) {
        float& w = weights[chosen[i]];
        w = (rule.weights == RouterRule::SCORE ? w : w / by) * rule.scale;
    }
}

// SparseMixer's answer (arXiv 2409.12136). chosen: the best first.
static void mix(const RouterRule& rule, const float* logits, size_t experts, const int32_t* chosen,
                size_t active, float* weights) {
    for (size_t i = 0; i < active; i++) {
        const float top = logits[chosen[i]];
        float sum = 0;
        for (size_t e = 0; e < experts; e++) {
            const bool taken = std::find(chosen, chosen + i, int32_t(e)) != chosen + i;
            const float apart = (top - logits[e]) / std::max(fabsf(logits[e]), top);
            if (!taken && !(apart > 2 * rule.epsilon)) sum += expf(logits[e] - top);
        }
        weights[chosen[i]] = rule.scale / sum;
    }
}

void route(const RouterRule& rule, const float* logits, const float* selection_bias, size_t experts,
           size_t active, float* weights) {
    float scores[kMostExperts], wanted[kMostExperts];
    int32_t chosen[kMostExperts];
    // Where nothing is added to scores, they follow the logits, which are exact.
    const bool by_score = selection_bias || rule.groups > 1;
    if (by_score || rule.weights != RouterRule::CHOSEN) score_experts(rule.score, logits, experts, scores);
    for (size_t e = 0; by_score && e < experts; e++)
        wanted[e] = scores[e] + (selection_bias ? selection_bias[e] : 0);
    if (rule.groups > 1) keep_best_groups(rule, experts, wanted);
    find_best(by_score ? wanted : logits, experts, active, chosen);
    std::fill_n(weights, experts, 0.0f);
    if (rule.weights == RouterRule::MIXED) {
        mix(rule, logits, experts, chosen, active, weights);
        return;
    }
    std::sort(chosen, chosen + active);
    weigh(rule, logits, scores, chosen, active, weights);
}

}  // namespace tc
