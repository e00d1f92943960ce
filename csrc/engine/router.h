// How a mixture's router picks experts for a token and weighs what they give: model/spec.py's Router.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tc {

constexpr size_t kMostExperts = 1024;  // of a mixture: a token's scores are on the stack

struct RouterRule {
    enum Score : int32_t { SOFTMAX = 0, SIGMOID = 1, LOGITS = 2, N_SCORES = 3 };
    // Softmax of the chosen experts' logits; their scores; their scores by the sum of them; MIXED: of each in
    // turn, its share of the softmax of those not chosen before it that are nearly as good: within 2 epsilon.
    enum Weights : int32_t { CHOSEN = 0, SCORE = 1, NORMALISED = 2, MIXED = 3, N_WEIGHTS = 4 };
    enum GroupRule : int32_t { MAX = 0, SUM2 = 1, N_GROUP_RULES = 2 };  // SUM2: the sum of its two best
    Score score = SOFTMAX;
    Weights weights = CHOSEN;
    float epsilon = 0;                   // added to the sum that divides
    bool epsilon_floor = false;          // or else the least that it is
    float scale = 1;                     // of the weights
    size_t groups = 1, groups_kept = 1;  // of consecutive experts; those chosen from
    GroupRule group_rule = MAX;
    bool scales_input = false;  // weights multiply an expert's input in place of its answer
    // Whether the weights of a token's experts have one sum, whichever experts it has.
    bool normalises() const { return weights == CHOSEN || weights == NORMALISED; }
};

// weights [experts]: how much of each a token gets, 0 for all but the `active` best. Of equal ones the lower
// expert is taken; a NaN counts as the largest, so that it shows in the result. A chosen expert whose share
// is too small for a float gets 0 as well. selection_bias [experts], or null: added to scores for the choice.
void route(const RouterRule& rule, const float* logits, const float* selection_bias, size_t experts,
           size_t active, float* weights);

float sigmoid(float x);

}  // namespace tc
