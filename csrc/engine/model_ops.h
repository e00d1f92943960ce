// The ops of one decoder layer over a thread pool: Python makes a few of these calls a layer. Matrices are as
// in kernels.h, arrays f32 in C order unless said otherwise. bindings.cpp validates arguments: nothing is
// checked here. Only calls that read from disk fail, with a DiskError.
#pragma once
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/kernels.h"
#include "router.h"
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

class DiskExperts;  // storage/disk_experts.h
class ExpertReads;
class DenseStream;  // storage/dense_stream.h

// x wT + bias; bias may be null.
struct Linear {
    Matrix weight;
    const float* bias;
};

// Matrices of one width, one under the other, with a bias for all their rows, or null.
constexpr size_t kStacked = 4;  // q, k and v; of a DeltaNet qkv, z, beta and alpha
struct Stack {
    std::vector<Matrix> parts;  // 1 to kStacked
    const float* bias;
    size_t rows() const {
        size_t n = 0;
        for (const Matrix& m : parts) n += m.rows;
        return n;
    }
    size_t cols() const { return parts[0].cols; }
};

// How the heads of a layer attend.
struct Heads {
    size_t n, n_kv, dim, window;   // window 0: all positions
    float scale, softcap;          // scores: scale * q.k, then cap * tanh(score / cap); softcap 0: none
    const float *q_norm, *k_norm;  // [dim], of an RMS norm of each head before rope; or null
    float norm_eps;
    const float* sinks =
        nullptr;               // [n]: a score that each head's softmax has besides, without a value; or null
    bool whole_norms = false;  // of all heads as one instead: [n * dim], [n_kv * dim]
    bool norms_last = false;   // behind rope
    const float* v_norm = nullptr;  // [dim], of each head's values; or null
    bool shares = false;            // it has queries alone: keys and values are what an earlier layer stored
    // Returns the size of a token's q, k and v.
    size_t width() const { return (n + (shares ? 0 : value_dim ? n_kv : 2 * n_kv)) * dim; }
    bool chunked = false;  // attend to the positions of the same `window` ones, counted from the first
    // q is multiplied by 1 + temperature * log(1 + floor((position + 1) / temperature_span)).
    float temperature = 0, temperature_span = 1;
    // Returns the first position that a token with `end` - 1 before it attends to.
    size_t first(size_t end) const {
        if (!window) return 0;
        return chunked ? (end - 1) / window * window : end > window ? end - window : 0;
    }
    bool own_norms = false;  // LayerNorms, every head's with its own weights: [n * dim], [n_kv * dim]
    // Keys are latents [dim], of which the first `value_dim` elements are the value; 0: keys and values.
    size_t value_dim = 0;
    size_t values() const { return value_dim ? value_dim : dim; }
    size_t group() const { return n / n_kv; }
};
// The tokens of a call: the same for every layer.
struct Step {
    const int32_t *positions, *sequence, *table;  // [tokens], [tokens], [sequences, table_width]
    const float *cos, *sin;  // [tokens, rotary/2], or null: the first `rotary` elements turn
    size_t tokens, block, table_width, rotary;
    // [sequences]: the slot of each one's state before these tokens, -1: there is none yet; and after them.
    // Or null: no layer has a state.
    const int32_t *state_from = nullptr, *state_to = nullptr;
    // [tokens]: where what a token attends to ends, for an encoder, whose tokens see later ones; null: behind
    // itself.
    const int32_t* ends = nullptr;
    size_t end(size_t t) const { return ends ? size_t(ends[t]) : size_t(positions[t]) + 1; }
};

// How a half's result joins the residual stream: x = after * (x + scale * norm(y)).
struct Join {
    Norm norm;
    float scale, after = 1;
    bool plain() const { return !norm.weight && scale == 1 && after == 1; }
};

// Multi-head latent attention, absorbed: every head's query becomes one for the latents, [rank + rope], which
// all heads share, and what it finds there, [rank], becomes the head's output. eps: of both norms.
struct Latent {
    size_t nope, rope, rank, value;  // of a head's query, of a latent, and of a head's output
    Norm q_norm, kv_norm;            // RMS norms [q_b.cols], [rank]
    Matrix q_b;                      // [heads * (nope + rope), low rank], or data null: queries come directly
    Matrix k_b, v_b;                 // [heads * rank, nope], [heads * value, rank]
};

// A layer's two halves, fixed when a model is loaded.
struct Attention {
    Norm norm;
    Stack qkv;  // of a latent attention: q_b's input, or the queries; the latent
    Linear out;
    Heads heads;
    Norm sub_norm;  // of what `out` takes
    Join join;
    Matrix gate = {};    // [n * dim, dim]: what attention gives is multiplied by sigmoid(gate . norm(h)); or
                         // data null
    Latent latent = {};  // k_b.data null: none
};

