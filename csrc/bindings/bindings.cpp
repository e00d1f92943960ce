// Validates what Python passes, releases the GIL, calls. Nothing else. Arrays are never converted
// (noconvert): a kernel writing into a silent copy would lose its result.
#include "bindings.h"
#include "engine/limits.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>

void bind_disk(nanobind::module_& m);                                            // bindings_disk.cpp
void bind_host(nanobind::module_& m);                                            // bindings_host.cpp
void bind_load(nanobind::module_& m);                                            // bindings_load.cpp
void bind_quantise(nanobind::module_& m);                                        // bindings_quantise.cpp
void bind_plan(nanobind::module_& m);                                            // bindings_plan.cpp
void bind_mixers(nanobind::module_& m, nanobind::class_<tc::Context>& context);  // bindings_mixers.cpp

// name(value=None): what `held` is; a value sets it, to measure.
template <class T>
static void bind_setting(nb::module_& m, const char* name, std::atomic<T>& held, const char* value,
                         const char* doc) {
    m.def(
        name, [&held](std::optional<T> to) { return to ? held.exchange(*to) : held.load(); },
        nb::arg(value).none() = nb::none(), doc);
}

// A matrix inside an arena. Everything a kernel will trust is checked here, once.
static Matrix make_matrix(const Arena& arena, size_t offset, int format, size_t rows, size_t cols,
                          size_t stride) {
    check(format >= 0 && format < tc::N_FORMATS, "unknown weight format");
    const auto f = tc::Format(format);
    check(rows > 0 && cols > 0 && rows <= size_t(1) << 40 && cols <= size_t(1) << 31,
          "matrix dimensions out of range");
    const tc::FormatFacts& facts = tc::kFormats[f];
    check(f == tc::SIGNS || cols % facts.block == 0, "columns are no whole number of the format's blocks");
    const size_t bytes = tc::row_bytes(f, cols);
    check(stride >= bytes && stride <= size_t(1) << 40, "row stride smaller than a row");
    check(offset <= arena.bytes && arena.bytes - offset >= bytes, "matrix outside its arena");
    check((arena.bytes - offset - bytes) / stride >= rows - 1, "matrix outside its arena");
    check(offset % facts.alignment == 0 && stride % facts.alignment == 0, "matrix not aligned");
    return {arena.data + offset, f, rows, cols, stride};
}

static void check_ids(const I1& ids, size_t limit, const char* what) {
    for (size_t i = 0; i < ids.shape(0); i++)
        check(ids.data()[i] >= 0 && size_t(ids.data()[i]) < limit, what);
}

// Can its rows be interleaved?
static bool fits_groups(const Matrix& w, size_t group) {
    return w.format != tc::SIGNS && tc::kFormats[w.format].block > 1 && group > 0 &&
           w.stride == tc::row_bytes(w.format, w.cols) && w.rows % group == 0;
}
static bool in_groups(const Context& c, const Matrix& w) {
    return w.group == 1 && fits_groups(w, size_t(c.k.panel_rows));
}
void check_groups(const Context& c, const Matrix& w) {
    check(w.group == 1 || w.group == size_t(c.k.panel_rows), "interleaved for another instruction set");
}
static void check_groups(const Context& c, const tc::FFN& f) {
    check_groups(c, f.gate.weight), check_groups(c, f.up), check_groups(c, f.down);
}

static void check_groups(const Context& c, const Mixture& m) {
    if (m.router) check_groups(c, m.layer.router.weight);
    for (const tc::FFN* expert : m.layer.experts) check_groups(c, *expert);
    if (m.layer.shared) check_groups(c, *m.layer.shared);
}

static void check_weights(const Matrix& w) { check(w.format != tc::SIGNS, "signs are no weights"); }

static tc::Linear make_linear(const Matrix& w, const std::optional<F1>& bias) {
    check_weights(w);
    return {w, optional_vector(bias, w.rows, "bias has the wrong length")};
}

static Stack make_stack(const std::vector<const Matrix*>& parts, const std::optional<F1>& bias) {
    check(!parts.empty() && parts.size() <= tc::kStacked, "a stack has 1 to 3 matrices");
    Stack made;
    for (const Matrix* part : parts) {
        check(part != nullptr, "a stack has no gaps");
        check_weights(*part);
        check(part->cols == parts[0]->cols, "stacked matrices differ in width");
        const bool divided = made.stack.rows() % part->group != 0;  // a piece of work would divide a group
        check(!divided, "the rows above are no whole groups");
        made.stack.parts.push_back(*part);
    }
    made.stack.bias = optional_vector(bias, made.stack.rows(), "bias has the wrong length");
    made.bias = bias;
    return made;
}

static Norm make_norm(F1 weight, std::optional<F1> bias, float eps, bool layer) {
    return {
        {weight.data(), optional_vector(bias, weight.shape(0), "norm bias has the wrong length"), eps, layer},
        weight,
        bias};
}
tc::Norm norm_of(const Norm* norm, size_t dim) {
    if (!norm) return {};
    check(norm->weight.shape(0) == dim, "norm weight has the wrong length");
    return norm->norm;
}

static Heads make_heads(size_t n, size_t n_kv, size_t dim, size_t window, float scale, float softcap,
                        std::optional<F1> q_norm, std::optional<F1> k_norm, float eps,
                        std::optional<F1> sinks, bool whole_norms, bool norms_last, std::optional<F1> v_norm,
                        bool shares, bool own_norms, bool chunked, float temperature, float temperature_span,
                        size_t value_dim) {
    check(n > 0 && n_kv > 0 && n % n_kv == 0 && dim > 0, "heads do not divide");
    check(softcap >= 0, "negative soft cap");
    check(!whole_norms || (q_norm && (k_norm || shares) && !norms_last),
          "norms of all heads as one need both");
    check(!own_norms || (q_norm && k_norm && !whole_norms && !norms_last), "every head's norm needs both");
    check(!shares || (!k_norm && !v_norm), "keys and values of another layer are not normed here");
    const bool all = whole_norms || own_norms;
    const float* q = optional_vector(q_norm, all ? n * dim : dim, "q_norm has the wrong length");
    window = std::min(window, size_t(INT32_MAX));  // positions go no further
    tc::Heads heads{
        n,     n_kv,    dim, window,
        scale, softcap, q,   optional_vector(k_norm, all ? n_kv * dim : dim, "k_norm has the wrong length"),
        eps};
    heads.sinks = optional_vector(sinks, n, "sinks have the wrong length");
    heads.whole_norms = whole_norms, heads.norms_last = norms_last, heads.own_norms = own_norms;
    check(!chunked || window, "chunks need a window");
    check(temperature >= 0 && temperature_span > 0, "a temperature out of range");
    heads.chunked = chunked, heads.temperature = temperature, heads.temperature_span = temperature_span;
    heads.v_norm = optional_vector(v_norm, dim, "v_norm has the wrong length"), heads.shares = shares;
    heads.value_dim = value_dim;
    check(!value_dim || (n_kv == 1 && value_dim < dim && !q_norm && !k_norm && !shares),
          "latents are one key of all heads");
    return {heads, q_norm, k_norm, sinks, v_norm};
}

