// The search, compiled for each instruction set. A lane is a row; `Slab` has the weights of one block of
// kLanes rows. Every format has the same three steps: scales of its parts (`Found::scales`), the quants,
// their numbers.
#include <math.h>
#include <string.h>

#include "lanes.h"
#include "search.h"

namespace tc {
namespace TC_SEARCH_ISA {

constexpr int kMost = 256, kParts = 16, kNCuts = 7;

struct Slab {
    V x[kMost], w[kMost], wx[kMost];   // weights, what the square of an error costs, their product
    V a[kParts], c[kParts];            // of each part: weight = a * value + c
    V scale[kParts], minimum[kParts];  // the integers that say a and c
    V super, super_minimum;
};

// ---- values that a quant stands for, before its scale

template <int kLow, int kHigh>
struct Integers {
    static constexpr float low = kLow, high = kHigh;
    static TC_INLINE V nearest(V t) { return rounded(least(most(t, all(low)), all(high))); }
    static uint8_t quant(float v) { return uint8_t(int(v) - (kLow == -127 ? 0 : kLow)); }
};

template <class T>
struct Table {
    static TC_INLINE V nearest(V t) {
        V r = all(T::value[0]);
        for (int k = 1; k < T::n; k++)
            r = r + pick(t > all(0.5f * (T::value[k] + T::value[k - 1])), all(T::value[k] - T::value[k - 1]),
                         all(0));
        return r;
    }
    static uint8_t quant(float v) {
        for (int k = 0; k < T::n; k++)
            if (T::value[k] == v) return T::code[k];
        return 0;
    }
};
struct Iq4Values {
    static constexpr int n = 16;
    static constexpr float value[n] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                       1,    13,   25,  38,  53,  69,  89,  113};
    static constexpr uint8_t code[n] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
};
struct E2m1Values {
    static constexpr int n = 15;
    static constexpr float value[n] = {-6, -4, -3, -2, -1.5f, -1, -0.5f, 0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    static constexpr uint8_t code[n] = {15, 14, 13, 12, 11, 10, 9, 0, 1, 2, 3, 4, 5, 6, 7};
};

// ---- one part: weight = a * value

struct Sums {
    V xv, vv;
    TC_INLINE V gain() const { return divided(xv * xv, vv); }  // what the best scale takes off the error
    TC_INLINE V scale() const { return divided(xv, vv); }
};

template <class Grid, int N>
TC_INLINE Sums sums(const V* x, const V* w, const V* wx, V inverse) {
    Sums s = {all(0), all(0)};
    for (int j = 0; j < N; j++) {
        const V v = Grid::nearest(x[j] * inverse);
        s.xv = s.xv + wx[j] * v;
        s.vv = s.vv + w[j] * (v * v);
    }
    return s;
}

template <int N>
TC_INLINE V farthest(const V* x) {  // from 0
    V far = x[0];
    for (int j = 1; j < N; j++) far = pick(magnitude(x[j]) > magnitude(far), x[j], far);
    return far;
}

// The best a: the farthest weight becomes each of `targets`, and from the best of them on scales and quants
// are chosen for each other in turn.
template <class Grid, int N>
V best_scale(const V* x, const V* w, const V* wx, const float* targets, int n_targets) {
    const V far = farthest<N>(x);
    V best = all(0), gain = all(0);
    auto attempt = [&](V inverse) {
        const Sums s = sums<Grid, N>(x, w, wx, inverse);
        const V g = s.gain();
        best = pick(g > gain, s.scale(), best);
        gain = most(g, gain);
    };
    for (int i = 0; i < n_targets; i++) attempt(divided(all(targets[i]), far));
    for (int i = 0; i < 3; i++) attempt(divided(all(1), best));
    return best;
}

template <class Grid, int N>
TC_INLINE V error(const V* x, const V* w, V a) {
    const V inverse = divided(all(1), a);
    V e = all(0);
    for (int j = 0; j < N; j++) {
        const V r = x[j] - a * Grid::nearest(x[j] * inverse);
        e = e + w[j] * (r * r);
    }
    return e;
}

// ---- one part: weight = a * q + c, q in 0..top

struct Line {
    V a, c;
};

template <int N>
struct LineSums {
    V w = all(0), wx = all(0);  // of all weights
    TC_INLINE LineSums(const V* weight, const V* weighted) {
        for (int j = 0; j < N; j++) {
            w = w + weight[j];
            wx = wx + weighted[j];
        }
    }
};

struct QuantSums {
    V q, qq, xq;
};

template <int kTop, int N>
TC_INLINE QuantSums quant_sums(const V* x, const V* w, const V* wx, V inverse, V c) {
    QuantSums s = {all(0), all(0), all(0)};
    for (int j = 0; j < N; j++) {
        const V q = Integers<0, kTop>::nearest((x[j] - c) * inverse);
        const V wq = w[j] * q;
        s.q = s.q + wq;
        s.qq = s.qq + wq * q;
        s.xq = s.xq + wx[j] * q;
    }
    return s;
}

// The best line for these quants; with `below`, c is at most 0.
template <bool kBelow, int N>
TC_INLINE Line fitted(const QuantSums& s, const LineSums<N>& t, V* gain) {
    const V det = t.w * s.qq - s.q * s.q;
    V a = divided(t.w * s.xq - t.wx * s.q, det);
    V c = divided(t.wx - a * s.q, t.w);
    if (kBelow) {
        a = pick(c > all(0), divided(s.xq, s.qq), a);
        c = least(c, all(0));
    }
    *gain = a * s.xq + c * t.wx;
    return {a, c};
}

template <int kTop, bool kBelow, int N>
Line best_line(const V* x, const V* w, const V* wx, const float (&cuts)[kNCuts]) {
    V low = x[0], high = x[0];
    for (int j = 1; j < N; j++) {
        low = least(low, x[j]);
        high = most(high, x[j]);
    }
    if (kBelow) low = least(low, all(0));
    const V range = high - low;
    const LineSums<N> total(w, wx);
    Line best = {all(0), low};
    V gain = all(-INFINITY);
    auto attempt = [&](V inverse, V c) {
        const QuantSums s = quant_sums<kTop, N>(x, w, wx, inverse, c);
        V g;
        const Line found = fitted<kBelow, N>(s, total, &g);
        const M better = (g > gain);
        best.a = pick(better, pick(found.a > all(0), found.a, best.a), best.a);
        best.c = pick(better, pick(found.a > all(0), found.c, best.c), best.c);
        gain = pick(better, pick(found.a > all(0), g, gain), gain);
    };
    for (const float below : cuts)
        for (const float above : cuts)
            attempt(divided(all(kTop / (1 - below - above)), range), low + all(below) * range);
    for (int i = 0; i < 3; i++) attempt(divided(all(1), best.a), best.c);
    return best;
}

template <int kTop, int N>
TC_INLINE V line_error(const V* x, const V* w, V a, V c) {
    const V inverse = divided(all(1), a);
    V e = all(0);
    for (int j = 0; j < N; j++) {
        const V r = x[j] - (a * Integers<0, kTop>::nearest((x[j] - c) * inverse) + c);
        e = e + w[j] * (r * r);
    }
    return e;
}

// ---- formats

static uint16_t half_bits(float f) {  // of a number that an f16 holds
    uint32_t x;
    memcpy(&x, &f, 4);
    const uint16_t sign = uint16_t(x >> 16 & 0x8000);
    const float a = fabsf(f);
    if (a < 6.103515625e-5f) return uint16_t(sign | uint16_t(a * 16777216.0f));
    return uint16_t(sign | (((x & 0x7fffffff) - 0x38000000) >> 13));
}

struct HalfSuper {
    static uint16_t store_super(float f) { return half_bits(f); }
};

// One f16 scale for a block.
template <class G, int kN>
struct OneScale : HalfSuper {
    using Grid = G;
    static constexpr int n = kN, part = kN;
    static void scales(Slab& s, const float* targets, int n_targets) {
        s.super = s.a[0] = as_half(best_scale<Grid, n>(s.x, s.w, s.wx, targets, n_targets));
        s.c[0] = all(0);
    }
};

// An f16 scale and an f16 minimum for a block of 32.
template <int kTop>
struct ScaleAndMinimum : HalfSuper {
    using Grid = Integers<0, kTop>;
    static constexpr int n = 32, part = 32;
    static void scales(Slab& s, const float (&cuts)[kNCuts]) {
        const Line l = best_line<kTop, false, n>(s.x, s.w, s.wx, cuts);
        s.super = s.a[0] = as_half(l.a);
        s.super_minimum = s.c[0] = as_half(l.c);
    }
};

// A power of two for a block of 32.
struct PowerOfTwo {
    using Grid = Table<E2m1Values>;
    static constexpr int n = 32, part = 32;
    static uint16_t store_super(float exponent) { return uint16_t(int(exponent) + 127); }
    static void scales(Slab& s) {
        const V far = magnitude(farthest<n>(s.x));
        V first;
        for (int l = 0; l < kLanes; l++) {
            int e = -127;
            if (far[l] > 0) e = ilogbf(far[l]) - 3;
            first[l] = float(e < -127 ? -127 : e > 124 ? 124 : e);
        }
        V best = all(INFINITY);
        for (int i = 0; i < 4; i++) {
            V a;
            for (int l = 0; l < kLanes; l++) a[l] = ldexpf(1, int(first[l]) + i);
            const V e = error<Grid, n>(s.x, s.w, a);
            s.super = pick(e < best, first + all(float(i)), s.super);
            s.a[0] = pick(e < best, a, s.a[0]);
            best = pick(e < best, e, best);
        }
        s.c[0] = all(0);
    }
};

// Signed integer scales of parts, and an f16 scale of those.
template <class G, int kPart, int kLowest, int kHighest>
struct SignedScales : HalfSuper {
    using Grid = G;
    static constexpr int n = 256, part = kPart, parts = n / kPart;
    static TC_INLINE V limited(V t) { return least(most(t, all(kLowest)), all(kHighest)); }
    static void scales(Slab& s, const float* targets, int n_targets, int rounds) {
        V best[parts];
        for (int p = 0; p < parts; p++)
            best[p] =
                best_scale<Grid, part>(s.x + p * part, s.w + p * part, s.wx + p * part, targets, n_targets);
        V d = as_half(divided(farthest<parts>(best), all(kLowest)));
        for (int p = 0; p < parts; p++) s.scale[p] = limited(rounded(divided(best[p], d)));
        V least_error = all(INFINITY), scale[parts], super = d;
        for (int p = 0; p < parts; p++) scale[p] = all(0);
        for (int r = 0; r < rounds; r++) {
            V total = all(0), xv = all(0), vv = all(0);
            for (int p = 0; p < parts; p++) {
                total = total + settled(s, p, d);
                const V sc = s.scale[p];
                const Sums t = sums<Grid, part>(s.x + p * part, s.w + p * part, s.wx + p * part,
                                                divided(all(1), d * sc));
                xv = xv + sc * t.xv;
                vv = vv + (sc * sc) * t.vv;
            }
            const M better = total < least_error;
            for (int p = 0; p < parts; p++) scale[p] = pick(better, s.scale[p], scale[p]);
            super = pick(better, d, super);
            least_error = pick(better, total, least_error);
            d = as_half(divided(xv, vv));
        }
        s.super = super;
        for (int p = 0; p < parts; p++) {
            s.scale[p] = scale[p];
            s.a[p] = super * scale[p];
            s.c[p] = all(0);
        }
    }
    // The part's best scale near the one it has; -> its error.
    static V settled(Slab& s, int p, V d) {
        const V* x = s.x + p * part;
        const V* w = s.w + p * part;
        const V middle = s.scale[p];
        V best = error<Grid, part>(x, w, d * middle);
        for (int i = -2; i <= 2; i++) {
            if (i == 0) continue;
            const V sc = limited(middle + all(float(i)));
            const V e = error<Grid, part>(x, w, d * sc);
            s.scale[p] = pick(e < best, sc, s.scale[p]);
            best = least(e, best);
        }
        return best;
    }
};

// Integer scales and minima of parts, and an f16 scale of each: weight = super scale q - super_minimum
// minimum.
template <int kTop, int kPart, int kMostScale>
struct ScalesAndMinima : HalfSuper {
    using Grid = Integers<0, kTop>;
    static constexpr int n = 256, part = kPart, parts = n / kPart;
    static TC_INLINE V limited(V t) { return least(most(t, all(0)), all(kMostScale)); }
    static void scales(Slab& s, const float (&cuts)[kNCuts], int rounds) {
        Line best[parts];
        V a = all(0), c = all(0);
        for (int p = 0; p < parts; p++) {
            best[p] = best_line<kTop, true, part>(s.x + p * part, s.w + p * part, s.wx + p * part, cuts);
            a = most(a, best[p].a);
            c = least(c, best[p].c);
        }
        V d = as_half(a * all(1.0f / kMostScale)), m = as_half(c * all(-1.0f / kMostScale));
        for (int p = 0; p < parts; p++) {
            s.scale[p] = limited(rounded(divided(best[p].a, d)));
            s.minimum[p] = limited(rounded(divided(all(0) - best[p].c, m)));
        }
        V least_error = all(INFINITY), scale[parts], minimum[parts], super = d, super_minimum = m;
        for (int p = 0; p < parts; p++) scale[p] = minimum[p] = all(0);
        for (int r = 0; r < rounds; r++) {
            V total = all(0), A = all(0), B = all(0), C = all(0), r1 = all(0), r2 = all(0);
            for (int p = 0; p < parts; p++) {
                total = total + settled(s, p, d, m);
                const V sc = s.scale[p], mn = s.minimum[p];
                const QuantSums t = quant_sums<kTop, part>(s.x + p * part, s.w + p * part, s.wx + p * part,
                                                           divided(all(1), d * sc), all(0) - m * mn);
                const LineSums<part> all_of(s.w + p * part, s.wx + p * part);
                A = A + (sc * sc) * t.qq;
                B = B + (sc * mn) * t.q;
                C = C + (mn * mn) * all_of.w;
                r1 = r1 + sc * t.xq;
                r2 = r2 + mn * all_of.wx;
            }
            const M better = total < least_error;
            for (int p = 0; p < parts; p++) {
                scale[p] = pick(better, s.scale[p], scale[p]);
                minimum[p] = pick(better, s.minimum[p], minimum[p]);
            }
            super = pick(better, d, super);
            super_minimum = pick(better, m, super_minimum);
            least_error = pick(better, total, least_error);
            // d A - m B = r1, d B - m C = r2
            const V det = A * C - B * B;
            const V d2 = divided(r1 * C - r2 * B, det), m2 = divided(r1 * B - r2 * A, det);
            const M apart = det > all(1e-6f) * A * C;
            d = as_half(most(pick(apart, d2, divided(r1 + m * B, A)), all(0)));
            m = as_half(most(pick(apart, m2, m), all(0)));
        }
        s.super = super;
        s.super_minimum = super_minimum;
        for (int p = 0; p < parts; p++) {
            s.scale[p] = scale[p];
            s.minimum[p] = minimum[p];
            s.a[p] = super * scale[p];
            s.c[p] = all(0) - super_minimum * minimum[p];
        }
    }
    static V settled(Slab& s, int p, V d, V m) {
        const V* x = s.x + p * part;
        const V* w = s.w + p * part;
        const V sc0 = s.scale[p], mn0 = s.minimum[p];
        V best = line_error<kTop, part>(x, w, d * sc0, all(0) - m * mn0);
        for (int i = -1; i <= 1; i++)
            for (int k = -1; k <= 1; k++) {
                if (i == 0 && k == 0) continue;
                const V sc = limited(sc0 + all(float(i))), mn = limited(mn0 + all(float(k)));
                const V e = line_error<kTop, part>(x, w, d * sc, all(0) - m * mn);
                s.scale[p] = pick(e < best, sc, s.scale[p]);
                s.minimum[p] = pick(e < best, mn, s.minimum[p]);
                best = least(e, best);
            }
        return best;
    }
};

// ---- what each format tries

// Shares of a part's range that are cut off below and above, each with each. Quants are dense enough that a
// step of 0.03 finds all but 0.3 % of what a grid four times as fine does; two bits want longer steps.
constexpr float kCuts[] = {-0.06f, -0.03f, 0, 0.03f, 0.06f, 0.09f, 0.12f};
constexpr float kWideCuts[] = {-0.2f, -0.1f, 0, 0.08f, 0.16f, 0.24f, 0.32f};

template <Search>
struct Found;
#define TC_TARGETS(...)                               \
    static constexpr float targets[] = {__VA_ARGS__}; \
    static constexpr int n_targets = int(sizeof(targets) / sizeof(float));
template <>
struct Found<Search::Q8_0> : OneScale<Integers<-127, 127>, 32> {
    TC_TARGETS(127, 126, 125, 124)
    static void search(Slab& s) { scales(s, targets, n_targets); }
};
template <>
struct Found<Search::Q4_0> : OneScale<Integers<-8, 7>, 32> {
    TC_TARGETS(-8, -7.5f, -8.5f, -7, 7, 6.5f, 7.5f, -9, 8, 6, -6.5f)
    static void search(Slab& s) { scales(s, targets, n_targets); }
};
template <>
struct Found<Search::Q5_0> : OneScale<Integers<-16, 15>, 32> {
    TC_TARGETS(-16, -15.5f, -15, -16.5f, -14.5f, 15, 14.5f, 15.5f, 14, -17)
    static void search(Slab& s) { scales(s, targets, n_targets); }
};
template <>
struct Found<Search::IQ4_NL> : OneScale<Table<Iq4Values>, 32> {
    TC_TARGETS(-127, -120, -114, -108, -132, 113, 120, 107, 101, -100, 95)
    static void search(Slab& s) { scales(s, targets, n_targets); }
};
template <>
struct Found<Search::TQ2_0> : OneScale<Integers<-1, 1>, 256> {
    TC_TARGETS(1, 1.2f, 1.4f, 1.7f, 2, 2.4f, 2.8f, 3.3f, 4, 5)
    static void search(Slab& s) { scales(s, targets, n_targets); }
};
template <>
struct Found<Search::Q4_1> : ScaleAndMinimum<15> {
    static void search(Slab& s) { scales(s, kCuts); }
};
template <>
struct Found<Search::Q5_1> : ScaleAndMinimum<31> {
    static void search(Slab& s) { scales(s, kCuts); }
};
template <>
struct Found<Search::MXFP4> : PowerOfTwo {
    static void search(Slab& s) { scales(s); }
};
template <>
struct Found<Search::Q6_K> : SignedScales<Integers<-32, 31>, 16, -128, 127> {
    TC_TARGETS(-32, -31.5f, -31, 31, 30.5f, 30)
    static void search(Slab& s) { scales(s, targets, n_targets, 2); }
};
template <>
struct Found<Search::Q3_K> : SignedScales<Integers<-4, 3>, 16, -32, 31> {
    TC_TARGETS(-4, -3.75f, -3.5f, -4.3f, -4.6f, -3.2f, -2.9f, 3, 3.3f, 2.7f, 2.4f, 3.6f)
    static void search(Slab& s) { scales(s, targets, n_targets, 3); }
};
template <>
struct Found<Search::IQ4_XS> : SignedScales<Table<Iq4Values>, 32, -32, 31> {
    TC_TARGETS(-127, -120, -114, -108, -132, 113, 120, 107, 101, -100, 95)
    static void search(Slab& s) { scales(s, targets, n_targets, 2); }
};
template <>
struct Found<Search::Q4_K> : ScalesAndMinima<15, 32, 63> {
    static void search(Slab& s) { scales(s, kCuts, 3); }
};
template <>
struct Found<Search::Q5_K> : ScalesAndMinima<31, 32, 63> {
    static void search(Slab& s) { scales(s, kCuts, 3); }
};
template <>
struct Found<Search::Q2_K> : ScalesAndMinima<3, 16, 15> {
    static void search(Slab& s) { scales(s, kWideCuts, 3); }
};
#undef TC_TARGETS

// ---- rows

template <class F>
void store_numbers(const Slab& s, int lane, BlockNumbers& b) {
    constexpr int parts = F::n / F::part;
    for (int p = 0; p < parts; p++) {
        b.scales[p] = uint8_t(int(s.scale[p][lane]));
        b.minima[p] = uint8_t(int(s.minimum[p][lane]));
    }
    b.super = F::store_super(s.super[lane]);
    b.super_minimum = half_bits(s.super_minimum[lane]);
}

// The quants of a slab, one column after the other. With U the error of each is evened out by the later
// columns of the slab; e[j] is what columns behind the slab still have to even out.
template <class F>
void assign(Slab& s, const float* u, size_t window, V* e, uint8_t (*quants)[kMost]) {
    for (int p = 0; p < F::n / F::part; p++) {
        const V a = s.a[p], c = s.c[p], inverse = divided(all(1), a);
        for (int j = p * F::part; j < (p + 1) * F::part; j++) {
            const V v = F::Grid::nearest((s.x[j] - c) * inverse);
            for (int l = 0; l < kLanes; l++) quants[l][j] = F::Grid::quant(v[l]);
            if (!u) continue;
            const float* row = u + size_t(j) * window;
            e[j] = (s.x[j] - (a * v + c)) * all(1 / row[j]);
            for (int k = j + 1; k < F::n; k++) s.x[k] = s.x[k] - e[j] * all(row[k]);
        }
    }
}

// x[k] -= sum over j of e[j] u[j][k], for columns [from, to) behind a slab of n.
void even_out(V* x, const V* e, const float* u, size_t window, int n, size_t from, size_t to) {
    size_t k = from;
    for (; k + 8 <= to; k += 8) {
        V t[8];
        for (int i = 0; i < 8; i++) t[i] = x[k + size_t(i)];
        for (int j = 0; j < n; j++) {
            const float* row = u + size_t(j) * window + k;
            for (int i = 0; i < 8; i++) t[i] = t[i] - e[j] * all(row[i]);
        }
        for (int i = 0; i < 8; i++) x[k + size_t(i)] = t[i];
    }
    for (; k < to; k++)
        for (int j = 0; j < n; j++) x[k] = x[k] - e[j] * all(u[size_t(j) * window + k]);
}

template <class F>
void search_lanes(const SearchInput& in, size_t first, V* x, BlockNumbers* blocks) {
    const size_t per_row = in.columns / F::n;
    float* flat = reinterpret_cast<float*>(x);
    for (int l = 0; l < kLanes; l++) {
        const size_t r = first + size_t(l) < in.rows ? first + size_t(l) : in.rows - 1;
        for (size_t j = 0; j < in.columns; j++) flat[j * kLanes + size_t(l)] = in.x[r * in.columns + j];
    }
    Slab s;
    V e[F::n];
    uint8_t quants[kLanes][kMost];
    for (size_t at = 0; at < in.columns; at += F::n) {
        const size_t window_at = in.feedback ? at / in.window * in.window : 0;
        const size_t window_end = window_at + in.window < in.columns ? window_at + in.window : in.columns;
        const float* u =
            in.feedback ? in.feedback + window_at * in.window + (at - window_at) * in.window : nullptr;
        for (int j = 0; j < F::n; j++) {
            s.x[j] = x[at + size_t(j)];
            s.w[j] = all(in.importance ? in.importance[at + size_t(j)] : 1);
            s.wx[j] = s.w[j] * s.x[j];
        }
        s.super = s.super_minimum = s.a[0] = all(0);
        for (int p = 0; p < kParts; p++) s.scale[p] = s.minimum[p] = all(0);
        F::search(s);
        const size_t in_window = at - window_at;
        assign<F>(s, u ? u + in_window : nullptr, in.window, e, quants);
        if (u && window_end > at + F::n)
            even_out(x + window_at, e, u, in.window, F::n, in_window + F::n, window_end - window_at);
        for (int l = 0; l < kLanes; l++) {
            BlockNumbers& b = blocks[size_t(l) * per_row + at / F::n];
            memcpy(b.quants, quants[l], F::n);
            store_numbers<F>(s, l, b);
        }
    }
}

void search(const SearchInput& in, size_t first, float* scratch, BlockNumbers* blocks) {
    V* x = reinterpret_cast<V*>(scratch);
    for (size_t r = 0; r < kPanelRows && first + r < in.rows; r += kLanes) {
        BlockNumbers* out = blocks + r * (in.columns / searched_together(in.format));
        switch (in.format) {
#define TC_ROW(id, ...)                                         \
    case Search::id:                                            \
        search_lanes<Found<Search::id>>(in, first + r, x, out); \
        break;
            TC_SEARCHES(TC_ROW)
#undef TC_ROW
            case Search::COUNT:
                break;
        }
    }
}

}  // namespace TC_SEARCH_ISA
}  // namespace tc
