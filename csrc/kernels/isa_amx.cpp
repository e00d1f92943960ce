// AVX-512's kernels but for products of many tokens in formats of blocks: amx.inl. Compiled with the flags of
// both (CMakeLists.txt). Nothing else may live here.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace tc {
namespace {
#define TC_AMX 1  // panels hold signed numbers
#include "simd_avx512.h"
#include "kernels.inl"
#include "gemm.inl"
#include "amx.inl"
}  // namespace
const Kernels* amx_kernels() {
    static const Kernels table = unit_kernels();
    return &table;
}
}  // namespace tc