// Mixes tokens in place of attention, through a state that each token changes. What `in` gives of a token:
//   DELTANET    q, k [groups * rows each], v, z [heads * cols each], beta, alpha [heads each]
//   MAMBA2      z, x [heads * cols each], B, C [groups * rows each], dt [heads]
//   SHORT_CONV  B, C, x [channels each]
// A convolution goes over DELTANET's q, k and v, MAMBA2's x, B and C, and SHORT_CONV's B * x. A state is what
// it has seen last, [width - 1, channels], then for each head [rows, cols], kStateColumns columns at a time.
constexpr size_t kStateColumns = 32;   // [128, 32] f32 are 16 KiB: they stay in L1 from token to token
constexpr size_t kMostConvolved = 64;  // tokens that a convolution sees
struct Mixer {
    enum Kind : int32_t { DELTANET = 0, MAMBA2 = 1, SHORT_CONV = 2, N_KINDS };
    Kind kind;
    Norm norm;
    Stack in;
    Linear out;
    Join join;
    size_t width, channels;
    const float *conv, *conv_bias;  // [width, channels], [channels] or null
    // Head h reads and writes with q and k, or B and C, of group h / (heads / groups); `tiled`: h % groups.
    size_t heads, groups, rows, cols;
    bool tiled;
    const float *decay, *step_bias, *skip;  // [heads]; skip: MAMBA2's D
    const float* gated_norm;  // DELTANET: [cols], of each head; MAMBA2: [heads * cols], each group by itself
    float norm_eps;
    const float *q_weight, *k_weight;  // DELTANET: [rows], of the norms of q and k
    size_t inner() const { return kind == SHORT_CONV ? channels : heads * cols; }
    size_t in_rows() const {
        return kind == SHORT_CONV ? 3 * channels
                                  : channels + inner() + (kind == DELTANET ? 2 * heads : heads);
    }
    size_t conv_floats() const { return (width - 1) * channels; }
    size_t state_floats() const { return conv_floats() + heads * rows * cols; }
};
struct MixerArgs {
    const Mixer& mixer;
    const Step& step;
    float* states;  // [slots, state_floats]
    float* in;      // [tokens, in_rows]; worked on in place
    float* out;     // [tokens, inner]
};

// Guesses from the FFN's input x which neurons are active: those with score >= threshold, where score is
// second . f(first . x), or second . x without `first`.
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
    Matrix down;  // [neurons, dim] of bundles, else [dim, neurons]; each of the three has its own format
    const float* down_bias;
    Activation activation;
    float threshold;
    bool up_relu, bundles;
    Norm sub_norm;  // of the activations, before down; of bundles: an RMS norm without bias
    Join join;
    Predictor predictor;  // of bundles only
    // Where neurons are on disk, rows of up and down are the slots of disk->pool(). With gate_disk, too, rows
    // of gate are the slots of its pool.
    DiskRows *disk = nullptr, *gate_disk = nullptr;
    const float* up_bias = nullptr;  // [neurons], or null: of plain matrices only
    float alpha = 1, limit = 0;      // SWIGLU_OAI's
    // Of plain matrices that are too large for memory: gate, up and down are their first rows; the others
    // come from here, as its layer `stream_layer`.
    DenseStream* stream = nullptr;
    size_t stream_layer = 0;
    Gating gating() const { return {activation, threshold, up_relu, alpha, limit}; }
    size_t neurons() const { return disk ? disk->neurons : stream ? down.cols : gate.weight.rows; }
};

// A router picks `active` of the experts for each token. The result is the sum of their FFNs, weighted as the
// rule says, then that of the shared one.
struct Mixture {
    Norm norm;                        // of the input, which router and experts have in common
    Linear router;                    // [experts, dim]; data null: weights are given
    std::vector<const FFN*> experts;  // all of one shape, without norms or joins of their own
    size_t active;
    Join join;
    RouterRule rule;
    const float* selection_bias;  // [experts], or null
    const FFN* shared = nullptr;  // takes every token; as plain matrices in memory, or null
    Matrix shared_router = {};    // f32 [1, dim]: shared is multiplied by sigmoid(w . x); or data null
    Norm router_norm = {};        // of the router's own input, the stream itself; or none: it is the experts'
    const float* expert_scale = nullptr;  // [experts]: times the weights; or null
    // The shared FFN has a norm of its own input, the stream, and a join with a norm; the experts' sum has
    // one too. Or none.
    Norm experts_norm = {};
    bool apart() const { return experts_norm.weight != nullptr; }
    // Where experts are on disk: matrices say where they lie in slot 0.
    DiskExperts* disk = nullptr;
    const Mixture* next = nullptr;  // of the layer behind: it and those behind it are guessed beside this one
    size_t neurons() const { return experts[0]->neurons(); }  // of an expert
};

