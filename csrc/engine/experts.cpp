// Experts as plain matrices in memory, all of a call's in one region, and the FFN that every token takes.
//
// Tokens are grouped by expert: each group is a matrix product of its own, whose pieces (an expert, some of
// its rows) threads take as they come, with no barrier between experts. What experts give is added up by
// rows of down: one thread has a row of all experts, in ascending order, so that the sum is the same for any
// number of threads and any company.
#include <string.h>

#include <algorithm>
#include <atomic>

#include "model_ops.h"
#include "storage/disk_experts.h"
#include "work.h"

namespace tc {

// Neurons of a piece are whole blocks of down's input.
constexpr size_t kBlock = 32;
// Rows of a piece at most: a thread keeps their products with up to kFewTokens, or with a pass's tokens.
constexpr size_t kFewRows = 1024, kManyRows = kExpertRows;

// Up to so many tokens, rows that lie in groups are multiplied as they lie: for 8 tokens of each of 128
// experts that took 50 ms and panels took 58, for 16 tokens 94 and 105 (q4_0, dim 2048, one thread of Zen 4).
constexpr size_t kExpertTokens = 32;
static bool in_groups(const FFN& f) {
    return f.gate.weight.group > 1 && (!f.up.data || f.up.group > 1) && f.down.group > 1;
}

// Of an expert on disk: the matrix where its slot is.
static Matrix in_slot(Matrix w, const Visit& v) {
    w.data += v.shift;
    return w;
}

// The tokens' common input, as matrices of some formats take it. `gathered`: that of each visit.
struct Form {
    Format format;
    size_t bytes, row_bytes;  // of a token in lanes, and in rows
    const uint8_t* rows;
    uint8_t *lanes, *gathered;
};

struct Context::Experts {
    Experts(Context& context, const MixtureArgs& args, const float* input, float* total)
        : ctx(context), k(context.k), a(args), h(input), sum(total), threads(context.pool.threads()) {}

    void visit(const FFN& f, size_t expert, const float* weights, size_t stride);
    void place_all();
    void make_inputs();
    FFNCounts run();
    FFNCounts run_from_disk(const float* weights);
    FFNCounts counts(size_t active) const;

    const Form& form_of(Format format) const;
    void add_form(Format format);
    Input input(const Visit& v, Format format) const;
    void gather(const Visit& v, const Form& form) const;
    void gather(const Visit& v) const;
    const uint8_t* gate_row(const Visit& v, size_t row) const;
    const uint8_t* gate_at(size_t place) const;
    const uint8_t* down_row(const Visit& v, size_t row) const;
    size_t activations(const Visit& v, size_t begin, size_t end, int thread, const uint8_t* then) const;
    void product(const Visit& v, size_t begin, size_t end, int thread, float* to, size_t stride,
                 const uint8_t* then) const;
    void answers(size_t from, size_t to, size_t begin, size_t end, int thread, const uint8_t* then) const;
    float* products(int thread) const { return ctx.products_.data() + size_t(thread) * product_stride; }
    uint8_t* panel(int thread) const { return panels + size_t(thread) * ctx.panel_stride_; }

