// What planning and replays ask of the core: its limits, its scratch, its cache policies. As bindings.cpp.
#include <string>

#include "bindings.h"
#include "engine/limits.h"
#include "engine/router.h"
#include "storage/replay.h"

using tc::CacheReplay;

static void bind_limits(nb::module_& m) {
    nb::class_<tc::Limits>(m, "NativeLimits")
        .def_ro("pass_tokens", &tc::Limits::pass_tokens)
        .def_ro("few_tokens", &tc::Limits::few_tokens)
        .def_ro("chunk_neurons", &tc::Limits::chunk_neurons)
        .def_ro("stream_slots", &tc::Limits::stream_slots)
        .def_ro("slot_alignment", &tc::Limits::slot_alignment)
        .def_ro("arena_padding", &tc::Limits::arena_padding)
        .def_ro("measured_bytes", &tc::Limits::measured_bytes)
        .def_ro("page_run", &tc::Limits::page_run)
        .def_ro("gap_bytes", &tc::Limits::gap_bytes)
        .def_ro("slot_table_bytes", &tc::Limits::slot_table_bytes)
        .def_ro("record_table_bytes", &tc::Limits::record_table_bytes)
        .def_ro("half_life", &tc::Limits::half_life);
    m.def("limits", &tc::limits);
}

static tc::LayerShape make_shape(size_t dim, size_t ffn_dim, size_t experts, size_t active, size_t heads,
                                 size_t kv_heads, size_t head_dim, size_t shared_dim, size_t dense_dim,
                                 bool bundles, bool gated, size_t mixer_in, size_t mixer_inner,
                                 size_t mixer_heads, size_t mixer_ring, size_t lower, size_t nope,
                                 size_t rank, size_t value) {
    for (const size_t n : {dim, ffn_dim, experts, active, heads, kv_heads, head_dim})
        check(n > 0 && n <= size_t(1) << 31, "a size is out of range");
    check(heads % kv_heads == 0, "heads do not divide");
    check(active <= experts, "more experts chosen than there are");
    for (const size_t n :
         {shared_dim, dense_dim, mixer_in, mixer_inner, mixer_heads, mixer_ring, lower, nope, rank, value})
        check(n <= size_t(1) << 31, "a size is out of range");
    check(rank < head_dim, "a latent is wider than its keys");
    return {dim,        ffn_dim,   experts, active, heads,    kv_heads,    head_dim,
            shared_dim, dense_dim, bundles, gated,  mixer_in, mixer_inner, mixer_heads,
            mixer_ring, lower,     nope,    rank,   value};
}

static size_t scratch_bytes(const tc::LayerShape& shape, size_t tokens, size_t positions, size_t threads) {
    check(threads >= 1 && threads <= 1024, "threads out of range");
    check(tokens <= size_t(1) << 31 && positions <= size_t(1) << 31, "tokens or positions out of range");
    return tc::scratch_bytes(shape, tokens, positions, threads);
}

static void bind_scratch(nb::module_& m) {
    nb::class_<tc::LayerShape>(m, "LayerShape")
        .def(nb::new_(&make_shape), nb::kw_only(), "dim"_a, "ffn_dim"_a, "experts"_a, "active"_a, "heads"_a,
             "kv_heads"_a, "head_dim"_a, "shared_dim"_a = 0, "dense_dim"_a = 0, "bundles"_a = false,
             "gated"_a = false, "mixer_in"_a = 0, "mixer_inner"_a = 0, "mixer_heads"_a = 0,
             "mixer_ring"_a = 0, "lower"_a = 0, "nope"_a = 0, "rank"_a = 0, "value"_a = 0);
    m.def("scratch_bytes", &scratch_bytes, "shape"_a, nb::kw_only(), "tokens"_a, "positions"_a, "threads"_a);
    m.def("disk_scratch_bytes", &tc::disk_scratch_bytes, "shape"_a);
}

static CacheReplay* make_replay(const std::string& policy, size_t neurons, size_t hot, size_t slots,
                                std::optional<F1> likely) {
    check(neurons > 0 && neurons <= size_t(INT32_MAX) && hot <= neurons, "more hot neurons than there are");
    check(slots <= neurons - hot, "more slots than records");
    const float* frequency = optional_vector(likely, neurons, "likely has the wrong length");
    std::unique_ptr<CacheReplay> made = CacheReplay::make(policy.c_str(), neurons, hot, slots, frequency);
    check(made != nullptr, "unknown cache policy");
    return made.release();
}

static size_t replay_step(CacheReplay& r, I1 needed, Array<int32_t, 1> missed) {
    check(missed.shape(0) >= needed.shape(0), "missed is too short");
    for (size_t i = 0; i < needed.shape(0); i++)
        check(needed.data()[i] >= (i ? needed.data()[i - 1] + 1 : 0) && size_t(needed.data()[i]) < r.neurons,
              "needed is not ascending, or names a neuron that does not exist");
    return r.step(needed.data(), needed.shape(0), missed.data());
}

static void replay_experts(const std::string& policy, I1 ids, Array<const int64_t, 1> ends,
                           Array<int32_t, 1> missed, size_t experts, size_t slots, size_t passing,
                           std::optional<F1> likely) {
    check(experts > 0 && experts <= tc::kMostExperts && slots <= experts, "more slots than experts");
    check(passing >= 1 && passing <= size_t(1) << 20, "passing out of range");
    const size_t steps = ends.shape(0);
    check(missed.shape(0) >= steps, "missed is too short");
    int64_t begin = 0;
    for (size_t s = 0; s < steps; s++) {
        const int64_t end = ends.data()[s];
        check(end >= begin && size_t(end) <= ids.shape(0), "ends do not rise, or are beyond the ids");
        for (int64_t i = begin; i < end; i++)
            check(ids.data()[i] >= (i > begin ? ids.data()[i - 1] + 1 : 0) && size_t(ids.data()[i]) < experts,
                  "ids are not ascending, or name an expert that does not exist");
        begin = end;
    }
    const float* frequency = optional_vector(likely, experts, "likely has the wrong length");
    nb::gil_scoped_release release;
    const bool known = tc::replay_experts(policy.c_str(), experts, slots, passing, frequency, ids.data(),
                                          ends.data(), steps, missed.data());
    check(known, "unknown cache policy");
}

void bind_plan(nb::module_& m) {
    bind_limits(m);
    bind_scratch(m);
    nb::class_<CacheReplay>(m, "CacheReplay")
        .def(nb::new_(&make_replay), "policy"_a, nb::kw_only(), "neurons"_a, "hot"_a, "slots"_a,
             "likely"_a.noconvert().none())
        .def("step", &replay_step, "needed"_a.noconvert(), "missed"_a.noconvert());
    m.def("replay_experts", &replay_experts, "policy"_a, "ids"_a.noconvert(), "ends"_a.noconvert(),
          "missed"_a.noconvert(), nb::kw_only(), "experts"_a, "slots"_a, "passing"_a,
          "likely"_a.noconvert().none());
}