static Join make_join(const Norm* norm, float scale, float after) {
    return {{norm ? norm->norm : tc::Norm{}, scale, after}, held(norm)};
}
tc::Join join_of(const Join& join, size_t dim) {
    return {norm_of(join.norm ? &*join.norm : nullptr, dim), join.join.scale, join.join.after};
}

static Latent make_latent(size_t nope, size_t rope, const Norm* q_norm, const Matrix* q_b,
                          const Norm& kv_norm, const Matrix& k_b, const Matrix& v_b) {
    const size_t rank = v_b.cols;
    check(nope > 0 && rope > 0 && rope % 2 == 0 && nope <= 1 << 16 && rope <= 1 << 16, "parts out of range");
    check(k_b.cols == nope && k_b.rows % rank == 0 && k_b.rows > 0, "k_b has the wrong shape");
    const size_t heads = k_b.rows / rank;
    check(v_b.rows % heads == 0 && v_b.rows > 0, "v_b has the wrong shape");
    check(!q_norm == !q_b && (!q_b || q_b->rows == heads * (nope + rope)), "q_b has the wrong shape");
    for (const Matrix* w : {&k_b, &v_b})
        check_weights(*w), check(w->group == 1, "rows of heads are interleaved");
    if (q_b) check_weights(*q_b);
    check(!kv_norm.norm.layer && !kv_norm.bias && (!q_norm || (!q_norm->norm.layer && !q_norm->bias)),
          "norms of latents are RMS norms without bias");
    return {{nope, rope, rank, v_b.rows / heads, norm_of(q_norm, q_b ? q_b->cols : 0),
             norm_of(&kv_norm, rank), q_b ? *q_b : Matrix{}, k_b, v_b},
            held(q_norm),
            kv_norm};
}

// What the first and the last matrix of an attention must be.
static void check_latent(const tc::Heads& heads, const tc::Latent& l, size_t rows, size_t out) {
    const size_t lower = l.q_b.data ? l.q_b.cols : heads.n * (l.nope + l.rope);
    check(heads.value_dim == l.rank && heads.dim == l.rank + l.rope && heads.n * l.rank == l.k_b.rows,
          "the heads are not those of these latents");
    check(rows == lower + heads.dim, "qkv has the wrong shape");
    check(out == heads.n * l.value, "the output projection has the wrong shape");
}

static Attention make_attention(const Norm* norm, const Stack& qkv, const Linear& out, const Heads& h,
                                const Norm* sub_norm, const Join& join, const Matrix* gate,
                                const Latent* latent) {
    const tc::Heads& heads = h.heads;
    const tc::Stack& in = qkv.stack;
    const Matrix& proj = out.linear.weight;
    check(!heads.value_dim == !latent, "latents and their heads need each other");
    if (latent) {
        check(!gate, "latents have no gate");
        check_latent(heads, latent->latent, in.rows(), proj.cols);
    } else {
        check(in.rows() == heads.width(), "qkv has the wrong shape");
        check(proj.cols == heads.n * heads.dim, "the output projection has the wrong shape");
    }
    check(proj.rows == in.cols(), "the output projection has the wrong shape");
    check(!gate || (gate->rows == proj.cols && gate->cols == in.cols()), "the gate has the wrong shape");
    if (gate) check_weights(*gate);
    return {{norm_of(norm, in.cols()), in, out.linear, heads, norm_of(sub_norm, proj.cols),
             join_of(join, in.cols()), gate ? *gate : Matrix{}, latent ? latent->latent : tc::Latent{}},
            held(norm),
            held(sub_norm),
            qkv,
            out,
            h,
            join,
            latent ? std::optional<Latent>(*latent) : std::nullopt};
}

static Predictor make_predictor(const Matrix* first, const Matrix& second, F1 threshold, size_t hot,
                                bool relu) {
    check(!first || first->rows == second.cols, "the predictor's matrices do not fit");
    check(!first || (first->format != tc::SIGNS && second.format != tc::SIGNS), "signs are of x itself");
    check(threshold.shape(0) == second.rows, "thresholds have the wrong length");
    check(hot <= second.rows, "more hot neurons than there are");
    return {{first ? *first : Matrix{}, second, threshold.data(), hot, relu}, threshold};
}

// Is row r of w in slot r of the pool?
static bool over_slots(const Matrix& w, const DiskRows& disk) {
    const tc::SlotPool& pool = disk.pool();
    return w.rows == pool.slots && w.stride == pool.stride && w.data >= pool.data &&
           w.data + tc::row_bytes(w.format, w.cols) <= pool.data + pool.stride;
}

// Has the layer these matrices, of which the first rows are held?
static void check_stream(const tc::StreamedLayer& s, const Matrix& gate, const Matrix* up,
                         const Matrix& down) {
    using Stream = tc::DenseStream;
    const Stream::Layer& layer = s.stream->layers()[s.layer];
    auto check_part = [](const tc::StreamedMatrix& m, const Matrix& w) {
        check(m.held == w.rows && m.run.form->format == w.format && m.run.group == w.group &&
                  m.run.blocks * m.run.form->block == w.cols && m.run.stride == w.stride,
              "the stream has another matrix");
    };
    const auto& first = layer.parts[Stream::GATE_UP];
    check(first.size() == (up ? 2 : 1), "the stream has other matrices");
    check_part(first[0], gate), check_part(layer.parts[Stream::DOWN][0], down);
    if (up) check_part(first[1], *up);
    check(first[0].run.rows == down.cols && layer.parts[Stream::DOWN][0].run.rows == gate.cols,
          "the stream's matrices have other rows");
}

