// The kernels, once. Included by each isa_*.cpp after its simd_*.h, inside its own namespace; no STL, no exceptions
// (an inline STL function compiled with AVX flags here could be the copy the linker keeps for everyone).
//
// A format is a struct of: STEP (weights per step), Step (unpacked weights), Act (what one activation step is),
// load / load_tail / dot for dot products, unpack for weights as floats.

struct FormatF32 {
    using Act = float;
    using Step = vf;
    static constexpr size_t STEP = W;
    static size_t row_bytes(size_t n) { return 4 * n; }
    static const Act* act(const Input& x, size_t t, size_t cols) { return x.f32 + t * cols; }
    static Step load(const uint8_t* row, size_t s) { return vload((const float*)row + s * W); }
    static Step load_tail(const uint8_t* row, size_t s, int n) { return vload_n((const float*)row + s * W, n); }
    static vf dot(Step w, const Act* x, size_t s, vf acc) { return vfma(w, vload(x + s * W), acc); }
    static vf dot_tail(Step w, const Act* x, size_t s, int n, vf acc) { return vfma(w, vload_n(x + s * W, n), acc); }
    static void unpack(const uint8_t* row, size_t c, vf* out) {
        for (int k = 0; k < 32 / W; k++) out[k] = vload((const float*)row + c + k * W);
    }
    static vf unpack_n(const uint8_t* row, size_t c, int n) { return vload_n((const float*)row + c, n); }
};

template <vf (*LOAD)(const uint16_t*), vf (*LOAD_N)(const uint16_t*, int)>
struct FormatHalf {
    using Act = float;
    using Step = vf;
    static constexpr size_t STEP = W;
    static size_t row_bytes(size_t n) { return 2 * n; }
    static const Act* act(const Input& x, size_t t, size_t cols) { return x.f32 + t * cols; }
    static Step load(const uint8_t* row, size_t s) { return LOAD((const uint16_t*)row + s * W); }
    static Step load_tail(const uint8_t* row, size_t s, int n) { return LOAD_N((const uint16_t*)row + s * W, n); }
    static vf dot(Step w, const Act* x, size_t s, vf acc) { return vfma(w, vload(x + s * W), acc); }
    static vf dot_tail(Step w, const Act* x, size_t s, int n, vf acc) { return vfma(w, vload_n(x + s * W, n), acc); }
    static void unpack(const uint8_t* row, size_t c, vf* out) {
        for (int k = 0; k < 32 / W; k++) out[k] = LOAD((const uint16_t*)row + c + k * W);
    }
    static vf unpack_n(const uint8_t* row, size_t c, int n) { return LOAD_N((const uint16_t*)row + c, n); }
};
using FormatF16 = FormatHalf<vload_f16, vload_f16_n>;
using FormatBF16 = FormatHalf<vload_bf16, vload_bf16_n>;

template <class Block, QW (*LOAD)(const Block*, int), vf (*DOT)(const QW&, const XBlock*, vf),
          void (*UNPACK)(const Block*, vf*)>
struct FormatQ {
    using Act = XBlock;
    using Step = QW;
    static constexpr size_t STEP = 32 * QB;
    static size_t row_bytes(size_t n) { return n / 32 * sizeof(Block); }
    static const Act* act(const Input& x, size_t t, size_t) { return (const XBlock*)(x.blocks + t * x.row_bytes); }
    static Step load(const uint8_t* row, size_t s) { return LOAD((const Block*)row + s * QB, QB); }
    static Step load_tail(const uint8_t* row, size_t s, int n) { return LOAD((const Block*)row + s * QB, n / 32); }
    static vf dot(const Step& w, const Act* x, size_t s, vf acc) { return DOT(w, x + s, acc); }
    static vf dot_tail(const Step& w, const Act* x, size_t s, int, vf acc) { return DOT(w, x + s, acc); }
    static void unpack(const uint8_t* row, size_t c, vf* out) { UNPACK((const Block*)row + c / 32, out); }
    static vf unpack_n(const uint8_t*, size_t, int) { return vzero(); }  // cols % 32 == 0: never reached
};
using FormatQ8_0 = FormatQ<BlockQ8_0, q8_load, q8_dot, q8_unpack>;
using FormatQ4_0 = FormatQ<BlockQ4_0, q4_load, q4_dot, q4_unpack>;

