// Numbers of blocks -> bytes of a pack's row: planes, one after the other (docs/internals/pack.md).
#include <string.h>

#include "search.h"

namespace tc {
namespace {

uint8_t* nibbles(const uint8_t* q, uint8_t* out) {  // of 32 weights
    for (int j = 0; j < 16; j++) out[j] = uint8_t((q[j] & 15) | (q[j + 16] & 15) << 4);
    return out + 16;
}
uint8_t* pairs(const uint8_t* q, int shift, uint8_t* out) {
    for (int k = 0; k < 8; k++) {
        int b = 0;
        for (int i = 0; i < 4; i++) b |= (q[8 * i + k] >> shift & 3) << 2 * i;
        out[k] = uint8_t(b);
    }
    return out + 8;
}
uint8_t* singles(const uint8_t* q, int shift, uint8_t* out) {
    for (int k = 0; k < 4; k++) {
        int b = 0;
        for (int t = 0; t < 4; t++) {
            b |= (q[4 * t + k] >> shift & 1) << t;
            b |= (q[16 + 4 * t + k] >> shift & 1) << (4 + t);
        }
        out[k] = uint8_t(b);
    }
    return out + 4;
}
uint8_t* half(uint16_t h, uint8_t* out) {
    out[0] = uint8_t(h);
    out[1] = uint8_t(h >> 8);
    return out + 2;
}

struct Planes {
    const BlockNumbers* blocks;
    size_t n;       // blocks
    int per_block;  // parts of 32 weights in one
    uint8_t* out;

    template <class Fn>
    void each_32(Fn f) {
        for (size_t i = 0; i < n; i++)
            for (int p = 0; p < per_block; p++) out = f(blocks[i].quants + 32 * p, out);
    }
    template <class Fn>
    void each(Fn f) {
        for (size_t i = 0; i < n; i++) out = f(blocks[i], out);
    }
    void low_nibbles() { each_32(nibbles); }
    void low_pairs() {
        each_32([](const uint8_t* q, uint8_t* o) { return pairs(q, 0, o); });
    }
    void fifth() {
        each_32([](const uint8_t* q, uint8_t* o) { return singles(q, 4, o); });
    }
    void super() {
        each([](const BlockNumbers& b, uint8_t* o) { return half(b.super, o); });
    }
    void super_minimum() {
        each([](const BlockNumbers& b, uint8_t* o) { return half(b.super_minimum, o); });
    }
    void bytes(int count) {
        each([count](const BlockNumbers& b, uint8_t* o) {
            memcpy(o, b.scales, size_t(count));
            return o + count;
        });
    }
    void k_scales() {  // of 6 bits: 8 scales with two bits of the minima, then the minima's others
        each([](const BlockNumbers& b, uint8_t* o) {
            for (int i = 0; i < 8; i++) *o++ = uint8_t(b.scales[i] | (b.minima[i] & 3) << 6);
            return o;
        });
        each([](const BlockNumbers& b, uint8_t* o) {
            for (int i = 0; i < 4; i++) *o++ = uint8_t(b.minima[i] >> 2 | b.minima[i + 4] >> 2 << 4);
            return o;
        });
        super();
        super_minimum();
    }
    void offset_scales(int count) {  // of 6 bits, stored with 32 added: low nibbles, then pairs of high bits
        each([count](const BlockNumbers& b, uint8_t* o) {
            for (int i = 0; i < count; i += 2)
                *o++ = uint8_t(((b.scales[i] + 32) & 15) | ((b.scales[i + 1] + 32) & 15) << 4);
            return o;
        });
        each([count](const BlockNumbers& b, uint8_t* o) {
            for (int i = 0; i < count; i += 4) {
                int high = 0;
                for (int k = 0; k < 4; k++) high |= ((b.scales[i + k] + 32) >> 4 & 3) << 2 * k;
                *o++ = uint8_t(high);
            }
            return o;
        });
        super();
    }
};

}  // namespace

void store_row(Search format, const BlockNumbers* blocks, size_t columns, uint8_t* out) {
    const size_t together = searched_together(format);
    Planes p = {blocks, columns / together, int(together / 32), out};
    switch (format) {
        case Search::Q8_0:
            p.each([](const BlockNumbers& b, uint8_t* o) {
                memcpy(o, b.quants, 32);
                return o + 32;
            });
            return p.super();
        case Search::Q4_0:
        case Search::IQ4_NL:
            p.low_nibbles();
            return p.super();
        case Search::Q4_1:
            p.low_nibbles();
            p.super();
            return p.super_minimum();
        case Search::Q5_0:
            p.low_nibbles();
            p.fifth();
            return p.super();
        case Search::Q5_1:
            p.low_nibbles();
            p.fifth();
            p.super();
            return p.super_minimum();
        case Search::Q4_K:
            p.low_nibbles();
            return p.k_scales();
        case Search::Q5_K:
            p.low_nibbles();
            p.fifth();
            return p.k_scales();
        case Search::Q6_K:
            p.low_nibbles();
            p.each_32([](const uint8_t* q, uint8_t* o) { return pairs(q, 4, o); });
            p.bytes(16);
            return p.super();
        case Search::Q3_K:
            p.low_pairs();
            p.each_32([](const uint8_t* q, uint8_t* o) { return singles(q, 2, o); });
            return p.offset_scales(16);
        case Search::Q2_K:
            p.low_pairs();
            p.each([](const BlockNumbers& b, uint8_t* o) {
                for (int i = 0; i < 16; i++) *o++ = uint8_t(b.scales[i] | b.minima[i] << 4);
                return o;
            });
            p.super();
            return p.super_minimum();
        case Search::IQ4_XS:
            p.low_nibbles();
            return p.offset_scales(8);
        case Search::MXFP4:
            p.low_nibbles();
            p.each([](const BlockNumbers& b, uint8_t* o) {
                *o = uint8_t(b.super);
                return o + 1;
            });
            return;
        case Search::TQ2_0:
            p.low_pairs();
            return p.super();
        case Search::COUNT:
            return;
    }
}

}  // namespace tc
