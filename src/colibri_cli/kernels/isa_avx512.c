/* AVX-512 runs linear layers and what surrounds them; what is left takes so little time that AVX2's kernels do. */
#if defined(__x86_64__) && defined(__GNUC__)
/* The headers first: what they define must not be compiled for AVX-512. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")
#endif

#include "simd_avx512.h"

#include "transcendental.h"

#include "activation.h"
#include "linear.h"
#include "quant.h"
#include "quantize.h"

#include "peak.h"

#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512bf16")
#endif

#include "linear_pairs.h"

/* As pair_up's of blocks. */
#define FIRST_OF_PAIR(j) (4 * ((j) / 2) + (j) % 2)
#define SECOND_OF_PAIR(j) (FIRST_OF_PAIR(j) + 2)
#define PAIR(first, second) (first | second >> 16)
#include "narrow.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#include "avx512.h"

const clb_kernels clb_kernels_avx512 = CLB_AVX512("avx512", NULL, NULL, NULL, clb_narrow_f32_avx2);
const clb_kernels clb_kernels_avx512_bf16 =
    CLB_AVX512("avx512_bf16", KERNEL(linear_pairs), NULL, KERNEL(pair_up), KERNEL(narrow_f32));
#endif
