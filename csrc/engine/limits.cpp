#include "limits.h"

#include <algorithm>

#include "bundles.h"
#include "storage/fetches.h"
#include "storage/store.h"

namespace tc {

Limits limits() {
    return {kPassTokens,    kFewTokens, kChunk,        kStreamSlots,    kSlotAlignment,    kArenaPadding,
            kMeasuredBytes, kPageRun,   kMostGapBytes, kSlotTableBytes, kRecordTableBytes, LFU::kHalfLife};
}

constexpr size_t kSlack = 512;  // floats: inputs are padded to whole blocks and tiles
static size_t parts(size_t n, size_t size) { return (n + size - 1) / size; }

// Of experts that are plain matrices, and of a shared FFN (experts.cpp): inputs, activations, products.
static size_t plain_experts(const LayerShape& s, size_t threads) {
    constexpr size_t kPadded = 192;  // int8 is padded to 512 columns
    const size_t entries = s.bundles ? 0 : kPassTokens * s.active, all = kPassTokens + kMostTileTokens,
                 groups = std::min(s.experts, entries / (kFewTokens + 1)),
                 rows = entries + groups * (kMostTileTokens - 1);  // each expert's begin with a tile
    // All tokens': int8 in rows and in lanes, besides f32 in lanes. Gathered: gate's and up's.
    const size_t int8 = s.dim / 8 * 3 + kPadded, forms = s.shared_dim ? 3 : 1,
                 inputs = all * (s.dim + kPadded + 2 * forms * int8) + rows * (s.dim + int8);
    const size_t activations = rows * (s.ffn_dim + kPadded) + all * (s.shared_dim + kPadded);
    const size_t widest = std::max({s.dim, s.ffn_dim, s.shared_dim}),
                 products = threads * 2 * kPassTokens * std::min(widest, kExpertRows),
                 visits = (s.experts + 1) * sizeof(Visit) / sizeof(float) + 4 * (entries + kPassTokens);
    return inputs + activations + products + visits;
}

// Of one FFN, or of experts in bundles.
static size_t one_ffn(const LayerShape& s, size_t threads) {
    const size_t ffn = std::max(s.ffn_dim, s.dense_dim);
    // Gate and hidden values, and those as down's input.
    const size_t values = kPassTokens * 3 * (ffn + kSlack);
    // A sum for each chunk and each of a few tokens, or each of a token's experts; neuron ids and counts.
    const size_t together = s.experts > 1 && s.bundles ? s.active : 1;
    const size_t partial = parts(ffn, kChunk) * std::max(kFewTokens, together) * s.dim + 2 * together * ffn;
    // Of bundles alone: sums of many tokens, unpacked rows, factors.
    const size_t tiles =
        !s.bundles
            ? 0
            : threads * (2 * kPassTokens * kTileColumns + kTileRows * kTileColumns + bundle_factors(s.dim));
    // A predictor's input, its code (at most as wide), its marks.
    const size_t guess = kFewTokens * 3 * (s.dim + kSlack) + together * (ffn / 4) + 2 * (together - 1);
    return values + partial + tiles + guess;
}

static size_t ffns(const LayerShape& s, size_t threads) {
    const size_t one = one_ffn(s, threads);
    if (s.experts == 1) return one;
    // Its input, normed and gathered, an expert's answers, their sum, the router's answer. What the next
    // layer's router is asked, and says.
    const size_t routed = kPassTokens * (4 * s.dim + 2 * s.experts + 2) + kFewTokens * (s.dim + s.experts);
    return routed + (s.bundles || s.dense_dim ? one : 0) +
           (!s.bundles || s.shared_dim ? plain_experts(s, threads) : 0);
}

// Of a latent attention: a pass's first products and their norm, each head's query and its input, queries for
// latents, what they find and its input.
static size_t latents(const LayerShape& s, size_t tokens) {
    constexpr size_t kPadded = 192;
    const size_t rope = s.head_dim - s.rank, heads = s.heads * (s.nope + rope),
                 pass = std::min(tokens, kPassTokens),
                 input = (pass + kMostTileTokens) * s.heads * (std::max(s.nope, s.rank) + kPadded);
    const size_t arrays = (s.lower + s.head_dim) + s.lower + heads + (s.heads + 1) * s.head_dim +
                          s.heads * (s.rank + s.value) + std::max({s.dim, s.lower, s.heads * s.value});
    return pass * arrays + input;
}

size_t scratch_bytes(const LayerShape& s, size_t tokens, size_t positions, size_t threads) {
    const size_t heads = s.heads * (s.rank ? s.value : s.head_dim),
                 qkv = s.rank ? 0 : (s.heads + 2 * s.kv_heads) * s.head_dim, group = s.heads / s.kv_heads,
                 answer = std::max(heads, s.mixer_inner),
                 widest =
                     std::max({s.dim, answer, s.ffn_dim, s.shared_dim, s.dense_dim, s.lower, s.nope, s.rank});
    // A residual branch and its norm; queries, keys and values, or a mixer's; what these answer; gates.
    const size_t gates = std::max(s.gated ? heads : 0, 2 * s.mixer_heads),
                 arrays = tokens * (2 * s.dim + std::max(qkv, s.mixer_in) + answer + gates);
    // The input of a matrix, at most as f32.
    const size_t inputs = tokens * (std::max(s.dim, answer) + 64);
    // Each thread's rows of weights, unpacked, and their products.
    const size_t unpacked = (widest + kSlack) * kMostPanelBytes / (8 * sizeof(float));
    const size_t panels =
        threads * (kMostPanelRows * std::max(kFloatChunk, unpacked) + kMostPanelRows * tokens);
    // Scores of a thread; sums of a span of positions, for each of up to 4 tasks a thread.
    const size_t rows = std::max(group, kQueryRows) * (s.head_dim + 2);
    const size_t scores = threads * (4 * kSpan + kQueryRows * (s.head_dim + 2) + s.head_dim);
    const size_t spans = 4 * threads * parts(positions, kSpan) * rows;
    const size_t more = threads * s.mixer_ring + (s.rank ? latents(s, tokens) : 0);
    return sizeof(float) * (arrays + inputs + panels + ffns(s, threads) + scores + spans + more);
}

size_t disk_scratch_bytes(const LayerShape& s) {
    // slots, entries and places; slots and entries of gate rows
    return sizeof(float) * kPassTokens * s.dim + (5 * sizeof(int32_t) + 2 * sizeof(Wanted)) * s.ffn_dim;
}

}  // namespace tc
