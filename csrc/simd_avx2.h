// The vector vocabulary for AVX2 + FMA + F16C. simd_scalar.h says what each does.
#pragma once
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "quant.inl"

constexpr int W = 8;
using vf = __m256;

static inline __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
static inline vf vset1(float x) { return _mm256_set1_ps(x); }
static inline vf vzero() { return _mm256_setzero_ps(); }
static inline vf vload(const float* p) { return _mm256_loadu_ps(p); }
static inline vf vload_n(const float* p, int n) { return _mm256_maskload_ps(p, lanes_below(n)); }
static inline void vstore(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline void vstore_n(float* p, vf a, int n) { _mm256_maskstore_ps(p, lanes_below(n), a); }
static inline vf vload_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
static inline vf vload_f16_n(const uint16_t* p, int n) {
    uint16_t t[8] = {0};
    memcpy(t, p, size_t(n) * 2);
    return vload_f16(t);
}
static inline void vstore_f16_n(uint16_t* p, vf a, int n) {
    uint16_t t[8];
    _mm_storeu_si128((__m128i*)t, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
    memcpy(p, t, size_t(n) * 2);
}
static inline vf vload_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf vload_bf16_n(const uint16_t* p, int n) {
    uint16_t t[8] = {0};
    memcpy(t, p, size_t(n) * 2);
    return vload_bf16(t);
}
static inline vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vabs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vfma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vround(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vpow2(vf a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127)), 23));
}
static inline vf vgate(vf x, vf threshold) { return _mm256_and_ps(x, _mm256_cmp_ps(x, threshold, _CMP_GT_OQ)); }
static inline float vsum(vf a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float vmaximum(vf a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
// Into L2: a group of records, the next one, x and y together outgrow an L1.
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

constexpr int QB = 1;
struct XBlock {
    int8_t q[32];
    float d;
    int32_t ns;  // minus the sum of q
};
static inline void x_quantize(const float* x, int, XBlock* out) {
    vf m = vzero(), finite = vzero();
    for (int i = 0; i < 32; i += W) {
        m = vmax(m, vabs(vload(x + i)));
        finite = vadd(finite, vsub(vload(x + i), vload(x + i)));
    }
    const float nan = vsum(finite), top = nan == 0 ? vmaximum(m) : 0, inverse = top > 1e-36f ? 127.0f / top : 0;
    out->d = top / 127.0f + nan;
    uint32_t sum = 0;  // unsigned: a NaN converts to INT_MIN, and may wrap
    for (int i = 0; i < 32; i += W) {
        int32_t t[W];
        _mm256_storeu_si256((__m256i*)t, _mm256_cvtps_epi32(vmul(vload(x + i), vset1(inverse))));
        for (int k = 0; k < W; k++) out->q[i + k] = int8_t(t[k]), sum += uint32_t(t[k]);
    }
    out->ns = int32_t(0 - sum);
}
struct QW {
    __m256i q;
    vf d;
};
static inline QW q8_load(const BlockQ8_0* b, int) {
    return {_mm256_loadu_si256((const __m256i*)b->q), vset1(f16_to_f32(b->d))};
}
static inline QW q4_load(const BlockQ4_0* b, int) {  // nibbles as they are, 0..15
    const __m128i raw = _mm_loadu_si128((const __m128i*)b->q);
    const __m256i both = _mm256_insertf128_si256(_mm256_castsi128_si256(raw), _mm_srli_epi16(raw, 4), 1);
    return {_mm256_and_si256(both, _mm256_set1_epi8(15)), vset1(f16_to_f32(b->d))};
}
// maddubs wants unsigned x signed and saturates at i16: |w| <= 128, |x| <= 127, two products <= 32512: it never does.
static inline vf q8_dot(const QW& w, const XBlock* x, vf acc) {
    const __m256i xq = _mm256_loadu_si256((const __m256i*)x->q);
    const __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(w.q), _mm256_sign_epi8(xq, w.q));
    const __m256i s = _mm256_madd_epi16(p, _mm256_set1_epi16(1));
    return vfma(_mm256_cvtepi32_ps(s), vmul(w.d, vset1(x->d)), acc);
}
// sum (n - 8) x = sum n x - 8 sum x; each of the eight lanes takes one eighth of the correction.
static inline vf q4_dot(const QW& w, const XBlock* x, vf acc) {
    const __m256i xq = _mm256_loadu_si256((const __m256i*)x->q);
    const __m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(w.q, xq), _mm256_set1_epi16(1));
    return vfma(_mm256_cvtepi32_ps(_mm256_add_epi32(s, _mm256_set1_epi32(x->ns))), vmul(w.d, vset1(x->d)), acc);
}
static inline vf bytes_f32(__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)); }
static inline void q8_unpack(const BlockQ8_0* b, vf* out) {
    for (int k = 0; k < 4; k++) out[k] = bytes_f32(_mm_loadl_epi64((const __m128i*)(b->q + 8 * k)));
}
static inline void q4_unpack(const BlockQ4_0* b, vf* out) {
    const __m128i raw = _mm_loadu_si128((const __m128i*)b->q), m = _mm_set1_epi8(15), eight = _mm_set1_epi8(8);
    const __m128i lo = _mm_sub_epi8(_mm_and_si128(raw, m), eight);
    const __m128i hi = _mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(raw, 4), m), eight);
    out[0] = bytes_f32(lo), out[1] = bytes_f32(_mm_srli_si128(lo, 8));
    out[2] = bytes_f32(hi), out[3] = bytes_f32(_mm_srli_si128(hi, 8));
}
template <class Block>
static inline vf eight_scales(const Block* b) {
    return _mm256_cvtph_ps(_mm_setr_epi16(short(b[0].d), short(b[1].d), short(b[2].d), short(b[3].d), short(b[4].d),
                                          short(b[5].d), short(b[6].d), short(b[7].d)));
}
static inline vf q8_scales(const BlockQ8_0* b) { return eight_scales(b); }
static inline vf q4_scales(const BlockQ4_0* b) { return eight_scales(b); }
