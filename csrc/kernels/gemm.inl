// Many tokens: weights go through panels. A panel is kPanelRows rows, unpacked and transposed once so that a
// vector holds one column (four for int8) of W rows; then a tile of two vectors by kTileTokens tokens needs
// no horizontal sums. Every element of the result is added up in the order of the row kernels (kernels.inl):
// lane by lane, and the lanes as the same binary tree. Panels and activations are therefore stored lane by
// lane, activations of the tokens of a tile side by side: the inner loops follow two pointers.
//
// A panel is for one thread and lives in its L2 cache: 32 rows of 4096 columns are 128 KiB of int8 and 16 KiB
// for each f32 that a format has of a block (panel_floats), 144 KiB for q4_0 and 224 for q2_k.

constexpr int kPanelRows = 2 * W;
static_assert(kPanelRows <= kMostPanelRows && kTileTokens <= kMostTileTokens &&
                  kFloatTileTokens <= kMostTileTokens,
              "the memory plan counts as many");

// The lane that comes i-th when lanes are added up as a tree with a counter: the bits of i reversed.
static constexpr int tree_order(int i, int lanes) {
    int r = 0;
    for (int bit = 1; bit < lanes; bit *= 2, i /= 2) r = 2 * r + i % 2;
    return r;
}

// Partial sums of a tile waiting for their sibling, by level of the tree. V: vectors of rows.
template <int NT, int V = 2>
struct Tree {
    vf waiting[6][V][NT];  // up to 32 lanes
    // Lane number i (in tree order) is complete: add it to its left sibling, that to its own, and so on.
    void add(int i, vf (*lane)[NT]) {
        int level = 0;
        for (; i >> level & 1; level++)
            for (int v = 0; v < V; v++)
                for (int n = 0; n < NT; n++) lane[v][n] = vadd(waiting[level][v][n], lane[v][n]);
        for (int v = 0; v < V; v++)
            for (int n = 0; n < NT; n++) waiting[level][v][n] = lane[v][n];
    }
};

// -------------------------------------------------------------------------------- float formats
//
// Chunk by chunk of kFloatChunk columns: [lane][step][kPanelRows] as stored, and activations
// [lane][step][kFloatTileTokens].

static size_t float_steps(size_t columns) { return (columns + kLanes - 1) / kLanes; }
// A lane has a step too many: at 4 KiB apart, lanes would share the sets of the L1 cache.
static size_t lane_stride(size_t steps) { return (steps + 1) * kPanelRows; }

// x: columns [begin, end) of cols. out: this token's place in its tile.
static void float_lanes(const float* x, size_t cols, size_t begin, size_t end, float* out) {
    for (size_t c = begin; c < end; c += kLanes) {  // a step of all lanes of a chunk
        const size_t k0 = c / kFloatChunk * kFloatChunk, steps = float_steps(smaller(kFloatChunk, cols - k0)),
                     s = (c - k0) / kLanes;
        for (size_t l = 0; l < size_t(kLanes); l++)
            out[(k0 + l * steps + s) * kFloatTileTokens] = c + l < end ? x[c + l - begin] : 0.0f;
    }
}

// 16-bit weights are transposed as pairs, and stay 16 bits wide: half the shuffles, half the cache.
template <class F>
static void float_panel(const uint8_t* const* rows, size_t k0, size_t n, typename F::Stored* panel) {
    using T = typename F::Stored;
    constexpr int per = int(4 / sizeof(T));  // columns of a dword
    const size_t stride = lane_stride(float_steps(n));
    T tail[kPanelRows][kLanes];
    for (size_t c = 0; c < n; c += kLanes, panel += kPanelRows) {
        const T* from[kPanelRows];
        for (int i = 0; i < kPanelRows; i++) {
            from[i] = (const T*)rows[i] + k0 + c;
            if (c + kLanes <= n) continue;
            for (size_t k = 0; k < size_t(kLanes); k++) tail[i][k] = c + k < n ? from[i][k] : T(0);
            from[i] = tail[i];
        }
        for (int d = 0; d < kLanes; d += W * per) {
            vi t[2][W];
            for (int v = 0; v < 2; v++) {
                for (int i = 0; i < W; i++) t[v][i] = vi_load(from[v * W + i] + d);
                transpose(t[v]);
            }
            for (int i = 0; i < W; i++) {
                T* to = panel + size_t(d + per * i) * stride;
                if constexpr (per == 1) {
                    vi_store(to, t[0][i]);
                    vi_store(to + W, t[1][i]);
                } else {
                    vi even, odd;
                    split_words(t[0][i], t[1][i], &even, &odd);
                    vi_store(to, even);
                    vi_store(to + stride, odd);
                }
            }
        }
    }
}

