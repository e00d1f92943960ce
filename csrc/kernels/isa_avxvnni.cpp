// The kernels for one ISA; compiled with its flags (CMakeLists.txt). Nothing else may live here.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace tc {
namespace {
#define AVXVNNI 1  // what simd_avx2.h does with it: one dot product instruction instead of two or three
#define ISA_NAME "avxvnni"
#include "simd_avx2.h"
#include "kernels.inl"
#include "gemm.inl"
#include "ops.inl"
}  // namespace
const Kernels* avxvnni_kernels() { return &table; }
}  // namespace tc
