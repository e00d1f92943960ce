// Attention over pages of keys and values, and how these are stored. kernels.h says how a page lies.
//
// Scores of some vectors of positions at a time (a position is a lane), positions in spans of kSpan, whose
// softmax parts are merged in order (the rule of flash attention, arXiv 2205.14135). Nothing here depends on
// which queries or spans a call works on: each sum has one order, whatever the tile. A score of f16 keys is
// the sum of the even elements' products plus that of the odd ones'; of quantised keys, blocks of 32 are
// exact integers, added in order. f16 values are added position after position; of quantised ones, chunks of
// 32 positions are exact integers.

constexpr int kSums = kRegisters / 2;  // accumulators of a tile; as many registers are left for operands
constexpr int kTileQueries = 4;        // of a tile at most

// ---------------------------------------------------------------------------------------------- asking ahead

// The lines of a span's pages in the order in which they will be read: keys, values, the next span's keys.
// They are asked for kAheadBytes before their turn, at the rate at which others are used up, and while the
// softmax reads nothing: memory never idles. Into L2, not L1: of the few lines L1 can wait for, what arrives
// is 10 GB/s where pages of 8 KiB are scattered, and 19 GB/s into L2 (of 26).
constexpr size_t kAheadBytes = 16384;
struct Ahead {
    const Span& a;
    size_t first, pages, next, total;  // in the order of reading: `pages` of keys, as many of values, keys
    const uint8_t* at = nullptr;
    size_t left = 0;  // lines of the page
    Ahead(const Span& span, size_t begin, size_t end)
        : a(span), first(begin / span.block), pages((end + span.block - 1) / span.block - first) {
        const size_t distance = kAheadBytes / a.k.page_bytes + 1,
                     last = (a.following + a.block - 1) / a.block;
        next = distance;
        total = 2 * pages + (a.following > end ? smaller(distance, last - first - pages) : 0);
    }
    NOINLINE void turn() {
        if (next >= total) return;
        const bool values = next >= pages && next < 2 * pages;
        const CachePages& of = values ? a.v : a.k;
        at = of.at(a.head, size_t(a.table[first + next - (next < pages ? 0 : pages)]));
        left = (of.page_bytes + 63) / 64, next++;
    }
};

// The lines that a tile asks for while it works, so many bytes a step. No calls: registers would go to
// memory.
struct Near {
    const uint8_t* at;
    size_t mask;  // 0: there are none
    Near(Ahead* ahead, size_t bytes, const void* other) : at((const uint8_t*)other), mask(0) {
        if (!ahead) return;
        const size_t lines = bytes / 64;
        if (ahead->left < lines) {
            for (; ahead->left; ahead->left--, ahead->at += 64) prefetch(ahead->at);
            ahead->turn();
        }
        if (ahead->left < lines) return;
        at = ahead->at, mask = ~size_t(0);
        ahead->at += 64 * lines, ahead->left -= lines;
    }
    template <int BYTES>
    inline void pass() {
        for (int k = 0; k < BYTES; k += 64) prefetch(at + k);
        at += size_t(BYTES) & mask;
    }
};

// ---------------------------------------------------------------------------------------------- scores

// All V vectors of positions are there if WHOLE, else n positions.
template <int V, bool WHOLE>
static inline bool all_of(int v, int n) {
    return WHOLE || n >= (v + 1) * W;
}
template <int V, bool WHOLE>
static inline vf some_f16(const uint16_t* p, int v, int n) {
    return all_of<V, WHOLE>(v, n) ? vload_f16(p + v * W)
           : n > v * W            ? vload_f16_n(p + v * W, n - v * W)
                                  : vzero();
}
template <int V, bool WHOLE>
static inline void store_scores(float* out, int v, int n, vf s) {
    if (all_of<V, WHOLE>(v, n))
        vstore(out + v * W, s);
    else if (n > v * W)
        vstore_n(out + v * W, s, n - v * W);
}

