#define _GNU_SOURCE
#include "usable.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

#ifdef HAVE_AMXINT8
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023 /* asm/prctl.h of Linux 5.16 */
#define XFEATURE_XTILEDATA 18
#endif

#ifdef HAVE_AVX2
static bool has_avx2(void) {
    __builtin_cpu_init(); /* checks that the operating system saves the wide registers, too */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

#ifdef HAVE_AVX512VNNI
static bool has_avx512vnni(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef HAVE_AMXINT8
/* Linux gives tiles to a process that asks; the answer holds for all its threads and for its children. */
static bool has_amxint8(void) {
    return has_avx512vnni() && __builtin_cpu_supports("gfni") && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

#ifdef HAVE_NEONDOT
/* Dot products are optional in Armv8.2, which is all else the neondot build asks for. */
static bool has_neondot(void) {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true; /* every Apple silicon Mac */
#endif
}
#endif

int usable_kernels(const struct kernels *tables[MAX_TABLES]) {
    int num_tables = 0;
    tables[num_tables++] = &kernels_base;
#ifdef HAVE_AVX2
    if (has_avx2()) tables[num_tables++] = &kernels_avx2;
#endif
#ifdef HAVE_AVX512VNNI
    if (has_avx512vnni()) tables[num_tables++] = &kernels_avx512vnni;
#endif
#ifdef HAVE_AMXINT8
    if (has_amxint8()) tables[num_tables++] = &kernels_amxint8;
#endif
#ifdef HAVE_NEONDOT
    if (has_neondot()) tables[num_tables++] = &kernels_neondot;
#endif
    return num_tables;
}
