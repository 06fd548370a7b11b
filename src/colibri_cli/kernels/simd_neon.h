/* Four lanes: NEON, which every armv8-a has. See ops.h for the names, simd_scalar.h for their meaning. */
#include <arm_neon.h>
#include <stdint.h>

#include "dots_plain.h"

#define CLB_ISA neon
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 4
#define SINGLE_TILE 6 /* 24 accumulators, 4 vectors of the panel, 1 broadcast: 29 of 32 registers */
#define PAIR_TILE 3
#define QUANT_ROWS 4

typedef float32x4_t vf;
typedef int32x4_t vi;
typedef uint32x4_t vm;

static inline vf vf_set1(float x) { return vdupq_n_f32(x); }
static inline vf vf_load(const float *p) { return vld1q_f32(p); }
static inline void vf_store(float *p, vf x) { vst1q_f32(p, x); }
static inline vf vf_add(vf a, vf b) { return vaddq_f32(a, b); }
static inline vf vf_sub(vf a, vf b) { return vsubq_f32(a, b); }
static inline vf vf_mul(vf a, vf b) { return vmulq_f32(a, b); }
static inline vf vf_div(vf a, vf b) { return vdivq_f32(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
static inline vf vf_fnma(vf a, vf b, vf c) { return vfmsq_f32(c, a, b); }
static inline vf vf_max(vf a, vf b) { return vbslq_f32(vcgtq_f32(a, b), a, b); } /* vmaxq would give NaN for either */
static inline vf vf_min(vf a, vf b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline vf vf_abs(vf a) { return vabsq_f32(a); }
static inline vf vf_sqrt(vf a) { return vsqrtq_f32(a); }
static inline vf vf_round(vf a) { return vrndnq_f32(a); }
static inline vm vf_gt(vf a, vf b) { return vcgtq_f32(a, b); }
static inline vm vm_or(vm a, vm b) { return vorrq_u32(a, b); }
static inline int vm_any(vm a) { return vmaxvq_u32(a) != 0; }
static inline vf vf_select(vm m, vf a, vf b) { return vbslq_f32(m, a, b); }
static inline vi vi_select(vm m, vi a, vi b) { return vbslq_s32(m, a, b); }
static inline vi vi_set1(int32_t x) { return vdupq_n_s32(x); }
static inline void vi_store(int32_t *p, vi x) { vst1q_s32(p, x); }
static inline vi vi_of(vf whole) { return vcvtq_s32_f32(whole); }
static inline vi vi_bits(vf x) { return vreinterpretq_s32_f32(x); }
static inline vi vi_max(vi a, vi b) { return vmaxq_s32(a, b); }
static inline int32_t vi_highest(vi a) { return vmaxvq_s32(a); }
static inline vi vi_half(vi n) { return vshrq_n_s32(n, 1); }
static inline vm vi_odd(vi n) { return vtstq_s32(n, vdupq_n_s32(1)); }
static inline vf vf_scale(vf x, vi n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(n, 23)));
}
/* A panel row of bfloat16 as vectors of columns: CLB_BF16's order in kernels.h. */
static inline void vf_load_bf16(const void *p, vf row[4]) {
  uint32x4_t high = vdupq_n_u32(0xffff0000), low_pairs = vld1q_u32(p), high_pairs = vld1q_u32((const uint32_t *)p + 4);
  row[0] = vreinterpretq_f32_u32(vshlq_n_u32(low_pairs, 16));
  row[1] = vreinterpretq_f32_u32(vshlq_n_u32(high_pairs, 16));
  row[2] = vreinterpretq_f32_u32(vandq_u32(low_pairs, high));
  row[3] = vreinterpretq_f32_u32(vandq_u32(high_pairs, high));
}
static inline void vf_widen_row(const uint16_t *halves, float *row) { /* even halves are the first eight columns */
  uint16x8x2_t columns = vld2q_u16(halves);
  for (int half = 0; half < 2; half++) {
    float16x8_t h = vreinterpretq_f16_u16(columns.val[half]);
    vst1q_f32(row + 8 * half, vcvt_f32_f16(vget_low_f16(h)));
    vst1q_f32(row + 8 * half + 4, vcvt_high_f32_f16(h));
  }
}
static inline vf vf_of(vi n) { return vcvtq_f32_s32(n); }

/* Integer dots (quant.h), left to the compiler's vectors. */
static inline void dots_i8(const char *const *x, int n_rows, const char *w, int n_inputs, const char *next,
                           vi (*sums)[4]) {
  int32_t plain[QUANT_ROWS][16];
  plain_i8(x, n_rows, (const int8_t *)w, n_inputs, next, plain);
  for (int r = 0; r < n_rows; r++)
    for (int v = 0; v < 4; v++) sums[r][v] = vld1q_s32(plain[r] + 4 * v);
}
static inline void dots_u8(const char *const *x, int n_rows, const void *w, vi (*sums)[4]) {
  int32_t plain[QUANT_ROWS][16];
  plain_u8(x, n_rows, w, plain);
  for (int r = 0; r < n_rows; r++)
    for (int v = 0; v < 4; v++) sums[r][v] = vld1q_s32(plain[r] + 4 * v);
}
static inline void dots_u4(const char *const *x, int n_rows, const char *w, vi (*sums)[4]) {
  char bytes[512];
  unpack_u4(w, bytes);
  dots_u8(x, n_rows, bytes, sums);
}
static inline void vf_load_i4(const char *codes, vf scale[4], vf zero[4]) {
  float scales[16], zeros[16];
  plain_i4(codes, scales, zeros);
  for (int v = 0; v < 4; v++) scale[v] = vld1q_f32(scales + 4 * v), zero[v] = vld1q_f32(zeros + 4 * v);
}
static inline void vf_transpose(vf r[LANES]) {
  float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);
  r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
/* Two words of bfloat16 pairs: their low halves as pairs, their high halves. */
static inline vf vf_low_pairs(vf a, vf b) {
  return vreinterpretq_f32_u32(vsliq_n_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b), 16));
}
static inline vf vf_high_pairs(vf a, vf b) {
  return vreinterpretq_f32_u32(vsriq_n_u32(vreinterpretq_u32_f32(b), vreinterpretq_u32_f32(a), 16));
}
static inline void vf_zip_row(const void *from, void *to) { /* 16 bfloat16 into the order of CLB_BF16 */
  uint16x8_t low = vreinterpretq_u16_u8(vld1q_u8(from));
  uint16x8_t high = vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)from + 16));
  vst1q_u16(to, vzip1q_u16(low, high));
  vst1q_u16((uint16_t *)to + 8, vzip2q_u16(low, high));
}
