// The kernels for one ISA; compiled with its flags (CMakeLists.txt). Nothing else may live here.
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace tc {
namespace {
#define ISA_NAME "neon"
#include "simd_neon.h"
#include "kernels.inl"
#include "gemm.inl"
#include "ops.inl"
}  // namespace
const Kernels* neon_kernels() { return &table; }
}  // namespace tc