static FFN make_ffn(const Norm* norm, const Linear& gate, const Matrix* up, const Matrix& down,
                    std::optional<F1> down_bias, int activation, float threshold, bool up_relu, bool bundles,
                    const Norm* sub_norm, const Join& join, const Predictor* predictor, DiskRows* disk,
                    DiskRows* gate_disk, std::optional<F1> gate_bias, std::optional<F1> up_bias, float alpha,
                    float limit, const tc::StreamedLayer* stream) {
    check(!sub_norm || !bundles || (!sub_norm->norm.layer && !sub_norm->bias),
          "bundles take an RMS sub-norm without bias");
    const Matrix &g = gate.linear.weight, &d = down;
    const size_t dim = g.cols, neurons = disk ? disk->neurons : stream ? d.cols : g.rows;
    check(!stream || !bundles, "neurons in bundles do not come in a stream");
    if (stream) check_stream(*stream, g, up, d);
    check(bundles ? (disk || d.rows == neurons) && d.cols == dim
                  : (stream || d.rows == dim) && d.cols == neurons,
          "down has the wrong shape");
    check(!up || ((disk || up->rows == g.rows) && up->cols == dim), "up does not match gate");
    if (up) check_weights(*up);
    check(!disk || bundles, "only bundles can be on disk");
    check(!disk || (over_slots(d, *disk) && (!up || over_slots(*up, *disk))),
          "up and down are not over the pool's slots");
    check(gate_disk ? disk && over_slots(g, *gate_disk) && gate_disk->neurons == neurons &&
                          &gate_disk->reader == &disk->reader
                    : stream || g.rows == neurons,
          "gate does not match the neurons");
    const bool gates_left = gate_disk || stream;
    check(!gates_left || !gate.linear.bias, "the bias of gates on disk is gate_bias");
    check(gates_left || !gate_bias, "gate_bias is for gates on disk");
    check_weights(down);
    check(neurons <= size_t(INT32_MAX), "too many neurons");
    const tc::Predictor guess = predictor ? predictor->predictor : tc::Predictor{};
    const Matrix& taker = guess.first.data ? guess.first : guess.second;
    check(!predictor || (guess.second.rows == neurons && taker.cols == dim),
          "the predictor is of another shape");
    check(!predictor || bundles, "only neurons in bundles can be skipped");
    check(!bundles || (g.group == 1 && d.group == 1 && (!up || up->group == 1)),
          "rows of neurons are interleaved");
    check(activation >= 0 && activation < tc::N_ACTIVATIONS, "unknown activation");
    // The kernels skip a neuron when its activation is zero; that is the answer only where zero means "not
    // above".
    check(threshold >= 0, "negative activation threshold");
    check(limit >= 0 && (limit > 0 || activation != tc::SWIGLU_OAI), "a clamped activation needs a limit");
    check(!bundles || activation != tc::SWIGLU_OAI, "no neuron of this activation can be skipped");
    check(!up_bias || (up && !bundles), "only up as a plain matrix has a bias");
    tc::Linear gates = gate.linear;
    if (gates_left) gates.bias = optional_vector(gate_bias, neurons, "gate_bias has the wrong length");
    return {{norm_of(norm, dim), gates, up ? *up : Matrix{}, down,
             optional_vector(down_bias, dim, "down bias has the wrong length"), tc::Activation(activation),
             threshold, up_relu, bundles, norm_of(sub_norm, neurons), join_of(join, dim), guess, disk,
             gate_disk, optional_vector(up_bias, neurons, "up_bias has the wrong length"), alpha, limit,
             stream ? stream->stream : nullptr, stream ? stream->layer : 0},
            held(norm),
            held(sub_norm),
            gate,
            down_bias,
            join,
            predictor ? std::optional<Predictor>(*predictor) : std::nullopt,
            gate_bias,
            up_bias};
}

static tc::RouterRule make_rule(int score, int weights, float epsilon, bool epsilon_floor, float scale,
                                size_t groups, size_t groups_kept, int group_rule, bool scales_input) {
    using Rule = tc::RouterRule;
    check(score >= 0 && score < Rule::N_SCORES && weights >= 0 && weights < Rule::N_WEIGHTS &&
              group_rule >= 0 && group_rule < Rule::N_GROUP_RULES,
          "unknown router rule");
    check(groups_kept >= 1 && groups_kept <= groups, "more groups kept than there are");
    return {Rule::Score(score), Rule::Weights(weights),      epsilon,     epsilon_floor, scale, groups,
            groups_kept,        Rule::GroupRule(group_rule), scales_input};
}

static void check_rule(const tc::RouterRule& rule, size_t experts, size_t active) {
    check(experts <= tc::kMostExperts && active >= 1 && active <= experts, "experts and router do not fit");
    check(experts % rule.groups == 0, "groups do not divide the experts");
    const size_t each = experts / rule.groups;
    check(each * rule.groups_kept >= active, "the groups kept have too few experts");
    check(rule.group_rule != tc::RouterRule::SUM2 || each >= 2, "a group's two best are of two experts");
}

// Experts, or a shared one, as a mixture has them: `dim` wide.
static void check_part(const tc::FFN& f, size_t dim) {
    check(f.gate.weight.cols == dim, "an expert is of another width");
    check(!f.norm.weight && !f.sub_norm.weight && f.join.plain(), "norm and join are the mixture's");
}

// Do all matrices of all experts lie within the pool's first slot?
static void check_slots(const tc::Mixture& m, const tc::DiskExperts& disk) {
    const tc::SlotPool& pool = disk.pool();
    check(disk.neurons == m.experts.size(), "the experts on disk are others");
    for (const tc::FFN* f : m.experts) {
        for (const Matrix* w : {&f->gate.weight, &f->up, &f->down}) {
            if (!w->data) continue;
            const size_t bytes = (w->rows - 1) * w->stride + tc::row_bytes(w->format, w->cols);
            check(w->data >= pool.data && bytes <= pool.stride &&
                      size_t(w->data - pool.data) <= pool.stride - bytes,
                  "experts are not over the pool's first slot");
        }
    }
}

// `experts`: of FFN, kept alive as they are.
static Mixture make_mixture(const Norm* norm, const Linear* router, const nb::tuple& experts, size_t active,
                            const Join& join, const tc::RouterRule& rule, std::optional<F1> selection_bias,
                            const FFN* shared, const Matrix* shared_router, const Norm* router_norm,
                            std::optional<F1> expert_scale, const Norm* experts_norm, DiskExperts* disk) {
    const size_t n = experts.size();
    check(n && (!router || router->linear.weight.rows == n), "experts and router do not fit");
    if (!nb::isinstance<FFN>(experts[0])) throw nb::type_error("an expert is no FFN");
    const size_t dim = nb::cast<const FFN&>(experts[0]).layer.gate.weight.cols;
    check(!router || router->linear.weight.cols == dim, "experts and router do not fit");
    if (router) check_rule(rule, n, active);
    Mixture m = {{norm_of(norm, dim),
                  router ? router->linear : tc::Linear{},
                  {},
                  active,
                  join_of(join, dim),
                  rule,
                  optional_vector(selection_bias, n, "selection_bias has the wrong length")},
                 held(norm),
                 held(router),
                 join,
                 selection_bias,
                 expert_scale,
                 held(router_norm),
                 held(experts_norm)};
    for (nb::handle item : experts) {
        if (!nb::isinstance<FFN>(item)) throw nb::type_error("an expert is no FFN");
        const tc::FFN& f = nb::cast<const FFN&>(item).layer;
        check_part(f, dim);
        m.layer.experts.push_back(&f);
        const tc::FFN& first = *m.layer.experts[0];
        check(f.neurons() == first.neurons() && !f.up.data == !first.up.data && f.bundles == first.bundles,
              "experts differ in shape");
        check(f.gate.weight.format == first.gate.weight.format && f.up.format == first.up.format &&
                  f.down.format == first.down.format,
              "experts differ in format");
    }
    check(!experts_norm || shared, "the experts' sum has a norm of its own beside a shared FFN");
    if (shared) check(!shared->layer.bundles && shared->dim() == dim, "the shared FFN does not fit");
    if (shared && !experts_norm) check_part(shared->layer, dim);
    check(!shared_router || !experts_norm, "a shared FFN with norms of its own has no gate");
    check(!shared_router || (shared && shared_router->format == tc::F32 && shared_router->rows == 1 &&
                             shared_router->cols == dim),
          "the shared FFN's router does not fit");
    m.layer.shared = shared ? &shared->layer : nullptr;
    if (shared_router) m.layer.shared_router = *shared_router;
    m.layer.router_norm = norm_of(router_norm, dim), m.layer.experts_norm = norm_of(experts_norm, dim);
    m.layer.expert_scale = optional_vector(expert_scale, n, "expert_scale has the wrong length");
    if (disk) check_slots(m.layer, disk->rows);
    m.layer.disk = disk ? &disk->rows : nullptr;
    return m;
}