// sums[n] [kPanelRows] += the chunk's dot products with token n. Of `next`, `share` bytes are asked for per
// lane.
template <class F, int NT>
static void float_tile(const typename F::Stored* panel, size_t steps, const float* x, const uint8_t* next,
                       size_t share, float* sums) {
    Tree<NT> tree;
    vf lane[2][NT];
    for (int i = 0; i < kLanes; i++) {
        const size_t at = size_t(tree_order(i, kLanes));
        const typename F::Stored* p = panel + at * lane_stride(steps);
        const float* xp = x + at * steps * kFloatTileTokens;
        prefetch_span(next + size_t(i) * share, share);
        for (int n = 0; n < NT; n++) lane[0][n] = lane[1][n] = vzero();
        for (size_t s = 0; s < steps; s++, p += kPanelRows, xp += kFloatTileTokens) {
            const vf a = F::load((const uint8_t*)p, 0), b = F::load((const uint8_t*)p, W);
            for (int n = 0; n < NT; n++) {
                const vf xs = vset1(xp[n]);
                lane[0][n] = vfma(a, xs, lane[0][n]);
                lane[1][n] = vfma(b, xs, lane[1][n]);
            }
        }
        tree.add(i, lane);
    }
    for (int n = 0; n < NT; n++)
        for (int v = 0; v < 2; v++) {
            float* s = sums + n * kPanelRows + v * W;
            vstore(s, vadd(vload(s), lane[v][n]));
        }
}

// -------------------------------------------------------------------------------- formats of blocks
//
// Lane l of C chunks (512 columns each) holds blocks l, 16 + l, ...: panel [lane][chunk][8
// dwords][kPanelRows], then f32 of each block [lane][chunk][panel_floats][kPanelRows]. Activations:
// [lane][chunk] of XTile.

static size_t int_chunks(size_t cols) { return (cols / 32 + 15) / 16; }
static size_t lane_slot(size_t block, size_t chunks) { return block % 16 * chunks + block / 16; }

// What a panel has of each block in f32: d; and m where weights have it; then the scales of both halves.
template <class F>
constexpr int panel_floats() {
    return F::kind == OFFSET ? 1 : F::kind == AFFINE ? 2 : F::kind == GROUPS ? 3 : 6;
}

// Of W rows, DWORDS dwords of each of up to 16 blocks of one plane: out[block * DWORDS + dword], a row a
// lane.
template <int DWORDS>
static inline void plane_columns(const Planes* rows, int plane, int blocks, vi* out) {
    if constexpr (DWORDS > 0)
        for (int d = 0; d < DWORDS * blocks; d += W) {
            for (int i = 0; i < W; i++) out[d + i] = vi_load(rows[i].at[plane] + 4 * d);
            transpose(out + d);
        }
}

