// The FFN half of a layer: as plain matrices here, of neurons in bundles in bundles.cpp.
#include <algorithm>
#include <atomic>

#include "model_ops.h"
#include "storage/dense_stream.h"
#include "work.h"

namespace tc {

FFNCounts Context::ffn_add(const FFNArgs& a) {
    FFNCounts total = {};
    for (size_t t = 0; t < a.tokens; t += kPassTokens) {
        FFNArgs part = a;
        part.x = a.x + t * a.dim, part.h = a.h + t * a.dim, part.tokens = std::min(kPassTokens, a.tokens - t);
        if (a.record) part.record = a.record + t * a.ffn.neurons();
        if (a.sparsity == PREDICT && a.tokens > kFewTokens) part.sparsity = EXACT;
        const bool plain = a.ffn.join.plain();
        if (!plain) {
            part.x = grown(branch_, part.tokens * a.dim);
            std::fill(part.x, part.x + part.tokens * a.dim, 0.0f);
        }
        total += a.ffn.bundles ? bundle_ffn(part) : dense_ffn(part);
        if (!plain) join(a.ffn.join, part.x, part.tokens, a.dim, a.x + t * a.dim);
    }
    return total;
}

GateUpInputs Context::gate_up_inputs(const FFNArgs& a) {
    const Matrix both[] = {a.ffn.gate.weight, a.ffn.up};
    Input made[2];
    inputs(both, a.ffn.up.data ? 2 : 1, a.ffn.norm, a.h, a.tokens, inputs_, made);
    return {made[0], a.ffn.up.data ? made[1] : made[0]};
}

size_t Context::gate_up_panel_bytes(const FFNArgs& a, const GateUpInputs& in) const {
    const size_t gate = in.gate.lanes ? k.panel_bytes(a.ffn.gate.weight.format, a.dim, a.tokens) : 0,
                 up = in.up.lanes && a.ffn.up.data ? k.panel_bytes(a.ffn.up.format, a.dim, a.tokens) : 0;
    return std::max(gate, up);
}

size_t activate(const Kernels& k, const FFN& f, float* gate, const float* up, size_t n) {
    k.combine(gate, up, n, f.gating());
    size_t live = 0;
    for (size_t i = 0; i < n; i++) live += gate[i] != 0;
    return live;
}

// A thread's rows of an FFN's matrices: those in memory, `held` in pieces, and those that come from disk
// meanwhile.
class EachRow {
 public:
    EachRow(Pieces& held, bool ahead, const FFN& f, DenseStream::Phase phase)
        : held_(held, ahead), f_(f), phase_(phase) {}
    const PiecesAhead& held() const { return held_; }
    // Calls work(first, begin, end, part) for rows [begin, end) behind row `first`: part(w, i) is w, the i-th
    // matrix of the phase, of which row 0 is that. Streamed rows come first: the disk waits for their
    // buffers.
    template <class Fn>
    void run(int thread, Fn work) {
        auto streamed = [&](bool wait) {
            DenseStream::Taken taken;
            if (!f_.stream || !f_.stream->take(phase_, &taken, thread, wait)) return false;
            for (DenseStream::Rows rows; f_.stream->next(&taken, &rows, thread);)
                work(rows.first, 0, rows.n, [&](const Matrix& w, size_t i) { return rows.of(w, i); });
            return true;
        };
        for (size_t begin, end;;) {
            if (streamed(false)) continue;
            if (held_.take(&begin, &end))
                work(0, begin, end, [](const Matrix& w, size_t) { return w; });
            else if (!streamed(true))
                return;
        }
    }

