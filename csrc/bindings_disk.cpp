// What Python needs of the disk tier. As bindings.cpp: validates, releases the GIL, calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <errno.h>

#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "reader.h"

namespace nb = nanobind;
using namespace nb::literals;
using tc::Reader;

static void check(bool ok, const char* what) {
    if (!ok) throw nb::value_error(what);
}

static void make_reader(Reader* self, const std::string& path, unsigned depth, size_t buffer_bytes,
                        const std::string& method, bool direct) {
    check(depth >= 1 && depth <= 4096, "depth out of range");
    check(buffer_bytes >= 1 && buffer_bytes <= size_t(1) << 30, "buffer_bytes out of range");
    check(method.empty() || method == "io_uring" || method == "threads", "method is io_uring or threads");
    const tc::Method how = method.empty() ? tc::Method::AUTO : method == "threads" ? tc::Method::THREADS : tc::Method::URING;
    new (self) Reader(path.c_str(), depth, buffer_bytes, how, direct);
    if (const int error = self->error()) {
        self->~Reader();
        errno = error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw nb::python_error();
    }
}

static bool submit(Reader& r, const std::vector<std::tuple<uint64_t, uint32_t, unsigned, uint64_t>>& reads) {
    std::vector<tc::ReadRequest> requests;
    for (const auto& [offset, bytes, buffer, tag] : reads) {
        check(buffer < r.depth() && bytes <= r.buffer_bytes(), "outside the buffers");
        requests.push_back({offset, bytes, r.buffer(buffer), tag});
    }
    nb::gil_scoped_release release;
    return r.submit(requests.data(), requests.size());
}

static std::vector<std::tuple<uint64_t, int>> take(Reader& r, bool wait) {
    std::vector<tc::ReadDone> done(r.depth());
    size_t n;
    {
        nb::gil_scoped_release release;
        n = r.take(done.data(), done.size(), wait);
    }
    std::vector<std::tuple<uint64_t, int>> out;
    for (size_t i = 0; i < n; i++) out.emplace_back(done[i].tag, done[i].error);
    return out;
}

void bind_disk(nb::module_& m) {
    nb::class_<Reader>(m, "Reader")
        .def("__init__", &make_reader, "path"_a, nb::kw_only(), "depth"_a, "buffer_bytes"_a, "method"_a = "", "direct"_a = true)
        .def_prop_ro("how", [](const Reader& r) { return std::string(r.how()); })
        .def_prop_ro("alignment", &Reader::alignment)
        .def_prop_ro("changed", &Reader::changed)
        .def("buffer", [](Reader& r, unsigned i) {
            check(i < r.depth(), "no such buffer");
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(r.buffer(i), {r.buffer_bytes()}, nb::find(&r));
        }, "i"_a)
        .def("submit", &submit, "reads"_a, "(offset, bytes, buffer, tag) each; see reader.h")
        .def("take", &take, "wait"_a)
        .def("measure", [](Reader& r, nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> offsets,
                           uint32_t bytes, double seconds) {
            check(bytes <= r.buffer_bytes(), "outside the buffers");
            int error;
            size_t n;
            {
                nb::gil_scoped_release release;
                n = r.measure(offsets.data(), offsets.shape(0), bytes, seconds, error);
            }
            return std::make_tuple(n, error);
        }, "offsets"_a.noconvert(), "nbytes"_a, "seconds"_a);
}