// Of W rows the f32 of 16 blocks: out[f][block][row].
template <class F>
static TC_INLINE void block_floats(const Planes* rows, int blocks, float (*out)[16][W]) {
    constexpr bool minima = F::kind == AFFINE || F::kind == GROUPS_AFFINE;
    constexpr int halves = minima ? 2 : 1;  // the first plane of the scales of halves
    vi d[16 / W][W], m[16 / W][W];
    for (int i = 0; i < W; i++) {
        Scales s;
        F::ScalesOf::load(rows[i], blocks, &s);
        for (int v = 0; v < 16 / W; v++) {
            d[v][i] = vf_bits(s.d[v]);
            if constexpr (minima) m[v][i] = vf_bits(s.m[v]);
        }
        int8_t part[32];
        auto apart = [&](const vb* scales, int f) {
            vb_store(part, scales[0]), vb_store(part + 16, scales[1]);
            for (int b = 0; b < 16; b++) out[f][b][i] = part[2 * b], out[f + 1][b][i] = part[2 * b + 1];
        };
        if constexpr (F::grouped) apart(s.s, halves);
        if constexpr (F::kind == GROUPS_AFFINE) apart(s.t, halves + 2);
    }
    for (int v = 0; v < 16 / W; v++) {
        transpose(d[v]);
        if constexpr (minima) transpose(m[v]);
        for (int i = 0; i < W; i++) {
            vi_store(out[0][v * W + i], d[v][i]);
            if constexpr (minima) vi_store(out[1][v * W + i], m[v][i]);
        }
    }
}
// Numbers of a panel: as `spread` gives them, or signed, for a matrix unit.
template <class F>
static TC_INLINE vi panel_numbers(vi a) {
    if constexpr (kMatrixUnit && F::added)
        return vi_sub8(a, repeated(F::added));
    else
        return a;
}
// Dwords K and K + 4 of a block, as dwords of int8.
template <class F, int K>
static TC_INLINE void spread_block(const vi* a, const vi* b, uint8_t* to) {
    vi lo, hi;
    F::Numbers::template spread<K>(a, b, &lo, &hi);
    vi_store(to + K * kPanelStep, panel_numbers<F>(lo)),
        vi_store(to + (4 + K) * kPanelStep, panel_numbers<F>(hi));
}
template <class F>
static void int_panel(const uint8_t* const* rows, size_t cols, uint8_t* panel) {
    constexpr int A = F::Numbers::first / 4, B = F::Numbers::second / 4, floats = panel_floats<F>();
    const size_t blocks = cols / 32, chunks = int_chunks(cols);
    float* scales = (float*)(panel + chunks * 512 * kPanelRows);
    for (size_t c = 0; c < chunks; c++)
        for (int v = 0; v < 2; v++) {
            const int left = int(smaller(16, blocks - 16 * c));
            Planes planes[W];
            for (int i = 0; i < W; i++) planes[i] = F::planes(rows[v * W + i], cols, 16 * c);
            alignas(64) float of[floats][16][W];
            if (left == 16)
                block_floats<F>(planes, 16, of);
            else
                block_floats<F>(planes, left, of);
            vi a[16 * A + W], b[16 * B + W];
            plane_columns<A>(planes, 0, left, a), plane_columns<B>(planes, 1, left, b);
            for (int j = 0; j < 16; j++) {
                const size_t slot = lane_slot(16 * c + size_t(j), chunks);
                for (int f = 0; f < floats; f++)
                    vi_store(scales + ((slot * floats + size_t(f)) * 2 + size_t(v)) * W, vi_load(of[f][j]));
                if (j >= left) continue;
                uint8_t* to = panel + (slot * 16 + size_t(v)) * (4 * W);
                spread_block<F, 0>(a + A * j, b + B * j, to), spread_block<F, 1>(a + A * j, b + B * j, to);
                spread_block<F, 2>(a + A * j, b + B * j, to), spread_block<F, 3>(a + A * j, b + B * j, to);
            }
        }
}

// A block of kTileTokens tokens. extra: OFFSET: - added * (sum of q). AFFINE: - d * (sum of q), a float.
// GROUPS: OFFSET's of each half. GROUPS_AFFINE: the sum of each half, a float.
template <Kind KIND>
struct XTile {
    static constexpr int extras = KIND == GROUPS || KIND == GROUPS_AFFINE ? 2 : 1;
    int32_t q[8][kTileTokens];  // dword k of each
    float d[kTileTokens];
    int32_t extra[extras][kTileTokens];
    float real(int i, size_t t) const {
        float f;
        memcpy(&f, &extra[i][t], 4);
        return f;
    }
    void put(size_t n, const int8_t* numbers, float scale, const int32_t* more) {  // token n's
        for (int k = 0; k < 8; k++) memcpy(&q[k][n], numbers + 4 * k, 4);
        d[n] = scale;
        for (int i = 0; i < extras; i++) extra[i][n] = more[i];
    }
};

