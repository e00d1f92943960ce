// Norms, activations, rope; attention.inl has attention, recurrent.inl the other mixers of tokens.

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

static void activate(float* x, size_t n, const Gating& how) {
    const float threshold = how.threshold, alpha = how.alpha, limit = how.limit;
    switch (how.activation) {
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
        case SWIGLU_OAI:
            map(x, n, [=](vf g) {
                g = vmin(vset1(limit), g);  // in this order: a NaN comes through
                return vmul(g, sigmoid(vmul(vset1(alpha), g)));
            });
            break;
        default:
            break;
    }
}

static void combine(float* h, const float* up, size_t n, const Gating& how) {
    activate(h, n, how);
    if (!up) return;
    if (how.activation != SWIGLU_OAI) {
        for (size_t i = 0; i < n; i++) h[i] = how.up_relu && up[i] <= 0 ? 0.0f : h[i] * up[i];
        return;
    }
    const vf limit = vset1(how.limit), least = vset1(-how.limit);
    for (size_t i = 0; i < n; i += W) {
        const int k = int(smaller(W, n - i));
        const vf u = vmin(limit, vmax(least, vload_n(up + i, k)));
        vstore_n(h + i, vmul(vadd(u, vset1(1)), vload_n(h + i, k)), k);
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

#include "attention.inl"
#include "recurrent.inl"

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

static const Kernels table = {ISA_NAME,   kPanelRows,  kInterleaves, kGroupedTokens, input_bytes, tile_tokens,
                              quantize,   copy_lanes,  panel_bytes,  matmul,         bundles,     accumulate,
                              decode_row, norm,        activate,     combine,        rope,        rotate,
                              store_key,  store_value, code_query,   attend,         merge,       recur,
                              convolve,   open_gate,   read_all};