// tile: NR queries times the keys of the positions at `at` of a page.
struct KeysF16 {
    using Query = float;
    // Sums of even and of odd elements: at once where registers hold both, else one after the other.
    template <int NR, int V, bool WHOLE>
    NOINLINE static void tile(const Span& a, const uint8_t* page, size_t at, int n, const Query* const* q,
                              Ahead* ahead, float* const* out) {
        constexpr int P = 2 * NR * V <= kSums ? 2 : 1;
        const uint16_t* k = (const uint16_t*)page + at;
        const size_t block = a.block, head_dim = a.head_dim;
        vf sum[2][NR][V];
        for (size_t odd = 0; odd < 2; odd += P) {
            vf acc[P][NR][V];
            for (int p = 0; p < P; p++)
                for (int r = 0; r < NR; r++)
                    for (int v = 0; v < V; v++) acc[p][r][v] = vzero();
            Near near(ahead, head_dim * P * V * W, k);
            auto add = [&](size_t i, vf(*to)[V]) {
                vf x[NR];
                for (int r = 0; r < NR; r++) x[r] = vset1(q[r][i]);
                for (int v = 0; v < V; v++) {
                    const vf key = some_f16<V, WHOLE>(k + i * block, v, n);
                    for (int r = 0; r < NR; r++) to[r][v] = vfma(key, x[r], to[r][v]);
                }
            };
            size_t i = odd;
            for (; i + 4 <= head_dim + odd; i += 4) {
                near.template pass<4 * P * V * W>();
                add(i, acc[0]);
                if constexpr (P == 2) add(i + 1, acc[P - 1]);
                add(i + 2, acc[0]);
                if constexpr (P == 2) add(i + 3, acc[P - 1]);
            }
            for (; i < head_dim; i += 2) {
                add(i, acc[0]);
                if (P == 2 && i + 1 < head_dim) add(i + 1, acc[P - 1]);
            }
            for (int p = 0; p < P; p++)
                for (int r = 0; r < NR; r++)
                    for (int v = 0; v < V; v++) sum[odd + size_t(p)][r][v] = acc[p][r][v];
        }
        for (int r = 0; r < NR; r++)
            for (int v = 0; v < V; v++)
                store_scores<V, WHOLE>(out[r], v, n, vmul(vadd(sum[0][r][v], sum[1][r][v]), vset1(a.scale)));
    }
};

static inline vi some_dwords(const uint8_t* p, int n) {
    if (n >= W) return vi_load(p);
    int32_t t[W] = {0};
    if (n > 0) memcpy(t, p, size_t(n) * 4);
    return vi_load(t);
}

// A dword is 4 elements of a position (8 bits), or 8 (4 bits).
template <int BITS>
struct KeyBlocks {
    using Query = QueryBlock;
    using D = Dot<BITS>;
    static_assert(D::run >= 8, "a block is 8 steps");
    static constexpr int kAdded = BITS == 8 ? kOffsetQ8 : 8, kParts = 8 / BITS;
    template <int NR, int V, bool WHOLE>
    NOINLINE static void tile(const Span& a, const uint8_t* page, size_t at, int n, const Query* const* q,
                              Ahead* ahead, float* const* out) {
        const uint8_t* k = page + 4 * at;
        const uint16_t* d = (const uint16_t*)(page + a.block * a.head_dim * BITS / 8) + at;
        Near near(ahead, a.head_dim * BITS / 8 * V * W, k);
        vf sum[NR][V];
        for (int r = 0; r < NR; r++)
            for (int v = 0; v < V; v++) sum[r][v] = vzero();
        for (size_t b = 0; b < a.head_dim / 32; b++, d += a.block) {
            vi dot[NR][V];
            for (int r = 0; r < NR; r++)
                for (int v = 0; v < V; v++) dot[r][v] = vi_set1(D::wide ? -kAdded * q[r][b].sum : 0);
            for (int g = 0; g < BITS; g++, k += 4 * a.block) {
                near.template pass<4 * V * W>();
                vi w[kParts][V];
                for (int v = 0; v < V; v++)
                    split(WHOLE ? vi_load(k + 4 * v * W) : some_dwords(k + 4 * v * W, n - v * W), v, w);
                for (int part = 0; part < kParts; part++)
                    for (int r = 0; r < NR; r++) {
                        int32_t dword;
                        memcpy(&dword, q[r][b].q + 4 * (kParts * g + part), 4);
                        const vi x = vi_set1(dword);
                        for (int v = 0; v < V; v++) dot[r][v] = D::step(dot[r][v], w[part][v], x);
                    }
            }
            for (int v = 0; v < V; v++) {
                const vf own = some_f16<V, WHOLE>(d, v, n);
                for (int r = 0; r < NR; r++) {
                    const vi i =
                        D::wide ? dot[r][v] : vi_add(D::widen(dot[r][v]), vi_set1(-kAdded * q[r][b].sum));
                    const vf s = vi_f32(i);
                    sum[r][v] = vfma(s, vmul(own, vset1(q[r][b].d)), sum[r][v]);
                }
            }
        }
        for (int r = 0; r < NR; r++)
            for (int v = 0; v < V; v++) store_scores<V, WHOLE>(out[r], v, n, vmul(sum[r][v], vset1(a.scale)));
    }
    template <int V>
    static inline void split(vi raw, int v, vi (*w)[V]) {
        if constexpr (BITS == 4) {
            const vi low = vi_set1(0x0f0f0f0f);
            w[0][v] = vi_and(raw, low), w[1][v] = vi_and(vi_shr<4>(raw), low);
        } else if constexpr (kAdded != 0) {
            w[0][v] = vi_xor(raw, vi_set1(int32_t(0x01010101u * unsigned(kAdded))));
        } else {
            w[0][v] = raw;
        }
    }
};