// ---------------------------------------------------------------------------------------------- dot products

// MR weight rows times NR tokens. Each (row, token) pair has one accumulator, fed in the order of K:
// the result is the same for every MR and NR.
template <class F, int MR, int NR>
static void dot_tile(const uint8_t* const* rows, const typename F::Act* const* xs, size_t cols, float (*out)[NR]) {
    vf acc[MR][NR];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) acc[m][n] = vzero();
    const size_t steps = cols / F::STEP;
    for (size_t s = 0; s < steps; s++) {
        for (int m = 0; m < MR; m++) {
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
        for (int n = 0; n < NR; n++) out[m][n] = vsum(acc[m][n]);
}

template <class F, int MR, int NR>
static void matmul_tile(const Matrix& w, const int32_t* ids, size_t r, size_t begin, const Input& x, size_t t,
                        const float* bias, float* y, size_t ldy) {
    const uint8_t* rows[MR];
    const typename F::Act* xs[NR];
    size_t id[MR];
    float out[MR][NR];
    for (int m = 0; m < MR; m++) id[m] = ids ? size_t(ids[r + m]) : r + m, rows[m] = w.data + id[m] * w.stride;
    for (int n = 0; n < NR; n++) xs[n] = F::act(x, t + n, w.cols);
    dot_tile<F, MR, NR>(rows, xs, w.cols, out);
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NR; n++) y[(t + n) * ldy + (r + m - begin)] = out[m][n] + (bias ? bias[id[m]] : 0.0f);
}

template <class F, int MR>
static void matmul_rows(const Matrix& w, const int32_t* ids, size_t r, size_t begin, const Input& x, const float* bias,
                        float* y, size_t ldy) {
    size_t t = 0;
    for (; t + 4 <= x.tokens; t += 4) matmul_tile<F, MR, 4>(w, ids, r, begin, x, t, bias, y, ldy);
    for (; t < x.tokens; t++) matmul_tile<F, MR, 1>(w, ids, r, begin, x, t, bias, y, ldy);
}

template <class F>
static void matmul_format(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                          const float* bias, float* y, size_t ldy) {
    size_t r = begin;
    for (; r + 4 <= end; r += 4) matmul_rows<F, 4>(w, ids, r, begin, x, bias, y, ldy);
    for (; r < end; r++) matmul_rows<F, 1>(w, ids, r, begin, x, bias, y, ldy);
}

// ---------------------------------------------------------------------------------------------- weighted row sums

// One token: a group of G rows at a time straight from the stored format, y loaded and stored once per group.
template <class F, int G>
static void accumulate_group(const uint8_t* const* rows, const float* h, size_t begin, size_t end, float* y,
                             const uint8_t* const* next) {
    constexpr int U = 32 / W;
    vf hv[G];
    for (int g = 0; g < G; g++) hv[g] = vset1(h[g]);
    size_t c = begin;
    for (; c + 32 <= end; c += 32) {
        vf acc[U];
        for (int k = 0; k < U; k++) acc[k] = vload(y + c + k * W);
        for (int g = 0; g < G; g++) {
            vf w[U];
            F::unpack(rows[g], c, w);
            if (next) prefetch(next[g] + F::row_bytes(c));
            for (int k = 0; k < U; k++) acc[k] = vfma(w[k], hv[g], acc[k]);
        }
        for (int k = 0; k < U; k++) vstore(y + c + k * W, acc[k]);
    }
    for (; c < end; c += W) {
        const int n = int(end - c < size_t(W) ? end - c : size_t(W));
        vf acc = vload_n(y + c, n);
        for (int g = 0; g < G; g++) acc = vfma(F::unpack_n(rows[g], c, n), hv[g], acc);
        vstore_n(y + c, acc, n);
    }
}