// weights [tokens, experts] of logits of the same shape.
static void route(const Mixture& m, F2 logits, MutF2 weights) {
    const tc::Mixture& x = m.layer;
    const size_t experts = x.experts.size();
    check(m.router.has_value(), "there is no router");
    check(logits.shape(1) == experts && weights.shape(1) == experts && weights.shape(0) == logits.shape(0),
          "logits or weights have the wrong shape");
    for (size_t t = 0; t < logits.shape(0); t++)
        tc::route(x.rule, logits.data() + t * experts, x.selection_bias, experts, x.active,
                  weights.data() + t * experts);
}

// Tokens of a sequence are worked on together: from the first page that any of them attends to through its
// last, all of its pages must be there.
static size_t check_table(const I1& positions, const I1& sequence, const I2& table, size_t block,
                          size_t window) {
    struct Range {
        size_t first = SIZE_MAX, last = 0;
    };
    std::vector<Range> ranges(table.shape(0));
    for (size_t t = 0; t < positions.shape(0); t++) {
        const size_t end = size_t(positions.data()[t]) + 1, begin = window && end > window ? end - window : 0;
        Range& r = ranges[size_t(sequence.data()[t])];
        r.first = std::min(r.first, begin / block), r.last = std::max(r.last, (end - 1) / block);
    }
    int32_t largest = -1;
    for (size_t s = 0; s < ranges.size(); s++)
        for (size_t b = ranges[s].first; b <= ranges[s].last && b < table.shape(1); b++) {
            const int32_t page = table.data()[s * table.shape(1) + b];
            check(page >= 0, "block table names a page that does not exist");
            largest = std::max(largest, page);
        }
    return size_t(largest + 1);
}

// States of `sequences`: what is written is nobody else's, and each sequence's tokens are side by side.
// Returns one more than the largest slot.
static size_t check_states(const I1& sequence, const I1& from, const I1& to, size_t sequences) {
    check(from.shape(0) == sequences && to.shape(0) == sequences, "states are not of these sequences");
    std::vector<int32_t> written(to.data(), to.data() + sequences);
    std::sort(written.begin(), written.end());
    check(std::adjacent_find(written.begin(), written.end()) == written.end(), "a state is written twice");
    int32_t largest = -1;
    for (size_t s = 0; s < sequences; s++) {
        check(from.data()[s] >= -1 && to.data()[s] >= 0, "no such state");
        check(!std::binary_search(written.begin(), written.end(), from.data()[s]),
              "a state is read and written");
        largest = std::max({largest, from.data()[s], to.data()[s]});
    }
    std::vector<bool> ended(sequences);
    for (size_t t = 1; t < sequence.shape(0); t++)
        if (sequence.data()[t] != sequence.data()[t - 1]) {
            ended[size_t(sequence.data()[t - 1])] = true;
            check(!ended[size_t(sequence.data()[t])], "a sequence's tokens lie apart");
        }
    return size_t(largest + 1);
}

// Check that tokens of an encoder attend to their sequence's tokens up to the last one of the step.
static void check_ends(const I1& positions, const I1& sequence, const I1& ends) {
    const size_t tokens = positions.shape(0);
    check(ends.shape(0) == tokens, "ends has the wrong length");
    for (size_t t = 0; t < tokens; t++) {
        const bool last = t + 1 == tokens || sequence.data()[t + 1] != sequence.data()[t];
        check(ends.data()[t] == (last ? positions.data()[t] + 1 : ends.data()[t + 1]),
              "a token does not attend up to its sequence's end");
    }
}

static Step make_step(I1 positions, I1 sequence, I2 table, size_t block, size_t window, std::optional<F2> cos,
                      std::optional<F2> sin, std::optional<I1> state_from, std::optional<I1> state_to,
                      std::optional<I1> ends) {
    const size_t tokens = positions.shape(0);
    check(sequence.shape(0) == tokens, "positions or sequence has the wrong length");
    check(block > 0, "empty blocks");
    check(cos.has_value() == sin.has_value(), "cos without sin");
    check(!cos || (cos->shape(0) == tokens && sin->shape(0) == tokens && cos->shape(1) == sin->shape(1)),
          "cos and sin differ in shape");
    check_ids(sequence, table.shape(0), "sequence out of range");
    check_ids(positions, table.shape(1) * block, "position beyond the block table");
    window = std::min(window, size_t(INT32_MAX));  // as the heads'
    const size_t pages = check_table(positions, sequence, table, block, window);
    if (ends) check_ends(positions, sequence, *ends);
    check(state_from.has_value() == state_to.has_value(), "states to read without states to write");
    const size_t slots = state_to ? check_states(sequence, *state_from, *state_to, table.shape(0)) : 0;
    return {{positions.data(), sequence.data(), table.data(), cos ? cos->data() : nullptr,
             sin ? sin->data() : nullptr, tokens, block, table.shape(1), cos ? 2 * cos->shape(1) : 0,
             state_from ? state_from->data() : nullptr, state_to ? state_to->data() : nullptr,
             ends ? ends->data() : nullptr},
            positions,
            sequence,
            table,
            cos,
            sin,
            state_from,
            state_to,
            ends,
            slots,
            pages,
            window};
}

// Keys or values: f16 [heads * pages, dim or block, the other one], else u8 [heads * pages, bytes of a page].
static tc::CachePages make_pages(const AnyArray& x, int type, size_t heads, size_t dim, size_t block,
                                 bool keys) {
    check(type >= 0 && type < tc::N_CACHE_TYPES, "unknown type of keys or values");
    const auto t = tc::CacheType(type);
    const bool plain = t == tc::CACHE_F16;
    const auto code = plain ? nb::dlpack::dtype_code::Float : nb::dlpack::dtype_code::UInt;
    const nb::dlpack::dtype wanted = {uint8_t(code), uint8_t(plain ? 16 : 8), 1};
    if (x.dtype() != wanted) throw nb::type_error("the kv cache's arrays are not of its types");
    check(plain || dim % 32 == 0, "quantised keys and values need heads of whole blocks of 32");
    check(plain || keys || block % 4 == 0, "quantised values need pages of a multiple of 4 positions");
    const size_t bytes = tc::cache_page_bytes(t, dim, block);
    const bool fits =
        plain ? x.ndim() == 3 && x.shape(1) == (keys ? dim : block) && x.shape(2) == (keys ? block : dim)
              : x.ndim() == 2 && x.shape(1) == bytes;
    check(fits && x.shape(0) % heads == 0,
          keys ? "k cache has the wrong shape" : "v cache has the wrong shape");
    return {static_cast<uint8_t*>(x.data()), t, x.shape(0) / heads, heads, bytes};
}

