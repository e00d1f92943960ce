// The kernels for one ISA; compiled with its flags (CMakeLists.txt). Nothing else may live here.
#include <math.h>
#include <string.h>

#include "kernels.h"

namespace tc {
namespace {
#define ISA_NAME "scalar"
#include "simd_scalar.h"
#include "kernels.inl"
#include "gemm.inl"
#include "ops.inl"
}  // namespace
const Kernels* scalar_kernels() { return &table; }
}  // namespace tc
