#include "row_load.h"

#include <errno.h>
#include <string.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "round.h"

namespace tc {
namespace {

constexpr size_t kBuffer = size_t(1) << 20;  // of a reader, from the disk
constexpr size_t kWarm =
    size_t(256) << 10;  // read at a time from the page cache: it stays in a core's own cache
constexpr size_t kSlack = size_t(8) << 10;  // a direct read is that much longer, at most
// A reader's own part of the arena. It ends where a huge page begins, so that no two of them clear the same
// one.
constexpr size_t kPart = size_t(4) << 20;

struct OpenFile {
    File through_cache, direct;
    size_t alignment = 0;  // of direct reads; 0: there are none
    const FileState expected;
    bool opened, as_expected;

    OpenFile(const SourceFile& source, bool directly)
        : through_cache(source.path.c_str(), File::THROUGH_CACHE),
          direct(source.path.c_str(), directly ? File::DIRECT : File::THROUGH_CACHE),
          expected(source.state) {
        if (directly && direct.open()) alignment = direct.direct_alignment();
        opened = through_cache.open();
        as_expected = !opened || (unchanged() && (!alignment || is_expected(direct)));
    }

    bool is_expected(const File& file) const {
        FileState now;
        return file.state(now) && now == expected;
    }
    bool unchanged() const { return is_expected(through_cache); }

    // Return where bytes [at, at + n) are in the buffer, and how many were read.
    const uint8_t* read(uint64_t at, size_t n, uint8_t* buffer, bool cached, size_t& got, int& why) const {
        why = 0;
        if (alignment && !cached) {
            const uint64_t low = at / alignment * alignment;
            const size_t lead = size_t(at - low), all = whole(lead + n, alignment);
            const size_t read = direct.read(buffer, all, low, why);
            if (read >= lead + n) {
                why = 0, got = n;
                return buffer + lead;
            }
            if (why && why != EINVAL) {  // EINVAL: refused, or at the file's end
                got = read > lead ? read - lead : 0;
                return buffer + lead;
            }
        }
        got = through_cache.read(buffer, n, at, why);
        return buffer;
    }
};

uint8_t* place(const RowRun& run, uint8_t* arena, size_t row) {
    const int64_t to = run.order ? run.order[row] : int64_t(row);
    return to < 0 ? nullptr : arena + run.to + size_t(to) * run.stride;
}

size_t arrange(const RowRun& run, uint8_t* arena, size_t first, size_t n, const uint8_t* from) {
    for (size_t r = first; r < first + n; r++, from += run.row_bytes()) {
        uint8_t* const to = place(run, arena, r);
        if (!to) continue;
        if (run.form->row && !run.planar)
            run.form->row(run.blocks, from, to);
        else
            memcpy(to, from, run.row_bytes());
        if (run.form->row && !scales_are_finite(*run.form, run.blocks, to)) return r;
    }
    return first + n;
}

// The same of rows that come in groups, whose planar rows are made in `scratch`. Rows of a file that the
// order scatters are taken in the order of their lanes: lines of a group are written once.
size_t arrange_groups(const RowRun& run, uint8_t* arena, size_t first, size_t n, const uint8_t* from,
                      uint8_t* scratch) {
    const size_t bytes = run.row_bytes();
    std::vector<std::pair<size_t, size_t>> places;  // (row of the tensor from the first group on, of these)
    for (size_t i = 0; i < n; i++) {
        const int64_t to = run.order ? run.order[first + i] : int64_t(first + i);
        if (to >= 0) places.emplace_back(run.lane + size_t(to), i);
    }
    if (run.order) std::sort(places.begin(), places.end());
    size_t bad = n;
    std::vector<LaneOfGroup> lanes;
    for (size_t i = 0; i < places.size(); i++) {
        const auto [to, row] = places[i];
        const uint8_t* planar = from + row * bytes;
        if (!run.planar) {
            uint8_t* const made = scratch + lanes.size() * bytes;
            run.form->row(run.blocks, planar, made);
            planar = made;
        }
        if (!scales_are_finite(*run.form, run.blocks, planar)) bad = std::min(bad, row);
        lanes.push_back({planar, to % run.group});
        if (i + 1 < places.size() && places[i + 1].first / run.group == to / run.group) continue;
        interleave_rows(run.form->format, run.blocks * run.form->block, run.group, lanes.data(), lanes.size(),
                        arena + run.to + (to / run.group * run.group - run.lane) * run.stride);
        lanes.clear();
    }
    return first + bad;
}

struct Part {
    size_t run, first, rows;
};

struct RowLoad {
    uint8_t* const arena;
    const std::vector<RowRun> runs;
    std::vector<std::unique_ptr<OpenFile>> files;
    std::vector<Part> parts;
    size_t buffer_bytes = kBuffer;  // for what is read
    size_t group_bytes = 0;         // behind it, for planar rows that wait for the others of their group