static KVPages make_kv_pages(AnyArray k, std::optional<AnyArray> v, int k_type, int v_type, size_t heads,
                             size_t dim, size_t block) {
    check(heads > 0 && heads <= size_t(1) << 20 && dim > 0 && dim <= size_t(1) << 20 && block > 0 &&
              block <= size_t(1) << 20,
          "pages out of range");
    check(v || (heads == 1 && k_type == tc::CACHE_F16 && v_type == tc::CACHE_F16),
          "latents are f16, of one head");
    const tc::CachePages keys = make_pages(k, k_type, heads, dim, block, v.has_value()),
                         values = v ? make_pages(*v, v_type, heads, dim, block, false) : keys;
    check(keys.pages == values.pages, "k and v cache differ in shape");
    return {keys, values, dim, block, k, v};
}

static void attention(Context& c, MutF2 qkv, const Heads& h, const Step& s, const KVPages& kv, MutF2 out) {
    const tc::Heads& heads = h.heads;
    check_pages(heads, s, kv);
    check(!heads.value_dim, "latents have matrices of their own");
    check(qkv.shape(0) == s.step.tokens && qkv.shape(1) == heads.width(), "qkv has the wrong shape");
    check(out.shape(0) == s.step.tokens && out.shape(1) == heads.n * heads.dim, "out has the wrong shape");
    const tc::AttentionArgs a = {heads, s.step, kv.k, kv.v, qkv.data(), out.data()};
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.attention(a);
}

static void attention_add(Context& c, MutF2 x, F2 h, const Attention& a, const Step& s, const KVPages& kv) {
    check_rows(x, h, a.layer.qkv.cols());
    check(x.shape(0) == s.step.tokens, "x and the step differ in tokens");
    check_pages(a.layer.heads, s, kv);
    for (const Matrix& part : a.layer.qkv.parts) check_groups(c, part);
    check_groups(c, a.layer.out.weight), check_groups(c, a.layer.gate);
    if (a.layer.latent.q_b.data) check_groups(c, a.layer.latent.q_b);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.attention_add(x.data(), h.data(), a.layer, s.step, kv.k, kv.v);
}

static PerLayer make_per_layer(const Matrix& gate, const Matrix& down, int activation, const Join& join) {
    check(activation >= 0 && activation < tc::N_ACTIVATIONS, "unknown activation");
    check(down.rows == gate.cols && down.cols == gate.rows, "gate and down do not fit");
    check_weights(gate), check_weights(down);
    return {{gate, down, tc::Activation(activation), join_of(join, gate.cols)}, join};
}

static void per_layer_add(Context& c, MutF2 x, const PerLayer& p, F2 given) {
    check(x.shape(1) == p.layer.gate.cols, "x has the wrong width");
    check(given.shape(0) == x.shape(0) && given.shape(1) == p.layer.gate.rows, "given has the wrong shape");
    check_groups(c, p.layer.gate), check_groups(c, p.layer.down);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.per_layer_add(x.data(), p.layer, given.data(), x.shape(0));
}

using Counts = std::tuple<size_t, size_t, size_t, size_t, size_t>;
static Counts counts_of(const tc::FFNCounts& r) {
    return {r.active, r.rows, r.rows_dense, r.gates, r.predictor_bytes};
}

static Counts ffn_add(Context& c, MutF2 x, F2 h, const FFN& f, int sparsity, std::optional<MutF2> record) {
    check(sparsity >= 0 && sparsity < tc::N_SPARSITIES, "unknown sparsity");
    check_rows(x, h, f.layer.gate.weight.cols);
    check_groups(c, f.layer);
    check(!record || (record->shape(0) == x.shape(0) && record->shape(1) == f.layer.neurons()),
          "record has the wrong shape");
    const tc::FFNArgs a = {f.layer,
                           x.data(),
                           h.data(),
                           x.shape(0),
                           x.shape(1),
                           tc::Sparsity(sparsity),
                           record ? record->data() : nullptr};
    tc::FFNCounts r;
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(c.one_call);
        r = c.ffn_add(a);
    }
    return counts_of(r);
}

// Returns the shares that are given, or null.
static const float* given(const std::optional<F2>& weights, const Mixture& m, size_t tokens) {
    check(!weights || (weights->shape(0) == tokens && weights->shape(1) == m.layer.experts.size()),
          "weights has the wrong shape");
    check(weights || m.router, "without a router the weights have to be given");
    return weights ? weights->data() : nullptr;
}

static void routed(Context& c, F2 h, const Mixture& m, MutF2 out) {
    check(m.router.has_value(), "there is no router");
    check(h.shape(1) == m.dim(), "h has the wrong width");
    check(out.shape(0) == h.shape(0) && out.shape(1) == m.layer.experts.size(), "out has the wrong shape");
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.routed(m.layer, h.data(), h.shape(0), out.data());
}

static Counts moe_add(Context& c, MutF2 x, F2 h, const Mixture& m, int sparsity, std::optional<MutF2> record,
                      std::optional<F2> weights, std::optional<MutF2> used) {
    check(sparsity >= 0 && sparsity < tc::N_SPARSITIES, "unknown sparsity");
    check_rows(x, h, m.dim());
    check_groups(c, m);
    const size_t neurons = m.layer.experts.size() * m.layer.neurons();
    check(!record || (record->shape(0) == x.shape(0) && record->shape(1) == neurons),
          "record has the wrong shape");
    check(!used || (used->shape(0) == x.shape(0) && used->shape(1) == m.layer.experts.size()),
          "used has the wrong shape");
    const tc::MixtureArgs a = {m.layer,
                               x.data(),
                               h.data(),
                               x.shape(0),
                               x.shape(1),
                               tc::Sparsity(sparsity),
                               record ? record->data() : nullptr,
                               given(weights, m, x.shape(0)),
                               used ? used->data() : nullptr};
    tc::FFNCounts r;
    {
        nb::gil_scoped_release release;
        std::lock_guard<std::mutex> lock(c.one_call);
        r = c.moe_add(a);
    }
    return counts_of(r);
}

template <class Args, class Bound>
static Args about(F2 h, const Bound& bound, int sparsity) {
    check(sparsity >= 0 && sparsity < tc::N_SPARSITIES, "unknown sparsity");
    check(h.shape(1) == bound.dim(), "h has the wrong width");
    return {bound.layer, nullptr, h.data(), h.shape(0), h.shape(1), tc::Sparsity(sparsity), nullptr};
}

static void read_ahead(Context& c, F2 h, const FFN& f, int sparsity) {
    const auto a = about<tc::FFNArgs>(h, f, sparsity);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.read_ahead(a);
}

static void read_ahead_of_experts(Context& c, F2 h, const Mixture& m, int sparsity,
                                  std::optional<F2> weights) {
    auto a = about<tc::MixtureArgs>(h, m, sparsity);
    a.weights = given(weights, m, h.shape(0));
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.read_ahead(a);
}

using tc::kMeasuredBytes;

// Bytes per second of reading `chunks` of 1 MiB over and over for `seconds`, at least once, with every thread
// of the pool.
static double best_pass(const uint8_t* data, size_t chunks, tc::Pool& pool, double seconds) {
    const tc::Kernels& k = *tc::chosen_kernels();
    std::atomic<size_t> next{0};
    std::atomic<uint64_t> sink{0};
    auto read = [&](int) {
        for (size_t c; (c = next.fetch_add(1)) < chunks;)
            sink.fetch_add(k.read_all(data + c * kMeasuredBytes, kMeasuredBytes), std::memory_order_relaxed);
    };
    double best = 0,
           elapsed = 0;  // the best pass: the roof is what the memory can do, not what a neighbour left of it
    using clock = std::chrono::steady_clock;
    for (const auto start = clock::now(); elapsed < seconds;) {
        next.store(0);
        const auto t0 = clock::now();
        pool.run(read);
        best = std::max(
            best, double(chunks * kMeasuredBytes) / std::chrono::duration<double>(clock::now() - t0).count());
        elapsed = std::chrono::duration<double>(clock::now() - start).count();
    }
    return best;
}

