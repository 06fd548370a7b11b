/* Eight lanes: AVX2 and FMA. See ops.h for the names, simd_scalar.h for their meaning. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define CLB_ISA avx2
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 8
#define SINGLE_TILE 6 /* 12 accumulators, 2 vectors of the panel, 1 broadcast: 15 of 16 registers */
#define PAIR_TILE 3
#define QUANT_ROWS 4 /* 8 int32 accumulators, 2 vectors of the panel, 1 broadcast, 1 product */

typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;

static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
static inline vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vm vf_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
static inline vm vm_or(vm a, vm b) { return _mm256_or_ps(a, b); }
static inline int vm_any(vm a) { return _mm256_movemask_ps(a); }
static inline vf vf_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }
static inline vi vi_select(vm m, vi a, vi b) { return _mm256_blendv_epi8(b, a, _mm256_castps_si256(m)); }
static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
static inline void vi_store(int32_t *p, vi x) { _mm256_storeu_si256((__m256i *)p, x); }
static inline vi vi_of(vf whole) { return _mm256_cvtps_epi32(whole); }
static inline vi vi_bits(vf x) { return _mm256_castps_si256(x); }
static inline vi vi_max(vi a, vi b) { return _mm256_max_epi32(a, b); }
static inline int32_t vi_highest(vi a) {
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
static inline vi vi_half(vi n) { return _mm256_srai_epi32(n, 1); }
static inline vm vi_odd(vi n) { return _mm256_castsi256_ps(_mm256_slli_epi32(n, 31)); } /* blendv reads the sign */
static inline vf vf_scale(vf x, vi n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23)));
}
/* The low halves of 32-bit words, and the high ones, as bfloat16. */
static inline void vf_widen_bf16(vf words, vf halves[2]) {
  __m256i pairs = _mm256_castps_si256(words);
  halves[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  halves[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)));
}
/* A panel row of bfloat16 as vectors of columns: CLB_BF16's order in kernels.h. */
static inline void vf_load_bf16(const void *p, vf row[2]) { vf_widen_bf16(vf_load(p), row); }
static inline void vf_widen_row(const uint16_t *halves, float *row) { /* even halves are the first eight columns */
  const __m256i even_odd = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12,
                                            13, 2, 3, 6, 7, 10, 11, 14, 15);
  __m256i columns = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)halves), even_odd);
  columns = _mm256_permute4x64_epi64(columns, 0xd8);
  _mm256_storeu_ps(row, _mm256_cvtph_ps(_mm256_castsi256_si128(columns)));
  _mm256_storeu_ps(row + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(columns, 1)));
}
static inline vf vf_of(vi n) { return _mm256_cvtepi32_ps(n); }

/* Integer dots of up to 4 rows with one group of a panel (quant.h). vpmaddwd and vpmaddubsw multiply and add the 2 or 4
 * neighbouring inputs that the layout puts side by side; no intermediate saturates. */
#define KEEP_IN_REGISTERS(a, b) __asm__("" : "+x"(a), "+x"(b))
static inline __m256i broadcast_4_bytes(const char *p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm256_set1_epi32(word);
}
static inline __attribute__((always_inline)) void dots_i8(const char *const *x, int n_rows, const char *w, int n_inputs,
                                                          const char *next, vi (*sums)[2]) {
#pragma GCC unroll 4
  for (int r = 0; r < n_rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
  for (int first = 0; first < n_inputs / 2; first += CLB_CHUNK / 2) {
    if (next)
#pragma GCC unroll 1
      for (int i = 0; i < 8; i++) __builtin_prefetch(next + 32 * first + 64 * i, 0, 2);
#pragma GCC unroll 4
    for (int i = first; i < first + CLB_CHUNK / 2; i++) {
      __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w + 2 * i));
      __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w + 2 * i + 1));
#pragma GCC unroll 4
      for (int r = 0; r < n_rows; r++) {
        __m256i a = broadcast_4_bytes(x[r] + 4 * i);
        sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(a, low));
        sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(a, high));
        KEEP_IN_REGISTERS(sums[r][0], sums[r][1]);
      }
    }
  }
}

