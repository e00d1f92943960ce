// Rows that lie in groups of 2 * W, side by side: a vector of memory holds one unit (a dword of numbers, a
// byte or an f16 of scales) of each of W rows. No vector has to be summed up across, what is done for a scale
// is done for W rows at once, and a group is read from its first byte to its last (arrange.h): the stream
// that Zen 4 prefetches by itself (`group_ahead`). Included by gemm.inl.
//
// Every element of the result is added up in the order of the row kernels: the same bits.

// `blocks` blocks from block b on of a group. planes: of the first W rows, of the others; at[0]: the numbers
// of all blocks. The scales are copied when the slab is begun: read one by one among the numbers they would
// be a second stream, and Zen 4 prefetches one of two (32 to 12 GB/s).
template <class F>
struct Slab {
    static constexpr size_t kMostScales = 20 * kGroupRows;  // q2_k's
    alignas(64) uint8_t scales[kMostScales], unpacked[kUnpacked];
    Planes planes[2];

    TC_INLINE Slab(const uint8_t* group, size_t b, size_t blocks) : planes{} {
        const uint8_t* from = group + F::row_bytes(32 * b) * kGroupRows;
        size_t bytes = 0;
        for (int i = 0; i < kMostPlanes; i++)
            if (F::facts.units[i] < 4) {
                planes[0].at[i] = scales + bytes;
                bytes += blocks * F::facts.planes[i] / 8 * kGroupRows;
            }
        for (size_t i = 0; i < bytes; i += 2 * W) memcpy(scales + i, from + i, 2 * W);
        planes[0].at[0] = from + bytes;
        if (blocks) F::ScalesOf::unpack(planes, unpacked);
        for (int i = 0; i < kMostPlanes; i++)
            if (planes[0].at[i]) planes[1].at[i] = planes[0].at[i] + F::facts.units[i] * W;
    }
};

// The dwords of block j of a group's rows.
template <class N>
struct Dwords {
    static constexpr int A = N::first / 4, B = N::second / 4;
    vi a[2][A], b[2][B ? B : 1];
    TC_INLINE Dwords(const Planes* p, size_t j) {
        const uint8_t* from = p[0].at[0] + size_t(A + B) * 4 * kGroupRows * j;
        for (int d = 0; d < A; d++)
            for (int g = 0; g < 2; g++) a[g][d] = vi_load(from + (2 * d + g) * 4 * W);
        for (int d = 0; d < B; d++)
            for (int g = 0; g < 2; g++) b[g][d] = vi_load(from + (2 * (A + d) + g) * 4 * W);
    }
    template <int K>  // dword K and dword K + 4
    TC_INLINE void get(int g, vi* lo, vi* hi) const {
        N::template spread<K>(a[g], b[g], lo, hi);
    }
};

// A block of a group's rows, and block `at` of NT chunks.
template <class F, int NT>
struct BlockSums {
    using D = Dot<F::Numbers::bits>;
    // Of both halves, where their scales differ, or where more steps than `run` do not fit an i16.
    static constexpr int parts = F::grouped || D::run < 8 ? 2 : 1;
    const XChunk* first;
    size_t stride, at;
    static constexpr int G = 2;       // vectors of W rows
    vi s[2][G][NT], total[2][G][NT];  // total: of the first half of the steps, where not all of them fit

