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

#include "narrow.h"
#include "peak.h"

#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx512bf16")
#endif

#include "linear_pairs.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#define OF_AVX2(op) extern __typeof__(*((clb_kernels *)0)->op) clb_##op##_avx2
OF_AVX2(linear_bf16);
OF_AVX2(transpose_f32);
OF_AVX2(pack_group);
OF_AVX2(fill_panels);
OF_AVX2(widen_f16);
OF_AVX2(linear_in_place_f32);
OF_AVX2(linear_eight);
OF_AVX2(accumulate_f32);
OF_AVX2(softmax_f32);
OF_AVX2(score_f32);
OF_AVX2(gate_f32);

/* bfloat16 is cheaper to widen 8 lanes at a time: 115 against 105 GFLOP/s over 96 rows on a Zen 4 core. In place it is
 * no faster from registers there. Panels are taken whole: L2 caches beside 16 lanes hold 96 rows and more. */
#define TABLE(name, pairs, pair_up) \
  {name,                            \
   0,                               \
   KERNEL(linear_f32),              \
   clb_linear_bf16_avx2,            \
   KERNEL(linear_i8),               \
   KERNEL(linear_i4),               \
   pairs,                           \
   pair_up,                         \
   KERNEL(quantize),                \
   clb_transpose_f32_avx2,          \
   clb_pack_group_avx2,             \
   clb_fill_panels_avx2,            \
   clb_widen_f16_avx2,              \
   clb_linear_in_place_f32_avx2,    \
   NULL,                            \
   clb_linear_eight_avx2,           \
   KERNEL(activate_f32),            \
   KERNEL(narrow_f32),              \
   clb_accumulate_f32_avx2,         \
   clb_softmax_f32_avx2,            \
   clb_score_f32_avx2,              \
   clb_gate_f32_avx2,               \
   KERNEL(peak_f32)}
const clb_kernels clb_kernels_avx512 = TABLE("avx512", NULL, NULL);
const clb_kernels clb_kernels_avx512_bf16 = TABLE("avx512_bf16", KERNEL(linear_pairs), KERNEL(pair_up));
#endif