// What a block's product with a token adds to a lane of W rows. sum: of both halves, times their scales where
// they have them. scale(f): as in a panel. d, extra(i): of the token, as XTile has them as floats.
template <Kind KIND, class SCALE, class EXTRA>
static TC_INLINE vf add_scaled(vf lane, vf sum, SCALE scale, float d, EXTRA extra) {
    lane = vfma(sum, vmul(scale(0), vset1(d)), lane);
    if constexpr (KIND == AFFINE) lane = vfma(scale(1), vset1(extra(0)), lane);
    if constexpr (KIND == GROUPS_AFFINE) {
        const vf m = vfma(scale(5), vset1(extra(1)), vmul(scale(4), vset1(extra(0))));
        lane = vfma(m, vmul(scale(1), vset1(-d)), lane);
    }
    return lane;
}

// Integer sums of dwords [K0, K0 + steps) of a block's product with NT tokens.
template <class DOT, int NT>
static inline void block_product(const uint8_t* w, const int32_t* q, int steps, vi (*total)[NT]) {
    constexpr int run = DOT::run < 8 ? DOT::run : 8;
    for (int k0 = 0; k0 < steps; k0 += run) {
        vi s[2][NT];
        if constexpr (run < 8 || !DOT::wide)
            for (int n = 0; n < NT; n++) s[0][n] = s[1][n] = vi_set1(0);
        else
            for (int n = 0; n < NT; n++) s[0][n] = total[0][n], s[1][n] = total[1][n];
        for (int k = k0; k < k0 + run && k < steps; k++) {
            const vi a = vi_load(w + k * 4 * kPanelRows), b = vi_load(w + k * 4 * kPanelRows + 4 * W);
            for (int n = 0; n < NT; n++) {
                const vi xs = vi_set1(q[k * kTileTokens + n]);
                s[0][n] = DOT::step(s[0][n], a, xs);
                s[1][n] = DOT::step(s[1][n], b, xs);
            }
        }
        for (int v = 0; v < 2; v++)
            for (int n = 0; n < NT; n++)
                total[v][n] = DOT::wide ? s[v][n] : vi_add(total[v][n], DOT::widen(s[v][n]));
    }
}

// x: the tile's, from its first token of NT on. Of `next`, `share` bytes are asked for per lane.
template <class F, int NT>
static void int_tile(const uint8_t* panel, size_t chunks, const XTile<F::kind>* x, size_t first,
                     const uint8_t* next, size_t share, float* sums) {
    using D = Dot<F::Numbers::bits>;
    constexpr int floats = panel_floats<F>(), parts = F::grouped ? 2 : 1, steps = 8 / parts;
    const float* scales = (const float*)(panel + chunks * 512 * kPanelRows);
    Tree<NT> tree;
    vf lane[2][NT];
    for (int i = 0; i < 16; i++) {
        const size_t at = size_t(tree_order(i, 16)) * chunks;
        prefetch_span(next + size_t(i) * share, share);
        for (int n = 0; n < NT; n++) lane[0][n] = lane[1][n] = vzero();
        for (size_t c = at; c < at + chunks; c++) {
            const uint8_t* w = panel + c * (8 * 4 * kPanelRows);
            const float* scale = scales + c * (floats * kPanelRows);
            auto real = [&](int f, int v) { return vload(scale + f * kPanelRows + v * W); };
            vf sum[2][NT] = {};
            for (int p = 0; p < parts; p++) {
                vi total[2][NT];
                for (int n = 0; n < NT; n++) {
                    const bool less = F::kind == OFFSET || F::kind == GROUPS;
                    total[0][n] = total[1][n] = vi_set1(less ? x[c].extra[p][first + n] : 0);
                }
                block_product<D, NT>(w + p * steps * 4 * kPanelRows, x[c].q[p * steps] + first, steps, total);
                for (int v = 0; v < 2; v++)
                    for (int n = 0; n < NT; n++) {
                        const vf s = vi_f32(total[v][n]);
                        constexpr int s0 = floats == 6 ? 2 : 1;
                        if constexpr (!F::grouped)
                            sum[v][n] = s;
                        else
                            sum[v][n] = p ? vfma(s, real(s0 + 1, v), sum[v][n]) : vmul(s, real(s0, v));
                    }
            }
            for (int v = 0; v < 2; v++)
                for (int n = 0; n < NT; n++)
                    lane[v][n] = add_scaled<F::kind>(
                        lane[v][n], sum[v][n], [&](int f) TC_INLINED { return real(f, v); },
                        x[c].d[first + n], [&](int i) TC_INLINED { return x[c].real(i, first + n); });
        }
        tree.add(i, lane);
    }
    for (int n = 0; n < NT; n++)
        for (int v = 0; v < 2; v++) vstore(sums + n * kPanelRows + v * W, lane[v][n]);
}

