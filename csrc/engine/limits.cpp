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

static size_t parts(size_t n, size_t size) { return (n + size - 1) / size; }

size_t scratch_bytes(const LayerShape& s, size_t tokens, size_t positions, size_t threads) {
    const size_t heads = s.heads * s.head_dim, qkv = (s.heads + 2 * s.kv_heads) * s.head_dim,
                 group = s.heads / s.kv_heads, widest = std::max({s.dim, heads, s.ffn_dim});
    constexpr size_t kSlack = 512;  // floats: inputs are padded to whole blocks and tiles
    // A residual branch and its norm; queries, keys and values; what attention answers.
    const size_t arrays = tokens * (2 * s.dim + qkv + heads);
    // The input of a matrix, at most as f32; of the FFN, gate and hidden values, and those as down's input.
    const size_t inputs = tokens * (std::max(s.dim, heads) + 64) + kPassTokens * 3 * (s.ffn_dim + kSlack);
    // Each thread's rows of weights, unpacked, and their products.
    const size_t unpacked = (widest + kSlack) * kMostPanelBytes / (8 * sizeof(float));
    const size_t panels =
        threads * (kMostPanelRows * std::max(kFloatChunk, unpacked) + kMostPanelRows * tokens);
    // A sum for each chunk and each of a few tokens; neuron ids and counts.
    const size_t partial = parts(s.ffn_dim, kChunk) * kFewTokens * s.dim + 2 * s.ffn_dim;
    const size_t tiles =
        threads * (2 * kPassTokens * kTileColumns + kTileRows * kTileColumns + s.dim / 8 + 4);
    // A predictor's input, its code (at most as wide), its marks.
    const size_t guess = kFewTokens * 3 * (s.dim + kSlack) + s.ffn_dim / 4;
    // Scores of a thread; sums of a span of positions, for each of up to 4 tasks a thread.
    const size_t rows = std::max(group, kQueryRows) * (s.head_dim + 2);
    const size_t scores = threads * (4 * kSpan + kQueryRows * (s.head_dim + 2) + s.head_dim);
    const size_t spans = 4 * threads * parts(positions, kSpan) * rows;
    // Of a mixture: its input, normed and gathered, an expert's answers, their sum.
    const size_t routed = s.experts > 1 ? kPassTokens * (4 * s.dim + 2 * s.experts + 2) : 0;
    return sizeof(float) * (arrays + inputs + panels + partial + tiles + guess + routed + scores + spans);
}

size_t disk_scratch_bytes(const LayerShape& s) {
    // slots, entries and places; slots and entries of gate rows
    return sizeof(float) * kPassTokens * s.dim + (5 * sizeof(int32_t) + 2 * sizeof(Wanted)) * s.ffn_dim;
}

}  // namespace tc