    Context& ctx;
    const Kernels& k;
    const MixtureArgs& a;
    const float* h;                      // [tokens, dim]
    float* sum;                          // [tokens, dim]
    const ExpertReads* reads = nullptr;  // of experts on disk
    float* given = nullptr;              // [entries, dim]: what visits gave while others were read
    const int threads;
    Visit* visits = nullptr;
    size_t n = 0, entries = 0;  // visits; tokens of all of them
    size_t* tokens = nullptr;   // of all visits
    float* shares = nullptr;    // how much of its expert each of them gets
    size_t places = 0, rows = 0, most = 0, product_stride = 0;
    bool gathers = false;
    Form forms[kMostForms];
    size_t n_forms = 0;
    uint8_t* panels = nullptr;
};

// Lists the tokens that go to an expert: those whose weight, `stride` floats apart, is not 0.
void Context::Experts::visit(const FFN& f, size_t expert, const float* weights, size_t stride) {
    Visit& v = visits[n];
    v = {};
    v.ffn = &f, v.expert = expert, v.first = entries;
    for (size_t t = 0; t < a.tokens; t++)
        if (const float w = weights[t * stride]; w != 0) tokens[entries] = t, shares[entries++] = w;
    v.n = entries - v.first;
    if (!v.n) return;
    v.lanes = v.n > (in_groups(f) ? kExpertTokens : kFewTokens), v.everyone = v.n == a.tokens;
    v.place = places, places += whole(f.neurons(), kBlock);
    gathers |= !v.everyone;
    most = std::max(most, v.n);
    add_form(f.gate.weight.format);
    if (f.up.data) add_form(f.up.format);
    n++;
}

void Context::Experts::add_form(Format format) {
    for (size_t f = 0; f < n_forms; f++)
        if (same_input(forms[f].format, format)) return;
    const size_t bytes = k.input_bytes(format, a.dim);
    forms[n_forms++] = {format,  bytes,   kFormats[format].quantised ? bytes : 4 * a.dim,
                        nullptr, nullptr, nullptr};
}
const Form& Context::Experts::form_of(Format format) const {
    size_t f = 0;
    while (!same_input(forms[f].format, format)) f++;
    return forms[f];
}

// Finds a place for each visit's inputs and activations, and scratch for every thread.
void Context::Experts::place_all() {
    size_t bytes = 0, panel_bytes = 0, widest = a.dim;
    for (size_t i = 0; i < n; i++) {
        Visit& v = visits[i];
        const FFN& f = *v.ffn;
        const Format all[] = {f.gate.weight.format, f.up.data ? f.up.format : f.gate.weight.format,
                              f.down.format};
        size_t tile = 1;
        for (const Format format : all) {
            if (!v.lanes) continue;
            tile = std::max(tile, k.tile_tokens(format));
            panel_bytes = std::max(panel_bytes, k.panel_bytes(format, std::max(a.dim, f.neurons()), v.n));
        }
        v.row = rows, v.hidden_bytes = k.input_bytes(f.down.format, f.neurons()), v.hidden = bytes;
        rows += v.everyone ? 0 : v.n + tile - 1;
        bytes += (v.n + tile - 1) * v.hidden_bytes;
        widest = std::max(widest, f.neurons());
    }
    grown(ctx.hidden_input_, bytes);
    panels = ctx.panels(panel_bytes);
    product_stride = whole(2 * most * std::min(widest, most > kFewTokens ? kManyRows : kFewRows), 16);
    grown(ctx.products_, size_t(threads) * product_stride);
}

// The input of all tokens, made once for each form: rows where few go to some expert, lanes where many do.
void Context::Experts::make_inputs() {
    bool in_rows = false, in_lanes = false;
    for (size_t i = 0; i < n; i++) (visits[i].lanes ? in_lanes : in_rows) = true;
    size_t bytes = 0, most_tile = 1;
    for (int pass = 0; pass < 2; pass++) {  // how much; where
        uint8_t* at = pass ? grown(ctx.expert_input_, bytes) : nullptr;
        for (size_t f = 0; f < n_forms; f++) {
            Form& form = forms[f];
            const size_t tile = k.tile_tokens(form.format),
                         copied = kFormats[form.format].quantised && in_rows;
            const size_t some[] = {copied ? a.tokens : 0, in_lanes ? whole(a.tokens, tile) : 0, rows};
            most_tile = std::max(most_tile, tile);
            for (const size_t each : some) bytes += pass ? 0 : each * form.bytes;
            if (!pass) continue;
            form.rows = copied ? at : reinterpret_cast<const uint8_t*>(h);
            form.lanes = at + some[0] * form.bytes;
            form.gathered = form.lanes + some[1] * form.bytes;
            at = form.gathered + some[2] * form.bytes;
        }
    }
    const size_t dim = a.dim;
    each_token(ctx.pool, a.tokens, in_lanes ? most_tile : 1, [&](size_t t) {
        for (size_t f = 0; f < n_forms; f++) {
            const Form& form = forms[f];
            if (in_rows && kFormats[form.format].quantised)
                k.quantize(form.format, h + t * dim, dim, 0, dim, false, form.bytes, t,
                           const_cast<uint8_t*>(form.rows));
            if (in_lanes) k.quantize(form.format, h + t * dim, dim, 0, dim, true, form.bytes, t, form.lanes);
        }
    });
}

Input Context::Experts::input(const Visit& v, Format format) const {
    const Form& form = form_of(format);
    const uint8_t* all = v.lanes ? form.lanes : form.rows;
    return {v.everyone ? all : form.gathered + v.row * form.bytes, v.lanes ? form.bytes : form.row_bytes, v.n,
            v.lanes};
}

// A visit's part of the input, which is not quantised again.
void Context::Experts::gather(const Visit& v, const Form& form) const {
    uint8_t* to = form.gathered + v.row * form.bytes;
    for (size_t i = 0; i < v.n; i++) {
        const size_t t = tokens[v.first + i];
        if (v.lanes)
            k.copy_lanes(form.format, a.dim, form.lanes, t, to, i);
        else
            memcpy(to + i * form.row_bytes, form.rows + t * form.row_bytes, form.row_bytes);
    }
}
void Context::Experts::gather(const Visit& v) const {
    if (v.everyone) return;
    const Form &gate = form_of(v.ffn->gate.weight.format),
               &up = v.ffn->up.data ? form_of(v.ffn->up.format) : gate;
    gather(v, gate);
    if (&up != &gate) gather(v, up);
}

const uint8_t* Context::Experts::gate_row(const Visit& v, size_t row) const {
    return row_of(in_slot(v.ffn->gate.weight, v), row);
}
const uint8_t* Context::Experts::down_row(const Visit& v, size_t row) const {
    return row_of(in_slot(v.ffn->down, v), row);
}
// The first gate row from a place on.
const uint8_t* Context::Experts::gate_at(size_t place) const {
    size_t i = 0;
    while (place >= visits[i].place + visits[i].ffn->neurons()) i++;
    return gate_row(visits[i], std::max(place, visits[i].place) - visits[i].place);
}

// Neurons [begin, end) of a visit, as down's input; returns how many are not 0. then: what the thread reads
// next, here and in `answers`, as Kernels::matmul.
size_t Context::Experts::activations(const Visit& v, size_t begin, size_t end, int thread,
                                     const uint8_t* then) const {
    const FFN& f = *v.ffn;
    const size_t some = end - begin, neurons = f.neurons();
    float *gate = products(thread), *up = f.up.data ? gate + v.n * some : nullptr;
    const Matrix ups = up ? in_slot(f.up, v) : Matrix{};
    k.matmul(in_slot(f.gate.weight, v), nullptr, begin, end, input(v, f.gate.weight.format), f.gate.bias,
             false, gate, some, panel(thread), up ? row_of(ups, begin) : then);
    if (up)
        k.matmul(ups, nullptr, begin, end, input(v, f.up.format), f.up_bias, false, up, some, panel(thread),
                 then);
    size_t live = 0;
    for (size_t i = 0; i < v.n; i++) {
        float* x = gate + i * some;
        if (a.mixture.rule.scales_input && &f != a.mixture.shared) {  // as if its input had been
            const float w = shares[v.first + i];
            for (size_t j = 0; j < some; j++) x[j] *= w;
            for (size_t j = 0; up && j < some; j++) up[i * some + j] *= w;
        }
        live += activate(k, f, x, up ? up + i * some : nullptr, some);
        if (a.record && &f != a.mixture.shared)
            std::copy_n(
                x, some,
                a.record + (tokens[v.first + i] * a.mixture.experts.size() + v.expert) * neurons + begin);
        k.quantize(f.down.format, x, neurons, begin, end, v.lanes, v.hidden_bytes, i,
                   ctx.hidden_input_.data() + v.hidden);
    }
    return &f == a.mixture.shared ? 0 : live;
}

// to [v.n, end - begin], `stride` floats apart := columns [begin, end) of what a visit gives.
void Context::Experts::product(const Visit& v, size_t begin, size_t end, int thread, float* to, size_t stride,
                               const uint8_t* then) const {
    k.matmul(in_slot(v.ffn->down, v), nullptr, begin, end,
             {ctx.hidden_input_.data() + v.hidden, v.hidden_bytes, v.n, v.lanes}, v.ffn->down_bias, false, to,
             stride, panel(thread), then);
}

// sum += columns [begin, end) of what visits [from, to) give, by their shares. The first ones of a visit may
// have been computed.
void Context::Experts::answers(size_t from, size_t to, size_t begin, size_t end, int thread,
                               const uint8_t* then) const {
    const size_t some = end - begin;
    float* y = products(thread);
    for (size_t i = from; i < to; i++) {
        const Visit& v = visits[i];
        const size_t known = reads ? reads->tasks()[i].given : 0,
                     there = std::min(std::max(begin, known), end) - begin;
        if (there < some)
            product(v, begin + there, end, thread, y + there, some,
                    i + 1 < to ? down_row(visits[i + 1], begin) : then);
        for (size_t j = 0; j < v.n; j++) {
            const bool scaled = a.mixture.rule.scales_input && v.ffn != a.mixture.shared;
            const float w = scaled ? 1 : shares[v.first + j];
            float *add = sum + tokens[v.first + j] * a.dim + begin, *give = y + j * some;
            if (there) std::copy_n(given + (v.first + j) * a.dim + begin, there, give);
            for (size_t c = 0; c < some; c++) add[c] += w * give[c];
        }
    }
}

FFNCounts Context::Experts::run() {
    const bool many = most > kFewTokens;
    size_t gate_bytes = 0, down_bytes = 0;
    for (size_t i = 0; i < n; i++) {
        gate_bytes = std::max(gate_bytes, visits[i].ffn->gate.weight.stride);
        down_bytes += visits[i].ffn->down.stride;
    }
    const size_t unit = size_t(k.panel_rows);
    const size_t rows_at_most = many ? kManyRows : kFewRows;
    auto least = [&](size_t bytes, size_t of) {
        return many ? of : std::min(rows_at_most, piece_rows(bytes, of, threads));
    };
    Pieces neurons(places, least(gate_bytes, kBlock), threads, rows_at_most),
        columns(a.dim, least(down_bytes, unit), threads, rows_at_most);
    std::atomic<size_t> next{0}, active{0};
    auto first_down = [&](size_t column) { return down_row(visits[0], column); };
    auto region = [&](int thread) {
        if (gathers) {
            for (size_t i; (i = next.fetch_add(1)) < n;) gather(visits[i]);
            ctx.pool.barrier();
        }
        PiecesAhead mine(neurons, !many), after(columns, !many);
        size_t live = 0;
        for (size_t begin, end; mine.take(&begin, &end);)
            for (size_t i = 0; i < n; i++) {
                const Visit& v = visits[i];
                const size_t from = std::max(begin, v.place), to = std::min(end, v.place + v.ffn->neurons());
                if (from >= to) continue;
                const uint8_t* then =
                    i + 1 < n && visits[i + 1].place < end
                        ? gate_row(visits[i + 1], 0)
                        : mine.next([&](size_t place) { return gate_at(place); }, after.next(first_down));
                live += activations(v, from - v.place, to - v.place, thread, then);
            }
        active.fetch_add(live, std::memory_order_relaxed);
        ctx.pool.barrier();
        for (size_t begin, end; after.take(&begin, &end);)
            answers(0, n, begin, end, thread, after.next(first_down));
    };
    ctx.pool.run(region);
    return counts(active.load());
}

FFNCounts Context::Experts::counts(size_t active) const {
    FFNCounts counts;
    for (size_t i = 0; i < n; i++) {
        const FFN& f = *visits[i].ffn;
        if (&f == a.mixture.shared) continue;
        counts.rows += f.neurons() * (f.up.data ? 2 : 1), counts.gates += f.neurons();
    }
    counts.active = active;
    return counts;
}

// Experts on disk, in waves: activations of those that are there, then of the others in the order in which
// they come, and when all are there the answers. Of a few tokens, threads that wait for a read begin with the
// answers. The next wave's are read meanwhile.
FFNCounts Context::Experts::run_from_disk(const float* weights) {
    DiskExperts& disk = *a.mixture.disk;
    const bool many = most > kFewTokens;
    const size_t rows_at_most = many ? kManyRows : kFewRows, unit = size_t(k.panel_rows);
    std::vector<ExpertReads::Task> tasks;
    if (!many) given = grown(ctx.routed_.out, entries * a.dim);
    for (size_t i = 0; i < n; i++) {
        const Visit& v = visits[i];
        const FFN& f = *v.ffn;
        const bool kept = &f == a.mixture.shared;
        const size_t least = piece_rows(f.gate.weight.stride, kBlock, threads);
        const float uses = kept ? 0 : uses_of(weights + v.expert, a.mixture.experts.size(), a.tokens);
        tasks.push_back({kept ? -1 : int32_t(v.expert), uses, f.neurons(),
                         many ? kBlock : std::min(rows_at_most, least), many ? 0 : a.dim,
                         std::min(rows_at_most, piece_rows(f.down.stride, unit, threads))});
    }
    ExpertReads reads(disk, std::move(tasks), a.tokens > kFewTokens ? a.tokens : 1, rows_at_most, threads,
                      ctx.interrupted);
    this->reads = &reads;
    std::atomic<size_t> active{0};
    for (size_t from = 0, to; from < n; from = to) {
        to = from + reads.begin_wave();
        if (to == n) ctx.read_next_ahead(a, reads);
        size_t down_bytes = 0;
        for (size_t i = from; i < to; i++) {
            const int32_t slot = reads.tasks()[i].slot;
            visits[i].shift = slot < 0 ? 0 : size_t(slot) * disk.pool().stride;
            down_bytes += visits[i].ffn->down.stride;
        }
        const size_t least = many ? unit : std::min(rows_at_most, piece_rows(down_bytes, unit, threads));
        Pieces columns(a.dim, least, threads, rows_at_most);
        auto first_down = [&](size_t column) { return down_row(visits[from], column); };
        std::atomic<size_t> next{from};
        auto region = [&](int thread) {
            if (gathers) {
                for (size_t i; (i = next.fetch_add(1)) < to;) gather(visits[i]);
                ctx.pool.barrier();
            }
            size_t live = 0;
            for (ExpertReads::Work w; reads.take(w, thread);) {
                const Visit& v = visits[w.task];
                if (w.columns)
                    product(v, w.begin, w.end, thread, given + v.first * a.dim + w.begin, a.dim, nullptr);
                else
                    live += activations(v, w.begin, w.end, thread, nullptr);
            }
            active.fetch_add(live, std::memory_order_relaxed);
            ctx.pool.barrier();
            PiecesAhead mine(columns, !many);
            for (size_t begin, end; !reads.failed() && mine.take(&begin, &end); reads.help(thread))
                answers(from, to, begin, end, thread, mine.next(first_down));
        };
        ctx.pool.run(region);
        reads.end_wave();
    }
    return counts(active.load());
}

// How much of the shared FFN each token gets.
const float* Context::shares_of_shared(const MixtureArgs& a, const float* h) {
    const Matrix& w = a.mixture.shared_router;
    float* shares = grown(routed_.shared, a.tokens);
    each_token(pool, a.tokens, 1, [&](size_t t) {
        shares[t] = 1;
        if (!w.data) return;
        const Input one = {reinterpret_cast<const uint8_t*>(h + t * a.dim), 4 * a.dim, 1, false};
        k.matmul(w, nullptr, 0, 1, one, nullptr, false, shares + t, 1, nullptr, nullptr);
        shares[t] = sigmoid(shares[t]);
    });
    return shares;
}

FFNCounts Context::experts_add(const MixtureArgs& a, const float* h, const float* weights, float* sum) {
    const Mixture& m = a.mixture;
    const bool plain = !m.experts[0]->bundles;
    const size_t experts = plain ? m.experts.size() : 0, shared = m.shared && !m.apart() ? 1 : 0;
    if (experts + shared == 0) return {};
    Experts all(*this, a, h, sum);
    all.visits = grown(routed_.visits, experts + shared);
    const size_t each = a.weights ? experts : std::min(experts, m.active);  // others may choose more
    const size_t entries = a.tokens * (each + shared);
    all.tokens = grown(routed_.tokens, entries), all.shares = grown(routed_.shares, entries);
    for (size_t e = 0; e < experts; e++) all.visit(*m.experts[e], e, weights + e, m.experts.size());
    if (shared) all.visit(*m.shared, experts, shares_of_shared(a, h), 1);
    if (!all.n) return {};
    all.place_all();
    all.make_inputs();
    return m.disk && experts ? all.run_from_disk(weights) : all.run();
}

}  // namespace tc