#include "interleaved.inl"

// -------------------------------------------------------------------------------- matrix products

// Activations as a format multiplies with them: input_bytes, tile_tokens, quantize (as in kernels.h; `n`: the
// token's place in its tile). The product: bytes (of a panel) and run, sums [tokens][kPanelRows] = panel of
// rows . tokens; `next`: what to ask memory for meanwhile. rows: of `interleaved` ones the first, where
// their group begins.
template <class F>
struct Gemm;

template <class T, vf (*LOAD)(const T*), vf (*LOAD_N)(const T*, int)>
struct Gemm<FormatFloat<T, LOAD, LOAD_N>> {
    using Format = FormatFloat<T, LOAD, LOAD_N>;
    static constexpr int tile_tokens = kFloatTileTokens;
    static size_t input_bytes(size_t cols) { return 4 * (cols + kLanes); }
    static void quantize(const float* x, size_t cols, size_t begin, size_t end, bool lanes, size_t n,
                         uint8_t* out) {
        if (lanes)
            float_lanes(x, cols, begin, end, (float*)out + n);
        else
            memcpy(out + 4 * begin, x, 4 * (end - begin));
    }
    static size_t bytes(size_t cols) {
        return sizeof(T) * kLanes * lane_stride(float_steps(smaller(cols, kFloatChunk)));
    }
    static void run(const uint8_t* const* rows, bool, size_t cols, const Input& x, const uint8_t* next,
                    uint8_t* panel, float* sums) {
        constexpr size_t G = kFloatTileTokens;
        const size_t chunks = (cols + kFloatChunk - 1) / kFloatChunk;
        const size_t share =
            kPanelRows * sizeof(T) * cols / (chunks * x.tokens * kLanes);  // per token and lane
        for (size_t i = 0; i < x.tokens * kPanelRows; i++) sums[i] = 0;
        for (size_t k0 = 0; k0 < cols; k0 += kFloatChunk) {
            const size_t n = smaller(kFloatChunk, cols - k0), steps = float_steps(n);
            float_panel<Format>(rows, k0, n, (T*)panel);
            tiles<kFloatTileTokens>(0, x.tokens, [&](size_t t, auto nt) {
                const float* xs = (const float*)(x.data + t / G * G * x.row_bytes) + k0 * G + t % G;
                float_tile<Format, nt.value>((const T*)panel, steps, xs, next, nt.value * share,
                                             sums + t * kPanelRows);
                next += nt.value * share * kLanes;
            });
        }
    }
};

