// The kernels for one ISA; compiled with its flags (CMakeLists.txt). Nothing else may live here.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace tc {
namespace {
#define ISA_NAME "avx2"
#include "simd_avx2.h"
#include "kernels.inl"
#include "gemm.inl"
#include "ops.inl"
}  // namespace
const Kernels* avx2_kernels() { return &table; }
}  // namespace tc
