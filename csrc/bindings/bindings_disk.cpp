// What Python needs of the disk tier. As bindings.cpp: validates, releases the GIL, calls.
#include "bindings.h"

#include <errno.h>

#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using tc::Reader;
using tc::SlotPool;
using Likely = Array<const float, 1>;
using Checksums = Array<const uint32_t, 1>;

static void make_reader(Reader* self, const std::string& path, unsigned depth, size_t buffer_bytes,
                        const std::string& method, bool direct) {
    check(depth >= 1 && depth <= 4096, "depth out of range");
    check(buffer_bytes >= 1 && buffer_bytes <= size_t(1) << 30, "buffer_bytes out of range");
    check(method.empty() || method == "io_uring" || method == "threads", "method is io_uring or threads");
    const tc::Method how = method.empty()        ? tc::Method::AUTO
                           : method == "threads" ? tc::Method::THREADS
                                                 : tc::Method::URING;
    new (self) Reader(path.c_str(), depth, buffer_bytes, how, direct);
    if (const int error = self->error()) {
        self->~Reader();
        errno = error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw nb::python_error();
    }
}

static bool submit(Reader& r, const std::vector<std::tuple<uint64_t, uint32_t, unsigned, uint64_t>>& reads) {
    if (r.forked()) throw std::runtime_error(tc::kForked);  // who is told to take first would do so for ever
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

static SlotPool* make_pool(const tc::Arena& arena, size_t offset, size_t stride, size_t slots) {
    check(offset % tc::kSlotAlignment == 0 && stride % tc::kSlotAlignment == 0 && stride > 0,
          "slots are not aligned");
    check(slots >= tc::kStreamSlots && slots <= size_t(INT32_MAX), "number of slots out of range");
    check(offset <= arena.bytes && stride <= (arena.bytes - offset) / slots, "slots outside their arena");
    return new SlotPool(arena.data + offset, stride, slots);
}

static DiskRows* make_rows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot,
                           size_t quota, Checksums crc, std::string name, int disable,
                           std::optional<Likely> likely) {
    check(neurons > 0 && neurons <= size_t(INT32_MAX) && hot <= neurons, "more hot neurons than there are");
    check(quota <= neurons - hot, "more slots than records");
    check(!likely || likely->shape(0) == neurons, "likely has the wrong length");
    check(file_offset <= uint64_t(INT64_MAX) - neurons * pool.stride, "offset out of range");
    check(crc.shape(0) == neurons, "crc has the wrong length");
    check(reader.buffer_bytes() >= pool.stride + 2 * reader.alignment(),
          "a record is larger than the reader's buffers");
    check(reader.depth() >= 2, "a reader of at least two reads is needed");
    check(disable >= 0 && disable < 8, "disable out of range");
    try {
        return new DiskRows(pool, reader, file_offset, neurons, hot, quota, crc.data(),
                            likely ? likely->data() : nullptr, std::move(name), disable);
    } catch (const std::length_error& e) {
        throw nb::value_error(e.what());
    }
}

// Signal handlers run, as in any Python code; one that raises ends what waits.
bool interrupted_by_python() {
    nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
}

static std::map<std::string, uint64_t> stats(const DiskRows& rows) {
    const DiskRows::Stats& s = rows.stats;
    return {{"needed", s.needed}, {"missed", s.missed},        {"reads", s.reads},
            {"bytes", s.bytes},   {"streamed", s.streamed},    {"waited_ns", s.waited_ns},
            {"early", s.early},   {"early_used", s.early_used}};
}

// tc::DiskError as _native.DiskError(error, name, neuron, changed)
static void bind_disk_error(nb::module_& m) {
    static nb::handle type =
        nb::handle(PyErr_NewException("thermocline._native.DiskError", PyExc_Exception, nullptr));
    m.attr("DiskError") = type;
    nb::register_exception_translator([](const std::exception_ptr& p, void*) {
        try {
            std::rethrow_exception(p);
        } catch (const tc::DiskError& e) {
            if (PyErr_Occurred()) return;  // a signal handler's, which ended the call
            PyErr_SetObject(type.ptr(), nb::make_tuple(e.error, e.name, e.neuron, e.changed).ptr());
        }
    });
}

static void bind_slots(nb::module_& m) {
    m.attr("NO_BUNDLE") = int(DiskRows::NO_BUNDLE);
    m.attr("NO_CACHE") = int(DiskRows::NO_CACHE);
    m.attr("NO_PIPELINE") = int(DiskRows::NO_PIPELINE);
    nb::class_<SlotPool>(m, "SlotPool")
        .def(nb::new_(&make_pool), "arena"_a, "offset"_a, "stride"_a, "slots"_a,
             nb::keep_alive<0, 2>())  // argument 1 of __new__ is the class
        .def_prop_ro("free", &SlotPool::free);
    nb::class_<DiskRows>(m, "DiskRows")
        .def(nb::new_(&make_rows), "pool"_a, "reader"_a, "file_offset"_a, "neurons"_a, "hot"_a, "quota"_a,
             "crc"_a.noconvert(), "name"_a = "", "disable"_a = 0, "likely"_a.noconvert().none() = nb::none(),
             nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>())
        .def_ro("first_slot", &DiskRows::first_slot)
        .def(
            "load", [](DiskRows& r) { r.load(&interrupted_by_python); },
            nb::call_guard<nb::gil_scoped_release>())
        .def("stats", &stats);
}

void bind_disk(nb::module_& m) {
    bind_disk_error(m);
    bind_slots(m);
    nb::class_<Reader>(m, "Reader")
        .def("__init__", &make_reader, "path"_a, nb::kw_only(), "depth"_a, "buffer_bytes"_a, "method"_a = "",
             "direct"_a = true)
        .def_prop_ro("how", [](const Reader& r) { return std::string(r.how()); })
        .def_prop_ro("alignment", &Reader::alignment)
        .def_prop_ro("changed", &Reader::changed)
        .def(
            "buffer",
            [](Reader& r, unsigned i) {
                check(i < r.depth(), "no such buffer");
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(r.buffer(i), {r.buffer_bytes()},
                                                                    nb::find(&r));
            },
            "i"_a)
        .def("submit", &submit, "reads"_a, "(offset, bytes, buffer, tag) each; see reader.h")
        .def("take", &take, "wait"_a)
        .def(
            "measure",
            [](Reader& r, nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> offsets,
               uint32_t bytes, double seconds) {
                check(bytes <= r.buffer_bytes(), "outside the buffers");
                int error;
                size_t n;
                {
                    nb::gil_scoped_release release;
                    n = r.measure(offsets.data(), offsets.shape(0), bytes, seconds, error);
                }
                return std::make_tuple(n, error);
            },
            "offsets"_a.noconvert(), "nbytes"_a, "seconds"_a);
}
