// The search for the bytes of weights. As bindings.cpp.
#include "quantise/quantise.h"

#include "bindings.h"

using MutU2 = Array<uint8_t, 2>;
using F3 = Array<const float, 3>;

static void quantise(const std::string& format, F2 x, MutU2 out, std::optional<F1> importance,
                     std::optional<F3> feedback, int threads, const std::string& isa) {
    const tc::Search search = tc::search_named(format);
    check(search != tc::Search::COUNT, "no search for this format");
    const size_t rows = x.shape(0), columns = x.shape(1), together = tc::searched_together(search);
    check(columns % together == 0, "columns are no whole number of blocks");
    check(out.shape(0) == rows, "out has the wrong number of rows");
    check(out.shape(1) == tc::stored_bytes(search, columns), "out has the wrong width");
    check(threads >= 1 && threads <= 1024, "threads out of range");
    tc::SearchInput in = {search, x.data(), rows, columns, nullptr, nullptr, columns};
    in.importance = optional_vector(importance, columns, "importance has the wrong length");
    if (feedback) {
        in.window = feedback->shape(1);
        check(feedback->shape(2) == in.window && in.window > 0, "feedback has no square windows");
        check(in.window % together == 0, "a window is no whole number of blocks");
        check(feedback->shape(0) * in.window >= columns, "feedback has too few windows");
        in.feedback = feedback->data();
    }
    const tc::Kernels* kernels = isa.empty() ? tc::chosen_kernels() : tc::kernels_named(isa.c_str());
    check(kernels != nullptr, "instruction set not supported by this CPU");
    bool done;
    {
        nb::gil_scoped_release release;
        done = tc::quantise(in, *tc::search_kernels_named(kernels->isa), threads, out.data(), out.shape(1));
    }
    if (!done) throw std::bad_alloc();
}

void bind_quantise(nb::module_& m) {
    m.def("quantise", &quantise, "format"_a, "x"_a.noconvert(), "out"_a.noconvert(), nb::kw_only(),
          "importance"_a.noconvert().none() = nb::none(), "feedback"_a.noconvert().none() = nb::none(),
          "threads"_a = 1, "isa"_a = "");
}