// Scores of positions [begin, end): s[r][0] is that of the span's first position.
template <class K, int NR>
NOINLINE static void score_pages(const Span& a, const void* const* queries, size_t begin, size_t end,
                                 Ahead* ahead, float* const* s) {
    const typename K::Query* q[NR];
    for (int r = 0; r < NR; r++) q[r] = (const typename K::Query*)queries[r];
    constexpr int V = NR * 4 <= kSums && 4 * W <= 32 ? 4 : 2;
    for (size_t p = begin; p < end;) {
        const uint8_t* page = a.k.at(a.head, size_t(a.table[p / a.block]));
        const size_t at = p % a.block, room = smaller(a.block - at, a.begin + kSpan - p),
                     stop = smaller(a.block - at, end - p);
        size_t i = 0;
        float* to[NR];
        auto tile = [&](auto v, auto whole) {
            for (int r = 0; r < NR; r++) to[r] = s[r] + (p + i - a.begin);
            K::template tile<NR, v.value, whole.value>(a, page, at + i, int(smaller(stop - i, v.value * W)),
                                                       q, ahead, to);
            i += v.value * W;
        };
        // Of a page that is not full, what is there is read: nobody looks at those scores.
        while (i < stop && i + V * W <= room) tile(Constant<V>(), Constant<true>());
        while (i < stop) tile(Constant<1>(), Constant<false>());
        p += stop;
    }
}

// ---------------------------------------------------------------------------------------------- latents

// Scores of NR queries times P latents, rows of a page from `k` on: lane i mod W has element i.
template <int NR, int P>
NOINLINE static void latent_tile(const Span& a, const uint16_t* k, const float* const* q, float* const* out) {
    const size_t head_dim = a.head_dim;
    vf sum[NR][P];
    for (int r = 0; r < NR; r++)
        for (int p = 0; p < P; p++) sum[r][p] = vzero();
    size_t i = 0;
    for (; i + W <= head_dim; i += W) {
        vf x[NR];
        for (int r = 0; r < NR; r++) x[r] = vload(q[r] + i);
        for (int p = 0; p < P; p++) {
            const vf key = vload_f16(k + size_t(p) * head_dim + i);
            for (int r = 0; r < NR; r++) sum[r][p] = vfma(key, x[r], sum[r][p]);
        }
    }
    if (const int n = int(head_dim - i))
        for (int p = 0; p < P; p++) {
            const vf key = vload_f16_n(k + size_t(p) * head_dim + i, n);
            for (int r = 0; r < NR; r++) sum[r][p] = vfma(key, vload_n(q[r] + i, n), sum[r][p]);
        }
    for (int r = 0; r < NR; r++)
        for (int p = 0; p < P; p++) out[r][p] = vsum(sum[r][p]) * a.scale;
}

// Scores of positions [begin, end), as `score_pages`. No position is read that is not there.
template <int NR>
NOINLINE static void score_latents(const Span& a, const void* const* queries, size_t begin, size_t end,
                                   float* const* s) {
    constexpr int P = NR * 4 <= kSums ? 4 : kSums / NR;
    const float* q[NR];
    for (int r = 0; r < NR; r++) q[r] = (const float*)queries[r];
    for (size_t p = begin; p < end;) {
        const uint16_t* page = (const uint16_t*)a.k.at(a.head, size_t(a.table[p / a.block]));
        const size_t at = p % a.block, n = smaller(a.block - at, end - p);
        tiles<P>(0, n, [&](size_t i, auto tile) {
            float* to[NR];
            for (int r = 0; r < NR; r++) to[r] = s[r] + (p + i - a.begin);
            latent_tile<NR, tile.value>(a, page + (at + i) * a.head_dim, q, to);
        });
        p += n;
    }
}

