// The kernels, once. Included by each isa_*.cpp after its simd_*.h, inside its own namespace; no STL, no exceptions
// (an inline STL function compiled with AVX flags here could be the copy the linker keeps for everyone).
//
// A format is a struct of: STEP (weights per step), Step (unpacked weights), Act (an activation step), Acc (a running
// sum), load / load_tail / dot / total for dot products, unpack for weights as floats without their scale, scales for
// the scale of every 32 columns (1 for float formats), and STREAMS: how many rows one
// token's dot products have in flight. Memory likes one stream (q8_0, 1 thread: 43 GB/s with one row, 19 to 25 with
// four), but q4_0 needs four rows' worth of instruction parallelism to keep up (37 against 32). LOG 2026-11-21.

// f32, f16 and bf16: two sums per row hide the latency of the fused multiply-add (f16: 24 GB/s with one).
struct Pair {
    vf a, b;
};
template <class T, vf (*LOAD)(const T*), vf (*LOAD_N)(const T*, int)>
struct FormatFloat {
    using Act = float;
    using Step = Pair;
    using Acc = Pair;
    static constexpr size_t STEP = 2 * W;
    static constexpr int STREAMS = 1;
    static size_t row_bytes(size_t n) { return sizeof(T) * n; }
    static const Act* act(const Input& x, size_t t, size_t cols) { return x.f32 + t * cols; }
    static vf load_some(const T* p, int n) { return n >= W ? LOAD(p) : n > 0 ? LOAD_N(p, n) : vzero(); }
    static vf x_some(const float* p, int n) { return n >= W ? vload(p) : n > 0 ? vload_n(p, n) : vzero(); }
    static Acc zero() { return {vzero(), vzero()}; }
    static Step load(const uint8_t* row, size_t s) {
        const T* p = (const T*)row + s * STEP;
        return {LOAD(p), LOAD(p + W)};
    }
    static Step load_tail(const uint8_t* row, size_t s, int n) {
        const T* p = (const T*)row + s * STEP;
        return {load_some(p, n), load_some(p + W, n - W)};
    }
    static Acc dot(const Step& w, const Act* x, size_t s, const Acc& acc) {
        return {vfma(w.a, vload(x + s * STEP), acc.a), vfma(w.b, vload(x + s * STEP + W), acc.b)};
    }
    static Acc dot_tail(const Step& w, const Act* x, size_t s, int n, const Acc& acc) {
        return {vfma(w.a, x_some(x + s * STEP, n), acc.a), vfma(w.b, x_some(x + s * STEP + W, n - W), acc.b)};
    }
    static float total(const Acc& acc) { return vsum(vadd(acc.a, acc.b)); }
    static void unpack(const uint8_t* row, size_t c, vf* out) {
        for (int k = 0; k < 32 / W; k++) out[k] = LOAD((const T*)row + c + k * W);
    }
    static vf unpack_n(const uint8_t* row, size_t c, int n) { return LOAD_N((const T*)row + c, n); }
    static void scales(const uint8_t*, size_t, size_t n, float h, float* out) {
        for (size_t b = 0; b < n; b++) out[b] = h;
    }
};
using FormatF32 = FormatFloat<float, vload, vload_n>;
using FormatF16 = FormatFloat<uint16_t, vload_f16, vload_f16_n>;
using FormatBF16 = FormatFloat<uint16_t, vload_bf16, vload_bf16_n>;

template <class Block, QW (*LOAD)(const Block*, int), vf (*DOT)(const QW&, const XBlock*, vf),
          void (*UNPACK)(const Block*, vf*), vf (*SCALES)(const Block*), int ROWS_IN_FLIGHT>
