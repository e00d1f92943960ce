// Mixers of tokens with a state: gated DeltaNet, Mamba-2, short convolutions.
//
// Tokens go through a state one after the other, always in the same way, so that a token's bits depend on no
// chunk and no batch. The columns of a state are independent: a task is some columns of one head of one
// sequence, which it takes through all the tokens of the call. They stay in L1 meanwhile; from memory a state
// is read once and written once. States are values: they are read from one slot and written to another one.
#include <math.h>
#include <string.h>

#include "work.h"

namespace tc {

constexpr size_t kChannels = 128;  // of a convolution that are worked on at a time
constexpr float kKeyEps = 1e-6f;   // of the sum of squares of a query or key, as the models were trained
static const float kNoState[kStateColumns] = {};

struct Context::Turn {
    size_t first, tokens;  // of the call
    const float* from;     // null: no state yet
    float* to;
};

static float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Where the parts of a token's row begin.
struct Places {
    size_t conv, q, k, v, z, gates;
};
static Places places(const Mixer& m) {
    const size_t keys = m.groups * m.rows, inner = m.inner();
    if (m.kind == Mixer::DELTANET) return {0, 0, keys, 2 * keys, m.channels, m.channels + inner};
    if (m.kind == Mixer::MAMBA2) return {inner, 2 * inner + keys, 2 * inner, inner, 0, inner + m.channels};
    return {};
}

// Channels [begin, end) of a sequence's tokens. ring: `width` rows of kChannels or `rows` floats, the last
// inputs.
void Context::convolve(const MixerArgs& a, const Turn& turn, size_t begin, size_t end, float* ring) {
    const Mixer& m = a.mixer;
    const size_t n = end - begin, width = m.width, ld = m.in_rows();
    const bool alone = m.kind == Mixer::SHORT_CONV;
    for (size_t j = 0; j + 1 < width; j++)
        if (turn.from)
            memcpy(ring + j * n, turn.from + j * m.channels + begin, n * sizeof(float));
        else
            memset(ring + j * n, 0, n * sizeof(float));
    const float* seen[kMostConvolved];
    const Gating silu = {SILU, 0, false, 1, 0};
    const float* const bias = m.conv_bias ? m.conv_bias + begin : nullptr;
    for (size_t i = 0; i < turn.tokens; i++) {
        const size_t t = turn.first + i;
        float *const row = a.in + t * ld, *const x = row + places(m).conv + begin;
        float* const now = ring + (i + width - 1) % width * n;
        if (alone)
            for (size_t c = 0; c < n; c++) now[c] = row[begin + c] * row[2 * m.channels + begin + c];
        else
            memcpy(now, x, n * sizeof(float));
        for (size_t j = 0; j < width; j++) seen[j] = ring + (i + j) % width * n;
        float* const y = alone ? a.out + t * m.inner() + begin : x;
        k.convolve(seen, width, m.conv + begin, m.channels, bias, n, y);
        if (alone) {
            for (size_t c = 0; c < n; c++) y[c] *= row[m.channels + begin + c];
            continue;
        }
        k.activate(y, n, silu);
        const size_t keys = m.groups * m.rows;
        if (m.kind == Mixer::DELTANET && begin < 2 * keys)  // then these channels are a head of q or k
            k.norm(y, begin < keys ? m.q_weight : m.k_weight, nullptr, kKeyEps / float(n), false, n, y);
    }
    for (size_t j = 0; j + 1 < width; j++)
        memcpy(turn.to + j * m.channels + begin, ring + (turn.tokens + j) % width * n, n * sizeof(float));
}

// Of each head, in place of what the projection gave: how much of the state stays, and how much is written.
void Context::state_gates(const MixerArgs& a, size_t t) {
    const Mixer& m = a.mixer;
    float* const row = a.in + t * m.in_rows() + places(m).gates;
    float* const decays = open_.data() + t * 2 * m.heads;
    float* const writes = decays + m.heads;
    for (size_t h = 0; h < m.heads; h++) {
        if (m.kind == Mixer::DELTANET) {
            decays[h] = expf(m.decay[h] * softplus(row[m.heads + h] + m.step_bias[h]));
            writes[h] = 1 / (1 + expf(-row[h]));
        } else {
            const float dt = softplus(row[h] + m.step_bias[h]);
            decays[h] = expf(m.decay[h] * dt);
            writes[h] = dt;
        }
    }
}

// Columns from `begin` on, kStateColumns at most, of a head's state, through a sequence's tokens.
void Context::recur(const MixerArgs& a, const Turn& turn, size_t head, size_t begin) {
    const Mixer& m = a.mixer;
    const Places at = places(m);
    const size_t n = std::min(kStateColumns, m.cols - begin), ld = m.in_rows(),
                 group = m.tiled ? head % m.groups : head / (m.heads / m.groups),
                 place = m.conv_floats() + (head * m.cols + begin) * m.rows;
    float* const to = turn.to + place;
    StateStep s = {};
    s.from = turn.from ? turn.from + place : kNoState;
    s.from_stride = turn.from ? n : 0;
    s.to = to, s.to_stride = n, s.rows = m.rows, s.cols = n;
    s.delta = m.kind == Mixer::DELTANET;
    for (size_t t = turn.first; t < turn.first + turn.tokens; t++) {
        const float* const row = a.in + t * ld;
        const float* const gates = open_.data() + t * 2 * m.heads;
        s.k = row + at.k + group * m.rows, s.q = row + at.q + group * m.rows;
        s.v = row + at.v + head * m.cols + begin;
        s.decay = gates[head], s.write = gates[m.heads + head];
        s.out = a.out + t * m.inner() + head * m.cols + begin;
        k.recur(s);
        s.from = to, s.from_stride = n;
    }
}

// The norm and the gate of what a token read.
void Context::gate_mixed(const MixerArgs& a, size_t t) {
    const Mixer& m = a.mixer;
    const Gating silu = {SILU, 0, false, 1, 0};
    const size_t inner = m.inner();
    float *const row = a.in + t * m.in_rows(), *const z = row + places(m).z, *const y = a.out + t * inner;
    if (m.kind == Mixer::DELTANET) {
        for (size_t h = 0; h < m.heads; h++)
            k.norm(y + h * m.cols, m.gated_norm, nullptr, m.norm_eps, false, m.cols, y + h * m.cols);
        k.combine(z, y, inner, silu);
        memcpy(y, z, inner * sizeof(float));
        return;
    }
    const float* const x = row + places(m).v;
    for (size_t h = 0; h < m.heads; h++)
        for (size_t c = h * m.cols; c < (h + 1) * m.cols; c++) y[c] += m.skip[h] * x[c];
    k.combine(z, y, inner, silu);
    const size_t n = inner / m.groups;
    for (size_t c = 0; c < inner; c += n)
        k.norm(z + c, m.gated_norm + c, nullptr, m.norm_eps, false, n, y + c);
}

void Context::mix(const MixerArgs& a) {
    const Mixer& m = a.mixer;
    std::vector<Turn> turns;
    const size_t floats = m.state_floats();
    for (size_t t = 0; t < a.step.tokens; t++) {
        if (!turns.empty() && a.step.sequence[t] == a.step.sequence[t - 1]) {
            turns.back().tokens++;
            continue;
        }
        const size_t s = size_t(a.step.sequence[t]);
        const int32_t from = a.step.state_from[s];
        turns.push_back({t, 1, from < 0 ? nullptr : a.states + size_t(from) * floats,
                         a.states + size_t(a.step.state_to[s]) * floats});
    }
    const size_t threads = size_t(pool.threads()), channels = m.kind == Mixer::DELTANET ? m.rows : kChannels,
                 ring = m.width * channels, parts = (m.channels + channels - 1) / channels,
                 blocks = (m.cols + kStateColumns - 1) / kStateColumns;
    float* const rings = grown(rings_, threads * ring);
    if (m.heads) grown(open_, a.step.tokens * 2 * m.heads);
    Pieces convolved(turns.size() * parts, 1, pool.threads()),
        heads(turns.size() * m.heads * blocks, 1, pool.threads());
    auto region = [&](int thread) {
        for (size_t begin, end; convolved.take(&begin, &end);)
            for (size_t i = begin; i < end; i++) {
                const size_t c = i % parts * channels;
                convolve(a, turns[i / parts], c, std::min(m.channels, c + channels),
                         rings + size_t(thread) * ring);
            }
        if (!m.heads) return;
        own_tokens(a.step.tokens, 1, thread, pool.threads(), [&](size_t t) { state_gates(a, t); });
        pool.barrier();
        for (size_t begin, end; heads.take(&begin, &end);)
            for (size_t i = begin; i < end; i++)
                recur(a, turns[i / blocks / m.heads], i / blocks % m.heads, i % blocks * kStateColumns);
        pool.barrier();
        own_tokens(a.step.tokens, 1, thread, pool.threads(), [&](size_t t) { gate_mixed(a, t); });
    };
    pool.run(region);
}

void Context::mixer_add(float* x, const float* h, const Mixer& mixer, const Step& step, float* states) {
    if (!step.tokens) return;
    float* in = grown(qkv_, step.tokens * mixer.in_rows());
    float* out = grown(attended_, step.tokens * mixer.inner());
    matmul(mixer.in, mixer.norm, h, step.tokens, in);
    mix({mixer, step, states, in, out});
    const bool plain = mixer.join.plain();
    const size_t dim = mixer.out.weight.rows;
    float* y = plain ? x : grown(branch_, step.tokens * dim);
    matmul(mixer.out, {}, out, step.tokens, y, plain);
    if (!plain) join(mixer.join, y, step.tokens, dim, x);
}

}  // namespace tc
