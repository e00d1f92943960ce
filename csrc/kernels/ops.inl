// Norms, activations, rope and attention.

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
        case SILU:
            map(x, n, [](vf g) { return vmul(g, sigmoid(g)); });
            break;
        case GELU:
            for (size_t i = 0; i < n; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
            break;
        case GELU_TANH:  // 1 + tanh(z) = 2 sigmoid(2z)
            map(x, n, [](vf g) {
                const vf z = vmul(g, vfma(vmul(g, g), vset1(0.0356774081f), vset1(0.797884561f)));
                return vmul(g, sigmoid(vadd(z, z)));
            });
            break;
        case RELU:
            map(x, n, [](vf g) { return vgate(g, vzero()); });
            break;
        case FATRELU:
            map(x, n, [=](vf g) { return vgate(g, vset1(threshold)); });
            break;
        case RELU2:
            map(x, n, [](vf g) {
                g = vgate(g, vzero());
                return vmul(g, g);
            });
            break;
        default:
            break;
    }
}

static void norm(const float* x, const float* weight, const float* bias, float eps, bool layer, size_t n,
                 float* y) {
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
        const vf a = vload_n(x + i, k), b = vload_n(x + half + i, k), c = vload_n(cos + i, k),
                 s = vload_n(sin + i, k);
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
//
// Scores of W positions at a time (keys lie [head_dim][block] in their page), even and odd elements of the
// head apart; positions in spans of kSpan, whose softmax parts are merged in order (the rule of flash
// attention, arXiv 2205.14135). Nothing here depends on which queries or spans a call works on.

// Queries times the keys of n <= 2W positions. `ahead`: the page that will be read next, asked for line by
// line: all of it at once would fill the queue to memory and then leave it empty (16 GB/s instead of 30).
template <int NR, bool FULL>
static void score_tile(const uint16_t* k, size_t block, size_t head_dim, int n, const float* const* q,
                       float scale, const uint16_t* ahead, float* const* out) {
    vf sum[2][NR][2];
    for (int odd = 0; odd < 2; odd++)
        for (int r = 0; r < NR; r++) sum[odd][r][0] = sum[odd][r][1] = vzero();
    for (size_t i = 0; i < head_dim; i += 2, ahead += 2 * block) {
        prefetch_span((const uint8_t*)ahead, 4 * block);
        for (int odd = 0; odd < 2; odd++) {
            if (i + odd >= head_dim) break;
            const uint16_t* at = k + (i + odd) * block;
            const vf a = FULL ? vload_f16(at) : vload_f16_n(at, n < W ? n : W);
            const vf b = FULL ? vload_f16(at + W) : n > W ? vload_f16_n(at + W, n - W) : vzero();
            for (int r = 0; r < NR; r++) {
                const vf x = vset1(q[r][i + odd]);
                sum[odd][r][0] = vfma(a, x, sum[odd][r][0]);
                sum[odd][r][1] = vfma(b, x, sum[odd][r][1]);
            }
        }
    }
    for (int r = 0; r < NR; r++) {
        const vf a = vmul(vadd(sum[0][r][0], sum[1][r][0]), vset1(scale));
        const vf b = vmul(vadd(sum[0][r][1], sum[1][r][1]), vset1(scale));
        vstore_n(out[r], a, n < W ? n : W);
        if (n > W) vstore_n(out[r] + W, b, n - W);
    }
}

// out[r] += sum over `count` positions of weight[r][p] * v[p]; n columns, or U vectors of them.
template <int NR, int U>
static void value_tile(const uint16_t* v, size_t head_dim, size_t count, int n, const float* const* weight,
                       const uint16_t* ahead, float* const* out) {
    vf acc[NR][U];
    for (int r = 0; r < NR; r++)
        for (int u = 0; u < U; u++) acc[r][u] = U > 1 ? vload(out[r] + u * W) : vload_n(out[r], n);
    for (size_t p = 0; p < count; p++, v += head_dim, ahead += head_dim) {
        prefetch_span((const uint8_t*)ahead, 2 * U * W);
        vf x[U];
        for (int u = 0; u < U; u++) x[u] = U > 1 || n == W ? vload_f16(v + u * W) : vload_f16_n(v, n);
        for (int r = 0; r < NR; r++)
            for (int u = 0; u < U; u++) acc[r][u] = vfma(x[u], vset1(weight[r][p]), acc[r][u]);
    }
    for (int r = 0; r < NR; r++)
        for (int u = 0; u < U; u++) {
            if (U > 1)
                vstore(out[r] + u * W, acc[r][u]);
            else
                vstore_n(out[r], acc[r][u], n);
        }
}

// Scores of one query over [begin, end) -> weights e^(s - top), 0 outside [lo, hi); partial's top and total.
static void span_softmax(float* s, size_t lo, size_t hi, size_t n, float* top_total) {
    float top = -INFINITY;
    for (size_t i = lo; i < hi; i++) top = s[i] > top ? s[i] : top;
    if (hi > lo) map(s, n, [=](vf x) { return vexp(vsub(x, vset1(top))); });
    for (size_t i = 0; i < smaller(lo, n); i++) s[i] = 0;
    for (size_t i = hi > lo ? hi : 0; i < n; i++) s[i] = 0;
    vf sum = vzero();
    for (size_t i = 0; i < n; i += W) sum = vadd(sum, vload_n(s + i, int(smaller(W, n - i))));
    top_total[0] = top, top_total[1] = vsum(sum);
}

template <int NR>
static void attend_rows(const Span& a, const float* const* q, const int32_t* first, const int32_t* last,
                        float* scores, float* partial) {
    const size_t n = a.end - a.begin, hd = a.head_dim;
    float *s[NR], *out[NR];
    size_t lo[NR], hi[NR], lowest = n, highest = 0;  // what each query attends to, and any of them
    for (int r = 0; r < NR; r++) {
        s[r] = scores + size_t(r) * kSpan;
        out[r] = partial + size_t(r) * (hd + 2);
        for (size_t i = 0; i < hd; i++) out[r][i] = 0;
        lo[r] = size_t(first[r]) > a.begin ? smaller(size_t(first[r]) - a.begin, n) : 0;
        hi[r] = size_t(last[r]) > a.begin ? smaller(size_t(last[r]) - a.begin, n) : 0;
        if (hi[r] > lo[r]) lowest = smaller(lowest, lo[r]), highest = hi[r] > highest ? hi[r] : highest;
    }
    // Pages before the queries' windows are not touched: they may be gone. Scores not written here are never
    // used.
    const size_t touched = (a.begin + lowest) / a.block * a.block, until = a.begin + highest;
    for (size_t p = touched > a.begin ? touched : a.begin; p < until;) {
        const size_t page = p / a.block, stop = smaller((page + 1) * a.block, until);
        const uint16_t* k = a.k + size_t(a.table[page]) * a.page_stride + p % a.block;
        const uint16_t* ahead = stop < until
                                    ? a.k + size_t(a.table[page + 1]) * a.page_stride
                                    : a.v + size_t(a.table[(a.begin + lowest) / a.block]) * a.page_stride;
        for (size_t i = p; i < stop; i += 2 * W, k += 2 * W) {
            const int count = int(smaller(2 * W, stop - i));
            float* to[NR];
            for (int r = 0; r < NR; r++) to[r] = s[r] + (i - a.begin);
            if (count == 2 * W)
                score_tile<NR, true>(k, a.block, hd, count, q, a.scale, ahead, to);
            else
                score_tile<NR, false>(k, a.block, hd, count, q, a.scale, ahead, to);
        }
        p = stop;
    }
    for (int r = 0; r < NR && a.softcap > 0; r++)  // tanh(z) = 1 - 2/(1 + e^2z)
        map(s[r], n, [&](vf x) {
            const vf z = vmul(x, vset1(2 / a.softcap)), e = vadd(vexp(z), vset1(1));
            return vmul(vset1(a.softcap), vdiv(vsub(e, vset1(2)), e));
        });
    for (int r = 0; r < NR; r++) span_softmax(s[r], lo[r], hi[r], n, out[r] + hd);
    for (size_t p = a.begin + lowest; p < until;) {
        const size_t page = p / a.block, stop = smaller((page + 1) * a.block, until);
        const uint16_t* v = a.v + size_t(a.table[page]) * a.page_stride + p % a.block * hd;
        const uint16_t* ahead = stop < until ? a.v + size_t(a.table[page + 1]) * a.page_stride : v;
        const float* weight[NR];
        for (int r = 0; r < NR; r++) weight[r] = s[r] + (p - a.begin);
        constexpr int U = 4;
        size_t i = 0;
        float* to[NR];
        for (; i + U * W <= hd; i += U * W) {
            for (int r = 0; r < NR; r++) to[r] = out[r] + i;
            value_tile<NR, U>(v + i, hd, stop - p, W, weight, ahead + i, to);
        }
        for (; i < hd; i += W) {
            for (int r = 0; r < NR; r++) to[r] = out[r] + i;
            value_tile<NR, 1>(v + i, hd, stop - p, int(smaller(W, hd - i)), weight, ahead + i, to);
        }
        p = stop;
    }
}

static void attend(const Span& a, const float* const* q, const int32_t* first, const int32_t* last,
                   size_t rows, float* scores, float* partial) {
    constexpr int NR = W / 4;  // 4 queries times 2 vectors, even and odd: half of the registers
    size_t r = 0;
    for (; r + NR <= rows; r += NR)
        attend_rows<NR>(a, q + r, first + r, last + r, scores, partial + r * (a.head_dim + 2));
    for (; r < rows; r++)
        attend_rows<1>(a, q + r, first + r, last + r, scores, partial + r * (a.head_dim + 2));
}

static void merge(float* into, const float* partial, size_t n) {
    const float a = into[n], b = partial[n], top = a > b ? a : b;
    if (partial[n + 1] == 0) return;  // no position of this span was for this query
    if (into[n + 1] == 0) {
        for (size_t i = 0; i < n + 2; i++) into[i] = partial[i];
        return;
    }
    float scale[2 * W] = {a - top, b - top};
    vstore(scale, vexp(vload(scale)));
    for (size_t i = 0; i < n; i++) into[i] = into[i] * scale[0] + partial[i] * scale[1];
    into[n] = top, into[n + 1] = into[n + 1] * scale[0] + partial[n + 1] * scale[1];
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

static const Kernels table = {ISA_NAME, kPanelRows, input_bytes, tile_tokens, quantize, panel_bytes,
                              matmul,   bundles,    accumulate,  decode_row,  norm,     activate,
                              rope,     to_f16,     attend,      merge,       read_all};
