// What Python needs to hand parts of a step to a GPU's driver. As bindings.cpp; but tasks run later, on any
// thread, so what changes from step to step is checked when they do: what they throw, `HostTask::take`
// throws.
#include "bindings.h"

#include <string.h>

#include "engine/doorbell.h"
#include "engine/host_task.h"

using Named = Array<const uint8_t, 2>;

// The step that tasks are about: set before each run.
struct StepSlot {
    std::optional<Step> now;
    const Step& step() const {
        check(now.has_value(), "no step is set");
        return *now;
    }
};

struct HostTask {
    tc::HostTask task;
    nb::object context, slot;  // kept alive
    const StepSlot& steps;
    HostTask(nb::object c, nb::object s)
        : task(nb::cast<Context&>(c)), context(c), slot(s), steps(nb::cast<const StepSlot&>(s)) {}
    // Rows of the buffers that are in use.
    size_t tokens(size_t rows) const {
        const size_t n = steps.step().step.tokens;
        check(n <= rows, "more tokens than the buffers have rows");
        return n;
    }
};

static void check_record(const std::optional<MutF2>& record, MutF2 x, size_t neurons) {
    check(!record || (record->shape(0) == x.shape(0) && record->shape(1) == neurons),
          "record has the wrong shape");
}

static void zero(HostTask& t, MutF2 out) {
    t.task.add([&t, out](Context&) {
        memset(out.data(), 0, t.tokens(out.shape(0)) * out.shape(1) * sizeof(float));
        return tc::FFNCounts{};
    });
}

static void copy(HostTask& t, MutF2 out, F2 x) {
    check_rows(out, x, x.shape(1));
    t.task.add([&t, out, x](Context&) {
        memcpy(out.data(), x.data(), t.tokens(x.shape(0)) * x.shape(1) * sizeof(float));
        return tc::FFNCounts{};
    });
}

// `slot`: the step of this attention's window.
static void attention(HostTask& t, MutF2 x, F2 h, const Attention& a, const StepSlot& slot,
                      const KVPages& kv) {
    check_rows(x, h, a.layer.qkv.cols());
    t.task.add([&t, x, h, &a, &slot, &kv](Context& c) {
        t.tokens(x.shape(0));
        check_pages(a.layer.heads, slot.step(), kv);
        c.attention_add(x.data(), h.data(), a.layer, slot.step().step, kv.k, kv.v);
        return tc::FFNCounts{};
    });
}

static void mixer(HostTask& t, MutF2 x, F2 h, const Mixer& m, MutF2 states) {
    check_rows(x, h, m.layer.in.cols());
    t.task.add([&t, x, h, &m, states](Context& c) {
        t.tokens(x.shape(0));
        check_states(m, t.steps.step(), states);
        c.mixer_add(x.data(), h.data(), m.layer, t.steps.step().step, states.data());
        return tc::FFNCounts{};
    });
}

static void matmul(HostTask& t, const Linear& w, F2 x, MutF2 out) {
    check(x.shape(1) == w.linear.weight.cols && out.shape(1) == w.linear.weight.rows &&
              out.shape(0) == x.shape(0),
          "x or out has the wrong shape");
    t.task.add([&w, x, out](Context& c) {
        c.matmul(w.linear, {}, x.data(), x.shape(0), out.data(), false);
        return tc::FFNCounts{};
    });
}

// `record`: as FFNArgs::record.
static void ffn(HostTask& t, MutF2 x, F2 h, const FFN& f, int sparsity, std::optional<Named> named,
                std::optional<MutF2> record) {
    check(sparsity >= 0 && sparsity < tc::N_SPARSITIES, "unknown sparsity");
    check_rows(x, h, f.layer.gate.weight.cols);
    check(!named || (named->shape(0) == x.shape(0) && named->shape(1) == (f.layer.neurons() + 7) / 8),
          "named has the wrong shape");
    check_record(record, x, f.layer.neurons());
    t.task.add([&t, x, h, &f, sparsity, named, record](Context& c) {
        tc::FFNArgs a = {f.layer,
                         x.data(),
                         h.data(),
                         t.tokens(x.shape(0)),
                         x.shape(1),
                         tc::Sparsity(sparsity),
                         record ? record->data() : nullptr};
        a.named = named ? named->data() : nullptr;
        return c.ffn_add(a);
    });
}

static void mixture(HostTask& t, MutF2 x, F2 h, const Mixture& m, int sparsity, std::optional<F2> weights,
                    std::optional<MutF2> record) {
    check(sparsity >= 0 && sparsity < tc::N_SPARSITIES, "unknown sparsity");
    check(weights || m.router, "without a router the weights have to be given");
    check_rows(x, h, m.dim());
    check(!weights || (weights->shape(0) == x.shape(0) && weights->shape(1) == m.layer.experts.size()),
          "weights has the wrong shape");
    check_record(record, x, m.layer.experts.size() * m.layer.neurons());
    t.task.add([&t, x, h, &m, sparsity, weights, record](Context& c) {
        tc::MixtureArgs a = {m.layer,
                             x.data(),
                             h.data(),
                             t.tokens(x.shape(0)),
                             x.shape(1),
                             tc::Sparsity(sparsity),
                             record ? record->data() : nullptr};
        a.weights = weights ? weights->data() : nullptr;
        return c.moe_add(a);
    });
}

