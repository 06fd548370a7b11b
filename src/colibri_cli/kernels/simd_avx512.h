/* Sixteen lanes: AVX-512 with VNNI, for linear layers and what surrounds them (isa_avx512.c). See simd_scalar.h for
 * what the names mean. A panel row is one vector. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define CLB_ISA avx512
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 16
#define SINGLE_TILE 6
#define PAIR_TILE 6  /* 12 accumulators, more than the latency needs; the broadcast is part of the FMA */
#define QUANT_ROWS 8 /* as many int32 and float accumulators */

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vm vf_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }
static inline vi vi_select(vm m, vi a, vi b) { return _mm512_mask_blend_epi32(m, b, a); }
static inline void vi_store(int32_t *p, vi x) { _mm512_storeu_si512(p, x); }
static inline vi vi_of(vf whole) { return _mm512_cvtps_epi32(whole); }
static inline vi vi_bits(vf x) { return _mm512_castps_si512(x); }
static inline vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
static inline int32_t vi_highest(vi a) { return _mm512_reduce_max_epi32(a); }
static inline vi vi_half(vi n) { return _mm512_srai_epi32(n, 1); }
static inline vm vi_odd(vi n) { return _mm512_test_epi32_mask(n, _mm512_set1_epi32(1)); }
static inline vf vf_scale(vf x, vi n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(n, 23)));
}
static inline vf vf_of(vi n) { return _mm512_cvtepi32_ps(n); }
/* A panel row of bfloat16: one permutation of 16-bit words puts column j into the upper half of lane j. */
static inline void vf_load_bf16(const void *p, vf row[1]) {
  const __m512i column = _mm512_set_epi16(15, 0, 13, 0, 11, 0, 9, 0, 7, 0, 5, 0, 3, 0, 1, 0, 14, 0, 12, 0, 10, 0, 8, 0,
                                          6, 0, 4, 0, 2, 0, 0, 0);
  __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256(p));
  row[0] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, column, words));
}

static inline __m512i broadcast_4_bytes(const char *p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

/* Integer dots (quant.h) by vpdpwssd and vpdpbusd, which do not saturate. Few rows have several sums each, so that the
 * adds' latency does not set the pace. What is next is asked for step by step: all at once would stop the loads. */
static inline __attribute__((always_inline)) vi narrow_pair(const void *w, int i) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)w + i));
}
/* Low nibbles are columns 0..7, high ones 8..15. */
static inline __attribute__((always_inline)) vi nibble_quad(const void *w, int i) {
  __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)w + i));
  const __m512i shift = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
  return _mm512_and_si512(_mm512_srlv_epi64(both, shift), _mm512_set1_epi8(15));
}
static inline __attribute__((always_inline)) void dots(const char *const *x, int n_rows, const void *w, int n_steps,
                                                       vi (*load)(const void *w, int i), int bytes, const char *next,
                                                       vi (*sums)[1]) {
  enum { MOST = 4 };
  int in_chunk = bytes ? 8 : 16, n_sums = n_rows <= 2 ? MOST : n_rows <= 4 ? 2 : 1;
  vi sum[QUANT_ROWS][MOST];
#pragma GCC unroll 8
  for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
    for (int s = 0; s < n_sums; s++) sum[r][s] = _mm512_setzero_si512();
#pragma GCC unroll 1
  for (int first = 0; first < n_steps; first += in_chunk)
#pragma GCC unroll 2
    for (int i = first; i < first + in_chunk; i += n_sums) {
#pragma GCC unroll 4
      for (int s = 0; s < n_sums; s++) {
        if (next && s % 2 == 0) __builtin_prefetch(next + 32 * (i + s), 0, 2);
        vi w_i = load(w, i + s);
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++) {
          vi a = broadcast_4_bytes(x[r] + 4 * (i + s));
          sum[r][s] = bytes ? _mm512_dpbusd_epi32(sum[r][s], w_i, a) : _mm512_dpwssd_epi32(sum[r][s], w_i, a);
        }
      }
    }
#pragma GCC unroll 8
  for (int r = 0; r < n_rows; r++) {
    sums[r][0] = sum[r][0];
#pragma GCC unroll 4
    for (int s = 1; s < n_sums; s++) sums[r][0] = _mm512_add_epi32(sums[r][0], sum[r][s]);
  }
}
static inline __attribute__((always_inline)) void dots_i8(const char *const *x, int n_rows, const char *w, int n_inputs,
                                                          const char *next, vi (*sums)[1]) {
  dots(x, n_rows, w, n_inputs / 2, narrow_pair, 0, next, sums);
}
static inline __attribute__((always_inline)) void dots_u4(const char *const *x, int n_rows, const char *w,
                                                          vi (*sums)[1]) {
  dots(x, n_rows, w, 8, nibble_quad, 1, NULL, sums);
}
/* Scales and zeros of a group, as plain_i4 (dots_plain.h). */
static inline void vf_load_i4(const char *codes, vf scale[1], vf zero[1]) {
  __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes));
  __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes + 1));
  scale[0] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(code, 19), _mm512_set1_epi32((127 - 15) << 23)));
  zero[0] = _mm512_mul_ps(_mm512_cvtepi32_ps(z), _mm512_set1_ps(-0.0625f));
}