static inline __attribute__((always_inline)) void dots_bytes(const char *const *x, int n_rows, const void *w,
                                                             int packed, vi (*sums)[2]) {
  __m256i nibble = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int r = 0; r < n_rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i low, high;
    if (packed) {
      __m256i both = _mm256_loadu_si256((const __m256i *)w + i);
      low = _mm256_and_si256(both, nibble);
      high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    } else {
      low = _mm256_loadu_si256((const __m256i *)w + 2 * i);
      high = _mm256_loadu_si256((const __m256i *)w + 2 * i + 1);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++) { /* int16 sums of 8 x 2 products: at most 8 x 2 x 15 x 127 = 30,480 */
      __m256i a = broadcast_4_bytes(x[r] + 4 * i);
      sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16(low, a));
      sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16(high, a));
      KEEP_IN_REGISTERS(sums[r][0], sums[r][1]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < n_rows; r++)
    for (int v = 0; v < 2; v++) sums[r][v] = _mm256_madd_epi16(sums[r][v], one);
}
static inline __attribute__((always_inline)) void dots_u4(const char *const *x, int n_rows, const char *w,
                                                          vi (*sums)[2]) {
  dots_bytes(x, n_rows, w, 1, sums);
}
static inline __attribute__((always_inline)) void dots_u8(const char *const *x, int n_rows, const void *w,
                                                          vi (*sums)[2]) {
  dots_bytes(x, n_rows, w, 0, sums);
}
static inline void unpack_u4(const char *w, char *to) {
  __m256i nibble = _mm256_set1_epi8(15);
  for (int i = 0; i < 8; i++) {
    __m256i both = _mm256_loadu_si256((const __m256i *)w + i);
    _mm256_storeu_si256((__m256i *)to + 2 * i, _mm256_and_si256(both, nibble));
    _mm256_storeu_si256((__m256i *)to + 2 * i + 1, _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble));
  }
}
/* Scales and zeros of a group, as plain_i4 (dots_plain.h). */
static inline void vf_load_i4(const char *codes, vf scale[2], vf zero[2]) {
  for (int v = 0; v < 2; v++) {
    __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 8 * v)));
    __m256i z = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + 16 + 8 * v)));
    scale[v] = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_slli_epi32(code, 19), _mm256_set1_epi32((127 - 15) << 23)));
    zero[v] = _mm256_mul_ps(_mm256_cvtepi32_ps(z), _mm256_set1_ps(-0.0625f));
  }
}
static inline void vf_transpose(vf r[LANES]) {
  vf a0 = _mm256_unpacklo_ps(r[0], r[1]), a1 = _mm256_unpackhi_ps(r[0], r[1]);
  vf a2 = _mm256_unpacklo_ps(r[2], r[3]), a3 = _mm256_unpackhi_ps(r[2], r[3]);
  vf a4 = _mm256_unpacklo_ps(r[4], r[5]), a5 = _mm256_unpackhi_ps(r[4], r[5]);
  vf a6 = _mm256_unpacklo_ps(r[6], r[7]), a7 = _mm256_unpackhi_ps(r[6], r[7]);
  vf b0 = _mm256_shuffle_ps(a0, a2, 0x44), b1 = _mm256_shuffle_ps(a0, a2, 0xee);
  vf b2 = _mm256_shuffle_ps(a1, a3, 0x44), b3 = _mm256_shuffle_ps(a1, a3, 0xee);
  vf b4 = _mm256_shuffle_ps(a4, a6, 0x44), b5 = _mm256_shuffle_ps(a4, a6, 0xee);
  vf b6 = _mm256_shuffle_ps(a5, a7, 0x44), b7 = _mm256_shuffle_ps(a5, a7, 0xee);
  r[0] = _mm256_permute2f128_ps(b0, b4, 0x20), r[1] = _mm256_permute2f128_ps(b1, b5, 0x20);
  r[2] = _mm256_permute2f128_ps(b2, b6, 0x20), r[3] = _mm256_permute2f128_ps(b3, b7, 0x20);
  r[4] = _mm256_permute2f128_ps(b0, b4, 0x31), r[5] = _mm256_permute2f128_ps(b1, b5, 0x31);
  r[6] = _mm256_permute2f128_ps(b2, b6, 0x31), r[7] = _mm256_permute2f128_ps(b3, b7, 0x31);
}
/* Two words of bfloat16 pairs: their low halves as pairs, their high halves. */
static inline vf vf_low_pairs(vf a, vf b) {
  __m256i up = _mm256_slli_epi32(_mm256_castps_si256(b), 16);
  return _mm256_castsi256_ps(_mm256_blend_epi16(_mm256_castps_si256(a), up, 0xaa));
}
static inline vf vf_high_pairs(vf a, vf b) {
  __m256i down = _mm256_srli_epi32(_mm256_castps_si256(a), 16);
  return _mm256_castsi256_ps(_mm256_blend_epi16(down, _mm256_castps_si256(b), 0xaa));
}
static inline void vf_zip_row(const void *from, void *to) { /* 16 bfloat16 into the order of CLB_BF16 */
  __m128i low = _mm_loadu_si128(from), high = _mm_loadu_si128((const __m128i *)from + 1);
  _mm_storeu_si128(to, _mm_unpacklo_epi16(low, high));
  _mm_storeu_si128((__m128i *)to + 1, _mm_unpackhi_epi16(low, high));
}