// ---------------------------------------------------------------------------------------------- values

constexpr size_t kChunk = 32;  // positions that are added at a time

// out[r] += sum over `count` positions of weight * value, of U vectors of columns. `row`: from one to the
// next.
template <int NR, int U>
NOINLINE static void add_values(const uint16_t* v, size_t row, size_t count, const float* const* weight,
                                Ahead* ahead, float* const* out, size_t column) {
    vf acc[NR][U];
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++)
#pragma GCC unroll 8
        for (int u = 0; u < U; u++) acc[r][u] = vload(out[r] + column + size_t(u * W));
    Near near(ahead, count * U * W * 2, v);
    v += column;
    for (size_t p = 0; p < count; p++, v += row) {
        near.template pass<U * W * 2>();
        vf x[U];
        for (int u = 0; u < U; u++) x[u] = vload_f16(v + u * W);
#pragma GCC unroll 8
        for (int r = 0; r < NR; r++)
#pragma GCC unroll 8
            for (int u = 0; u < U; u++) acc[r][u] = vfma(x[u], vset1(weight[r][p]), acc[r][u]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < NR; r++)
#pragma GCC unroll 8
        for (int u = 0; u < U; u++) vstore(out[r] + column + size_t(u * W), acc[r][u]);
}

// Elements from one position's value to the next.
static inline size_t value_row(const Span& a) { return a.latents ? a.head_dim : a.value_dim; }

// All whole vectors from a column on: U at a time, then fewer.
template <int NR, int U>
static inline void add_columns(const uint16_t* v, const Span& a, size_t count, const float* const* weight,
                               Ahead* ahead, float* const* out, size_t column) {
    for (; column + U * W <= a.value_dim; column += U * W)
        add_values<NR, U>(v, value_row(a), count, weight, ahead, out, column);
    if constexpr (U > 1)
        if (column + W <= a.value_dim) add_columns<NR, U / 2>(v, a, count, weight, ahead, out, column);
}

// The last columns, which fill no vector.
template <int NR>
static void add_rest(const uint16_t* v, const Span& a, size_t count, const float* const* weight,
                     float* const* out) {
    const size_t c = a.value_dim / W * W, row = value_row(a);
    const int n = int(a.value_dim - c);
    for (int r = 0; r < NR; r++) {
        vf acc = vload_n(out[r] + c, n);
        for (size_t p = 0; p < count; p++)
            acc = vfma(vload_f16_n(v + p * row + c, n), vset1(weight[r][p]), acc);
        vstore_n(out[r] + c, acc, n);
    }
}

// out[r] += the values of positions [begin, end), weighted with s[r].
template <int NR, int U>
NOINLINE static void value_pages(const Span& a, const float* const* s, size_t begin, size_t end, Ahead* ahead,
                                 float* const* out) {
    for (size_t p = begin; p < end;) {
        const uint8_t* page = a.v.at(a.head, size_t(a.table[p / a.block]));
        const size_t at = p % a.block, count = smaller(kChunk, smaller(a.block - at, end - p));
        const uint16_t* v = (const uint16_t*)page + at * value_row(a);
        const float* weight[NR];
        for (int r = 0; r < NR; r++) weight[r] = s[r] + (p - a.begin);
        add_columns<NR, U>(v, a, count, weight, ahead, out, 0);
        if (a.value_dim % W) add_rest<NR>(v, a, count, weight, out);
        p += count;
    }
}

// ---------------------------------------------------------------------------------------------- values in
// blocks

constexpr size_t kCodedBlocks = 8;  // blocks of 32 columns whose weights are made at a time

// 32 floats as `x_quantize` has them, at a third of its time: the sum comes of vectors that are there, and
// what is no number shows in it.
static inline void code_block(const vf* x, QueryBlock* out) {
    constexpr int N = int(kChunk) / W;
    vf most = vzero(), sums = vzero(), r[N];
    for (int i = 0; i < N; i++) most = vmax(most, vabs(x[i]));
    const float top = vmaximum(most);
    const vf inverse = vset1(top > 1e-36f ? 127.0f / top : 0);
    for (int i = 0; i < N; i++) r[i] = vround(vmul(x[i], inverse)), sums = vadd(sums, r[i]);
    const vf magic = vset1(12582912.0f);  // 1.5 * 2^23: the lowest byte of a sum with it is the integer
    int32_t bits[kChunk];
    for (int i = 0; i < N; i++) vi_store(bits + i * W, vf_bits(vadd(r[i], magic)));
    for (size_t i = 0; i < kChunk; i++) out->q[i] = int8_t(bits[i]);
    const float sum = vsum(sums);
    out->d = top / 127.0f, out->sum = int32_t(sum);
    if (sum != sum) memset(out->q, 0, sizeof out->q), out->d = sum, out->sum = 0;
}

