/* One lane: the oracle of the numerics contract, and what runs where nothing wider can. See ops.h for the names. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "dots_plain.h"
#include "half.h"

#define CLB_ISA scalar
#define UNROLL /* small, not fast */
#define LANES 1
#define SINGLE_TILE 1 /* rows whose accumulators fit the register file together with one panel */
#define PAIR_TILE 0   /* and with two */
#define QUANT_ROWS 1

typedef float vf;   /* LANES floats */
typedef int32_t vi; /* LANES integers */
typedef int vm;     /* LANES truth values */

static inline vf vf_set1(float x) { return x; }
static inline vf vf_load(const float *p) {
  float x;
  memcpy(&x, p, sizeof x); /* at any address */
  return x;
}
static inline void vf_store(float *p, vf x) { *p = x; }
static inline vf vf_add(vf a, vf b) { return a + b; }
static inline vf vf_sub(vf a, vf b) { return a - b; }
static inline vf vf_mul(vf a, vf b) { return a * b; }
static inline vf vf_div(vf a, vf b) { return a / b; }
static inline vf vf_fma(vf a, vf b, vf c) { return fmaf(a, b, c); }   /* a b + c */
static inline vf vf_fnma(vf a, vf b, vf c) { return fmaf(-a, b, c); } /* c - a b */
static inline vf vf_max(vf a, vf b) { return a > b ? a : b; }         /* b where a lane is NaN, as vmaxps */
static inline vf vf_min(vf a, vf b) { return a < b ? a : b; }         /* likewise */
static inline vf vf_abs(vf a) { return fabsf(a); }
static inline vf vf_sqrt(vf a) { return sqrtf(a); }
static inline vf vf_round(vf a) { return rintf(a); } /* to nearest, ties to even */
static inline vm vf_gt(vf a, vf b) { return a > b; }
static inline vm vm_or(vm a, vm b) { return a | b; }
static inline int vm_any(vm a) { return a; }
static inline vf vf_select(vm m, vf a, vf b) { return m ? a : b; }
static inline vi vi_select(vm m, vi a, vi b) { return m ? a : b; }
static inline vi vi_set1(int32_t x) { return x; }
static inline void vi_store(int32_t *p, vi x) { *p = x; }
static inline vi vi_of(vf whole) { return (int32_t)whole; } /* of a whole number within int32 */
static inline vi vi_bits(vf x) {
  vi bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline vi vi_max(vi a, vi b) { return a > b ? a : b; }
static inline int32_t vi_highest(vi a) { return a; }
static inline vi vi_half(vi n) { return n >> 1; } /* towards minus infinity */
static inline vm vi_odd(vi n) { return n & 1; }
/* x * 2^n for normal x and results. */
static inline vf vf_scale(vf x, vi n) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  bits += (uint32_t)n << 23;
  memcpy(&x, &bits, sizeof bits);
  return x;
}
/* A panel row of bfloat16 as vectors of columns: CLB_BF16's order in kernels.h. */
static inline void vf_load_bf16(const void *p, vf row[16]) {
  for (int j = 0; j < 16; j++) {
    uint16_t half;
    memcpy(&half, (const char *)p + 4 * (j % 8) + 2 * (j / 8), sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&row[j], &bits, sizeof bits);
  }
}
static inline void vf_widen_row(const uint16_t *halves, float *row) {
  uint16_t from[16];
  memcpy(from, halves, sizeof from);
  for (int j = 0; j < 16; j++) row[j] = widened(&from[j % 8 * 2 + j / 8]);
}
static inline vf vf_of(vi n) { return (float)n; }
static inline void vf_load_i4(const char *codes, vf scale[16], vf zero[16]) { plain_i4(codes, scale, zero); }
static inline void dots_i8(const char *const *x, int n_rows, const char *w, int n_inputs, const char *next,
                           vi (*sums)[16]) {
  plain_i8(x, n_rows, (const int8_t *)w, n_inputs, next, sums);
}
static inline void dots_u8(const char *const *x, int n_rows, const void *w, vi (*sums)[16]) {
  plain_u8(x, n_rows, w, sums);
}
static inline void dots_u4(const char *const *x, int n_rows, const char *w, vi (*sums)[16]) {
  char bytes[512];
  unpack_u4(w, bytes);
  plain_u8(x, n_rows, (const uint8_t *)bytes, sums);
}
/* Lane i of row j becomes lane j of row i. */
static inline void vf_transpose(vf r[LANES]) { (void)r; }
