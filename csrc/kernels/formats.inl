// The weight formats as the kernels read them: a struct `FormatNAME` for each row of formats.h. Included by
// kernels.inl. A format of another kind than the two below needs all of
//   block, block_bytes, row_bytes(cols)
//   row_tokens, dot<NT>   one row times NT tokens as `quantize` left them, asking memory for the next row
//   unpack, unpack_n      32 weights (fewer) as floats without their scale
//   scales                h * the scale of every 32 columns; h alone where `unpack` gives the weights with it
//   Gemm<F>               in gemm.inl: the activations' two arrangements, and a product through a panel
// A format of 32 weights a block with one scale is FormatBlocks of a struct that says how a block is stored.

// ---------------------------------------------------------------------------------------------- float
// formats

template <class T, vf (*LOAD)(const T*), vf (*LOAD_N)(const T*, int)>
struct FormatFloat {
    using Stored = T;
    static constexpr size_t block = 1, block_bytes = sizeof(T);
    static constexpr bool packs_short_rows = false;
    static size_t row_bytes(size_t n) { return sizeof(T) * n; }
    static vf load(const uint8_t* row, size_t c) { return LOAD((const T*)row + c); }
    static vf load_some(const uint8_t* row, size_t c, int n) {
        return n >= W ? load(row, c) : LOAD_N((const T*)row + c, n);
    }
    static constexpr int row_tokens = kFloatRowTokens;
    // Of NT tokens, `stride` bytes apart. `next`: a row to ask memory for meanwhile.
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t stride, size_t cols,
                    float* out) {
        const T* w = (const T*)row;
        auto x = [&](int n, size_t k) { return (const float*)(input + size_t(n) * stride) + k; };
        for (int n = 0; n < NT; n++) out[n] = 0;
        prefetch(next);
        for (size_t k0 = 0; k0 < cols; k0 += kFloatChunk) {
            const size_t end = smaller(cols, k0 + kFloatChunk);
            vf acc[NT][kLanes / W];  // several sums hide the latency of the fused multiply-add
            for (int n = 0; n < NT; n++)
                for (int v = 0; v < kLanes / W; v++) acc[n][v] = vzero();
            size_t k = k0;
            for (; k + kLanes <= end; k += kLanes) {
                prefetch_on(next + sizeof(T) * k, sizeof(T) * kLanes);
                for (int v = 0; v < kLanes / W; v++) {
                    const vf a = LOAD(w + k + v * W);
                    for (int n = 0; n < NT; n++) acc[n][v] = vfma(a, vload(x(n, k + v * W)), acc[n][v]);
                }
            }
            for (int v = 0; v < kLanes / W; v++, k += W) {
                if (k >= end) continue;
                const vf a = load_some(row, k, int(end - k));
                for (int n = 0; n < NT; n++) acc[n][v] = vfma(a, x_some(x(n, k), int(end - k)), acc[n][v]);
            }
            for (int n = 0; n < NT; n++) out[n] += vsum(halves<kLanes / W>(acc[n]));
        }
    }
    static void unpack(const uint8_t* row, size_t c, vf* out) {
        for (int k = 0; k < 32 / W; k++) out[k] = LOAD((const T*)row + c + k * W);
    }
    static vf unpack_n(const uint8_t* row, size_t c, int n) { return LOAD_N((const T*)row + c, n); }
    static void scales(const uint8_t*, size_t, size_t, size_t n, float h, float* out) {
        for (size_t b = 0; b < n; b++) out[b] = h;
    }
};
using FormatF32 = FormatFloat<float, vload, vload_n>;
using FormatF16 = FormatFloat<uint16_t, vload_f16, vload_f16_n>;
using FormatBF16 = FormatFloat<uint16_t, vload_bf16, vload_bf16_n>;

// ---------------------------------------------------------------------------------------------- blocks of 32

