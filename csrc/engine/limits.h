// The core's own numbers, for those who plan with them: Python asks, and keeps no copy (`_native.limits()`).
#pragma once
#include <cstddef>

namespace tc {

constexpr size_t kMeasuredBytes = size_t(1) << 20;

struct Limits {
    size_t pass_tokens;         // tokens of an FFN that are computed together; a longer prompt takes turns
    size_t few_tokens;          // up to so many tokens a predictor is asked, and a neuron's rows are skipped
    size_t chunk_neurons;       // neurons whose contributions are added up before the sum over chunks
    size_t stream_slots;        // slots of a pool that belong to the running call, at its end
    size_t slot_alignment;      // bytes: offset and stride of a slot pool are multiples of it
    size_t arena_padding;       // bytes past the end of an arena that a kernel may read
    size_t measured_bytes;      // the least that `read_bandwidth` measures, and what a thread takes at a time
    size_t page_run;            // pages of a kv head that lie side by side in a layer's keys or values
    size_t gap_bytes;           // two reads of a disk are one where at most so many bytes lie between
    size_t slot_table_bytes;    // tables beside each slot of a layer's cache, at most
    size_t record_table_bytes;  // tables for each record that can be on disk, at most, Python's included
    float half_life;            // LFU: calls after which a use counts half
};
Limits limits();

// What the scratch of a model's layers depends on; of a mixture, ffn_dim is an expert's, of which a token
// takes `active`; they are bundles, or plain matrices. experts: 1 where there is no router. shared_dim,
// dense_dim: neurons of the FFN that every token takes besides, of layers with one plain FFN; 0: none.
struct LayerShape {
    size_t dim, ffn_dim, experts, active, heads, kv_heads, head_dim, shared_dim, dense_dim;
    bool bundles;
    bool gated = false;  // Is what attention gives multiplied by a gate?
    // Of recurrent layers: what their first matrix gives, what their last one takes, heads, and the inputs of
    // a convolution that a thread works on.
    size_t mixer_in = 0, mixer_inner = 0, mixer_heads = 0, mixer_ring = 0;
    size_t lower = 0, nope = 0, rank = 0,
           value = 0;  // of a latent attention, as `Latent` has them; rank 0: none
};

// Bytes of scratch that a Context takes at most in calls of up to `tokens` tokens over up to `positions`
// positions, with `threads` threads: the same on every processor, whatever its kernels need. Never less than
// Context::scratch_bytes (a test compares them).
size_t scratch_bytes(const LayerShape& shape, size_t tokens, size_t positions, size_t threads);

// Bytes that calls over records on disk take besides: the sums of many tokens, and, for each neuron, what is
// wanted of it and where it is.
size_t disk_scratch_bytes(const LayerShape& shape);

}  // namespace tc