struct FormatQ {
    using Act = XBlock;
    using Step = QW;
    using Acc = vf;
    static constexpr size_t STEP = 32 * QB;
    static constexpr int STREAMS = ROWS_IN_FLIGHT;
    static Acc zero() { return vzero(); }
    static float total(Acc acc) { return vsum(acc); }
    static size_t row_bytes(size_t n) { return n / 32 * sizeof(Block); }
    static const Act* act(const Input& x, size_t t, size_t) { return (const XBlock*)(x.blocks + t * x.row_bytes); }
    static Step load(const uint8_t* row, size_t s) { return LOAD((const Block*)row + s * QB, QB); }
    static Step load_tail(const uint8_t* row, size_t s, int n) { return LOAD((const Block*)row + s * QB, n / 32); }
    static vf dot(const Step& w, const Act* x, size_t s, vf acc) { return DOT(w, x + s, acc); }
    static vf dot_tail(const Step& w, const Act* x, size_t s, int, vf acc) { return DOT(w, x + s, acc); }
    static void unpack(const uint8_t* row, size_t c, vf* out) { UNPACK((const Block*)row + c / 32, out); }
    static vf unpack_n(const uint8_t*, size_t, int) { return vzero(); }  // cols % 32 == 0: never reached
    // out[b] = h * scale of block c/32 + b, for b in [0, n)
    static void scales(const uint8_t* row, size_t c, size_t n, float h, float* out) {
        const Block* blocks = (const Block*)row + c / 32;
        size_t b = 0;
        for (; b + W <= n; b += W) vstore(out + b, vmul(SCALES(blocks + b), vset1(h)));
        for (; b < n; b++) out[b] = f16_to_f32(blocks[b].d) * h;
    }
};
using FormatQ8_0 = FormatQ<BlockQ8_0, q8_load, q8_dot, q8_unpack, q8_scales, 1>;
using FormatQ4_0 = FormatQ<BlockQ4_0, q4_load, q4_dot, q4_unpack, q4_scales, 4>;

// ---------------------------------------------------------------------------------------------- dot products

// How far ahead of its use a weight is asked for, in bytes of rows to come. 8 to 32 KiB measured alike; less is worse.
// By row, not by address: between two up rows lies a down row nobody wants yet.
constexpr size_t kAhead = 16384;

// MR weight rows times NR tokens. Each (row, token) pair has one accumulator, fed in the order of K:
// the result is the same for every MR and NR.
template <class F, int MR, int NR>
static void dot_tile(const uint8_t* const* rows, const uint8_t* const* next, const typename F::Act* const* xs,
                     size_t cols, float (*out)[NR]) {
    typename F::Acc acc[MR][NR];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) acc[m][n] = F::zero();
    const size_t steps = cols / F::STEP;
    for (size_t s = 0; s < steps; s++) {
        for (int m = 0; m < MR; m++) {
            prefetch(next[m] + F::row_bytes(F::STEP) * s);
            const typename F::Step w = F::load(rows[m], s);
            for (int n = 0; n < NR; n++) acc[m][n] = F::dot(w, xs[n], s, acc[m][n]);
        }
    }
    const int tail = int(cols % F::STEP);
    if (tail) {
        for (int m = 0; m < MR; m++) {
            const typename F::Step w = F::load_tail(rows[m], steps, tail);
            for (int n = 0; n < NR; n++) acc[m][n] = F::dot_tail(w, xs[n], steps, tail, acc[m][n]);
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) out[m][n] = F::total(acc[m][n]);
}

template <class F, int MR, int NR>
static void matmul_tile(const Matrix& w, const int32_t* ids, size_t r, size_t begin, size_t end, const Input& x,
                        size_t t, const float* bias, float* y, size_t ldy) {
    const uint8_t *rows[MR], *next[MR];
    const size_t ahead = (kAhead / F::row_bytes(w.cols) / MR + 1) * MR;
    const typename F::Act* xs[NR];
    size_t id[MR];
    float out[MR][NR];
    for (int m = 0; m < MR; m++) {
        const size_t later = r + m + ahead < end ? r + m + ahead : end - 1;
        id[m] = ids ? size_t(ids[r + m]) : r + m;
        rows[m] = w.data + id[m] * w.stride;
        next[m] = w.data + (ids ? size_t(ids[later]) : later) * w.stride;
    }
    for (int n = 0; n < NR; n++) xs[n] = F::act(x, t + n, w.cols);
    dot_tile<F, MR, NR>(rows, next, xs, w.cols, out);
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) y[(t + n) * ldy + (r + m - begin)] = out[m][n] + (bias ? bias[id[m]] : 0.0f);
}

template <class F>
static void matmul_format(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                          const float* bias, float* y, size_t ldy) {
    constexpr int M = 4, N = 4, S = F::STREAMS;  // 16 accumulators, of 32 registers (AVX-512)
    const size_t grouped = x.tokens / N * N;
    size_t r = begin;
    for (; grouped && r + M <= end; r += M)
        for (size_t t = 0; t < grouped; t += N) matmul_tile<F, M, N>(w, ids, r, begin, end, x, t, bias, y, ldy);
    for (; r < end && grouped; r++)
        for (size_t t = 0; t < grouped; t += N) matmul_tile<F, 1, N>(w, ids, r, begin, end, x, t, bias, y, ldy);
    for (size_t t = grouped; t < x.tokens; t++) {
        for (r = begin; r + S <= end; r += S) matmul_tile<F, S, 1>(w, ids, r, begin, end, x, t, bias, y, ldy);
        for (; r < end; r++) matmul_tile<F, 1, 1>(w, ids, r, begin, end, x, t, bias, y, ldy);
    }
}