// The weights of a chunk's positions [lo, hi), times a block's scales, as int8. Others' scales may be no
// numbers.
static inline void code_weights(const float* s, const vf* scales, int lo, int hi, QueryBlock* out) {
    constexpr int N = int(kChunk) / W;
    vf x[N];
    if (lo == 0 && hi == int(kChunk)) {
        for (int i = 0; i < N; i++) x[i] = vmul(vload(s + i * W), scales[i]);
    } else {
        float some[kChunk], scale[kChunk];
        for (int i = 0; i < N; i++) vstore(scale + i * W, scales[i]);
        for (int i = 0; i < int(kChunk); i++) some[i] = lo <= i && i < hi ? s[i] * scale[i] : 0;
        for (int i = 0; i < N; i++) x[i] = vload(some + i * W);
    }
    code_block(x, out);
}

// out[r] += L loads of a block's columns, of the dwords [begin, end) of a chunk: 4 positions each.
template <int BITS, int NR, int L>
NOINLINE static void add_dwords(const uint8_t* v, size_t row_bytes, size_t begin, size_t end,
                                const QueryBlock (*w)[kCodedBlocks], Ahead* ahead, float* const* out) {
    using K = KeyBlocks<BITS>;
    using D = Dot<BITS>;
    constexpr int P = K::kParts;
    vi dot[NR][P][L];
    for (int r = 0; r < NR; r++)
        for (int part = 0; part < P; part++)
            for (int l = 0; l < L; l++) dot[r][part][l] = vi_set1(D::wide ? -K::kAdded * w[r]->sum : 0);
    Near near(ahead, (end - begin) * 4 * L * W, v);
    v += begin * row_bytes;
    for (size_t g = begin; g < end; g++, v += row_bytes) {
        near.template pass<4 * L * W>();
        vi x[P][L];
        for (int l = 0; l < L; l++) K::template split<L>(vi_load(v + 4 * l * W), l, x);
        for (int r = 0; r < NR; r++) {
            int32_t dword;
            memcpy(&dword, w[r]->q + 4 * g, 4);
            const vi weights = vi_set1(dword);
            for (int part = 0; part < P; part++)
                for (int l = 0; l < L; l++) dot[r][part][l] = D::step(dot[r][part][l], x[part][l], weights);
        }
    }
    for (int r = 0; r < NR; r++) {
        const vf d = vset1(w[r]->d);
        const vi added = vi_set1(D::wide ? 0 : -K::kAdded * w[r]->sum);
        for (int part = 0; part < P; part++)
            for (int l = 0; l < L; l++) {
                float* to = out[r] + 16 * part + l * W;
                vstore(to, vfma(vi_f32(vi_add(D::widen(dot[r][part][l]), added)), d, vload(to)));
            }
    }
}