// One token's activations for the row kernels: chunks of 16 blocks. Blocks past the end are zero, scale and
// all.
struct XChunk {
    int8_t q[512];  // where a block's numbers lie is the format's: `place`
    float d[16];
    int32_t offset[16];  // - (what was added to the weights) * (sum of q)
};

// Bytes between two dwords of a block in a panel: a dword of each of 2 * W rows (gemm.inl).
constexpr int kPanelStep = 2 * 4 * W;

// Scales of f16, one a block.
struct ScaleF16 {
    using Stored = uint16_t;
    static vf load(const Stored* d) { return vload_f16(d); }
    static vf load_n(const Stored* d, int n) { return vload_f16_n(d, n); }
};

// Rows of `BLOCK`, planar: the quants of all blocks, then their scales. w = scale * quant. BLOCK has
//   Scale, quant_bytes    of 32 quants
//   added                 what `sums` and `spread` add to each weight
//   packs_short_rows      its blocks lie in an XChunk in their order, so that those of several rows fit one
//   sums<NT>              the 16 dot products of a chunk's blocks, exact
//   unpack                32 quants as floats, less nothing
//   place                 block i of x into the chunk where `sums` wants it
//   spread, Product       a dword of each row as dwords of int8 in a panel, and how these are multiplied
template <class BLOCK>
struct FormatBlocks {
    using Block = BLOCK;
    using Scale = typename BLOCK::Scale;
    using StoredScale = typename Scale::Stored;
    static constexpr size_t block = 32, block_bytes = BLOCK::quant_bytes + sizeof(StoredScale);
    static constexpr int quant_bytes = BLOCK::quant_bytes, row_tokens = kRowTokens;
    static constexpr bool packs_short_rows = BLOCK::packs_short_rows;
    static size_t row_bytes(size_t n) { return n / block * block_bytes; }
    static const StoredScale* row_scales(const uint8_t* row, size_t cols) {
        return (const StoredScale*)(row + cols / 32 * quant_bytes);
    }
    template <int NT>
    static inline void add_chunk(const uint8_t* q, const StoredScale* d, const XChunk* first, size_t stride,
                                 int blocks, vf (*acc)[16 / W]) {
        vi sums[NT][16 / W];
        BLOCK::template sums<NT>(q, first->q, stride, blocks, sums);
        for (int v = 0; v < 16 / W; v++) {
            const int left = blocks - v * W;
            const vf scale = left >= W  ? Scale::load(d + v * W)
                             : left > 0 ? Scale::load_n(d + v * W, left)
                                        : vzero();
            for (int n = 0; n < NT; n++) {
                const XChunk* x = (const XChunk*)((const uint8_t*)first + size_t(n) * stride);
                const vf s = vi_f32(vi_add(sums[n][v], vi_load(x->offset + v * W)));
                acc[n][v] = vfma(s, vmul(scale, vload(x->d + v * W)), acc[n][v]);
            }
        }
    }
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t stride, size_t cols,
                    float* out) {
        const XChunk* x = (const XChunk*)input;
        const StoredScale* d = row_scales(row, cols);
        const size_t blocks = cols / 32;
        vf acc[NT][16 / W];
        for (int n = 0; n < NT; n++)
            for (int v = 0; v < 16 / W; v++) acc[n][v] = vzero();
        size_t b = 0;
        prefetch(next);
        for (; b + 16 <= blocks; b += 16, x++, next += 16 * block_bytes) {
            prefetch_on(next, 16 * block_bytes);
            add_chunk<NT>(row + b * quant_bytes, d + b, x, stride, 16, acc);
        }
        if (b < blocks) {
            prefetch_on(next, (blocks - b) * block_bytes);
            add_chunk<NT>(row + b * quant_bytes, d + b, x, stride, int(blocks - b), acc);
        }
        for (int n = 0; n < NT; n++) {
            for (int v = 1; v < 16 / W; v++) acc[n][0] = vadd(acc[n][0], acc[n][v]);
            out[n] = vsum(acc[n][0]);
        }
    }
    static void unpack(const uint8_t* row, size_t c, vf* out) {
        BLOCK::unpack(row + c / 32 * quant_bytes, out);
    }
    static vf unpack_n(const uint8_t*, size_t, int) { return vzero(); }  // cols % 32 == 0: never reached
    // out[b] = h * scale of block c/32 + b, for b in [0, n)
    static void scales(const uint8_t* row, size_t cols, size_t c, size_t n, float h, float* out) {
        const StoredScale* d = row_scales(row, cols) + c / 32;
        size_t b = 0;
        for (; b + W <= n; b += W) vstore(out + b, vmul(Scale::load(d + b), vset1(h)));
        if (b < n) vstore_n(out + b, vmul(Scale::load_n(d + b, int(n - b)), vset1(h)), int(n - b));
    }
};

