// The ops of one decoder layer over a thread pool: what Python calls, a few per layer. Shapes as in
// kernels.h; arguments are validated by bindings.cpp. Nothing here knows a model.
#pragma once
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/kernels.h"
#include "storage/fetches.h"
#include "threads.h"

namespace tc {

// Scratch begins at a cache line: a load of 64 bytes that straddles two takes both of a cycle's turns (q4_0
// with 4 tokens: 3.9 against 2.8 ns for 512 weights).
template <class T>
struct AtLine {
    using value_type = T;
    AtLine() = default;
    template <class U>
    AtLine(const AtLine<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
    bool operator==(const AtLine&) const { return true; }
    bool operator!=(const AtLine&) const { return false; }
};
template <class T>
using Scratch = std::vector<T, AtLine<T>>;

// RMSNorm, or LayerNorm with `layer`; weight null: no norm at all. bias may be null.
struct Norm {
    const float *weight, *bias;
    float eps;
    bool layer;
};

// x wT + bias; bias may be null.
struct Linear {
    Matrix weight;
    const float* bias;
};

// How the heads of a layer attend.
struct Heads {
    size_t n, n_kv, dim, window;   // window 0: all positions
    float scale, softcap;          // scores: scale * q.k, then cap * tanh(score / cap); softcap 0: none
    const float *q_norm, *k_norm;  // [dim], of an RMS norm of each head before rope; or null
    float norm_eps;
};
// The tokens of a call: the same for every layer.
struct Step {
    const int32_t *positions, *sequence, *table;  // [tokens], [tokens], [sequences, table_width]
    const float *cos, *sin;  // [tokens, rotary/2], or null: the first `rotary` elements turn
    size_t tokens, block, table_width, rotary;
};

// How a half's result joins the residual stream: x += scale * norm(y).
struct Join {
    Norm norm;
    float scale;
    bool plain() const { return !norm.weight && scale == 1; }
};

// A layer's two halves, fixed when a model is loaded.
struct Attention {
    Norm norm;
    Linear qkv, out;
    Heads heads;
    Norm sub_norm;  // of what `out` takes
    Join join;
};

// Guesses from x which neurons are active: those with score >= threshold, score = second . f(first . x), or
// second . x.
struct Predictor {
    Matrix first;            // [rank, dim], or data null
    Matrix second;           // [neurons, rank or dim]; data null: no predictor
    const float* threshold;  // [neurons]
    size_t hot;              // neurons [0, hot) are computed without asking
    bool relu;               // f: ReLU, else the identity
};

struct FFN {
    Norm norm;
    Linear gate;  // [neurons, dim]
    Matrix up;    // [neurons, dim], data null when ungated
    Matrix down;  // [neurons, dim] of bundles, else [dim, neurons]
    const float* down_bias;
    Activation activation;
    float threshold;
    bool up_relu, bundles;
    Norm sub_norm;  // of the activations, before down; of bundles: an RMS norm without bias
    Join join;
    Predictor predictor;                             // of bundles only
    DiskRows *disk = nullptr, *gate_disk = nullptr;  // where rows of up and down, of gate too, are slots
    size_t neurons() const { return disk ? disk->neurons : gate.weight.rows; }
};

// Experts, of which a router picks `active` for each token: their FFNs' sum, weighted by the softmax of those
// logits.
struct Mixture {
    Norm norm;                        // of what router and experts see
    Matrix router;                    // [experts, dim]
    std::vector<const FFN*> experts;  // all of one shape, without norms or joins of their own
    size_t active;
    Join join;
    size_t neurons() const { return experts[0]->neurons(); }  // of an expert
};

constexpr size_t kQueryRows = 16;    // queries at a time: their scores of a span are 32 KiB
constexpr size_t kPassTokens = 256;  // tokens of an FFN in one pass: bounds the scratch

struct AttentionArgs {
    Heads heads;
    Step step;
    uint16_t *k, *v;  // f16 pages: k [pages, n_kv, dim, block], v [pages, n_kv, block, dim]
    float* qkv;       // [tokens, (n + 2 n_kv) * dim]; q and k are rotated in place
    float* out;       // [tokens, n * dim]
};
// Which neurons are computed: all; those whose gate is not zero; of the predicted ones, those whose gate is
// not zero.
enum Sparsity : int32_t { OFF = 0, EXACT = 1, PREDICT = 2, N_SPARSITIES = 3 };
struct FFNArgs {
    const FFN& ffn;
    float* x;  // [tokens, dim]; x += FFN(norm(h)). h may be x
    const float* h;
    size_t tokens, dim;
    Sparsity sparsity;
    float* record;  // [tokens, neurons], or null: takes h, what down is multiplied with (before sub_norm); 0
                    // where skipped
    std::shared_ptr<Fetches> reads = nullptr;  // of an expert on disk: its layer's, and its first owner there
    size_t owner = 0;
    const uint8_t* named = nullptr;  // [tokens, ceil(neurons / 8)] bits, low first: what PREDICT takes in
                                     // place of a predictor's guess
};
struct MixtureArgs {
    const Mixture& mixture;
    float* x;  // as FFNArgs'
    const float* h;
    size_t tokens, dim;
    Sparsity sparsity;
    float* record;                   // [tokens, experts * neurons], or null
    const float* weights = nullptr;  // [tokens, experts]: how much of each a token gets, 0: it does not go
                                     // there; null: the router says
};
struct FFNCounts {
    size_t active = 0;           // (token, neuron) pairs whose activation is not zero
    size_t rows = 0;             // rows of up and down that were read
    size_t rows_dense = 0;       // rows of up and down that a pass without skipping reads
    size_t gates = 0;            // gate rows that were read
    size_t predictor_bytes = 0;  // of predictors that were read
    FFNCounts& operator+=(const FFNCounts& c) {
        active += c.active, rows += c.rows, rows_dense += c.rows_dense;
        gates += c.gates, predictor_bytes += c.predictor_bytes;
        return *this;
    }
};

class Pieces;
class Context {
 public:
    explicit Context(int threads, const Kernels* kernels) : pool(threads), k(*kernels) {}