// What `mixture` takes as weights, of a router that reads a layer's input.
static void routed(HostTask& t, F2 h, const Mixture& m, MutF2 out) {
    check(m.router.has_value(), "there is no router");
    check(h.shape(1) == m.dim(), "h has the wrong width");
    check(out.shape(0) == h.shape(0) && out.shape(1) == m.layer.experts.size(), "out has the wrong shape");
    t.task.add([&t, h, &m, out](Context& c) {
        c.routed(m.layer, h.data(), t.tokens(h.shape(0)), out.data());
        return tc::FFNCounts{};
    });
}

static void per_layer(HostTask& t, MutF2 x, const PerLayer& p, F2 given) {
    check(x.shape(1) == p.layer.gate.cols, "x has the wrong width");
    check(given.shape(0) == x.shape(0) && given.shape(1) == p.layer.gate.rows, "given has the wrong shape");
    t.task.add([&t, x, &p, given](Context& c) {
        c.per_layer_add(x.data(), p.layer, given.data(), t.tokens(x.shape(0)));
        return tc::FFNCounts{};
    });
}

using QueueWords = Array<uint32_t, 2>;
using DoorbellCall = std::tuple<uint32_t, uintptr_t, uintptr_t>;  // number, function, argument

struct Doorbell {
    QueueWords words;  // kept alive
    tc::Doorbell bell;
    explicit Doorbell(QueueWords w) : words(w), bell(of(w)) {}
    static std::vector<tc::Doorbell::Words> of(QueueWords w) {
        check(w.shape(1) == 32, "words are [queues, 32]");
        std::vector<tc::Doorbell::Words> queues;
        for (size_t i = 0; i < w.shape(0); i++) {
            auto* row = reinterpret_cast<tc::Doorbell::Word*>(w.data() + i * 32);
            queues.push_back({row, row + 16});
        }
        return queues;
    }
};

static void expect(Doorbell& d, const std::vector<DoorbellCall>& calls) {
    std::vector<tc::Doorbell::Call> made;
    for (const auto& [number, function, argument] : calls) {
        check(number != 0, "0 is no call's number");
        made.push_back(
            {number, reinterpret_cast<void (*)(void*)>(function), reinterpret_cast<void*>(argument)});
    }
    d.bell.expect(made);
}

void bind_host(nb::module_& m) {
    nb::class_<Doorbell>(m, "Doorbell")
        .def(nb::init<QueueWords>(), "words"_a.noconvert())
        .def("expect", &expect, "calls"_a)
        .def("settle", [](Doorbell& d) { return d.bell.settle(); })
        .def_prop_ro("expected", [](const Doorbell& d) { return d.bell.expected(); });
    nb::class_<StepSlot>(m, "StepSlot")
        .def(nb::init<>())
        .def("set", [](StepSlot& s, const Step& step) { s.now = step; }, "step"_a, "Not while a task runs.");
    nb::class_<HostTask>(m, "HostTask")
        .def(nb::init<nb::object, nb::object>(), "context"_a, "slot"_a)
        .def("zero", &zero, "out"_a.noconvert(), "The rows of the step's tokens become 0.")
        .def("copy", &copy, "out"_a.noconvert(), "x"_a.noconvert(),
             "The rows of the step's tokens become x's.")
        .def("attention", &attention, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "slot"_a, "kv"_a,
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
        .def("mixer", &mixer, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "states"_a.noconvert(),
             nb::keep_alive<1, 4>())
        .def("matmul", &matmul, "w"_a, "x"_a.noconvert(), "out"_a.noconvert(), nb::keep_alive<1, 2>())
        .def("ffn", &ffn, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "sparsity"_a,
             "named"_a.noconvert().none() = nb::none(), "record"_a.noconvert().none() = nb::none(),
             nb::keep_alive<1, 4>())
        .def("mixture", &mixture, "x"_a.noconvert(), "h"_a.noconvert(), "layer"_a, "sparsity"_a,
             "weights"_a.noconvert().none() = nb::none(), "record"_a.noconvert().none() = nb::none(),
             nb::keep_alive<1, 4>())
        .def("routed", &routed, "h"_a.noconvert(), "layer"_a, "out"_a.noconvert(), nb::keep_alive<1, 3>())
        .def("per_layer", &per_layer, "x"_a.noconvert(), "layer"_a, "given"_a.noconvert(),
             nb::keep_alive<1, 3>())
        .def("run",
             [](HostTask& t) {
                 nb::gil_scoped_release release;
                 tc::HostTask::call(&t.task);
             })
        .def(
            "take",
            [](HostTask& t) {
                const tc::FFNCounts r = t.task.take();
                return std::make_tuple(r.active, r.rows, r.rows_dense, r.gates, r.predictor_bytes);
            },
            "Counts since the last time; raises what a part raised.")
        .def_prop_ro("begun", [](const HostTask& t) { return t.task.begun(); })
        .def_prop_ro("ended", [](const HostTask& t) { return t.task.ended(); })
        .def_prop_ro(
            "function", [](const HostTask&) { return reinterpret_cast<uintptr_t>(&tc::HostTask::call); },
            "void (*)(void*)")
        .def_prop_ro("argument", [](const HostTask& t) { return reinterpret_cast<uintptr_t>(&t.task); });
}