// `value_pages`, where the weights of query r are 0 outside [lo[r], hi[r]) of the span.
template <int BITS, int NR>
NOINLINE static void value_blocks(const Span& a, const float* const* s, const size_t* lo, const size_t* hi,
                                  size_t begin, size_t end, Ahead* ahead, float* const* out) {
    constexpr int kLoads = (NR * 32 / W <= kSums ? 32 / W : 2) / KeyBlocks<BITS>::kParts;
    const size_t blocks = a.head_dim / 32, row_bytes = a.head_dim * BITS / 2;
    QueryBlock coded[NR][kCodedBlocks];
    for (size_t p = begin; p < end;) {
        const size_t at = p % a.block / kChunk * kChunk, start = p - p % a.block + at,
                     count = smaller(kChunk, a.block - at), stop = smaller(start + count, end);
        const ptrdiff_t first = ptrdiff_t(start) - ptrdiff_t(a.begin);
        const uint8_t* page = a.v.at(a.head, size_t(a.table[p / a.block]));
        const uint16_t* scales = (const uint16_t*)(page + a.block * a.head_dim * BITS / 8) + at;
        auto within = [&](size_t i) {
            const ptrdiff_t k = ptrdiff_t(i) - first;
            return k < 0 ? 0 : k > ptrdiff_t(count) ? int(count) : int(k);
        };
        for (size_t b0 = 0; b0 < blocks; b0 += kCodedBlocks) {
            const size_t n = smaller(kCodedBlocks, blocks - b0);
            for (size_t b = 0; b < n; b++) {
                const uint16_t* d = scales + (b0 + b) * a.block;
                vf scale[kChunk / W];
                for (size_t i = 0; i < kChunk; i += W)
                    scale[i / W] = i + W <= count ? vload_f16(d + i)
                                   : i < count    ? vload_f16_n(d + i, int(count - i))
                                                  : vzero();
                for (int r = 0; r < NR; r++)
                    code_weights(s[r] + first, scale, within(lo[r]), within(hi[r]), &coded[r][b]);
            }
            for (size_t b = 0; b < n; b++)
                for (size_t l = 0; l < 4 * BITS / W; l += kLoads) {
                    float* to[NR];
                    for (int r = 0; r < NR; r++) to[r] = out[r] + (b0 + b) * 32 + l * W;
                    const uint8_t* v = page + at / 4 * row_bytes + (b0 + b) * 16 * BITS + 4 * l * W;
                    add_dwords<BITS, NR, kLoads>(v, row_bytes, (p - start) / 4, (stop - start + 3) / 4,
                                                 (const QueryBlock(*)[kCodedBlocks]) & coded[0][b], ahead,
                                                 to);
                }
        }
        p = stop;
    }
}

// ---------------------------------------------------------------------------------------------- attention

// Scores of one query over [begin, end) -> weights e^(s - top), 0 outside [lo, hi); partial's top and total.
// Meanwhile lines are asked for: nothing is read here.
static void span_softmax(float* s, size_t lo, size_t hi, size_t n, Ahead* ahead, float* top_total) {
    vf most = vset1(-INFINITY);
    size_t i = lo;
    for (; i + W <= hi; i += W) most = vmax(vload(s + i), most);  // in this order: a NaN is passed over
    float top = vmaximum(most);
    for (; i < hi; i++) top = s[i] > top ? s[i] : top;
    vf sum = vzero();
    Near near(ahead, n / W * 64, s);
    for (i = 0; i < n; i += W) {
        near.pass<64>();
        vf x = vexp(vsub(x_some(s + i, int(smaller(W, n - i))), vset1(top)));
        if (i < lo || i + W > hi) {
            float t[W];
            vstore(t, x);
            for (size_t j = 0; j < W; j++) t[j] = i + j >= lo && i + j < hi ? t[j] : 0;
            x = vload(t);
        }
        store_some(s + i, x, int(smaller(W, n - i)));
        sum = vadd(sum, x);
    }
    top_total[0] = top, top_total[1] = vsum(sum);
}

template <int NR>
static void attend_rows(const Span& a, const void* const* q, const int32_t* first, const int32_t* last,
                        bool asks, float* scores, float* partial) {
    const size_t n = a.end - a.begin, vd = a.value_dim;
    float *s[NR], *out[NR];
    size_t lo[NR], hi[NR], lowest = n, highest = 0;  // what each query attends to, and any of them
    for (int r = 0; r < NR; r++) {
        s[r] = scores + size_t(r) * kSpan;
        out[r] = partial + size_t(r) * (vd + 2);
        for (size_t i = 0; i < vd; i++) out[r][i] = 0;
        lo[r] = size_t(first[r]) > a.begin ? smaller(size_t(first[r]) - a.begin, n) : 0;
        hi[r] = size_t(last[r]) > a.begin ? smaller(size_t(last[r]) - a.begin, n) : 0;
        if (hi[r] > lo[r]) lowest = smaller(lowest, lo[r]), highest = hi[r] > highest ? hi[r] : highest;
    }
    // Pages before the queries' windows are not touched: they may be gone. Scores not written here are never
    // used.
    const size_t begin = a.begin + lowest, whole = begin / a.block * a.block, end = a.begin + highest,
                 from = whole > a.begin ? whole : a.begin;
    Ahead pages(a, begin, end > begin ? end : begin);
    Ahead* ahead =
        asks && !a.latents ? &pages : nullptr;  // latents are one stream, which is in L2 at its second turn
    if (a.latents)
        score_latents<NR>(a, q, begin, end, s);
    else if (a.k.type == CACHE_F16)
        score_pages<KeysF16, NR>(a, q, from, end, ahead, s);
    else if (a.k.type == CACHE_Q8_0)
        score_pages<KeyBlocks<8>, NR>(a, q, from, end, ahead, s);
    else
        score_pages<KeyBlocks<4>, NR>(a, q, from, end, ahead, s);
    for (int r = 0; r < NR && a.softcap > 0; r++)  // tanh(z) = 1 - 2/(1 + e^2z)
        map(s[r], n, [&](vf x) {
            const vf z = vmul(x, vset1(2 / a.softcap)), e = vadd(vexp(z), vset1(1));
            return vmul(vset1(a.softcap), vdiv(vsub(e, vset1(2)), e));
        });
    for (int r = 0; r < NR; r++) span_softmax(s[r], lo[r], hi[r], n, ahead, out[r] + vd);
    if (a.v.type == CACHE_F16) {
        // Eight sums hide the latency of the multiply-add; latents are bound by loads, which more sums share.
        constexpr int U = NR == 1 ? 8 : NR == 2 ? 4 : 2, kOfLatents = NR > 2 && kSums >= 16 ? 4 : U;
        if (a.latents)
            value_pages<NR, kOfLatents>(a, s, begin, end, ahead, out);
        else
            value_pages<NR, U>(a, s, begin, end, ahead, out);
    } else if (a.v.type == CACHE_Q8_0) {
        value_blocks<8, NR>(a, s, lo, hi, begin, end, ahead, out);
    } else {
        value_blocks<4, NR>(a, s, lo, hi, begin, end, ahead, out);
    }
}

