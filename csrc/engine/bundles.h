// One call of an FFN in bundles: its scratch, and the steps that both of its walks take. bundles.cpp has the
// walk over neurons in memory, storage/disk_walk.cpp the walk over slots, through which neurons on disk pass.
#pragma once
#include <atomic>
#include <optional>

#include "model_ops.h"
#include "work.h"

namespace tc {

// Neurons are worked on, and summed, in chunks of kChunk: sum_c (sum_{i in c} h_i d_i), both in ascending
// order. That order is fixed by the layer alone, so threads can take chunks as they come and the bits stay
// the same. A smaller chunk balances better; a larger one spends less on its partial sum (dim floats, in the
// L2 cache).
constexpr size_t kChunk = 256;

// A predictor at work on the tokens of one call. Its codes are complete before the first chunk asks for
// scores.
struct Context::Guess {
    const Predictor& p;
    Input x, code;                   // the inputs of `first` and of `second`
    float* values;                   // [tokens, rank], code as floats
    const uint8_t* named = nullptr;  // FFNArgs::named: a guess that was made elsewhere
    size_t rank() const { return p.first.data ? p.first.rows : 0; }
    size_t bytes() const {
        return named ? 0
                     : rank() * p.first.stride + (p.second.rows - p.hot) * (p.second.stride + sizeof(float));
    }
};

// A cell is a part of a chunk, or a whole one: the neurons that a thread takes at a time. Lists of neurons
// lie in ids and rows, ascending: counts[c] entries for cell c, from place c * cell on. Where a thread takes
// several cells, their entries follow each other without gaps from the first cell's place on.
struct Context::Walk {
    // `which` of `of` walks in one region, over FFNs of one shape: each has its own part of the scratch.
    // given: what gate and up multiply with, made before; null: it is made.
    Walk(Context& context, const FFNArgs& args, size_t cell, size_t which = 0, size_t of = 1,
         const GateUpInputs* given = nullptr);

    void encode();  // the predictor's codes; every thread calls it first, inside the region
    // Lists the neurons of cells [first, last) that some token needs; returns how many.
    size_t needed_neurons(size_t first, size_t last, int thread);
    size_t predicted_neurons(size_t begin, size_t end);
    size_t list_active(size_t first, size_t last);  // the same, from activations that are in gate
    // Computes the activations of [begin, end): of neurons, into gate; where a predictor has listed
    // candidates, of entries, into hidden. gate_rows [n], or null: the row of the gate matrix for each.
    void activations(size_t begin, size_t end, const int32_t* gate_rows, int thread);
    // Moves those of entries [begin, begin + size) to the front that some token needs, where h is not 0 at
    // the entry's place, and copies h into gate by neuron. Returns how many entries are left.
    size_t keep_needed(size_t begin, size_t size, const float* h);
    void count_by_cell(size_t first, size_t last, size_t listed);
    void hidden_values(size_t begin, size_t end, int thread);  // h = act(gate) * up, for entries [begin, end)
    void weigh(size_t c);
    void factors_of_tokens();
    // Few tokens: adds the contributions of n entries from `at` on to y [tokens, dim]. The thread will work
    // on entries up to at + listed next: their rows are asked for meanwhile.
    void add_bundles(size_t at, size_t n, size_t listed, float* y, int thread);
    void join_partials(int thread);
    // Many tokens: adds the contributions of chunks [first, last) to columns [c0, c1), chunk by chunk, in sum
    // [tokens, c1 - c0]; join_columns adds that to x.
    void add_columns(size_t c0, size_t c1, size_t first, size_t last, float* sum, int thread);
    void join_columns(size_t c0, size_t c1, const float* sum);
    FFNCounts totals() const;

    bool surviving_up_apart() const { return skip && a.ffn.up_relu && a.ffn.up.data; }
    float* partial_of(size_t chunk) const { return partial + chunk * tokens * dim; }

    Context& ctx;
    const Kernels& k;
    const FFNArgs& a;
    const size_t n, dim, tokens, cell, cells, chunks;
    const int threads;
    const bool skip;    // neurons whose activation is zero
    const bool normed;  // all activations are known before down begins
    const bool few;     // each chunk leaves a partial sum per token
    const GateUpInputs in;
    std::optional<Guess> guessed;
    Pieces code_rows;
    float *gate, *hidden;             // [tokens, n]: activations by neuron; values by entry
    int32_t *ids, *rows;              // [n]: neurons; their rows in up and down, which are ids but for slots
    std::optional<float> open_above;  // a threshold for gates in place of the activation's
    const int32_t* gate_place =
        nullptr;     // [n]: the gate matrix's row of each neuron, where it is not the neuron
    uint8_t* marks;  // [n]: which neurons go into a list
    size_t* counts;  // [cells]
    float* partial;  // few: [chunks, tokens, dim]; many: a tile per thread, [threads, tokens, kTileColumns]
    float *tiles, *factors, *squares,
        *scale;  // squares [cells, tokens], then the sub-norm's factor of each token
    uint8_t* scratch;
    std::atomic<size_t> active{0}, rows_read{0}, gates{0};
};

// Of few tokens: chunks [first, last) do everything, so that each row in them knows what memory to ask for
// next.
void add_chunks(Context::Walk& w, size_t first, size_t last, int thread);

}  // namespace tc