 private:
    PiecesAhead held_;
    const FFN& f_;
    const DenseStream::Phase phase_;
};

// A long piece of rows in memory would keep a thread from those that come, whose buffers the disk waits for.
static size_t longest_piece(const FFN& f, DenseStream::Phase phase) {
    return f.stream ? f.stream->layers()[f.stream_layer].rows[phase] : SIZE_MAX;
}

// Rows of gate and up, then, when all are done, rows of down.
FFNCounts Context::dense_ffn(const FFNArgs& a) {
    const size_t n = a.ffn.neurons(), tokens = a.tokens, threads = size_t(pool.threads());
    const Format f = a.ffn.down.format;
    const GateUpInputs in = gate_up_inputs(a);
    const bool first_lanes = in.gate.lanes || in.up.lanes, lanes = tokens > as_they_lie(&a.ffn.down, 1);
    const bool copy = quantised(a.ffn.down) || lanes;
    const size_t bytes = copy ? k.input_bytes(f, n) : 4 * n, tile = lanes ? k.tile_tokens(f) : 1;
    float* gate = grown(gate_, tokens * n);
    float* up = a.ffn.up.data ? grown(hidden_, tokens * n) : nullptr;
    uint8_t* hidden =
        copy ? grown(hidden_input_, bytes * whole(tokens, tile)) : reinterpret_cast<uint8_t*>(gate);
    uint8_t* scratch = panels(std::max(gate_up_panel_bytes(a, in), lanes ? k.panel_bytes(f, n, tokens) : 0));
    const size_t panel = size_t(k.panel_rows), block = 32;  // of the next input: some panels
    Pieces neurons(a.ffn.gate.weight.rows,
                   first_lanes ? panel : piece_rows(a.ffn.gate.weight.stride, block, int(threads)),
                   int(threads), longest_piece(a.ffn, DenseStream::GATE_UP)),
        rows(a.ffn.down.rows, lanes ? panel : piece_rows(a.ffn.down.stride, panel, int(threads)),
             int(threads), longest_piece(a.ffn, DenseStream::DOWN));
    std::atomic<size_t> active{0};
    const bool whole_rows =
        lanes || a.ffn.sub_norm.weight;  // down's input is made when a token's row is complete

    auto region = [&](int thread) {
        uint8_t* mine = scratch + size_t(thread) * panel_stride_;
        EachRow each_neuron(neurons, !first_lanes, a.ffn, DenseStream::GATE_UP),
            each_row(rows, !lanes, a.ffn, DenseStream::DOWN);
        const uint8_t* const first_down = each_row.held().next(a.ffn.down);
        size_t live = 0;
        each_neuron.run(thread, [&](size_t first, size_t begin, size_t end, auto part) {
            const Linear& g = a.ffn.gate;
            const size_t at = first + begin, some = end - begin;
            const uint8_t* const then = each_neuron.held().next(g.weight, first_down);
            const Matrix gates = part(g.weight, 0), ups = up ? part(a.ffn.up, 1) : Matrix{};
            k.matmul(gates, nullptr, begin, end, in.gate, g.bias ? g.bias + first : nullptr, false, gate + at,
                     n, mine, up ? row_of(ups, begin) : then);
            const float* bias = a.ffn.up_bias ? a.ffn.up_bias + first : nullptr;
            if (up) k.matmul(ups, nullptr, begin, end, in.up, bias, false, up + at, n, mine, then);
            for (size_t t = 0; t < tokens; t++) {
                float* h = gate + t * n + at;
                live += activate(k, a.ffn, h, up ? up + t * n + at : nullptr, some);
                if (a.record) std::copy(h, h + some, a.record + t * n + at);
                if (!whole_rows && copy) k.quantize(f, h, n, at, at + some, false, bytes, t, hidden);
            }
        });
        active.fetch_add(live, std::memory_order_relaxed);
        pool.barrier();
        if (whole_rows) {
            own_tokens(tokens, tile, thread, int(threads), [&](size_t t) {
                const Norm& sub = a.ffn.sub_norm;
                if (sub.weight)
                    k.norm(gate + t * n, sub.weight, sub.bias, sub.eps, sub.layer, n, gate + t * n);
                if (copy) k.quantize(f, gate + t * n, n, 0, n, lanes, bytes, t, hidden);
            });
            pool.barrier();
        }
        const Input h = {hidden, bytes, tokens, lanes};
        each_row.run(thread, [&](size_t first, size_t begin, size_t end, auto part) {
            const float* bias = a.ffn.down_bias ? a.ffn.down_bias + first : nullptr;
            k.matmul(part(a.ffn.down, 0), nullptr, begin, end, h, bias, true, a.x + first + begin, a.dim,
                     mine, each_row.held().next(a.ffn.down));
        });
    };
    if (a.ffn.stream) a.ffn.stream->begin(a.ffn.stream_layer, pool.threads(), interrupted);
    pool.run(region);
    if (a.ffn.stream) a.ffn.stream->end();
    const size_t all = n * (up ? 2 : 1);
    return {active.load(), all, all, n, 0};
}

void Context::per_layer_add(float* x, const PerLayer& p, const float* given, size_t tokens) {
    const size_t width = p.gate.rows, dim = p.gate.cols;
    float *gate = grown(gate_, tokens * width), *y = grown(branch_, tokens * dim);
    matmul(Linear{p.gate, nullptr}, {}, x, tokens, gate, false);
    each_token(pool, tokens, 1, [&](size_t t) {
        k.combine(gate + t * width, given + t * width, width, {p.activation, 0, false, 1, 0});
    });
    matmul(Linear{p.down, nullptr}, {}, gate, tokens, y, false);
    join(p.join, y, tokens, dim, x);
}

}  // namespace tc
