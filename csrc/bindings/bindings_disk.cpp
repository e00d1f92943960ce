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

tc::Method method_of(const std::string& name) {
    check(name.empty() || name == "io_uring" || name == "threads", "method is io_uring or threads");
    return name.empty() ? tc::Method::AUTO : name == "threads" ? tc::Method::THREADS : tc::Method::URING;
}

static void make_reader(Reader* self, const std::string& path, unsigned depth, size_t buffer_bytes,
                        const std::string& method, bool direct) {
    check(depth >= 1 && depth <= 4096, "depth out of range");
    check(buffer_bytes >= 1 && buffer_bytes <= size_t(1) << 30, "buffer_bytes out of range");
    new (self) Reader(path.c_str(), depth, buffer_bytes, method_of(method), direct);
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

static SlotPool* make_pool(const tc::Arena& arena, size_t offset, size_t stride, size_t slots,
                           std::optional<size_t> passing) {
    check(offset % tc::kSlotAlignment == 0 && stride % tc::kSlotAlignment == 0 && stride > 0,
          "slots are not aligned");
    const size_t n_passing = passing.value_or(tc::kStreamSlots);
    check(n_passing >= 1 && slots >= n_passing && slots <= size_t(INT32_MAX), "number of slots out of range");
    check(offset <= arena.bytes && stride <= (arena.bytes - offset) / slots, "slots outside their arena");
    return new SlotPool(arena.data + offset, stride, slots, n_passing);
}

static DiskRows* make_rows(SlotPool& pool, Reader& reader, uint64_t file_offset, size_t neurons, size_t hot,
                           size_t quota, Checksums crc, std::string name, int disable,
                           std::optional<Likely> likely) {
    check(pool.passing.size() == tc::kStreamSlots, "too few passing slots for neurons");
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

template <class Rows>
static std::map<std::string, uint64_t> stats_of(const Rows& rows) {
    const auto& s = rows.stats;
    return {{"needed", s.needed}, {"missed", s.missed},         {"reads", s.reads},
            {"bytes", s.bytes},   {"streamed", s.streamed},     {"waited_ns", s.waited_ns},
            {"early", s.early},   {"early_used", s.early_used}, {"left_out", s.left_out}};
}

// ---- experts
static tc::ExpertFiles* make_files(const std::vector<std::tuple<std::string, State>>& files, unsigned depth,
                                   size_t piece_bytes, const std::string& method, bool direct) {
    check(!files.empty() && files.size() <= 4096, "no files");
    check(depth >= 2 && depth <= 4096, "depth out of range");
    check(piece_bytes >= 16384 && piece_bytes <= size_t(1) << 30, "piece_bytes out of range");
    auto made =
        std::make_unique<tc::ExpertFiles>(source_files(files), depth, piece_bytes, method_of(method), direct);
    if (const int error = made->reader.error()) {
        const std::string& path =
            made->files[std::min<size_t>(made->reader.failed_file(), files.size() - 1)].path;
        errno = error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw nb::python_error();
    }
    for (unsigned i = 0; i < files.size(); i++)
        if (made->changed(i)) throw tc::DiskError(tc::kChanged, made->files[i].path, -1, true);
    return made.release();
}

static DiskExperts* make_experts(SlotPool& pool, tc::ExpertFiles& files,
                                 const std::vector<std::vector<Run>>& runs, size_t quota,
                                 std::vector<std::string> names, bool planar, int disable,
                                 std::optional<Likely> likely) {
    check(!runs.empty() && runs.size() <= tc::kMostExperts && quota <= runs.size(),
          "more slots than experts");
    check(!names.empty() && names.size() <= 16, "an expert has no slabs");
    check(!likely || likely->shape(0) == runs.size(), "likely has the wrong length");
    check(disable >= 0 && disable < 8, "disable out of range");
    std::vector<std::vector<tc::RowRun>> made;
    std::vector<I1> orders;
    const size_t ends = 2 * files.reader.alignment();
    for (const std::vector<Run>& slabs : runs) {
        check(slabs.size() == names.size(), "experts differ in their slabs");
        made.emplace_back();
        for (const Run& run : slabs) {
            tc::RowRun r = make_run(run, pool.stride, files.files.size());
            r.planar = planar;
            check(r.row_bytes() + ends <= files.reader.buffer_bytes(), "a row is larger than a piece");
            check(r.at <= uint64_t(INT64_MAX) / 2, "offset out of range");
            const tc::RowRun& like = (made[0].size() > made.back().size() ? made[0][made.back().size()] : r);
            check(r.form == like.form && r.blocks == like.blocks && r.rows == like.rows && r.to == like.to &&
                      r.stride == like.stride && r.group == like.group && r.lane == like.lane,
                  "experts differ in shape");
            made.back().push_back(r);
            if (const auto& order = std::get<7>(run)) orders.push_back(*order);
        }
    }
    try {
        return new DiskExperts{
            {pool, files, made, quota, likely ? likely->data() : nullptr, std::move(names), disable},
            std::move(orders)};
    } catch (const std::length_error& e) {
        throw nb::value_error(e.what());
    }
}

// ---- FFNs that come in a stream

// (where all rows are in the file, as `begin_rows` takes them; how many of them are in memory; name)
using Streamed = std::tuple<Run, size_t, std::string>;
// (gate, and up where there is one; rows of a record; down; rows of a record)
using StreamedFFN = std::tuple<std::vector<Streamed>, size_t, Streamed, size_t>;

static tc::StreamedMatrix streamed(const Streamed& given, size_t rows_of_record, const tc::ExpertFiles& files,
                                   bool planar) {
    const auto& [run, held, name] = given;
    check(!std::get<7>(run), "streamed rows come in turn");
    check(std::get<9>(run) == 0 && std::get<5>(run) == 0, "a matrix begins at row 0");
    const size_t group = std::get<8>(run);
    tc::RowRun r = make_run(run, SIZE_MAX / 4, files.files.size());
    r.planar = planar;
    check(r.stride == r.row_bytes(), "streamed rows lie one behind the other");
    check(held >= 1 && held <= r.rows, "some rows are in memory");
    check(rows_of_record >= 1 && rows_of_record % group == 0 && r.rows % group == 0 && held % group == 0,
          "a record divides a group");
    check(group <= tc::kMostPanelRows && tc::kMostPanelRows % group == 0, "a group is larger than a panel");
    check(rows_of_record <= files.reader.buffer_bytes() / r.row_bytes(), "a record is larger than a piece");
    check(r.at <= uint64_t(INT64_MAX) / 2 && r.rows <= size_t(UINT32_MAX), "rows out of range");
    return {r, held, name};
}

static tc::DenseStream* make_stream(tc::ExpertFiles& files, const std::vector<StreamedFFN>& ffns, int threads,
                                    bool planar) {
    using Stream = tc::DenseStream;
    check(threads >= 1 && threads <= 1024, "threads out of range");
    std::vector<Stream::Layer> layers;
    bool some = false;
    for (const auto& [first, rows, down, down_rows] : ffns) {
        check(first.size() == 1 || first.size() == 2, "gate, and perhaps up");
        Stream::Layer layer;
        for (const Streamed& s : first)
            layer.parts[Stream::GATE_UP].push_back(streamed(s, rows, files, planar));
        layer.parts[Stream::DOWN].push_back(streamed(down, down_rows, files, planar));
        layer.rows[Stream::GATE_UP] = rows, layer.rows[Stream::DOWN] = down_rows;
        const auto &gate = layer.parts[Stream::GATE_UP].front(), &up = layer.parts[Stream::GATE_UP].back();
        check(gate.held == up.held && gate.run.rows == up.run.rows, "gate and up differ in rows");
        for (const Stream::Phase p : {Stream::GATE_UP, Stream::DOWN}) {
            const size_t bytes = tc::record_bytes(layer, p);
            check(bytes <= files.reader.buffer_bytes(), "a record is larger than a piece");
            some |= bytes > 0;
        }
        layers.push_back(std::move(layer));
    }
    check(some, "all rows are in memory");
    nb::gil_scoped_release release;
    return new Stream(files, std::move(layers), threads);
}

static std::map<std::string, uint64_t> stats_of_stream(const tc::DenseStream& stream) {
    const tc::DenseStream::Stats s = stream.stats();
    return {{"needed", s.needed}, {"missed", s.missed},       {"reads", s.reads},
            {"bytes", s.bytes},   {"waited_ns", s.waited_ns}, {"left_out", 0}};
}

static void bind_stream(nb::module_& m) {
    nb::class_<tc::StreamedLayer>(m, "StreamedLayer");
    nb::class_<tc::DenseStream>(m, "DenseStream")
        .def(nb::new_(&make_stream), "files"_a, "ffns"_a, "threads"_a, nb::kw_only(), "planar"_a = false,
             nb::keep_alive<0, 2>())
        .def(
            "layer",
            [](tc::DenseStream& s, size_t i) {
                check(i < s.layers().size(), "no such layer");
                return tc::StreamedLayer{&s, i};
            },
            "i"_a, nb::keep_alive<0, 1>())
        .def("stats", &stats_of_stream);
}

static void bind_experts(nb::module_& m) {
    nb::class_<tc::ExpertFiles>(m, "ExpertFiles")
        .def(nb::new_(&make_files), "files"_a, nb::kw_only(), "depth"_a, "piece_bytes"_a, "method"_a = "",
             "direct"_a = true)
        .def_prop_ro("how", [](const tc::ExpertFiles& f) { return std::string(f.reader.how()); })
        .def(
            "begin_step",
            [](tc::ExpertFiles& f, std::optional<uint64_t> most_bytes, bool read_only) {
                f.begin_step(most_bytes.value_or(tc::ExpertFiles::kUnbounded), read_only);
            },
            "most_bytes"_a.none() = nb::none(), nb::kw_only(), "read_only"_a = false);
    nb::class_<DiskExperts>(m, "DiskExperts")
        .def(nb::new_(&make_experts), "pool"_a, "files"_a, "runs"_a, "quota"_a, "names"_a, nb::kw_only(),
             "planar"_a = false, "disable"_a = 0, "likely"_a.noconvert().none() = nb::none(),
             nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>())
        .def(
            "load",
            [](DiskExperts& e, int threads) {
                check(threads >= 1 && threads <= 1024, "threads out of range");
                nb::gil_scoped_release release;
                e.rows.load(threads, &interrupted_by_python);
            },
            "threads"_a = 1)
        .def("stats", [](const DiskExperts& e) { return stats_of(e.rows); });
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
    m.attr("NOT_FINITE") = tc::kNotFinite;
    m.attr("NO_BUNDLE") = int(DiskRows::NO_BUNDLE);
    m.attr("NO_CACHE") = int(DiskRows::NO_CACHE);
    m.attr("NO_PIPELINE") = int(DiskRows::NO_PIPELINE);
    nb::class_<SlotPool>(m, "SlotPool")
        .def(nb::new_(&make_pool), "arena"_a, "offset"_a, "stride"_a, "slots"_a, "passing"_a = nb::none(),
             nb::keep_alive<0, 2>())  // argument 1 of __new__ is the class
        .def_prop_ro("free", &SlotPool::free);
    nb::class_<DiskRows>(m, "DiskRows")
        .def(nb::new_(&make_rows), "pool"_a, "reader"_a, "file_offset"_a, "neurons"_a, "hot"_a, "quota"_a,
             "crc"_a.noconvert(), "name"_a = "", "disable"_a = 0, "likely"_a.noconvert().none() = nb::none(),
             nb::keep_alive<0, 2>(), nb::keep_alive<0, 3>())
        .def(
            "load", [](DiskRows& r) { r.load(&interrupted_by_python); },
            nb::call_guard<nb::gil_scoped_release>())
        .def("stats", &stats_of<DiskRows>);
}

void bind_disk(nb::module_& m) {
    bind_disk_error(m);
    bind_slots(m);
    bind_experts(m);
    bind_stream(m);
    nb::class_<Reader>(m, "Reader")
        .def("__init__", &make_reader, "path"_a, nb::kw_only(), "depth"_a, "buffer_bytes"_a, "method"_a = "",
             "direct"_a = true)
        .def_prop_ro("how", [](const Reader& r) { return std::string(r.how()); })
        .def_prop_ro("alignment", &Reader::alignment)
        .def_prop_ro("changed", [](const Reader& r) { return r.changed(); })
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
