// One call of an FFN in bundles: its scratch, and the steps its walks have in common. Through memory:
// bundles.cpp; through slots, where records on disk pass: disk_walk.cpp.
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

// A predictor at work on some tokens. All of a layer's codes are there before the first chunk asks for
// scores.
struct Context::Guess {
    const Predictor& p;
    Input x, code;                   // what `first` and `second` take
    float* values;                   // [tokens, rank], code as floats
    const uint8_t* named = nullptr;  // FFNArgs': somebody has guessed already
    size_t rank() const { return p.first.data ? p.first.rows : 0; }
    size_t bytes() const {
        return named ? 0
                     : rank() * p.first.stride + (p.second.rows - p.hot) * (p.second.stride + sizeof(float));
    }
};

// Lists lie in ids and rows: of cell c, a whole part of a chunk, counts[c] entries from c * cell on,
// ascending (or, of several cells, one after the other from the first one's place on).
struct Context::Walk {
    Walk(Context& context, const FFNArgs& args, size_t cell);

    void encode();  // inside a region, by every thread, first: the predictor's codes
    // Of cells [first, last): how many neurons are listed, those some token needs.
    size_t needed_neurons(size_t first, size_t last, int thread);
    size_t predicted_neurons(size_t begin, size_t end);
    size_t list_active(size_t first, size_t last);  // by their activations, which are in gate
    // gate[] or, of listed candidates, hidden[]: the activations of [begin, end). `gate_rows`: of the gate
    // matrix, or null.
    void activations(size_t begin, size_t end, const int32_t* gate_rows, int thread);
    // Entries [begin, begin + size): those a token needs move to the front, their values (at the entry's
    // place in h) to their neurons' in gate. How many there are.
    size_t keep_needed(size_t begin, size_t size, const float* h);
    void count_by_cell(size_t first, size_t last, size_t listed);
    void hidden_values(size_t begin, size_t end, int thread);  // h = act(gate) * up, for entries [begin, end)
    void weigh(size_t c);
    void factors_of_tokens();
    // Few tokens: y += what n entries from `at` on say; entries up to at + listed will be worked on next.
    void add_bundles(size_t at, size_t n, size_t listed, float* y, int thread);
    void join_partials(int thread);
    // Many: sum [tokens, c1 - c0] += the sums of chunks [first, last) in columns [c0, c1), chunk by chunk;
    // then x += it.
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
    const Input in;
    std::optional<Guess> guessed;
    Pieces code_rows;
    float *gate, *hidden;             // [tokens, n]: activations by neuron; values by entry
    int32_t *ids, *rows;              // [n]: neurons; their rows in up and down, which are ids but for slots
    std::optional<float> open_above;  // where a gate counts as open, if not where the activation says
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

}  // namespace tc
