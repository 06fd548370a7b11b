/* Integer dots where no instruction set has its own: exact, so the order of operations is the compiler's to choose.
 * Included by simd_<isa>.h; quant.h says what they compute. */
#include <stdint.h>
#include <string.h>

#include "kernels.h"

static inline void plain_i8(const char *const *x, int n_rows, const int8_t *w, int n_inputs, const char *next,
                            int32_t (*sums)[16]) {
  for (int i = 0; next && i < 16 * n_inputs; i += 64) __builtin_prefetch(next + i, 0, 2);
  for (int r = 0; r < n_rows; r++)
    for (int j = 0; j < 16; j++) {
      int32_t sum = 0;
      for (int i = 0; i < n_inputs; i++) sum += ((const int16_t *)x[r])[i] * w[i / 2 * 32 + j * 2 + i % 2];
      sums[r][j] = sum;
    }
}
static inline void plain_u8(const char *const *x, int n_rows, const uint8_t *w, int32_t (*sums)[16]) {
  for (int r = 0; r < n_rows; r++)
    for (int j = 0; j < 16; j++) {
      int32_t sum = 0;
      for (int i = 0; i < 32; i++) sum += ((const int8_t *)x[r])[i] * w[i / 4 * 64 + j * 4 + i % 4];
      sums[r][j] = sum;
    }
}
static inline void unpack_u4(const char *w, char *to) {
  for (int i = 0; i < 8; i++)
    for (int b = 0; b < 32; b++) {
      to[64 * i + b] = w[32 * i + b] & 15;
      to[64 * i + 32 + b] = (char)((uint8_t)w[32 * i + b] >> 4);
    }
}

/* Scales: 2^(code / 16 - 15) (1 + code % 16 / 16), whose bits are the code itself: 16 octaves in steps of 1/16.
 * Zeros: -code / 16. */
static inline void plain_i4(const char *codes, float *scale, float *zero) {
  for (int j = 0; j < 16; j++) {
    uint32_t bits = ((uint32_t)(uint8_t)codes[j] << 19) + ((127 - 15) << 23);
    memcpy(&scale[j], &bits, sizeof bits);
    zero[j] = (float)(uint8_t)codes[16 + j] * -0.0625f;
  }
}
