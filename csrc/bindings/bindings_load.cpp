// What Python needs of loading: begun, waited for, given up. As bindings.cpp: validates, releases the GIL,
// calls.
#include "bindings.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

using tc::Crew;
using Checksums = Array<const uint32_t, 1>;
using Progress = std::optional<nb::callable>;

static constexpr unsigned kLook = 50;  // ms between two looks at Ctrl-C and the progress

struct Loading {
    std::unique_ptr<Crew> crew;
    std::vector<I1> orders;  // of rows: the crew reads them
    ~Loading() {
        nb::gil_scoped_release release;
        crew.reset();
    }
};

static Loading* begin_blocks(Arena& arena, const std::string& path,
                             const std::vector<std::tuple<size_t, size_t, size_t>>& ranges,
                             Checksums checksums, size_t block) {
    check(block >= 512 && block <= size_t(1) << 30, "bad block size");
    std::vector<tc::BlockRange> found;
    for (const auto& [begin, end, to] : ranges) {
        check(begin % block == 0, "a range begins inside a block");
        check(begin <= end && to <= arena.bytes && end - begin <= arena.bytes - to,
              "range outside the arena");
        check(checksums.shape(0) >= (end + block - 1) / block, "too few checksums");
        found.push_back({begin, end, to});
    }
    nb::gil_scoped_release release;
    return new Loading{tc::begin_blocks(arena, path.c_str(), found, checksums.data(), block), {}};
}

// Do whole groups lie in the arena, from the one of row 0 to the one of row `last`?
static void check_groups(const tc::Arrangement& form, const Run& run, size_t row_bytes, size_t last,
                         size_t bytes) {
    const auto& [format, columns, file, at, rows, to, stride, order, group, lane] = run;
    check(tc::kFormats[form.format].block > 1 && group <= 1024, "rows that cannot be in groups");
    check(stride == row_bytes && lane < group && lane * stride <= to, "rows of groups out of place");
    const size_t begin = to - lane * stride, all = (lane + last) / group * group + group;
    check(all <= (bytes - begin) / stride, "groups outside the arena");
}

tc::RowRun make_run(const Run& run, size_t bytes, size_t files) {
    const auto& [format, columns, file, at, rows, to, stride, order, group, lane] = run;
    const tc::Arrangement* form = tc::arrangement(format.c_str());
    check(form != nullptr, "unknown weight format");
    check(columns > 0 && columns <= size_t(1) << 31 && columns % form->block == 0, "no whole blocks");
    const size_t blocks = columns / form->block, row_bytes = blocks * form->block_bytes;
    check(file < files, "no such file");
    check(rows > 0 && rows < size_t(1) << tc::kRowBits && at <= uint64_t(1) << 62 &&
              row_bytes <= (uint64_t(1) << 62) / rows,
          "rows out of range");
    check(stride >= row_bytes && stride <= size_t(1) << 40, "row stride smaller than a row");
    check(group >= 1, "no group");
    size_t last = rows - 1;
    if (order) {
        check(order->shape(0) == rows, "order has the wrong length");
        int32_t most = 0;
        for (size_t i = 0; i < rows; i++) most = std::max(most, order->data()[i]);
        last = size_t(most);
    }
    check(to <= bytes && row_bytes <= bytes - to && last <= (bytes - to - row_bytes) / stride,
          "rows outside the arena");
    if (group > 1) check_groups(*form, run, row_bytes, last, bytes);
    return {form, blocks, file, at, rows, to, stride, order ? order->data() : nullptr, group, lane};
}

std::vector<tc::SourceFile> source_files(const std::vector<std::tuple<std::string, State>>& files) {
    std::vector<tc::SourceFile> sources;
    for (const auto& [path, state] : files) {
        const auto& [device, inode, bytes, modified_ns] = state;
        sources.push_back({path, {device, inode, bytes, modified_ns}});
    }
    return sources;
}

static Loading* begin_rows(Arena& arena, const std::vector<std::tuple<std::string, State>>& files,
                           const std::vector<Run>& runs) {
    check(runs.size() < size_t(1) << (63 - tc::kRowBits), "too many runs");
    const std::vector<tc::SourceFile> sources = source_files(files);
    std::vector<tc::RowRun> found;
    std::vector<I1> orders;
    for (const Run& run : runs) {
        found.push_back(make_run(run, arena.bytes, files.size()));
        if (const auto& order = std::get<7>(run)) orders.push_back(*order);
    }
    std::unique_ptr<Crew> crew;
    {
        nb::gil_scoped_release release;
        crew = tc::begin_rows(arena, sources, found);
    }
    return new Loading{std::move(crew), std::move(orders)};
}

static void give_up(Loading& loading) {
    nb::gil_scoped_release release;
    loading.crew->stop();
}