    TC_INLINE const XChunk* chunk(int n) const {
        return (const XChunk*)((const uint8_t*)first + size_t(n) * stride);
    }
    TC_INLINE vi dword(int n, size_t half, int k) const {
        int32_t x;
        memcpy(&x, chunk(n)->q + F::half_at(at, half) + 4 * k, 4);
        return vi_set1(x);
    }
    template <int K, class DWORDS>
    TC_INLINE void step(const DWORDS& w) {
        for (int n = 0; n < NT; n++) {
            const vi x[2] = {dword(n, 0, K), dword(n, 1, K)};
            for (int g = 0; g < G; g++) {
                vi lo, hi;
                w.template get<K>(g, &lo, &hi);
                s[0][g][n] = D::step(s[0][g][n], lo, x[0]);
                s[parts - 1][g][n] = D::step(s[parts - 1][g][n], hi, x[1]);
            }
        }
    }
    // Of numbers that fill their bytes, dword by dword as they lie: what is read in two places at once is not
    // prefetched.
    TC_INLINE void in_turn(const Planes* p, size_t j) {
        const uint8_t* from = p[0].at[0] + size_t(32) * kGroupRows * j;
        for (int k = 0; k < 8; k++)
            for (int g = 0; g < G; g++) {
                const vi w = vi_xor(vi_load(from + (2 * k + g) * 4 * W), repeated(kOffsetQ8));
                for (int n = 0; n < NT; n++) {
                    vi& sum = s[k / 4 % parts][g][n];
                    sum = D::step(sum, w, dword(n, size_t(k / 4), k % 4));
                }
            }
    }
    // s: the sums as integers.
    TC_INLINE void add_up(const Planes* p, size_t j) {
        for (int h = 0; h < parts; h++)
            for (int g = 0; g < G; g++)
                for (int n = 0; n < NT; n++) s[h][g][n] = vi_set1(0);
        if constexpr (F::Numbers::first == 32 && D::run >= 8) return in_turn(p, j);
        const Dwords<typename F::Numbers> w(p, j);
        step<0>(w), step<1>(w);
        if constexpr (D::run < 4)
            for (int h = 0; h < parts; h++)
                for (int g = 0; g < G; g++)
                    for (int n = 0; n < NT; n++)
                        total[h][g][n] = D::widen(s[h][g][n]), s[h][g][n] = vi_set1(0);
        step<2>(w), step<3>(w);
        for (int h = 0; h < parts; h++)
            for (int g = 0; g < G; g++)
                for (int n = 0; n < NT; n++) {
                    s[h][g][n] = D::widen(s[h][g][n]);
                    if constexpr (D::run < 4) s[h][g][n] = vi_add(s[h][g][n], total[h][g][n]);
                }
    }
    // The sums of W rows with token n, scaled, added to a lane.
    TC_INLINE vf scaled(int g, int n, const vf* scale, vf lane) const {
        const float d = chunk(n)->d[at];
        const int32_t extra = chunk(n)->extra[at];
        auto of = [&](int f) TC_INLINED { return scale[f]; };
        const vi *lo = &s[0][g][n], *hi = &s[parts - 1][g][n];
        if constexpr (F::grouped) {
            const int32_t halves[2] = {int16_t(extra), extra >> 16};
            constexpr int s0 = F::kind == GROUPS ? 1 : 2;
            auto part = [&](vi sum, int half) TC_INLINED {
                return vi_f32(F::kind == GROUPS ? vi_sub(sum, vi_set1(F::added * halves[half])) : sum);
            };
            const vf sum = vfma(part(*hi, 1), scale[s0 + 1], vmul(part(*lo, 0), scale[s0]));
            return add_scaled<F::kind>(lane, sum, of, d, [&](int i) TC_INLINED { return float(halves[i]); });
        }
        vi sum = parts == 2 ? vi_add(*lo, *hi) : *lo;
        if constexpr (F::kind == OFFSET) sum = vi_add(sum, vi_set1(extra));
        return add_scaled<F::kind>(lane, vi_f32(sum), of, d, [&](int) TC_INLINED {
            float m;
            memcpy(&m, &extra, 4);
            return m;
        });
    }
};

// What is asked for while a run of groups is multiplied: `by` bytes ahead of their use, and behind the run's
// end what the thread reads then. A run began with lines that nobody had asked for, and ended with a request
// for others that nobody read.
struct GroupAhead {
    size_t by;  // 0: the processor asks by itself
    const uint8_t* end;
    ptrdiff_t on;  // from the end to what is read then; where that is not known, back to what is read now
};

