// Weight block layouts: GGUF's, bit for bit (see DESIGN.md, "Pack"). numpy's side is thermocline/quant.py.
#pragma once
#include <stdint.h>

struct BlockQ8_0 {
    uint16_t d;      // f16 scale
    int8_t q[32];    // w = d * q
};
static_assert(sizeof(BlockQ8_0) == 34, "q8_0 is 34 bytes per 32 weights");

struct BlockQ4_0 {
    uint16_t d;      // f16 scale
    uint8_t q[16];   // weight j < 16: low nibble of q[j]; weight j + 16: its high nibble; w = d * (nibble - 8)
};
static_assert(sizeof(BlockQ4_0) == 18, "q4_0 is 18 bytes per 32 weights");