    RowLoad(Arena& to, const std::vector<SourceFile>& sources, const std::vector<RowRun>& given)
        : arena(to.data), runs(given) {
        for (const SourceFile& s : sources)
            files.push_back(std::make_unique<OpenFile>(s, reads_directly(to)));
        for (size_t i = 0; i < runs.size(); i++) {
            const size_t row_bytes = runs[i].row_bytes();
            buffer_bytes = std::max(buffer_bytes, (row_bytes + 2 * kSlack) / kSlack * kSlack);
            const size_t group = runs[i].group;
            if (group > 1) group_bytes = std::max(group_bytes, group * row_bytes);
            for (size_t r = 0; r < runs[i].rows;) {
                const size_t begin = runs[i].to + r * runs[i].stride, end = (begin / kPart + 1) * kPart;
                size_t n = (end - begin + runs[i].stride - 1) / runs[i].stride;
                n += (group - (runs[i].lane + r + n) % group) % group;  // to the end of a group
                parts.push_back({i, r, std::min(n, runs[i].rows - r)});
                r += parts.back().rows;
            }
        }
    }

    static Failure at_row(const Part& p, size_t row, int error) {
        return {error, uint64_t(p.run) << kRowBits | row};
    }

    ChunkDone load(size_t i, uint8_t* buffer) const {
        const Part& part = parts[i];
        const RowRun& run = runs[part.run];
        const OpenFile& file = *files[run.file];
        if (!file.opened) return {0, at_row(part, part.first, file.through_cache.error())};
        if (!file.as_expected) return {0, Failure{kChanged, run.file}};
        const size_t row_bytes = run.row_bytes(), end = part.first + part.rows;
        ChunkDone done;
        for (size_t r = part.first, n; r < end; r += n) {
            n = std::min(std::max(size_t(1), (buffer_bytes - kSlack) / row_bytes), end - r);
            const uint64_t at = run.at + uint64_t(r) * row_bytes;
            const bool cached = file.through_cache.cached(size_t(at), n * row_bytes);
            if (cached) n = std::min(n, std::max(size_t(1), kWarm / row_bytes));
            // What needs no arranging and is in the page cache goes to its place at once.
            const bool straight =
                (cached || !file.alignment) && !run.form->row && !run.order && run.stride == row_bytes;
            size_t got;
            int why;
            const uint8_t* from =
                file.read(at, n * row_bytes, straight ? place(run, arena, r) : buffer, cached, got, why);
            const size_t whole = got / row_bytes;
            const size_t found =
                straight ? r + whole : put_rows(run, arena, r, whole, from, buffer + buffer_bytes);
            done.bytes += got;
            if (found < r + whole)
                done.failure = at_row(part, found, 0);
            else if (whole < n)
                done.failure = at_row(part, r + whole, why ? why : -1);
            if (done.failure) break;
        }
        return done;
    }

    // A file that was changed may have given anything.
    std::optional<Failure> changed() const {
        for (size_t i = 0; i < files.size(); i++)
            if (files[i]->opened && !files[i]->unchanged()) return Failure{kChanged, i};
        return {};
    }
};

}  // namespace

size_t put_rows(const RowRun& run, uint8_t* arena, size_t first, size_t n, const uint8_t* from,
                uint8_t* scratch) {
    return run.group > 1 ? arrange_groups(run, arena, first, n, from, scratch)
                         : arrange(run, arena, first, n, from);
}

std::unique_ptr<Crew> begin_rows(Arena& arena, const std::vector<SourceFile>& files,
                                 const std::vector<RowRun>& runs) {
    const auto load = std::make_shared<const RowLoad>(arena, files, runs);
    const size_t most = std::max(size_t(1), kReaders * 2 * kBuffer / load->buffer_bytes);
    return std::make_unique<Crew>(
        load->parts.size(), std::min(kReaders, most), load->buffer_bytes + load->group_bytes,
        [load](size_t part, uint8_t* buffer) { return load->load(part, buffer); },
        [load] { return load->changed(); });
}

}  // namespace tc
