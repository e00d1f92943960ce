// Vectors of the search: a lane is a row of weights, so that nothing is added across lanes and the result of
// a row depends neither on its neighbours nor on the width of a vector. `TC_LANES` is the including file's.
#pragma once
#include <stdint.h>

namespace tc {
namespace TC_SEARCH_ISA {

constexpr int kLanes = TC_LANES;

#if defined(__GNUC__)
typedef float V __attribute__((vector_size(4 * TC_LANES)));
typedef int32_t M __attribute__((vector_size(4 * TC_LANES)));  // what a comparison gives
#define TC_INLINE inline __attribute__((always_inline))
TC_INLINE V pick(M m, V a, V b) { return m ? a : b; }
TC_INLINE V all(float x) { return x - V{}; }  // one instruction; a loop over lanes is one for each
#else
struct V {
    float v[TC_LANES];
    float operator[](int i) const { return v[i]; }
    float& operator[](int i) { return v[i]; }
};
struct M {
    bool v[TC_LANES];
};
#define TC_INLINE inline
#define TC_EACH for (int i = 0; i < TC_LANES; i++)
#define TC_OPERATOR(R, op)                 \
    TC_INLINE R operator op(V a, V b) {    \
        R r;                               \
        TC_EACH r.v[i] = a.v[i] op b.v[i]; \
        return r;                          \
    }
TC_OPERATOR(V, +)
TC_OPERATOR(V, -)
TC_OPERATOR(V, *)
TC_OPERATOR(V, /)
TC_OPERATOR(M, <)
TC_OPERATOR(M, >)
TC_OPERATOR(M, <=)
#undef TC_OPERATOR
TC_INLINE V pick(M m, V a, V b) {
    TC_EACH a.v[i] = m.v[i] ? a.v[i] : b.v[i];
    return a;
}
TC_INLINE V all(float x) {
    V r;
    TC_EACH r[i] = x;
    return r;
}
#endif

TC_INLINE V least(V a, V b) { return pick(a < b, a, b); }
TC_INLINE V most(V a, V b) { return pick(a > b, a, b); }
TC_INLINE V magnitude(V a) { return most(a, all(0) - a); }
// To the nearest integer, ties to even; |a| < 2^22.
TC_INLINE V rounded(V a) { return (a + all(12582912.0f)) - all(12582912.0f); }
TC_INLINE V divided(V a, V b) {  // 0 where b is 0
    return pick(magnitude(b) > all(0), a / pick(magnitude(b) > all(0), b, all(1)), all(0));
}
// To a number that an f16 holds; the largest where it is larger.
TC_INLINE V as_half(V a) {
    const V wide = a * all(8193);  // keeps the upper 11 bits (Veltkamp)
    const V normal = wide - (wide - a);
    const V tiny = (a + all(0.75f)) - all(0.75f);  // multiples of 2^-24
    const V r = pick(magnitude(a) < all(6.103515625e-5f), tiny, normal);
    return least(most(r, all(-65504)), all(65504));
}

}  // namespace TC_SEARCH_ISA
}  // namespace tc
