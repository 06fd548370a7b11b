/* The tables of processors with AVX-512: what isa_avx512.c defines, AVX2's kernels for the rest, and what differs. */
#ifndef CLB_AVX512_H
#define CLB_AVX512_H

#include "kernels.h"

#define CLB_DECLARE(op, isa) extern __typeof__(*((clb_kernels *)0)->op) clb_##op##_##isa
CLB_DECLARE(linear_bf16, avx2);
CLB_DECLARE(transpose_f32, avx2);
CLB_DECLARE(pack_group, avx2);
CLB_DECLARE(fill_panels, avx2);
CLB_DECLARE(widen_f16, avx2);
CLB_DECLARE(linear_in_place_f32, avx2);
CLB_DECLARE(linear_in_place_blocks, avx2);
CLB_DECLARE(linear_eight, avx2);
CLB_DECLARE(narrow_f32, avx2);
CLB_DECLARE(accumulate_f32, avx2);
CLB_DECLARE(softmax_f32, avx2);
CLB_DECLARE(score_f32, avx2);
CLB_DECLARE(gate_f32, avx2);
CLB_DECLARE(linear_f32, avx512);
CLB_DECLARE(linear_i8, avx512);
CLB_DECLARE(linear_i4, avx512);
CLB_DECLARE(quantize, avx512);
CLB_DECLARE(activate_f32, avx512);
CLB_DECLARE(peak_f32, avx512);

/* bfloat16 is cheaper to widen 8 lanes at a time: 115 against 105 GFLOP/s over 96 rows on a Zen 4 core. In place it is
 * no faster from registers there. Panels are taken whole: L2 caches beside 16 lanes hold 96 rows and more. */
#define CLB_AVX512(name, pairs, tiles, pair_up, narrow) \
  {name,                                                \
   0,                                                   \
   clb_linear_f32_avx512,                               \
   clb_linear_bf16_avx2,                                \
   clb_linear_i8_avx512,                                \
   clb_linear_i4_avx512,                                \
   pairs,                                               \
   tiles,                                               \
   pair_up,                                             \
   clb_quantize_avx512,                                 \
   clb_transpose_f32_avx2,                              \
   clb_pack_group_avx2,                                 \
   clb_fill_panels_avx2,                                \
   clb_widen_f16_avx2,                                  \
   clb_linear_in_place_f32_avx2,                        \
   NULL,                                                \
   clb_linear_in_place_blocks_avx2,                     \
   clb_linear_eight_avx2,                               \
   clb_activate_f32_avx512,                             \
   narrow,                                              \
   clb_accumulate_f32_avx2,                             \
   clb_softmax_f32_avx2,                                \
   clb_score_f32_avx2,                                  \
   clb_gate_f32_avx2,                                   \
   clb_peak_f32_avx512}

#endif
