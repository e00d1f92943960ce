// Which kernels run: the best the CPU has, or what THERMOCLINE_ISA lowers it to. Decided once.
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "system.h"

#if defined(THERMOCLINE_X86) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace tc {

#ifdef THERMOCLINE_X86
#ifdef __GNUC__
static bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool has_avxvnni() {  // no name for __builtin_cpu_supports before GCC 12 and Clang 18
    unsigned a = 0, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
static bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#else
static bool has_avx2() { return false; }
static bool has_avxvnni() { return false; }
static bool has_avx512() { return false; }
#endif
#ifdef THERMOCLINE_AMX
static bool has_amx() {
    unsigned a, b, c, d;
    constexpr unsigned tiles = 1u << 24 | 1u << 25;  // AMX-TILE, AMX-INT8
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tiles) == tiles && may_use_tiles();
}
#endif
#ifndef THERMOCLINE_AVXVNNI
static const Kernels* avxvnni_kernels() { return nullptr; }  // the compiler does not know it
#endif
#endif

// Zen 5 (family 1Ah) does not stream groups by itself: one thread had 21 GB/s of q6_k, 37 asked for 8 KiB
// ahead into the first level, and 29 to 34 into the second. Zen 4 does, and was slower where they are asked
// for. No other processor was measured.
//
// Of rows it drops requests into the second level where many are under way: two threads had 26 to 36 GB/s of
// every tenth neuron's in q4_0, and 36 to 39 asked for into the first; one of f16 rows in turn 27, and 30.
static bool is_zen5() {
#if defined(THERMOCLINE_X86) && defined(__GNUC__)
    unsigned a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && __get_cpuid(1, &a, &b, &c, &d))
        return (a >> 8 & 15) + (a >> 20 & 255) >= 0x1A;
#endif
    return false;
}
std::atomic<size_t> group_ahead{is_zen5() ? size_t(8192) : size_t(0)};
std::atomic<bool> rows_near{is_zen5()};

struct Level {
    const char* isa;
    bool (*supported)();
    const Kernels* (*kernels)();
};
static const Level levels[] = {
#ifdef THERMOCLINE_X86
#ifdef THERMOCLINE_AMX
    {"amx", has_amx, amx_kernels},
#endif
    {"avx512", has_avx512, avx512_kernels},
    {"avxvnni", has_avxvnni, avxvnni_kernels},
    {"avx2", has_avx2, avx2_kernels},
#endif
#ifdef THERMOCLINE_ARM
    {"neon", arm_has_dot_products, neon_kernels},
#endif
    {"scalar", [] { return true; }, scalar_kernels},
};
constexpr size_t kLevels = sizeof levels / sizeof *levels;

const char* isa_level(size_t i) { return i < kLevels ? levels[i].isa : nullptr; }

static const Kernels* kernels_of(const Level& level) { return level.supported() ? level.kernels() : nullptr; }

const Kernels* kernels_named(const char* isa) {
    for (const Level& level : levels)
        if (!strcmp(level.isa, isa)) return kernels_of(level);
    return nullptr;
}

static const Kernels* choose() {
    const char* limit = getenv("THERMOCLINE_ISA");
    bool below = limit == nullptr || !*limit;
    for (const Level& level : levels) {
        below = below || !strcmp(level.isa, limit);
        const Kernels* const kernels = below ? kernels_of(level) : nullptr;
        if (kernels) return kernels;
    }
    return nullptr;  // an unknown name: bindings.cpp turns it into an error at import
}

const Kernels* chosen_kernels() {
    static const Kernels* const chosen = choose();
    return chosen;
}

}  // namespace tc