// ---------------------------------------------------------------------------------------------- weighted row sums
//
// y += h_i * row_i, as fma(q, h_i * scale, y) with the product of h and the scale rounded once: the same in all paths.

// One token: G rows at a time straight from the stored format, y loaded and stored once per group; meanwhile the G
// rows at `next` are asked for, one after the other. factors: G * blocks floats of scratch, h * scale of 32 columns.
template <class F, int G>
static void accumulate_group(const uint8_t* const* rows, const float* h, size_t begin, size_t end, float* y,
                             const uint8_t* const* next, float* factors) {
    constexpr int U = 32 / W;
    const size_t blocks = (end - begin + 31) / 32;
    for (int g = 0; g < G; g++) F::scales(rows[g], begin, blocks, h[g], factors + size_t(g) * blocks);
    const size_t unit = F::row_bytes(32), row = F::row_bytes(end - begin);
    size_t b = 0, ahead = 0, segment = 0;
    for (size_t c = begin; c + 32 <= end; c += 32, b++, y += 32) {
        vf acc[U];
        for (size_t k = 0; k < G * unit; k += 64) prefetch(next[segment] + ahead + k);
        if ((ahead += G * unit) >= row && segment + 1 < G) ahead -= row, segment++;
        for (int k = 0; k < U; k++) acc[k] = vload(y + k * W);
        for (int g = 0; g < G; g++) {
            vf w[U];
            F::unpack(rows[g], c, w);
            const vf f = vset1(factors[size_t(g) * blocks + b]);
            for (int k = 0; k < U; k++) acc[k] = vfma(w[k], f, acc[k]);
        }
        for (int k = 0; k < U; k++) vstore(y + k * W, acc[k]);
    }
    for (size_t c = begin + 32 * b; c < end; c += W, y += W) {
        const int n = int(end - c < size_t(W) ? end - c : size_t(W));
        vf acc = vload_n(y, n);
        for (int g = 0; g < G; g++) acc = vfma(F::unpack_n(rows[g], c, n), vset1(h[g]), acc);
        vstore_n(y, acc, n);
    }
}

// Several tokens: a tile of rows is unpacked once (8 KiB, in L1), then added to every token.
template <class F>
static void accumulate_format(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh, size_t tokens,
                              size_t begin, size_t end, float* y, size_t ldy, float* tile) {
    constexpr size_t G = kTileRows, C = kTileColumns, B = C / 32;
    const size_t width = end - begin, blocks = (width + 31) / 32;
    for (size_t k0 = 0; k0 < n; k0 += G) {
        const size_t g1 = n - k0 < G ? n - k0 : G;
        float scale[G][B];
        for (size_t g = 0; g < g1; g++) {
            const uint8_t* row = w.data + size_t(ids[k0 + g]) * w.stride;
            F::scales(row, begin, blocks, 1.0f, scale[g]);
            size_t c = 0;
            for (; c + 32 <= width; c += 32) {
                vf u[32 / W];
                F::unpack(row, begin + c, u);
                for (int k = 0; k < 32 / W; k++) vstore(tile + g * C + c + k * W, u[k]);
            }
            for (; c < width; c += W) {
                const int left = int(width - c < size_t(W) ? width - c : size_t(W));
                vstore_n(tile + g * C + c, F::unpack_n(row, begin + c, left), left);
            }
        }
        for (size_t t = 0; t < tokens; t++) {
            const float* ht = h + t * ldh + k0;
            for (size_t b = 0; b < blocks; b++) {
                float factor[G];
                for (size_t g = 0; g < g1; g++) factor[g] = scale[g][b] * ht[g];
                for (size_t c = 32 * b; c < 32 * b + 32 && c < width; c += W) {
                    const int left = int(width - c < size_t(W) ? width - c : size_t(W));
                    float* yt = y + t * ldy + c;
                    vf acc = left == W ? vload(yt) : vload_n(yt, left);
                    for (size_t g = 0; g < g1; g++) {
                        const float* p = tile + g * C + c;
                        acc = vfma(left == W ? vload(p) : vload_n(p, left), vset1(factor[g]), acc);
                    }
                    if (left == W) vstore(yt, acc);
                    else vstore_n(yt, acc, left);
                }
            }
        }
    }
}

