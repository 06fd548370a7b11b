/* Processors with matrix registers: AVX-512, and tiles for bfloat16 in blocks. Their vdpbf16ps takes four times an
 * FMA's time (docs/decisions/0015), so there is no linear_pairs. */
#if defined(__x86_64__) && defined(__GNUC__)
/* The headers first: what they define must not be compiled for AVX-512. */
#include <immintrin.h>
#include <string.h>

#include "kernels.h"

#include "avx512.h"

#define CLB_ISA amx
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,amx-tile,amx-bf16")
#endif

#include "linear_tiles.h"

/* As they lie. */
#define FIRST_OF_PAIR(j) (2 * (j))
#define SECOND_OF_PAIR(j) (2 * (j) + 1)
#define PAIR(first, second) (first >> 16 | second)
#include "narrow.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const clb_kernels clb_kernels_avx512_amx =
    CLB_AVX512("avx512_amx", NULL, KERNEL(linear_tiles), KERNEL(pair_up), KERNEL(narrow_f32));
#endif