struct BlockQ8_0 {  // 32 int8
    using Scale = ScaleF16;
    using Product = Dot<8>;
    static constexpr int quant_bytes = 32, added = kOffsetQ8;
    static constexpr bool packs_short_rows = true;
    template <int NT>
    static constexpr auto sums = q8_sums<NT>;
    static constexpr auto unpack = q8_unpack;
    static void place(int8_t* chunk, size_t i, const int8_t* x) { memcpy(chunk + 32 * i, x, 32); }
    static void spread(vi dwords, uint8_t* panel) {
        vi_store(panel, vi_xor(dwords, vi_set1(int32_t(0x01010101u * unsigned(kOffsetQ8)))));
    }
};
using FormatQ8_0 = FormatBlocks<BlockQ8_0>;

struct BlockQ4_0 {  // 16 bytes: weight j < 16 + 8 in the low nibble of byte j, weight j + 16 in the high one
    using Scale = ScaleF16;
    using Product = Dot<4>;
    static constexpr int quant_bytes = 16, added = 8;
    static constexpr bool packs_short_rows = false;
    template <int NT>
    static constexpr auto sums = q4_sums<NT>;
    static constexpr auto unpack = q4_unpack;
    // Low halves of kQ4Group blocks, then their high halves, as the nibbles lie in a vector.
    static void place(int8_t* chunk, size_t i, const int8_t* x) {
        const size_t group = i / kQ4Group * kQ4Group;
        memcpy(chunk + 32 * group + 16 * (i - group), x, 16);
        memcpy(chunk + 32 * group + 16 * (kQ4Group + i - group), x + 16, 16);
    }
    static void spread(vi dwords, uint8_t* panel) {
        const vi low = vi_set1(0x0f0f0f0f);
        vi_store(panel, vi_and(dwords, low));
        vi_store(panel + 4 * kPanelStep, vi_and(vi_shr4(dwords), low));
    }
};
using FormatQ4_0 = FormatBlocks<BlockQ4_0>;

// ---------------------------------------------------------------------------------------------- signs

// Bits of weights and of activations (packed by `quantize`): only `matmul` knows them.
struct FormatSigns {
    static size_t row_bytes(size_t n) { return sign_bytes(n); }
    static constexpr int row_tokens = 1;
    static constexpr bool packs_short_rows = false;
    template <int NT>
    static void dot(const uint8_t* row, const uint8_t* next, const uint8_t* input, size_t, size_t cols,
                    float* out) {
        prefetch_span(next, sign_bytes(cols));
        *out = float(int64_t(cols) - 2 * int64_t(bits_that_differ(row, input, sign_bytes(cols))));
    }
};

#define TC_ROW(id, name, weights, bytes, ...) \
    static_assert(Format##id::block == weights && Format##id::block_bytes == bytes, "formats.h differs");
TC_WEIGHT_FORMATS(TC_ROW)
#undef TC_ROW

// call(F()), F the struct of `format`; of SIGNS nothing.
template <class Fn>
static inline void for_format(Format format, Fn call) {
    switch (format) {
#define TC_ROW(id, ...)     \
    case id:                \
        call(Format##id()); \
        break;
        TC_WEIGHT_FORMATS(TC_ROW)
#undef TC_ROW
        default:
            break;
    }
}