// What a token brings to a layer, which the stream gates: x = after * (x + norm(down(act(gate x) * given))).
struct PerLayer {
    Matrix gate, down;  // [width, dim], [dim, width]
    Activation activation;
    Join join;
};

constexpr size_t kQueryRows = 16;    // queries at a time: their scores of a span are 32 KiB
constexpr size_t kQueryTile = 4;     // heads of a task at least, where there are few tasks
constexpr size_t kPassTokens = 256;  // tokens of an FFN in one pass: bounds the scratch
constexpr size_t kExpertRows = 128;  // of an expert that a thread multiplies at a time with many tokens
constexpr size_t kMostForms = 4;     // of a mixture's input: gate's and up's, of experts and of a shared FFN

struct AttentionArgs {
    Heads heads;
    Step step;
    CachePages k, v;
    float* qkv;  // [tokens, heads.width()]; worked on in place. Of latents turned already
    float* out;  // [tokens, n * values()]
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
    // Of an expert on disk: the reads of its layer's call, and its first owner in them.
    std::shared_ptr<Fetches> reads = nullptr;
    size_t owner = 0;
    // [tokens, ceil(neurons / 8)] bits, the lowest first: neurons that PREDICT computes in place of those
    // that a predictor names. Or null.
    const uint8_t* named = nullptr;
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
    float* used = nullptr;           // [tokens, experts], or null: takes the weights that were computed with
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

// An FFN of a mixture, and the tokens of a call that go to it: `n` entries of a list from `first` on.
struct Visit {
    const FFN* ffn;
    size_t expert;  // its number
    size_t first, n;
    bool lanes, everyone;         // how its input lies; do all tokens go there?
    size_t place;                 // where its neurons begin among all visits'
    size_t row;                   // where its tokens' inputs begin, in rows
    size_t hidden, hidden_bytes;  // where its activations begin, in bytes; of a token
    size_t shift;                 // of an expert on disk: how far its slot is from where its matrices say
};

// How much an expert is used: a token at a time, a prompt's as if they had come one by one. 0: not at all.
// weights: how much of it each token gets, `experts` apart.
float uses_of(const float* weights, size_t experts, size_t tokens);

// What gate and up multiply with: the same where their formats take the same.
struct GateUpInputs {
    Input gate, up;
};

class Pieces;
class Context {
 public:
    explicit Context(int threads, const Kernels* kernels) : pool(threads), k(*kernels) {}

    // A matrix that is only multiplied, as rows that are interleaved. to: its data.
    Matrix interleaved(const Matrix& w, uint8_t* to);
    void embed(const Matrix& table, const int32_t* ids, size_t tokens, float* out);
    void norm(const Norm& norm, const float* x, size_t tokens, size_t dim, float* out);
    // out = norm(x) wT + bias, or out += when `add`.
    void matmul(const Linear& w, const Norm& norm, const float* x, size_t tokens, float* out, bool add);
    void matmul(const Stack& w, const Norm& norm, const float* x, size_t tokens, float* out);
    void attention(const AttentionArgs& a);
    // x += layer.out(attention(layer.qkv(norm(h)))). h may be x.
    void attention_add(float* x, const float* h, const Attention& layer, const Step& step,
                       const CachePages& k, const CachePages& v);
    // x += mixer(norm(h)), from the states of state_from to those of state_to. h may be x.
    void mixer_add(float* x, const float* h, const Mixer& mixer, const Step& step, float* states);
    FFNCounts ffn_add(const FFNArgs& a);
    // The same with a mixture in place of the one FFN. Counts are of all experts' neurons.
    FFNCounts moe_add(const MixtureArgs& a);
    // given: [tokens, p.gate.rows]
    void per_layer_add(float* x, const PerLayer& p, const float* given, size_t tokens);
    // How much of each expert tokens get whose router reads h itself. out: [tokens, experts].
    void routed(const Mixture& m, const float* h, size_t tokens, float* out);
    // Begins reads that the next ffn_add or moe_add of this layer will probably need. a.h is the residual
    // stream before attention; a.x and a.record are not used. Results do not depend on it, time does.
    void read_ahead(const FFNArgs& a);
    void read_ahead(const MixtureArgs& a);
    void read_experts_ahead(const MixtureArgs& a);
    std::vector<int32_t> likely_of(const Mixture& next, const MixtureArgs& a);
    void read_next_ahead(const MixtureArgs& a, ExpertReads& reads);
    size_t scratch_bytes() const;  // that calls have taken so far
    struct Walk;                   // one call of an FFN in bundles

    Pool pool;
    const Kernels& k;
    // Whether a call should end at once, or null: the calling thread asks while it waits for a disk.
    bool (*interrupted)() = nullptr;
    // The caller of an op holds it: a Context works on one call at a time, which owns the scratch below.
    std::mutex one_call;