// Wait, with Python's signal handlers and `progress(bytes)` every 50 ms. One that raises ends the load.
static std::tuple<int, int64_t> wait(Loading& loading, const Progress& progress) {
    if (loading.crew->forked()) throw std::runtime_error(tc::kForked);
    try {
        for (unsigned ms = 0;; ms = kLook) {
            bool over;
            {
                nb::gil_scoped_release release;
                over = loading.crew->wait(ms);
            }
            if (PyErr_CheckSignals()) throw nb::python_error();
            if (progress) (*progress)(loading.crew->done());
            if (over) break;
        }
    } catch (...) {
        give_up(loading);
        throw;
    }
    const std::optional<tc::Failure> failed = loading.crew->failure();
    return failed ? std::make_tuple(failed->error, int64_t(failed->where)) : std::make_tuple(0, int64_t(-1));
}

static nb::object arranged(const std::string& format, Array<const uint8_t, 2> rows, Array<uint8_t, 2> out) {
    const tc::Arrangement* form = tc::arrangement(format.c_str());
    check(form != nullptr, "unknown weight format");
    const size_t n = rows.shape(0), bytes = rows.shape(1), blocks = bytes / form->block_bytes;
    check(bytes % form->block_bytes == 0, "no whole blocks");
    check(out.shape(0) == n && out.shape(1) == bytes, "rows and out differ in shape");
    for (size_t r = 0; r < n; r++) {
        uint8_t* const to = out.data() + r * bytes;
        if (form->row)
            form->row(blocks, rows.data() + r * bytes, to);
        else if (bytes)
            memcpy(to, rows.data() + r * bytes, bytes);
        if (!tc::scales_are_finite(*form, blocks, to)) return nb::int_(r);
    }
    return nb::none();
}

// GB/s of one of `threads` that check and put away rows of a file, `kMostPanelRows` at a time, as a stream
// does with what a disk has brought: `bytes` of them in turn, which no cache holds, into memory of its own.
static double arranging_gbs(const std::string& format, size_t columns, size_t bytes, int threads,
                            double seconds) {
    const tc::Arrangement* form = tc::arrangement(format.c_str());
    check(form != nullptr, "unknown weight format");
    check(columns > 0 && columns % form->block == 0 && columns <= size_t(1) << 24, "no whole blocks");
    check(bytes <= size_t(1) << 40 && threads >= 1 && threads <= 1024 && seconds >= 0,
          "arguments out of range");
    tc::RowRun run{form, columns / form->block, 0, 0, tc::kMostPanelRows, 0, 0, nullptr};
    run.stride = run.row_bytes();
    check(tc::chosen_kernels() != nullptr, "no kernels");
    if (tc::kFormats[form->format].block > 1) run.group = size_t(tc::chosen_kernels()->panel_rows);
    const size_t piece = run.rows * run.row_bytes(), pieces = bytes / piece;
    check(pieces >= size_t(threads), "too few bytes");
    nb::gil_scoped_release release;
    const std::vector<uint8_t> from(pieces * piece, 0x40);  // 2.125 as an f16 scale
    tc::Pool pool(threads);
    std::atomic<size_t> next{0};
    std::atomic<uint32_t> sink{0};
    auto arrange = [&](int) {
        std::vector<uint8_t> to(piece + run.group * run.row_bytes());
        for (size_t i; (i = next.fetch_add(1)) < pieces;) {
            const uint8_t* const rows = from.data() + i * piece;
            sink.fetch_xor(tc::crc32c(rows, piece, 0), std::memory_order_relaxed);
            tc::put_rows(run, to.data(), 0, run.rows, rows, to.data() + piece);
        }
    };
    using clock = std::chrono::steady_clock;
    double passes = 0, elapsed = 0;
    for (const auto start = clock::now(); !passes || elapsed < seconds; passes++) {
        next.store(0);
        pool.run(arrange);
        elapsed = std::chrono::duration<double>(clock::now() - start).count();
    }
    return passes * double(pieces * piece) / elapsed / threads / 1e9;
}

void bind_load(nb::module_& m) {
    m.attr("ROW_BITS") = tc::kRowBits;
    m.attr("CHANGED") = tc::kChanged;
    nb::class_<Loading>(m, "Loading")
        .def("wait", &wait, "progress"_a.none() = nb::none())
        .def("stop", &give_up);
    m.def("begin_blocks", &begin_blocks, "arena"_a, "path"_a, "ranges"_a, "checksums"_a.noconvert(),
          "block"_a, nb::rv_policy::take_ownership, nb::keep_alive<0, 1>(), nb::keep_alive<0, 4>());
    m.def("begin_rows", &begin_rows, "arena"_a, "files"_a, "runs"_a, nb::rv_policy::take_ownership,
          nb::keep_alive<0, 1>());
    m.def("arranged", &arranged, "format"_a, "rows"_a.noconvert(), "out"_a.noconvert());
    m.def("arranging_gbs", &arranging_gbs, "format"_a, "columns"_a, "nbytes"_a, "threads"_a, "seconds"_a);
}
