// One token of a recurrent layer: a convolution over the last tokens, and a state that decays, is written to
// and is read. kernels.h says what each computes.
//
// A column of a state is a lane, so that no sum goes across a vector, and a column's bits depend neither on
// the vectors' width nor on the columns beside it. Sums over rows are kStateSums sums, of every
// kStateSums-th row, that are added as a tree: one alone would wait for each addition.

constexpr int kStateSums = 4;

// The sums of NV vectors of columns as one, in sums[0].
template <int NV>
static inline void joined(vf (*sums)[NV]) {
    for (int v = 0; v < NV; v++)
        sums[0][v] = vadd(vadd(sums[0][v], sums[2][v]), vadd(sums[1][v], sums[3][v]));
}

// Columns [c, c + NV * W) of which the last vector may be short, `last` wide.
template <int NV, bool WHOLE>
static inline void recur_columns(const StateStep& s, size_t c, int last) {
    auto load = [&](const float* p, int v) {
        return WHOLE || v < NV - 1 ? vload(p + v * W) : vload_n(p + v * W, last);
    };
    auto store = [&](float* p, vf a, int v) {
        if (WHOLE || v < NV - 1)
            vstore(p + v * W, a);
        else
            vstore_n(p + v * W, a, last);
    };
    const vf decay = vset1(s.decay), write = vset1(s.write);
    const float* const from = s.from + c;
    float* const to = s.to + c;
    vf u[NV];  // what is written, for a key of 1
    for (int v = 0; v < NV; v++) u[v] = load(s.v + c, v);
    if (s.delta) {
        vf held[kStateSums][NV];
        for (int i = 0; i < kStateSums; i++)
            for (int v = 0; v < NV; v++) held[i][v] = vzero();
        size_t r = 0;
        for (; r + kStateSums <= s.rows; r += kStateSums)
            for (int i = 0; i < kStateSums; i++) {
                const vf k = vset1(s.k[r + size_t(i)]);
                for (int v = 0; v < NV; v++)
                    held[i][v] = vfma(load(from + (r + size_t(i)) * s.from_stride, v), k, held[i][v]);
            }
        for (int i = 0; r < s.rows; r++, i++)
            for (int v = 0; v < NV; v++)
                held[i][v] = vfma(load(from + r * s.from_stride, v), vset1(s.k[r]), held[i][v]);
        joined<NV>(held);
        for (int v = 0; v < NV; v++) u[v] = vsub(u[v], vmul(decay, held[0][v]));
    }
    for (int v = 0; v < NV; v++) u[v] = vmul(u[v], write);
    vf read[kStateSums][NV];
    for (int i = 0; i < kStateSums; i++)
        for (int v = 0; v < NV; v++) read[i][v] = vzero();
    auto row = [&](size_t r, vf* sums) {
        const vf k = vset1(s.k[r]), q = vset1(s.q[r]);
        for (int v = 0; v < NV; v++) {
            const vf now = vfma(k, u[v], vmul(decay, load(from + r * s.from_stride, v)));
            store(to + r * s.to_stride, now, v);
            sums[v] = vfma(now, q, sums[v]);
        }
    };
    size_t r = 0;
    for (; r + kStateSums <= s.rows; r += kStateSums)
        for (int i = 0; i < kStateSums; i++) row(r + size_t(i), read[i]);
    for (int i = 0; r < s.rows; r++, i++) row(r, read[i]);
    joined<NV>(read);
    for (int v = 0; v < NV; v++) store(s.out + c, read[0][v], v);
}

static void recur(const StateStep& s) {
    size_t c = 0;
    for (; c + 2 * W <= s.cols; c += 2 * W) recur_columns<2, true>(s, c, W);
    for (; c < s.cols; c += W) recur_columns<1, false>(s, c, int(smaller(W, s.cols - c)));
}

static void convolve(const float* const* x, size_t width, const float* w, size_t stride, const float* bias,
                     size_t n, float* y) {
    for (size_t c = 0; c < n; c += W) {
        const int k = int(smaller(W, n - c));
        vf sum = bias ? vload_n(bias + c, k) : vzero();
        for (size_t j = 0; j < width; j++)
            sum = vfma(vload_n(w + j * stride + c, k), vload_n(x[j] + c, k), sum);
        vstore_n(y + c, sum, k);
    }
}

static void open_gate(float* x, const float* gate, size_t n) {
    for (size_t i = 0; i < n; i += W) {
        const int k = int(smaller(W, n - i));
        vstore_n(x + i, vmul(vload_n(x + i, k), sigmoid(vload_n(gate + i, k))), k);
    }
}