static void attend(const Span& a, const void* const* q, const int32_t* first, const int32_t* last,
                   size_t rows, float* scores, float* partial) {
    tiles<kTileQueries>(0, rows, [&](size_t r, auto nr) {  // the first tile asks: others find pages in L2
        attend_rows<nr.value>(a, q + r, first + r, last + r, r == 0, scores, partial + r * (a.value_dim + 2));
    });
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

// ---------------------------------------------------------------------------------------------- storing

// The normalised Hadamard transform of each `rotated` elements, which is its own inverse. A turn adds and
// subtracts neighbours; the sums go to the front half, the differences behind them.
static void rotate(float* x, size_t head_dim, float* scratch) {
    const size_t n = rotated(head_dim);
    for (float* end = x + head_dim; x < end; x += n) {
        float *from = x, *to = scratch;
        for (size_t turns = n; turns > 1; turns /= 2) {
            for (size_t i = 0; i < n / 2; i++) {
                const float a = from[2 * i], b = from[2 * i + 1];
                to[i] = a + b, to[i + n / 2] = a - b;
            }
            float* swap = from;
            from = to, to = swap;
        }
        const float scale = 1.0f / sqrtf(float(n));
        for (size_t i = 0; i < n; i++) x[i] = from[i] * scale;
    }
}

// Of 32 floats: the largest size, its element, and 0; or NaN, where one is infinite or NaN.
struct Extreme {
    float most = 0, element = 0, odd = 0;
    explicit Extreme(const float* x) {
        for (int i = 0; i < 32; i++) {
            odd += x[i] - x[i];
            if (fabsf(x[i]) > most) most = fabsf(x[i]), element = x[i];
        }
    }
};

// The f16 scale; *some: quants are those of 0 where it is 0 or no number.
static inline uint16_t block_scale(float d, bool* some) {
    uint16_t stored;
    float scale[W] = {d};
    vstore_f16_n(&stored, vload(scale), 1);
    *some = (stored & 0x7fff) != 0 && (stored & 0x7c00) != 0x7c00;
    return stored;
}

// 32 floats as GGUF's q8_0; returns the scale, which is NaN for a block with an infinity or NaN.
static uint16_t encode_q8(const float* x, uint8_t* q) {
    const Extreme e(x);
    const float d = e.odd != 0 ? e.odd : e.most / 127.0f;
    bool some;
    const uint16_t stored = block_scale(d, &some);
    const float inverse = some ? 1.0f / d : 0.0f;
    for (int i = 0; i < 32; i++) {  // halves away from zero
        const float v = (some ? x[i] : 0.0f) * inverse;
        q[i] = uint8_t(int8_t(v + copysignf(0.49999997f, v)));
    }
    return stored;
}

// 32 floats as GGUF's q4_0, quants + 8. Of eight quants that the largest element could have, those that leave
// the least squared error: 11 % less than with -8, of random numbers. A lane is a candidate, so that sums
// have one order on every instruction set.
constexpr float kLargest[16] = {-9.1f, -8.75f, -8.4f, -8.05f, -7.7f, -7.35f, -7.0f, -6.65f,
                                -9.1f, -8.75f, -8.4f, -8.05f, -7.7f, -7.35f, -7.0f, -6.65f};
static uint16_t encode_q4(const float* x, uint8_t* q) {
    static_assert(W >= 8 && W <= 16, "a lane is a candidate");
    const Extreme e(x);
    const vf least = vset1(-8), top = vset1(7);
    float d = e.odd != 0 ? e.odd : e.element / -8.0f, inverse = 1.0f / d;
    if (e.odd == 0 && e.most > 1e-7f && e.most < 1e5f) {  // else it is 0, or large enough to overflow sums
        const vf inverses = vdiv(vload(kLargest), vset1(e.element));
        vf products = vzero(), squares = vzero();
        for (int i = 0; i < 32; i++) {
            const vf v = vset1(x[i]), r = vmin(vmax(vround(vmul(v, inverses)), least), top);
            products = vadd(products, vmul(v, r)), squares = vadd(squares, vmul(r, r));
        }
        float xq[W], qq[W], best = -1;
        vstore(xq, products), vstore(qq, squares);
        for (int c = 0; c < 8; c++)
            if (xq[c] * xq[c] / qq[c] > best)
                best = xq[c] * xq[c] / qq[c], d = xq[c] / qq[c], inverse = kLargest[c] / e.element;
    }
    bool some;
    const uint16_t stored = block_scale(d, &some);
    for (int i = 0; i < 32; i += W) {
        float r[W];
        vstore(r, vmin(vmax(vround(vmul(vload(x + i), vset1(inverse))), least), top));
        for (int k = 0; k < W; k++) q[i + k] = some ? uint8_t(int(r[k]) + 8) : 8;
    }
    return stored;
}

// A position's key into its page, as kernels.h has it.
static void store_key(CacheType type, const float* x, size_t head_dim, size_t block, size_t p,
                      uint8_t* page) {
    if (type == CACHE_F16) {
        uint16_t half[32], *to = (uint16_t*)page + p;
        for (size_t i = 0; i < head_dim; i += 32) {
            const size_t n = smaller(32, head_dim - i);
            to_f16(x + i, n, half);
            for (size_t k = 0; k < n; k++) to[(i + k) * block] = half[k];
        }
        return;
    }
    const size_t bits = type == CACHE_Q8_0 ? 8 : 4;
    uint16_t* scales = (uint16_t*)(page + block * head_dim * bits / 8) + p;
    for (size_t b = 0; b < head_dim / 32; b++) {
        uint8_t q[32];
        scales[b * block] = bits == 8 ? encode_q8(x + 32 * b, q) : encode_q4(x + 32 * b, q);
        for (size_t g = 0; g < bits; g++) {
            uint8_t* to = page + 4 * ((b * bits + g) * block + p);
            for (size_t i = 0; i < 4; i++)
                to[i] = bits == 8 ? q[4 * g + i] : uint8_t(q[8 * g + i] | q[8 * g + 4 + i] << 4);
        }
    }
}

static void store_value(CacheType type, const float* x, size_t head_dim, size_t block, size_t p,
                        uint8_t* page) {
    if (type == CACHE_F16) return to_f16(x, head_dim, (uint16_t*)page + p * head_dim);
    const size_t bits = type == CACHE_Q8_0 ? 8 : 4, columns = 4 * bits;  // dwords of a block
    uint16_t* scales = (uint16_t*)(page + block * head_dim * bits / 8) + p;
    for (size_t b = 0; b < head_dim / 32; b++) {
        uint8_t q[32], *to = page + p / 4 * (head_dim * bits / 2) + b * 4 * columns + p % 4;
        scales[b * block] = bits == 8 ? encode_q8(x + 32 * b, q) : encode_q4(x + 32 * b, q);
        for (size_t i = 0; i < columns; i++) to[4 * i] = bits == 8 ? q[i] : uint8_t(q[i] | q[i + 16] << 4);
    }
}

// A query, in place, as scores of quantised keys take it.
static void code_query(float* q, size_t head_dim) {
    QueryBlock* out = (QueryBlock*)q;  // shorter than the 32 floats it is made of
    for (size_t b = 0; b < head_dim / 32; b++) {
        QueryBlock block;
        x_quantize(q + 32 * b, block.q, &block.d, &block.sum);
        memcpy(out + b, &block, sizeof block);
    }
}