 private:
    struct Queries;  // tokens that are attended to together
    void latent_add(float* x, const float* h, const Attention& layer, const Step& step, const CachePages& k);
    void latent_queries(const Attention& layer, const float* h, const Step& step, float* out);
    struct HeadProducts;
    void head_products(const HeadProducts& a);
    void attention_out(const Attention& layer, const float* from, size_t tokens, float* x);

    Input input(const Matrix& w, const Norm& norm, const float* x, size_t tokens, Scratch<uint8_t>& buffer);
    void inputs(const Matrix* w, size_t n, const Norm& norm, const float* x, size_t tokens,
                Scratch<uint8_t>* buffers, Input* out);
    size_t as_they_lie(const Matrix* w, size_t n) const;
    GateUpInputs gate_up_inputs(const FFNArgs& a);
    size_t gate_up_panel_bytes(const FFNArgs& a, const GateUpInputs& in) const;
    void linear(const Matrix* w, const Input* in, size_t n, const float* bias, float* out, bool add);
    void join(const Join& how, float* y, size_t tokens, size_t dim, float* x);
    struct Turn;  // consecutive tokens of one sequence
    void convolve(const MixerArgs& a, const Turn& turn, size_t begin, size_t end, float* ring);
    void state_gates(const MixerArgs& a, size_t t);
    void recur(const MixerArgs& a, const Turn& turn, size_t head, size_t begin);
    void gate_mixed(const MixerArgs& a, size_t t);
    void mix(const MixerArgs& a);
    FFNCounts moe_block(const MixtureArgs& a);
    struct RouterAnswer {
        Scratch<float> normed, weights;
    };
    const float* shares(const MixtureArgs& a, const float** h, RouterAnswer& to);
    const float* affordable(const MixtureArgs& a, const float* weights);
    size_t tokens_of(const MixtureArgs& a, size_t e, const float* h, const float* weights);
    struct Experts;
    FFNCounts experts_add(const MixtureArgs& a, const float* h, const float* weights, float* sum);
    const float* shares_of_shared(const MixtureArgs& a, const float* h);
    bool shares_region(const MixtureArgs& a, const float* weights) const;
    struct Chosen;  // a token's experts that are computed together
    FFNCounts token_experts(const MixtureArgs& a, const float* h, const float* weights, float* sum);
    FFNCounts chosen_add(const MixtureArgs& a, const Chosen& c, const float* h, const float* weights,
                         float* sum);
    FFNCounts bundles_from_disk(const MixtureArgs& a, const float* h, const float* weights, float* sum);
    FFNCounts expert_add(const MixtureArgs& a, size_t e, const FFN& expert, const float* h,
                         const float* weights, float* sum, const std::shared_ptr<Fetches>& reads = nullptr);
    void expect(const FFNArgs& a);
    FFNCounts dense_ffn(const FFNArgs& a);
    FFNCounts bundle_ffn(const FFNArgs& a);
    struct DiskWalk;
    FFNCounts disk_ffn(const FFNArgs& a);
    struct Guess;
    Guess guess(const FFNArgs& a, const Input& in);
    uint8_t* panels(size_t bytes);  // of scratch for each thread
    std::vector<Queries> queries(const AttentionArgs& a, size_t heads) const;
    void attend(const AttentionArgs& a, const Queries& q, size_t begin, size_t end, float* scores,
                float* into);
    void store(const AttentionArgs& a, size_t t, float* scratch);
    void finish(const AttentionArgs& a, const Queries& q, const float* from, float* scratch);

    // Scratch that grows to the largest step seen and is reused; one call at a time, so one set is enough.
    Scratch<uint8_t> inputs_[kStacked], hidden_input_, panels_, guess_input_, code_input_, marks_,
        expert_input_;
    Scratch<float> code_, normed_, gate_, hidden_, partial_, sums_, scores_, tiles_, factors_, qkv_,
        attended_, branch_, scales_, products_, open_, rings_, lower_, queries_, absorbed_, found_;
    Scratch<int32_t> ids_, slots_, entries_, places_, gate_slots_, gate_entries_;
    Scratch<Wanted> wanted_, gate_wanted_;
    struct Routed {  // a mixture's: the experts' input, the router's answer, one expert's tokens, the sum
        RouterAnswer own, next;  // of the layer, and of one behind it, which is guessed
        Scratch<float> logits, kept, in, out, sum, record, shares, shared;
        Scratch<size_t> tokens;
        Scratch<Visit> visits;
    } routed_;
    Scratch<size_t> counts_;
    size_t panel_stride_ = 0;
    // Reads that read_ahead began, until their call takes them over: attention looks at the disk meanwhile.
    std::weak_ptr<Fetches> early_;
};

}  // namespace tc