template <class F>
static void accumulate_one(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t begin, size_t end,
                           float* y) {
    constexpr size_t G = 8;
    const uint8_t* rows[2 * G];
    size_t k = 0;
    for (; k + G <= n; k += G) {
        const bool more = k + 2 * G <= n;
        for (size_t g = 0; g < (more ? 2 * G : G); g++) rows[g] = w.data + size_t(ids[k + g]) * w.stride;
        accumulate_group<F, G>(rows, h + k, begin, end, y, more ? rows + G : nullptr);
    }
    for (; k < n; k++) {
        rows[0] = w.data + size_t(ids[k]) * w.stride;
        accumulate_group<F, 1>(rows, h + k, begin, end, y, nullptr);
    }
}

// Several tokens: a tile of 16 rows x 256 columns is unpacked once (16 KiB, in L1), then added to every token.
template <class F>
static void accumulate_many(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh, size_t tokens,
                            size_t begin, size_t end, float* y, size_t ldy, float* tile) {
    constexpr size_t G = 16, C = 256;
    for (size_t c0 = begin; c0 < end; c0 += C) {
        const size_t c1 = c0 + C < end ? c0 + C : end, width = c1 - c0;
        for (size_t k0 = 0; k0 < n; k0 += G) {
            const size_t g1 = n - k0 < G ? n - k0 : G;
            for (size_t g = 0; g < g1; g++) {
                const uint8_t* row = w.data + size_t(ids[k0 + g]) * w.stride;
                size_t c = 0;
                for (; c + 32 <= width; c += 32) {
                    vf u[32 / W];
                    F::unpack(row, c0 + c, u);
                    for (int k = 0; k < 32 / W; k++) vstore(tile + g * C + c + k * W, u[k]);
                }
                for (; c < width; c += W) {
                    const int left = int(width - c < size_t(W) ? width - c : size_t(W));
                    vstore_n(tile + g * C + c, F::unpack_n(row, c0 + c, left), left);
                }
            }
            for (size_t t = 0; t < tokens; t++) {
                const float* ht = h + t * ldh + k0;
                float* yt = y + t * ldy + c0;
                for (size_t c = 0; c < width; c += W) {
                    const int left = int(width - c < size_t(W) ? width - c : size_t(W));
                    vf acc = left == W ? vload(yt + c) : vload_n(yt + c, left);
                    for (size_t g = 0; g < g1; g++) {
                        const float* p = tile + g * C + c;
                        acc = vfma(left == W ? vload(p) : vload_n(p, left), vset1(ht[g]), acc);
                    }
                    if (left == W) vstore(yt + c, acc);
                    else vstore_n(yt + c, acc, left);
                }
            }
        }
    }
}

template <class F>
static void accumulate_format(const Matrix& w, const int32_t* ids, size_t n, const float* h, size_t ldh, size_t tokens,
                              size_t begin, size_t end, float* y, size_t ldy, float* scratch) {
    if (tokens < 4)  // unpacking per token is cheaper than the detour over the tile
        for (size_t t = 0; t < tokens; t++) accumulate_one<F>(w, ids, n, h + t * ldh, begin, end, y + t * ldy);
    else
        accumulate_many<F>(w, ids, n, h, ldh, tokens, begin, end, y, ldy, scratch);
}

template <class F>
static void decode_row_format(const uint8_t* row, size_t cols, float* out) {
    size_t c = 0;
    for (; c + 32 <= cols; c += 32) {
        vf u[32 / W];
        F::unpack(row, c, u);
        for (int k = 0; k < 32 / W; k++) vstore(out + c + k * W, u[k]);
    }
    for (; c < cols; c += W) {
        const int n = int(cols - c < size_t(W) ? cols - c : size_t(W));
        vstore_n(out + c, F::unpack_n(row, c, n), n);
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
    x = vmin(vmax(x, vset1(-87.0f)), vset1(88.0f));
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

static const Kernels table = {ISA_NAME, input_bytes, quantize, matmul, accumulate, decode_row, norm,
                              activate, rope,        to_f16,   attend, read_all};
