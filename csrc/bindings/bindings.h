// Shared by the files that bind to Python: arrays, checks, and the parts of a layer as Python holds them.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "engine/model_ops.h"
#include "storage/dense_stream.h"
#include "storage/disk_experts.h"
#include "storage/store.h"

namespace nb = nanobind;
using namespace nb::literals;
using tc::Arena;
using tc::Context;
using tc::DiskRows;
using tc::Matrix;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using F1 = Array<const float, 1>;
using F2 = Array<const float, 2>;
using MutF2 = Array<float, 2>;
using I1 = Array<const int32_t, 1>;
using I2 = Array<const int32_t, 2>;
using AnyArray = nb::ndarray<nb::c_contig, nb::device::cpu>;  // type and shape are checked where it is used

inline void check(bool ok, const char* what) {
    if (!ok) throw nb::value_error(what);
}
inline const float* optional_vector(const std::optional<F1>& v, size_t n, const char* what) {
    if (!v) return nullptr;
    check(v->shape(0) == n, what);
    return v->data();
}

// Parts of a layer as Python holds them. They are validated when made and keep the arrays that they point
// into (nb::keep_alive keeps matrices alive), so calls have little left to check.
struct Norm {
    tc::Norm norm;
    F1 weight;
    std::optional<F1> bias;
};
struct Linear {
    tc::Linear linear;
    std::optional<F1> bias;
};
struct Stack {
    tc::Stack stack;
    std::optional<F1> bias;
};
struct Heads {
    tc::Heads heads;
    std::optional<F1> q_norm, k_norm, sinks, v_norm;
};
struct Join {
    tc::Join join;
    std::optional<Norm> norm;
};
struct Latent {
    tc::Latent latent;
    std::optional<Norm> q_norm;
    Norm kv_norm;
};
struct Attention {
    tc::Attention layer;
    std::optional<Norm> norm, sub_norm;
    Stack qkv;
    Linear out;
    Heads heads;
    Join join;
    std::optional<Latent> latent;
};
struct Mixer {
    tc::Mixer layer;
    std::optional<Norm> norm;
    Stack in;
    Linear out;
    Join join;
    F2 conv;
    std::optional<F1> conv_bias, decay, step_bias, skip, gated_norm;
    std::vector<float> q_weight, k_weight;  // a vector that moves keeps its data
};
struct Predictor {
    tc::Predictor predictor;
    F1 threshold;
};
struct FFN {
    tc::FFN layer;
    std::optional<Norm> norm, sub_norm;
    Linear gate;
    std::optional<F1> down_bias;
    Join join;
    std::optional<Predictor> predictor;
    std::optional<F1> gate_bias, up_bias;
    size_t dim() const { return layer.gate.weight.cols; }
};
struct Mixture {
    tc::Mixture layer;
    std::optional<Norm> norm;
    std::optional<Linear> router;
    Join join;
    std::optional<F1> selection_bias;
    std::optional<F1> expert_scale;
    std::optional<Norm> router_norm, experts_norm;
    size_t dim() const { return layer.experts[0]->gate.weight.cols; }
};
// The experts of a layer on disk, and the orders of their rows.
struct DiskExperts {
    tc::DiskExperts rows;
    std::vector<I1> orders;
};
struct PerLayer {
    tc::PerLayer layer;
    Join join;
};
struct Step {
    tc::Step step;
    I1 positions, sequence;
    I2 table;
    std::optional<F2> cos, sin;
    std::optional<I1> state_from, state_to, ends;
    size_t slots;   // of states: one more than the largest that is named
    size_t pages;   // one more than the largest page of the table that a token reads or writes
    size_t window;  // the window of its heads, which touch no page before it; 0: any heads
};

// A layer's keys and values.
struct KVPages {
    tc::CachePages k, v;
    size_t dim, block;
    AnyArray keys;
    std::optional<AnyArray> values;  // none: latents, which are both
};

// Rows of a file as Python names them (bindings_load.cpp), which go to `bytes` bytes of memory.
using State = std::tuple<uint64_t, uint64_t, uint64_t, int64_t>;
using Run = std::tuple<std::string, size_t, unsigned, uint64_t, size_t, size_t, size_t, std::optional<I1>,
                       size_t, size_t>;
tc::RowRun make_run(const Run& run, size_t bytes, size_t files);
std::vector<tc::SourceFile> source_files(const std::vector<std::tuple<std::string, State>>& files);
tc::Method method_of(const std::string& name);  // bindings_disk.cpp
bool interrupted_by_python();

// Parts of a layer, as bindings.cpp makes them.
tc::Norm norm_of(const Norm* norm, size_t dim);
tc::Join join_of(const Join& join, size_t dim);
void check_groups(const Context& c, const Matrix& w);
template <class T>
std::optional<T> held(const T* given) {
    return given ? std::optional<T>(*given) : std::nullopt;
}

// Check that the pages fit these heads and hold all pages that the step's tables name.
inline void check_pages(const tc::Heads& heads, const Step& s, const KVPages& kv) {
    check(kv.k.heads == heads.n_kv && kv.dim == heads.dim && kv.block == s.step.block &&
              !kv.values == (heads.value_dim != 0),
          "the kv cache is of another shape than the heads");
    check(!s.window || (heads.window && heads.window <= s.window),
          "the heads look further back than the step's pages");
    check(s.pages <= kv.k.pages, "block table names a page that does not exist");
    check(s.step.rotary <= heads.dim, "cos is wider than a head");
    check(!heads.value_dim || s.step.rotary == heads.dim - heads.value_dim,
          "cos is not of the part of a latent that turns");
    check(!s.ends || (!heads.window && !heads.value_dim), "tokens that see later ones need plain heads");
}

// Check that the states are those of the mixer, and there are all that the step names.
inline void check_states(const Mixer& m, const Step& s, const MutF2& states) {
    check(s.step.state_to != nullptr, "a step without states");
    check(states.shape(1) == m.layer.state_floats() && states.shape(0) >= s.slots,
          "states of another shape, or too few");
}

inline void check_rows(const MutF2& x, const F2& h, size_t dim) {
    check(x.shape(1) == dim, "x has the wrong width");
    check(h.shape(0) == x.shape(0) && h.shape(1) == dim, "h and x differ in shape");
}