template <class BLOCK>
struct Gemm<FormatBlocks<BLOCK>> {
    using Format = FormatBlocks<BLOCK>;
    using Tile = XTile<Format::kind>;
    static constexpr int tile_tokens = kTileTokens;
    static_assert(32 + 4 * panel_floats<Format>() <= 4 * kMostPanelBytes, "the memory plan counts less");
    static size_t input_bytes(size_t cols) {
        const size_t rows = sizeof(XChunk), lanes = 16 * sizeof(Tile) / kTileTokens;
        return int_chunks(cols) * (rows > lanes ? rows : lanes);
    }
    // A block's extra: as XChunk and XTile say.
    static void extras(const int8_t* q, float d, int32_t sum, bool lanes, int32_t* out) {
        int32_t half = 0;
        for (int i = 0; i < 16; i++) half += q[i];
        const int32_t halves[2] = {half, sum - half};
        const float real[3] = {-(d * float(sum)), float(halves[0]), float(halves[1])};
        if constexpr (Format::kind == OFFSET)
            out[0] = -BLOCK::added * sum;
        else if constexpr (Format::kind == AFFINE)
            memcpy(out, real, 4);
        else if (!lanes)
            out[0] = int32_t(uint32_t(halves[0]) & 0xffff) | int32_t(uint32_t(halves[1]) << 16);
        else if constexpr (Format::kind == GROUPS)
            out[0] = -BLOCK::added * halves[0], out[1] = -BLOCK::added * halves[1];
        else
            memcpy(out, real + 1, 8);
    }
    // TILE: of lanes.
    template <class TILE = Tile>
    static void quantize(const float* x, size_t cols, size_t begin, size_t end, bool lanes, size_t n,
                         uint8_t* out) {
        const size_t chunks = int_chunks(cols), last = cols / 32;
        for (size_t b = begin / 32; b < (end == cols ? chunks * 16 : end / 32); b++) {
            alignas(64) int8_t q[32] = {0};
            float d = 0;
            int32_t sum = 0, extra[2];
            if (b < last) x_quantize(x + 32 * b - begin, q, &d, &sum);
            extras(q, d, sum, lanes, extra);
            if (lanes) {
                ((TILE*)out + lane_slot(b, chunks))->put(n, q, d, extra);
                continue;
            }
            XChunk* chunk = (XChunk*)out + b / 16;
            Format::place(chunk->q, b % 16, q);
            chunk->d[b % 16] = d;
            chunk->extra[b % 16] = extra[0];
        }
    }
    static size_t bytes(size_t cols) {
        return int_chunks(cols) * 16 * kPanelRows * (32 + 4 * size_t(panel_floats<Format>()));
    }
    static void run(const uint8_t* const* rows, bool interleaved, size_t cols, const Input& x,
                    const uint8_t* next, uint8_t* panel, float* sums) {
        constexpr size_t G = kTileTokens;
        const size_t chunks = int_chunks(cols),
                     share = kPanelRows * Format::row_bytes(cols) / (x.tokens * 16);
        if (interleaved)
            interleaved_panel<Format>(rows[0], cols, panel);
        else
            int_panel<Format>(rows, cols, panel);
        tiles<kTileTokens>(0, x.tokens, [&](size_t t, auto nt) {
            const Tile* xs = (const Tile*)(x.data + t / G * G * x.row_bytes);
            int_tile<Format, nt.value>(panel, chunks, xs, t % G, next, nt.value * share,
                                       sums + t * kPanelRows);
            next += nt.value * share * 16;
        });
    }
};

