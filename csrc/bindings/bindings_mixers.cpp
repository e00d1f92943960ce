// Validates what Python passes for mixers of tokens that have a state; see bindings.cpp.
#include "bindings.h"

#include <math.h>

// What a mixer's vectors are, by name; a kind wants some of them and no others.
struct Vectors {
    std::optional<F1> decay, step_bias, skip, gated_norm;
};

static void check_vectors(const tc::Mixer& m, const Vectors& v) {
    const bool heads = m.kind != tc::Mixer::SHORT_CONV, mamba = m.kind == tc::Mixer::MAMBA2;
    check(v.decay.has_value() == heads && v.step_bias.has_value() == heads &&
              v.gated_norm.has_value() == heads && v.skip.has_value() == mamba,
          "a mixer's vectors are those of another kind");
    check(!heads || (v.decay->shape(0) == m.heads && v.step_bias->shape(0) == m.heads),
          "decay or step_bias is not of these heads");
    check(!mamba || v.skip->shape(0) == m.heads, "skip is not of these heads");
    check(!heads || v.gated_norm->shape(0) == (mamba ? m.inner() : m.cols),
          "gated_norm has the wrong length");
}

static void check_shape(const tc::Mixer& m) {
    const size_t most = size_t(1) << 20;
    check(m.width >= 1 && m.width <= tc::kMostConvolved && m.channels >= 1 && m.channels <= most,
          "a convolution of no size");
    check(m.rows >= 1 && m.rows <= most && m.cols >= 1 && m.cols <= most, "a state of no size");
    const size_t inner = m.inner();
    check(m.in.rows() == m.in_rows() && m.out.weight.cols == inner && m.out.weight.rows == m.in.cols(),
          "a mixer's projections do not fit");
    if (m.kind == tc::Mixer::SHORT_CONV) {
        check(m.heads == 0, "a short convolution has no heads");
        return;
    }
    check(m.heads >= 1 && m.heads <= most && m.groups >= 1 && m.heads % m.groups == 0,
          "a mixer's heads do not divide");
    const size_t keys = 2 * m.groups * m.rows;
    check(m.channels == keys + inner, "a convolution of other channels");
}

static Mixer make_mixer(int kind, const Norm* norm, const Stack& in, const Linear& out, const Join& join,
                        F2 conv, std::optional<F1> conv_bias, size_t heads, size_t groups, size_t rows,
                        size_t cols, bool tiled, std::optional<F1> decay, std::optional<F1> step_bias,
                        std::optional<F1> skip, std::optional<F1> gated_norm, float norm_eps) {
    check(kind >= 0 && kind < tc::Mixer::N_KINDS, "unknown kind of mixer");
    const size_t dim = in.stack.cols();
    auto data = [](const std::optional<F1>& v) { return v ? v->data() : nullptr; };
    tc::Mixer m = {};
    m.kind = tc::Mixer::Kind(kind), m.norm = norm_of(norm, dim), m.in = in.stack, m.out = out.linear;
    m.join = join_of(join, dim), m.width = conv.shape(0), m.channels = conv.shape(1), m.conv = conv.data();
    m.conv_bias = optional_vector(conv_bias, m.channels, "conv_bias has the wrong length");
    m.heads = heads, m.groups = groups, m.rows = rows, m.cols = cols, m.tiled = tiled;
    m.decay = data(decay), m.step_bias = data(step_bias), m.skip = data(skip);
    m.gated_norm = data(gated_norm), m.norm_eps = norm_eps;
    check_shape(m), check_vectors(m, {decay, step_bias, skip, gated_norm});
    // q times rows^-1/2 of the scores, both over their length: as an RMS norm, whose mean is a sum over rows.
    std::vector<float> q(rows, 1.0f / float(rows)), k(rows, 1.0f / sqrtf(float(rows)));
    m.q_weight = q.data(), m.k_weight = k.data();
    return {m,     held(norm), in,   out,        join,         conv,        conv_bias,
            decay, step_bias,  skip, gated_norm, std::move(q), std::move(k)};
}

static void mixer_add(Context& c, MutF2 x, F2 h, const Mixer& m, const Step& s, MutF2 states) {
    check_rows(x, h, m.layer.in.cols());
    check(x.shape(0) == s.step.tokens, "x and the step differ in tokens");
    check_states(m, s, states);
    for (const Matrix& part : m.layer.in.parts) check_groups(c, part);
    check_groups(c, m.layer.out.weight);
    nb::gil_scoped_release release;
    std::lock_guard<std::mutex> lock(c.one_call);
    c.mixer_add(x.data(), h.data(), m.layer, s.step, states.data());
}

void bind_mixers(nb::module_& m, nb::class_<Context>& context) {
    // nb::new_: argument 1 of __new__ is the class, the result 0
    nb::class_<Mixer>(m, "Mixer")
        .def(nb::new_(&make_mixer), nb::kw_only(), "kind"_a, "norm"_a.none(), "proj"_a, "out"_a, "join"_a,
             "conv"_a.noconvert(), "conv_bias"_a.noconvert().none(), "heads"_a = 0, "groups"_a = 1,
             "rows"_a = 1, "cols"_a = 1, "tiled"_a = false, "decay"_a.noconvert().none() = nb::none(),
             "step_bias"_a.noconvert().none() = nb::none(), "skip"_a.noconvert().none() = nb::none(),
             "gated_norm"_a.noconvert().none() = nb::none(), "norm_eps"_a = 1e-6f, nb::keep_alive<0, 4>(),
             nb::keep_alive<0, 5>())
        .def_prop_ro("state_floats", [](const Mixer& x) { return x.layer.state_floats(); });
    context.def("mixer_add", &mixer_add, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "step"_a,
                "states"_a.noconvert());
}