// A few tokens, all columns: the group's up rows, then its down rows. Meanwhile the next group's records are asked for
// in the order they lie in memory, at the rate at which this group's are used up: memory sees one stream.
template <class F, int G>
static size_t bundle_group(const Bundles& w, size_t k, const Input& x, const float* gate, size_t ldg, float* y,
                           float* factors) {
    constexpr int rows = 2;  // of a record
    const uint8_t *up[G], *down[G], *next[rows * G];
    const size_t dim = w.down.cols;
    const bool gated = w.up.data != nullptr;
    size_t live = 0;
    for (int g = 0; g < G; g++) {
        const size_t id = size_t(w.ids[k + g]), later = size_t(w.ids[k + G + g < w.n ? k + G + g : w.n - 1]);
        down[g] = w.down.data + id * w.down.stride;
        if (gated) {
            up[g] = w.up.data + id * w.up.stride;
            next[rows * g] = w.up.data + later * w.up.stride;
            next[rows * g + 1] = w.down.data + later * w.down.stride;
        } else {
            next[G + g] = w.down.data + later * w.down.stride;
        }
    }
    for (size_t t = 0; t < x.tokens; t++) {
        float h[G];
        for (int g = 0; g < G; g++) h[g] = gate[t * ldg + size_t(w.ids[k + g])];
        if (gated) {
            constexpr int S = F::STREAMS < G ? F::STREAMS : G;
            const typename F::Act* xs[1] = {F::act(x, t, dim)};
            for (int g = 0; g < G; g += S) {
                float u[S][1];
                dot_tile<F, S, 1>(up + g, next + g, xs, dim, u);
                for (int s = 0; s < S; s++) h[g + s] = w.up_relu && !(u[s][0] > 0) ? 0.0f : h[g + s] * u[s][0];
            }
        }
        for (int g = 0; g < G; g++) live += h[g] != 0;
        accumulate_group<F, G>(down, h, 0, dim, y + t * dim, next + G, factors);
    }
    return live;
}

template <class F>
static size_t bundles_format(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y,
                             float* factors) {
    size_t k = 0, live = 0;
    for (; k + 4 <= w.n; k += 4) live += bundle_group<F, 4>(w, k, x, gate, ldg, y, factors);
    for (; k < w.n; k++) live += bundle_group<F, 1>(w, k, x, gate, ldg, y, factors);
    return live;
}

template <class F>
static void decode_row_format(const uint8_t* row, size_t cols, float* out) {
    for (size_t c = 0; c < cols; c += 32) {
        float scale;
        F::scales(row, c, 1, 1.0f, &scale);
        vf u[32 / W];
        if (c + 32 <= cols) {
            F::unpack(row, c, u);
            for (int k = 0; k < 32 / W; k++) vstore(out + c + k * W, vmul(u[k], vset1(scale)));
        } else {
            for (size_t i = c; i < cols; i += W) {
                const int n = int(cols - i < size_t(W) ? cols - i : size_t(W));
                vstore_n(out + i, F::unpack_n(row, i, n), n);
            }
        }
    }
}

#define FOR_FORMAT(format, CALL)                 \
    switch (format) {                            \
        case F32: { using F = FormatF32; CALL; break; }   \
        case F16: { using F = FormatF16; CALL; break; }   \
        case BF16: { using F = FormatBF16; CALL; break; } \
        case Q8_0: { using F = FormatQ8_0; CALL; break; } \
        case Q4_0: { using F = FormatQ4_0; CALL; break; } \
        default: break;                          \
    }

static void matmul(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x, const float* bias,
                   float* y, size_t ldy) {
    FOR_FORMAT(w.format, matmul_format<F>(w, ids, begin, end, x, bias, y, ldy))
}
static void accumulate(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh, size_t tokens,
                       size_t begin, size_t end, float* y, size_t ldy, float* scratch) {
    FOR_FORMAT(w.format, accumulate_format<F>(w, ids, n, h, ldh, tokens, begin, end, y, ldy, scratch))
}
static size_t bundles(const Bundles& w, const Input& x, const float* gate, size_t ldg, float* y, float* factors) {
    size_t live = 0;
    FOR_FORMAT(w.down.format, live = bundles_format<F>(w, x, gate, ldg, y, factors))
    return live;
}
static void decode_row(const Matrix& w, size_t row, float* out) {
    FOR_FORMAT(w.format, decode_row_format<F>(w.data + row * w.stride, w.cols, out))
}
#undef FOR_FORMAT