// The same over memory of its own.
static double read_bandwidth(size_t bytes, int threads, double seconds) {
    check(bytes >= kMeasuredBytes && bytes <= size_t(1) << 40 && threads >= 1 && threads <= 1024,
          "arguments out of range");
    nb::gil_scoped_release release;
    Arena arena(bytes);
    if (!arena.data) throw std::bad_alloc();
    tc::Pool pool(threads);
    std::atomic<size_t> next{0};
    auto touch = [&](int) {
        for (size_t c; (c = next.fetch_add(1)) < bytes / kMeasuredBytes;)
            for (size_t i = 0; i < kMeasuredBytes; i += 4096) arena.data[c * kMeasuredBytes + i] = 1;
    };
    pool.run(touch);
    return best_pass(arena.data, bytes / kMeasuredBytes, pool, seconds);
}

// The same over a part of an arena that is in use: it takes no memory.
static double read_part(const Arena& a, size_t begin, size_t end, int threads, double seconds) {
    check(begin <= end && end <= a.bytes && end - begin >= kMeasuredBytes && threads >= 1 && threads <= 1024,
          "arguments out of range");
    nb::gil_scoped_release release;
    tc::Pool pool(threads);
    return best_pass(a.data + begin, (end - begin) / kMeasuredBytes, pool, seconds);
}

static std::map<std::string, bool> cpu_features() {
    std::map<std::string, bool> f;
#if defined(THERMOCLINE_X86) && defined(__GNUC__)
    __builtin_cpu_init();
#define FEATURE(name) f[name] = __builtin_cpu_supports(name) != 0
    FEATURE("sse4.2"), FEATURE("avx"), FEATURE("avx2"), FEATURE("fma"), FEATURE("f16c"), FEATURE("avx512f"),
        FEATURE("avx512bw"), FEATURE("avx512vl"), FEATURE("avx512dq"), FEATURE("avx512vnni"),
        FEATURE("avx512bf16");
#ifdef THERMOCLINE_AMX
    f["amx"] = tc::kernels_named("amx") != nullptr;
#endif
#undef FEATURE
#endif
#ifdef THERMOCLINE_ARM
    f["dotprod"] = tc::arm_has_dot_products(), f["crc32"] = tc::arm_has_crc32();
#endif
    return f;
}

static std::string isa_names() {
    std::string names;
    for (size_t i = 0; const char* level = tc::isa_level(i); i++)
        names += (i ? ", " : "") + std::string(level);
    return names;
}