// out[g][n]: dot products of W rows with token n.
template <class F, int NT>
static void group_dot(const uint8_t* group, const uint8_t* input, size_t stride, size_t cols,
                      const GroupAhead& ahead, vf (*out)[NT]) {
    constexpr int G = 2;
    const size_t blocks = cols / 32, by = ahead.by;
    const uint8_t* const end = ahead.end;
    const ptrdiff_t on = ahead.on;
    constexpr size_t block_bytes = 32 * F::block_bytes * kGroupRows / F::block;
    vf lane[16][G][NT];
    for (int l = 0; l < 16; l++)
        for (int g = 0; g < G; g++)
            for (int n = 0; n < NT; n++) lane[l][g][n] = vzero();
    for (size_t b = 0; b < blocks; b += kSlab) {
        const size_t some = F::block == 256 ? kSlab : smaller(kSlab, blocks - b);
        const XChunk* x = (const XChunk*)input + b / 16;
        const Slab<F> slab(group, b, some);
        for (size_t j = 0; j < some; j++) {
            if (by) {
                const uint8_t* soon = group + block_bytes * (b + j) + by;
                prefetch_near_span(soon < end ? soon : soon + on, block_bytes);
            }
            BlockSums<F, NT> sums;
            sums.first = x, sums.stride = stride, sums.at = b % 16 + j;
            sums.add_up(slab.planes, j);
            for (int g = 0; g < G; g++) {
                vf scale[panel_floats<F>()];
                F::ScalesOf::of_rows(slab.planes[g], j, scale);
                for (int n = 0; n < NT; n++) {
                    vf& to = lane[b % 16 + j][g][n];
                    to = sums.scaled(g, n, scale, to);
                }
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < NT; n++) {
            vf lanes[16];
            for (int l = 0; l < 16; l++) lanes[l] = lane[l][g][n];
            out[g][n] = halves<16>(lanes);
        }
}

// Tokens that share a reading of a group: each of its dwords is taken apart once for all of them. Four of
// four took a tenth less time than two by two (AVX-512, q4_0 and q4_k); 16 registers do not hold their sums.
constexpr int kGroupTokens = kRegisters == 32 ? 4 : 2;
// Of 5 to 16 tokens in whole groups, four at a time: with AVX-512 1.0 to 2.0 times as fast as panels of them,
// in every format (Zen 5). With 16 registers it depends on the format: 0.8 to 1.4.
constexpr size_t kGroupedTokens = kRegisters == 32 ? 16 : kFewTokens;

template <class F>
NOINLINE static void matmul_groups(const Matrix& w, size_t begin, size_t end, const Input& x,
                                   const float* bias, bool add, float* y, size_t ldy, const uint8_t* then) {
    const size_t by = group_ahead.load(std::memory_order_relaxed);
    const uint8_t* const last = w.data + end * w.stride;
    const GroupAhead ahead = {by, last, then ? then - last : -ptrdiff_t(by)};
    for (size_t r = begin; r < end; r += kGroupRows)
        tiles<kGroupTokens>(0, x.tokens, [&](size_t t, auto nt) {
            vf sums[2][nt.value];
            group_dot<F, nt.value>(w.data + r * w.stride, x.data + t * x.row_bytes, x.row_bytes, w.cols,
                                   ahead, sums);
            for (size_t n = 0; n < nt.value; n++)
                for (size_t g = 0; g < 2; g++) {
                    float* out = y + (t + n) * ldy + (r - begin) + g * W;
                    const vf v = bias ? vadd(sums[g][n], vload(bias + r + g * W)) : sums[g][n];
                    vstore(out, add ? vadd(vload(out), v) : v);
                }
        });
}

template <class F, int K, class DWORDS>
static TC_INLINE void store_dwords(const DWORDS& w, uint8_t* to) {
    for (int g = 0; g < 2; g++, to += 4 * W) {
        vi lo, hi;
        w.template get<K>(g, &lo, &hi);
        vi_store(to + K * kPanelStep, panel_numbers<F>(lo)),
            vi_store(to + (4 + K) * kPanelStep, panel_numbers<F>(hi));
    }
}
// A panel of a group.
template <class F>
static void interleaved_panel(const uint8_t* group, size_t cols, uint8_t* panel) {
    static_assert(kGroupRows == kPanelRows, "a panel is a group");
    constexpr int floats = panel_floats<F>();
    const size_t blocks = cols / 32, chunks = int_chunks(cols);
    float* scales = (float*)(panel + chunks * 512 * kPanelRows);
    for (size_t b = 0; b < 16 * chunks; b += kSlab) {
        const size_t some = b < blocks ? smaller(kSlab, blocks - b) : 0;
        const Slab<F> slab(group, smaller(b, blocks), some);
        for (size_t j = 0; j < kSlab; j++) {
            const size_t slot = lane_slot(b + j, chunks);
            if (j < some) {
                uint8_t* to = panel + slot * 16 * (4 * W);
                const Dwords<typename F::Numbers> w(slab.planes, j);
                store_dwords<F, 0>(w, to), store_dwords<F, 1>(w, to), store_dwords<F, 2>(w, to),
                    store_dwords<F, 3>(w, to);
            }
            for (size_t g = 0; g < 2; g++) {
                vf of[floats] = {};
                if (j < some) F::ScalesOf::of_rows(slab.planes[g], j, of);
                for (size_t f = 0; f < size_t(floats); f++)
                    vstore(scales + ((slot * floats + f) * 2 + g) * W, of[f]);
            }
        }
    }
}