static size_t input_bytes(size_t cols) { return (cols / 32 + QB - 1) / QB * sizeof(XBlock); }
static void quantize(const float* x, size_t cols, uint8_t* out) {
    const size_t blocks = cols / 32;
    XBlock* o = (XBlock*)out;
    for (size_t b = 0; b < blocks; b += QB) x_quantize(x + 32 * b, int(blocks - b < QB ? blocks - b : QB), o++);
}

// ---------------------------------------------------------------------------------------------- small ops

// Apply f(vf) -> vf to n floats; the tail goes through the same instructions as the rest.
template <class Fn>
static void map(float* x, size_t n, Fn f) {
    size_t i = 0;
    for (; i + W <= n; i += W) vstore(x + i, f(vload(x + i)));
    if (i < n) vstore_n(x + i, f(vload_n(x + i, int(n - i))), int(n - i));
}

// e^x, relative error below 2e-7: x = n ln 2 + r, |r| <= ln2/2, Taylor to r^7 (Horner), scaled by 2^n.
static vf vexp(vf x) {
    x = vmin(vset1(88.0f), vmax(vset1(-87.0f), x));  // in this order: a NaN comes through
    const vf n = vround(vmul(x, vset1(1.44269504f)));
    vf r = vsub(x, vmul(n, vset1(0.693359375f)));  // ln 2 in two parts (Cody-Waite): n * hi is exact
    r = vsub(r, vmul(n, vset1(-2.12194440e-4f)));
    vf p = vset1(1.0f / 5040);
    p = vfma(p, r, vset1(1.0f / 720));
    p = vfma(p, r, vset1(1.0f / 120));
    p = vfma(p, r, vset1(1.0f / 24));
    p = vfma(p, r, vset1(1.0f / 6));
    p = vfma(p, r, vset1(0.5f));
    p = vfma(p, r, vset1(1.0f));
    p = vfma(p, r, vset1(1.0f));
    return vmul(p, vpow2(n));
}
static vf sigmoid(vf x) { return vdiv(vset1(1), vadd(vset1(1), vexp(vsub(vzero(), x)))); }