NB_MODULE(_native, m) {
    m.doc() = "Thermocline's native core: kernels, thread pool, weight arena, checksums.";
    if (!tc::chosen_kernels())
        throw nb::import_error(
            ("THERMOCLINE_ISA names no instruction set of this processor: use " + isa_names()).c_str());

    m.def(
        "isa", [] { return std::string(tc::chosen_kernels()->isa); }, "The instruction set the kernels use.");
    m.def(
        "isa_levels",
        [] {
            std::vector<std::string> levels;
            for (size_t i = 0; const char* level = tc::isa_level(i); i++)
                if (tc::kernels_named(level)) levels.emplace_back(level);
            return levels;
        },
        "Instruction sets this CPU supports, best first.");
    bind_setting(
        m, "group_ahead", tc::group_ahead, "bytes",
        "How many bytes ahead of its use a group of rows is asked for; `bytes` sets it, to measure.");
    bind_setting(m, "rows_near", tc::rows_near, "near",
                 "Whether rows are asked for into the first-level cache; `near` sets it, to measure.");
    m.def("cpu_features", &cpu_features);
    m.def(
        "read_bandwidth", [](size_t b, int t, double s) { return read_bandwidth(b, t, s) / 1e9; }, "nbytes"_a,
        "threads"_a, "seconds"_a, "GB/s of reading memory: the roof.");
    m.def(
        "crc32c",
        [](nb::handle buffer, uint32_t seed) {
            Py_buffer view;
            if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
            uint32_t crc;
            {
                nb::gil_scoped_release release;
                crc = tc::crc32c(static_cast<const uint8_t*>(view.buf), size_t(view.len), seed);
            }
            PyBuffer_Release(&view);
            return crc;
        },
        "buffer"_a, "seed"_a = 0, "CRC-32C (Castagnoli); pass the last result as seed to continue.");

    m.attr("SIGNS") = int(tc::SIGNS);
    nb::dict formats;
    for (int f = 0; f < tc::N_FORMATS; f++)
        if (f != tc::SIGNS)
            formats[tc::kFormats[f].name] =
                nb::make_tuple(f, tc::kFormats[f].block, tc::kFormats[f].block_bytes);
    m.attr("FORMATS") = formats;
    nb::class_<Arena>(m, "Arena")
        .def(
            "__init__",
            [](Arena* self, size_t bytes) {
                new (self) Arena(bytes);
                if (bytes && !self->data) throw std::bad_alloc();
            },
            "nbytes"_a)
        .def_prop_ro("nbytes", [](const Arena& a) { return a.bytes; })
        .def_prop_ro("address", [](const Arena& a) { return reinterpret_cast<uintptr_t>(a.data); })
        .def(
            "write",
            [](Arena& a, size_t offset, Array<const uint8_t, 1> data) {
                check(offset <= a.bytes && data.shape(0) <= a.bytes - offset, "write outside the arena");
                if (data.shape(0)) memcpy(a.data + offset, data.data(), data.shape(0));
            },
            "offset"_a, "data"_a.noconvert())
        .def(
            "copy",
            [](Arena& a, size_t to, const Arena& from, size_t begin, size_t bytes) {
                check(&a != &from && begin <= from.bytes && bytes <= from.bytes - begin,
                      "copy from outside the other arena");
                check(to <= a.bytes && bytes <= a.bytes - to, "copy outside the arena");
                if (bytes) memcpy(a.data + to, from.data + begin, bytes);
            },
            "to"_a, "source"_a, "begin"_a, "nbytes"_a)
        .def(
            "checksums",
            [](const Arena& a, size_t begin, size_t stride, Array<uint32_t, 1> out) {
                check(stride > 0 && begin <= a.bytes && out.shape(0) <= (a.bytes - begin) / stride,
                      "records outside the arena");
                nb::gil_scoped_release release;
                for (size_t i = 0; i < out.shape(0); i++)
                    out.data()[i] = tc::crc32c(a.data + begin + i * stride, stride, 0);
            },
            "begin"_a, "stride"_a, "out"_a.noconvert(),
            "The CRC-32C of each record of `stride` bytes from `begin` on.")
        .def(
            "read_bandwidth",
            [](const Arena& a, size_t begin, size_t end, int t, double s) {
                return read_part(a, begin, end, t, s) / 1e9;
            },
            "begin"_a, "end"_a, "threads"_a, "seconds"_a,
            "GB/s of reading these bytes over and over: the roof of weights there.")
        .def(
            "gather_pages",
            [](Arena& a) {
                nb::gil_scoped_release release;
                a.gather_pages();
            },
            "Once filled: into huge pages what the system did not give as such.")
        .def(
            "fence", [](Arena& a) { check(a.fence(), "no page begins where the padding ends"); },
            "Tests: reading past the padding, where a page must begin, ends the process from now on.");
    bind_disk(m);
    bind_load(m);

    nb::class_<Matrix>(m, "Matrix")
        .def(nb::new_([](const Arena& arena, size_t offset, int format, size_t rows, size_t cols,
                         size_t stride, size_t group) {
                 Matrix made = make_matrix(arena, offset, format, rows, cols, stride);
                 check(group == 1 || fits_groups(made, group), "rows cannot be in groups");
                 made.group = group;
                 return new Matrix(made);
             }),
             "arena"_a, "offset"_a, "format"_a, "rows"_a, "cols"_a, "stride"_a, "group"_a = 1,
             nb::keep_alive<0, 2>())  // argument 1 of __new__ is the class
        .def_prop_ro("shape", [](const Matrix& w) { return std::make_tuple(w.rows, w.cols); })
        .def_prop_ro("row_bytes", [](const Matrix& w) { return tc::row_bytes(w.format, w.cols); })
        .def_prop_ro("interleaved", [](const Matrix& w) { return w.group > 1; })
        .def_prop_ro("nbytes", [](const Matrix& w) { return w.rows * tc::row_bytes(w.format, w.cols); });

    // nb::new_: argument 1 of __new__ is the class, the result 0
    nb::class_<Norm>(m, "Norm").def(nb::new_(&make_norm), "weight"_a.noconvert(), "bias"_a.noconvert().none(),
                                    "eps"_a, "layer"_a);
    nb::class_<Linear>(m, "Linear")
        .def(nb::new_(
                 [](const Matrix& w, std::optional<F1> bias) { return Linear{make_linear(w, bias), bias}; }),
             "weight"_a, "bias"_a.noconvert().none(), nb::keep_alive<0, 2>());
    // The tuple of matrices is kept, and each of them keeps its arena.
    nb::class_<Stack>(m, "Stack")
        .def(nb::new_([](const nb::tuple& parts, std::optional<F1> bias) {
                 std::vector<const Matrix*> found;
                 for (nb::handle part : parts) {
                     if (!nb::isinstance<Matrix>(part))
                         throw nb::type_error("a part of a stack is no Matrix");
                     found.push_back(&nb::cast<const Matrix&>(part));
                 }
                 return make_stack(found, bias);
             }),
             "parts"_a, "bias"_a.noconvert().none(), nb::keep_alive<0, 2>());
    nb::class_<Heads>(m, "Heads")
        .def(nb::new_(&make_heads), "n"_a, "n_kv"_a, "dim"_a, "window"_a, "scale"_a, "softcap"_a,
             "q_norm"_a.noconvert().none(), "k_norm"_a.noconvert().none(), "eps"_a,
             "sinks"_a.noconvert().none() = nb::none(), "whole_norms"_a = false, "norms_last"_a = false,
             "v_norm"_a.noconvert().none() = nb::none(), "shares"_a = false, "own_norms"_a = false,
             "chunked"_a = false, "temperature"_a = 0.0f, "temperature_span"_a = 1.0f, "value_dim"_a = 0);
    nb::class_<Join>(m, "Join").def(nb::new_(&make_join), "norm"_a.none(), "scale"_a, "after"_a = 1.0f);
    nb::class_<PerLayer>(m, "PerLayer")
        .def(nb::new_(&make_per_layer), "gate"_a, "down"_a, "activation"_a, "join"_a, nb::keep_alive<0, 2>(),
             nb::keep_alive<0, 3>());
    nb::class_<Latent>(m, "Latent")
        .def(nb::new_(&make_latent), nb::kw_only(), "nope"_a, "rope"_a, "q_norm"_a.none(), "q_b"_a.none(),
             "kv_norm"_a, "k_b"_a, "v_b"_a, nb::keep_alive<0, 5>(), nb::keep_alive<0, 7>(),
             nb::keep_alive<0, 8>());
    nb::class_<Attention>(m, "Attention")
        .def(nb::new_(&make_attention), "norm"_a.none(), "qkv"_a, "out"_a, "heads"_a, "sub_norm"_a.none(),
             "join"_a, "gate"_a.none() = nb::none(), "latent"_a.none() = nb::none(), nb::keep_alive<0, 3>(),
             nb::keep_alive<0, 4>(), nb::keep_alive<0, 8>(), nb::keep_alive<0, 9>());
    nb::class_<Predictor>(m, "Predictor")
        .def(nb::new_(&make_predictor), "first"_a.none(), "second"_a, "threshold"_a.noconvert(), "hot"_a,
             "relu"_a, nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>());
    nb::class_<FFN>(m, "FFN")
        .def(nb::new_(&make_ffn), "norm"_a.none(), "gate"_a, "up"_a.none(), "down"_a,
             "down_bias"_a.noconvert().none(), "activation"_a, "threshold"_a, "up_relu"_a, "bundles"_a,
             "sub_norm"_a.none(), "join"_a, "predictor"_a.none() = nb::none(), "disk"_a.none() = nb::none(),
             "gate_disk"_a.none() = nb::none(), "gate_bias"_a.noconvert().none() = nb::none(),
             "up_bias"_a.noconvert().none() = nb::none(), "alpha"_a = 1.0f, "limit"_a = 0.0f,
             "stream"_a.none() = nb::none(), nb::keep_alive<0, 3>(), nb::keep_alive<0, 4>(),
             nb::keep_alive<0, 5>(), nb::keep_alive<0, 13>(), nb::keep_alive<0, 14>(),
             nb::keep_alive<0, 15>(), nb::keep_alive<0, 20>())
        .def_prop_ro("neurons", [](const FFN& f) { return f.layer.neurons(); })
        .def_prop_ro("from_disk", [](const FFN& f) { return f.layer.disk != nullptr; });
    nb::class_<tc::RouterRule>(m, "RouterRule")
        .def(nb::new_(&make_rule), nb::kw_only(), "score"_a, "weights"_a, "epsilon"_a, "epsilon_floor"_a,
             "scale"_a, "groups"_a, "groups_kept"_a, "group_rule"_a, "scales_input"_a = false);
    nb::class_<Mixture>(m, "Mixture")
        .def(nb::new_(&make_mixture), "norm"_a.none(), "router"_a.none(), "experts"_a, "active"_a, "join"_a,
             nb::kw_only(), "rule"_a, "selection_bias"_a.noconvert().none() = nb::none(),
             "shared"_a.none() = nb::none(), "shared_router"_a.none() = nb::none(),
             "router_norm"_a.none() = nb::none(), "expert_scale"_a.noconvert().none() = nb::none(),
             "experts_norm"_a.none() = nb::none(), "disk"_a.none() = nb::none(), nb::keep_alive<0, 3>(),
             nb::keep_alive<0, 4>(), nb::keep_alive<0, 9>(), nb::keep_alive<0, 10>(), nb::keep_alive<0, 14>())
        .def("route", &route, "logits"_a.noconvert(), "weights"_a.noconvert())
        .def(
            "before",
            [](Mixture& m, const Mixture& next) {
                check(m.layer.disk && next.layer.disk && &m != &next, "both have experts on disk");
                check(&m.layer.disk->files == &next.layer.disk->files, "experts of one queue of reads");
                check(next.layer.disk->layer == m.layer.disk->layer + 1, "experts of the next layer");
                check(next.layer.router.weight.data && next.dim() == m.dim(), "a router that can be asked");
                m.layer.next = &next.layer;
            },
            "next"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("experts", [](const Mixture& m) { return m.layer.experts.size(); })
        .def_prop_ro("neurons", [](const Mixture& m) { return m.layer.experts.size() * m.layer.neurons(); })
        .def_prop_ro("from_disk", [](const Mixture& m) { return m.layer.disk || m.layer.experts[0]->disk; })
        .def_prop_ro("reads", [](const Mixture& m) -> std::optional<std::tuple<uint64_t, uint64_t>> {
            if (!m.layer.disk) return std::nullopt;
            return std::tuple{m.layer.disk->stats.needed, m.layer.disk->stats.missed};
        });
    nb::class_<Step>(m, "Step").def(
        nb::new_(&make_step), "positions"_a.noconvert(), "sequence"_a.noconvert(), "table"_a.noconvert(),
        "block"_a, "window"_a, "cos"_a.noconvert().none(), "sin"_a.noconvert().none(),
        "state_from"_a.noconvert().none() = nb::none(), "state_to"_a.noconvert().none() = nb::none(),
        "ends"_a.noconvert().none() = nb::none());
    nb::class_<KVPages>(m, "KVPages")
        .def(nb::new_(&make_kv_pages), "k"_a.noconvert(), "v"_a.noconvert().none(), "k_type"_a, "v_type"_a,
             "heads"_a, "dim"_a, "block"_a);
    m.def(
        "cache_page_bytes",
        [](int type, size_t dim, size_t block) {
            check(type >= 0 && type < tc::N_CACHE_TYPES && dim <= size_t(1) << 20 && block <= size_t(1) << 20,
                  "arguments out of range");
            return tc::cache_page_bytes(tc::CacheType(type), dim, block);
        },
        "type"_a, "dim"_a, "block"_a);

    nb::class_<Context> context(m, "Context");
    context
        .def(
            "__init__",
            [](Context* self, int threads, const std::string& isa) {
                check(threads >= 1 && threads <= 1024, "threads out of range");
                const tc::Kernels* k = isa.empty() ? tc::chosen_kernels() : tc::kernels_named(isa.c_str());
                check(k != nullptr, "instruction set not supported by this CPU");
                new (self) Context(threads, k);
                self->interrupted = &interrupted_by_python;
            },
            "threads"_a, "isa"_a = "")
        .def_prop_ro("threads", [](const Context& c) { return c.pool.threads(); })
        .def_prop_ro("isa", [](const Context& c) { return std::string(c.k.isa); })
        .def_prop_ro("group", [](const Context& c) { return c.k.panel_rows; })
        .def_prop_ro("scratch_bytes", &Context::scratch_bytes)
        .def(
            "interleaves",
            [](const Context& c, const Matrix& w) { return c.k.interleaves && in_groups(c, w); }, "w"_a)
        .def(
            "interleaved",
            [](Context& c, const Arena& arena, const Matrix& w) {
                check(w.data >= arena.data && w.data < arena.data + arena.bytes, "matrix of another arena");
                check(in_groups(c, w), "rows cannot be interleaved");
                nb::gil_scoped_release release;
                std::lock_guard<std::mutex> lock(c.one_call);
                return c.interleaved(w, arena.data + (w.data - arena.data));
            },
            "arena"_a, "w"_a, nb::keep_alive<0, 2>())
        .def(
            "embed",
            [](Context& c, const Matrix& w, I1 ids, MutF2 out) {
                check_weights(w), check_groups(c, w);
                check(out.shape(0) == ids.shape(0) && out.shape(1) == w.cols, "out has the wrong shape");
                check_ids(ids, w.rows, "token id out of range");
                nb::gil_scoped_release release;
                std::lock_guard<std::mutex> lock(c.one_call);
                c.embed(w, ids.data(), ids.shape(0), out.data());
            },
            "w"_a, "ids"_a.noconvert(), "out"_a.noconvert())
        .def(
            "norm",
            [](Context& c, F2 x, F1 weight, std::optional<F1> bias, float eps, bool layer, MutF2 out) {
                check(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1), "out has the wrong shape");
                const Norm made = make_norm(weight, bias, eps, layer);
                const tc::Norm norm = norm_of(&made, x.shape(1));
                nb::gil_scoped_release release;
                std::lock_guard<std::mutex> lock(c.one_call);
                c.norm(norm, x.data(), x.shape(0), x.shape(1), out.data());
            },
            "x"_a.noconvert(), "weight"_a.noconvert(), "bias"_a.noconvert().none(), "eps"_a, "layer"_a,
            "out"_a.noconvert())
        .def(
            "matmul",
            [](Context& c, const Matrix& w, F2 x, std::optional<F1> bias, MutF2 out, bool add) {
                check(x.shape(1) == w.cols, "x has the wrong width");
                check(out.shape(0) == x.shape(0) && out.shape(1) == w.rows, "out has the wrong shape");
                const tc::Linear linear = make_linear(w, bias);
                check_groups(c, w);
                nb::gil_scoped_release release;
                std::lock_guard<std::mutex> lock(c.one_call);
                c.matmul(linear, {}, x.data(), x.shape(0), out.data(), add);
            },
            "w"_a, "x"_a.noconvert(), "bias"_a.noconvert().none(), "out"_a.noconvert(), "add"_a)
        .def("attention", &attention, "qkv"_a.noconvert(), "heads"_a, "step"_a, "kv"_a, "out"_a.noconvert())
        .def("attention_add", &attention_add, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "step"_a,
             "kv"_a)
        .def("per_layer_add", &per_layer_add, "x"_a.noconvert(), "layer"_a, "given"_a.noconvert())
        .def("ffn_add", &ffn_add, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "sparsity"_a,
             "record"_a.noconvert() = nb::none())
        .def("read_ahead", &read_ahead, "h"_a.noconvert(), "layer"_a, "sparsity"_a)
        .def("read_ahead", &read_ahead_of_experts, "h"_a.noconvert(), "layer"_a, "sparsity"_a,
             "weights"_a.noconvert() = nb::none())
        .def("routed", &routed, "h"_a.noconvert(), "layer"_a, "out"_a.noconvert())
        .def("moe_add", &moe_add, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "sparsity"_a,
             "record"_a.noconvert() = nb::none(), "weights"_a.noconvert() = nb::none(),
             "used"_a.noconvert() = nb::none());
    bind_mixers(m, context);
    bind_host(m);
    bind_plan(m);
    bind_quantise(m);
}