    void embed(const Matrix& table, const int32_t* ids, size_t tokens, float* out);
    void norm(const Norm& norm, const float* x, size_t tokens, size_t dim, float* out);
    // out = norm(x) wT + bias, or out += when `add`.
    void matmul(const Linear& w, const Norm& norm, const float* x, size_t tokens, float* out, bool add);
    void attention(const AttentionArgs& a);
    // x += layer.out(attention(layer.qkv(norm(h)))). h may be x.
    void attention_add(float* x, const float* h, const Attention& layer, const Step& step, uint16_t* k,
                       uint16_t* v);
    FFNCounts ffn_add(const FFNArgs& a);
    // The same with a mixture in place of the one FFN. Counts are of all experts' neurons.
    FFNCounts moe_add(const MixtureArgs& a);
    // Begin to read what ffn_add or moe_add will want from disk: x, record are not looked at; h is the
    // residual stream before attention. Changes when reads happen, not what comes out.
    void read_ahead(const FFNArgs& a);
    void read_ahead(const MixtureArgs& a);
    size_t scratch_bytes() const;  // that calls have taken so far
    struct Walk;                   // one call of an FFN in bundles

    Pool pool;
    const Kernels& k;
    bool (*interrupted)() =
        nullptr;  // asked by the calling thread while it waits for a disk: should the call end at once?
    std::mutex one_call;  // held by whoever calls an op: the scratch below belongs to one call at a time

 private:
    struct Queries;  // tokens that are attended to together

    Input input(const Matrix& w, const Norm& norm, const float* x, size_t tokens, Scratch<uint8_t>& buffer);
    void linear(const Linear& w, const Input& in, float* out, bool add);
    void join(const Join& how, float* y, size_t tokens, size_t dim, float* x);
    FFNCounts moe_block(const MixtureArgs& a);
    const float* routed(const MixtureArgs& a, const float** h);
    size_t tokens_of(const MixtureArgs& a, size_t e, const float* h, const float* weights);
    FFNCounts expert_add(const MixtureArgs& a, size_t e, const float* h, const float* weights, float* sum,
                         const std::shared_ptr<Fetches>& reads);
    void expect(const FFNArgs& a);
    FFNCounts dense_ffn(const FFNArgs& a);
    FFNCounts bundle_ffn(const FFNArgs& a);
    struct DiskWalk;
    FFNCounts disk_ffn(const FFNArgs& a);
    struct Guess;
    Guess guess(const FFNArgs& a, const Input& in);
    uint8_t* panels(size_t bytes);  // of scratch for each thread
    std::vector<Queries> queries(const AttentionArgs& a) const;
    void attend(const AttentionArgs& a, const Queries& q, size_t head, size_t begin, size_t end,
                float* scores, float* into);

    // Scratch that grows to the largest step seen and is reused; one call at a time, so one set is enough.
    Scratch<uint8_t> input_, hidden_input_, panels_, guess_input_, code_input_, marks_;
    Scratch<float> code_, normed_, gate_, hidden_, partial_, sums_, scores_, tiles_, factors_, qkv_,
        attended_, branch_, scales_;
    Scratch<int32_t> ids_, slots_, entries_, places_, gate_slots_, gate_entries_;
    Scratch<Wanted> wanted_, gate_wanted_;
    struct Routed {  // a mixture's: what all experts see, which of them a token goes to, an expert's tokens,
                     // the sum
        Scratch<float> normed, logits, weights, in, out, sum, record;
        Scratch<size_t> tokens;
    } routed_;
    Scratch<size_t> counts_;
    size_t panel_stride_ = 0;
    std::weak_ptr<Fetches>
        early_;  // reads that go on while something else is computed, until their call takes them over
};

}  // namespace tc