static void activate(float* x, size_t n, Activation kind, float threshold) {
    switch (kind) {
        case SILU: map(x, n, [](vf g) { return vmul(g, sigmoid(g)); }); break;
        case GELU:
            for (size_t i = 0; i < n; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
            break;
        case GELU_TANH:  // 1 + tanh(z) = 2 sigmoid(2z)
            map(x, n, [](vf g) {
                const vf z = vmul(g, vfma(vmul(g, g), vset1(0.0356774081f), vset1(0.797884561f)));
                return vmul(g, sigmoid(vadd(z, z)));
            });
            break;
        case RELU: map(x, n, [](vf g) { return vgate(g, vzero()); }); break;
        case FATRELU: map(x, n, [=](vf g) { return vgate(g, vset1(threshold)); }); break;
        case RELU2: map(x, n, [](vf g) { g = vgate(g, vzero()); return vmul(g, g); }); break;
        default: break;
    }
}

static void norm(const float* x, const float* weight, const float* bias, float eps, bool layer, size_t n, float* y) {
    vf s = vzero();
    size_t i = 0;
    float mean = 0;
    if (layer) {
        for (; i + W <= n; i += W) s = vadd(s, vload(x + i));
        if (i < n) s = vadd(s, vload_n(x + i, int(n - i)));
        mean = vsum(s) / float(n);
    }
    const vf m = vset1(mean);
    s = vzero();
    for (i = 0; i + W <= n; i += W) {
        const vf d = vsub(vload(x + i), m);
        s = vfma(d, d, s);
    }
    float squares = vsum(s);
    for (; i < n; i++) squares += (x[i] - mean) * (x[i] - mean);
    const vf scale = vset1(1.0f / sqrtf(squares / float(n) + eps));
    for (i = 0; i < n; i += W) {
        const int k = int(n - i < size_t(W) ? n - i : size_t(W));
        vf v = vmul(vmul(vsub(vload_n(x + i, k), m), scale), vload_n(weight + i, k));
        if (bias) v = vadd(v, vload_n(bias + i, k));
        vstore_n(y + i, v, k);
    }
}

static void rope(float* x, const float* cos, const float* sin, size_t head_dim) {
    const size_t half = head_dim / 2;
    for (size_t i = 0; i < half; i += W) {
        const int k = int(half - i < size_t(W) ? half - i : size_t(W));
        const vf a = vload_n(x + i, k), b = vload_n(x + half + i, k), c = vload_n(cos + i, k), s = vload_n(sin + i, k);
        vstore_n(x + i, vsub(vmul(a, c), vmul(b, s)), k);
        vstore_n(x + half + i, vadd(vmul(b, c), vmul(a, s)), k);
    }
}

static void to_f16(const float* x, size_t n, uint16_t* out) {
    for (size_t i = 0; i < n; i += W) {
        const int k = int(n - i < size_t(W) ? n - i : size_t(W));
        vstore_f16_n(out + i, vload_n(x + i, k), k);
    }
}

// ---------------------------------------------------------------------------------------------- attention

// Two passes over the pages, each page read once for all heads of the group: scores, softmax, weighted values.
static void attend(const float* q, size_t group, size_t head_dim, float scale, const uint16_t* k_pages,
                   const uint16_t* v_pages, const int32_t* table, size_t page_stride, size_t block, size_t start,
                   size_t end, float* scores, float* out) {
    const size_t span = end - start, full = head_dim / W * W;
    const int tail = int(head_dim - full);
    for (size_t p = start; p < end; p++) {
        const uint16_t* k = k_pages + size_t(table[p / block]) * page_stride + p % block * head_dim;
        for (size_t g = 0; g < group; g++) {
            const float* qg = q + g * head_dim;
            vf acc = vzero();
            for (size_t i = 0; i < full; i += W) acc = vfma(vload_f16(k + i), vload(qg + i), acc);
            if (tail) acc = vfma(vload_f16_n(k + full, tail), vload_n(qg + full, tail), acc);
            scores[g * span + p - start] = vsum(acc) * scale;
        }
    }
    for (size_t g = 0; g < group; g++) {
        float* s = scores + g * span;
        float top = s[0];
        for (size_t i = 1; i < span; i++) top = s[i] > top ? s[i] : top;
        map(s, span, [=](vf v) { return vexp(vsub(v, vset1(top))); });
        vf acc = vzero();
        size_t i = 0;
        for (; i + W <= span; i += W) acc = vadd(acc, vload(s + i));
        float total = vsum(acc);
        for (; i < span; i++) total += s[i];
        const vf inverse = vset1(1.0f / total);
        map(s, span, [=](vf v) { return vmul(v, inverse); });
    }
    for (size_t i = 0; i < group * head_dim; i++) out[i] = 0;
    for (size_t p0 = start; p0 < end;) {  // positions of one page at a time
        const size_t p1 = (p0 / block + 1) * block < end ? (p0 / block + 1) * block : end;
        const uint16_t* v = v_pages + size_t(table[p0 / block]) * page_stride + p0 % block * head_dim;
        for (size_t g = 0; g < group; g++) {
            const float* s = scores + g * span - start;
            float* o = out + g * head_dim;
            for (size_t i = 0; i < head_dim; i += W) {
                const int n = int(head_dim - i < size_t(W) ? head_dim - i : size_t(W));
                vf acc = vload_n(o + i, n);
                for (size_t p = p0; p < p1; p++) {
                    const uint16_t* vp = v + (p - p0) * head_dim + i;
                    acc = vfma(n == W ? vload_f16(vp) : vload_f16_n(vp, n), vset1(s[p]), acc);
                }
                vstore_n(o + i, acc, n);
            }
        }
        p0 = p1;
    }
}

static uint64_t read_all(const uint8_t* p, size_t n) {
    vf a = vzero(), b = vzero(), c = vzero(), d = vzero();
    constexpr size_t S = W * 4;
    size_t i = 0;
    for (; i + 4 * S <= n; i += 4 * S) {
        for (size_t k = 0; k < 4 * S; k += 64) prefetch(p + i + k + kAhead);
        a = vmax(a, vload((const float*)(p + i)));
        b = vmax(b, vload((const float*)(p + i + S)));
        c = vmax(c, vload((const float*)(p + i + 2 * S)));
        d = vmax(d, vload((const float*)(p + i + 3 * S)));
    }
    const float m = vmaximum(vmax(vmax(a, b), vmax(c, d)));
    uint32_t bits;
    memcpy(&bits, &m, 4);
    return bits;
}

static const Kernels table = {ISA_NAME, input_bytes, quantize, matmul, bundles, accumulate, decode_row,
                              norm,     activate,    rope,     to_f16, attend,  read_all};