// By: what multiplies with a panel.
template <class F, class By = Gemm<F>>
NOINLINE static void matmul_panels(const Matrix& w, const int32_t* ids, size_t begin, size_t end,
                                   const Input& x, const float* bias, bool add, float* y, size_t ldy,
                                   uint8_t* scratch) {
    float* sums = (float*)scratch;
    uint8_t* panel = scratch + 4 * kPanelRows * x.tokens;
    const uint8_t* rows[kPanelRows];
    for (size_t r = begin; r < end; r += kPanelRows) {
        for (size_t i = 0; i < size_t(kPanelRows);
             i++) {  // past the end: the last row again, and nobody looks
            const size_t at = smaller(r + i, end - 1);
            rows[i] = w.data + (ids ? size_t(ids[at]) : at) * w.stride;
        }
        const size_t later = smaller(r + kPanelRows, end - 1);
        By::run(rows, w.group > 1, w.cols, x, w.data + (ids ? size_t(ids[later]) : later) * w.stride, panel,
                sums);
        for (size_t t = 0; t < x.tokens; t++) {
            for (size_t i = 0; i < size_t(kPanelRows) && r + i < end; i += W) {
                const int n = int(smaller(W, end - r - i));
                float* out = y + t * ldy + (r + i - begin);
                vf v = vload(sums + t * kPanelRows + i);
                if (bias) v = vadd(v, vload_n(bias + r + i, n));
                vstore_n(out, add ? vadd(vload_n(out, n), v) : v, n);
            }
        }
    }
}

static void matmul(const Matrix& w, const int32_t* ids, size_t begin, size_t end, const Input& x,
                   const float* bias, bool add, float* y, size_t ldy, uint8_t* scratch, const uint8_t* then) {
    if (x.lanes) {
        for_format(w.format, [&](auto f) {
            matmul_panels<decltype(f)>(w, ids, begin, end, x, bias, add, y, ldy, scratch);
        });
    } else if (w.format == SIGNS) {
        matmul_rows<FormatSigns>(w, ids, begin, end, x, bias, add, y, ldy);
    } else if (w.group > 1) {
        for_format(w.format, [&](auto f) {
            if constexpr (decltype(f)::block > 1)
                matmul_groups<decltype(f)>(w, begin, end, x, bias, add, y, ldy, then);
        });
    } else {
        for_format(w.format,
                   [&](auto f) { matmul_rows<decltype(f)>(w, ids, begin, end, x, bias, add, y, ldy); });
    }
}
static size_t panel_bytes(Format format, size_t cols, size_t tokens) {
    size_t bytes = 0;
    for_format(format, [&](auto f) { bytes = Gemm<decltype(f)>::bytes(cols); });
    return bytes + 4 * kPanelRows * tokens;
}

// ---------------------------------------------------------------------------------------------- activations

static size_t input_bytes(Format format, size_t cols) {
    size_t bytes = sign_bytes(cols);
    for_format(format, [&](auto f) { bytes = Gemm<decltype(f)>::input_bytes(cols); });
    return bytes;
}

static size_t tile_tokens(Format format) {
    size_t tokens = 1;
    for_format(format, [&](auto f) { tokens = size_t(Gemm<decltype(f)>::tile_tokens); });
    return tokens;
}

static void signs_of(const float* x, size_t cols, uint8_t* out) {
    for (size_t c = 0; c < cols; c += W) {
        const int n = int(smaller(W, cols - c));
        const uint32_t bits = vpositive(x_some(x + c, n));
        memcpy(out + c / 8, &bits, sign_bytes(size_t(n)));
    }
}

// Token `from` of the tiles at `all` becomes token `to` of those at `out`.
static void copy_lanes(Format format, size_t cols, const uint8_t* all, size_t from, uint8_t* out, size_t to) {
    const size_t bytes = input_bytes(format, cols), tile = tile_tokens(format);
    const uint8_t* source = all + from / tile * tile * bytes + from % tile * 4;
    out += to / tile * tile * bytes + to % tile * 4;
    for (size_t i = 0; i < bytes / 4; i++) memcpy(out + 4 * i * tile, source + 4 * i * tile, 4);
}

static void quantize(Format format, const float* x, size_t cols, size_t begin, size_t end, bool lanes,
                     size_t row_bytes, size_t t, uint8_t* out) {
    const size_t tile = lanes ? tile_tokens(format) : 1, n = t % tile;
    out += (t - n) * row_bytes;
    if (format == SIGNS) return signs_of(x, cols, out);
    for_format(format, [&](auto f) { Gemm<decltype(f)>::quantize(x, cols, begin, end, lanes, n, out); });
}
