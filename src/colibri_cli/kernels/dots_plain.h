/* Integer dots where no instruction set has its own: exact, so the order of operations is the compiler's to choose.
 * Included by simd_<isa>.h; quant.h says what they compute. */
#include <stdint.h>
#include <string.h>

static inline void dots_i16(const int16_t *const *x, int n_rows, const int16_t *w, int32_t (*sums)[16]) {
  for (int r = 0; r < n_rows; r++)
    for (int j = 0; j < 16; j++) {
      int32_t sum = 0;
      for (int i = 0; i < 32; i++) sum += x[r][i] * w[i / 2 * 32 + j * 2 + i % 2];
      sums[r][j] = sum;
    }
}
static inline void unpack_i8(const int8_t *w, int16_t *to) {
  for (int i = 0; i < 512; i++) to[i] = w[i];
}
static inline void dots_i8(const int16_t *const *x, int n_rows, const int8_t *w, int32_t (*sums)[16]) {
  int16_t wide[512];
  unpack_i8(w, wide);
  dots_i16(x, n_rows, wide, sums);
}

static inline void dots_u8(const int8_t *const *x, const int32_t *total, int n_rows, const uint8_t *w,
                           const uint8_t *zeros, int32_t (*sums)[16]) {
  for (int r = 0; r < n_rows; r++)
    for (int j = 0; j < 16; j++) {
      int32_t sum = 0;
      for (int i = 0; i < 32; i++) sum += x[r][i] * w[i / 4 * 64 + j * 4 + i % 4];
      sums[r][j] = 16 * sum - zeros[j] * total[r];
    }
}
static inline void unpack_u4(const uint8_t *w, uint8_t *to) {
  for (int i = 0; i < 8; i++)
    for (int b = 0; b < 32; b++) to[64 * i + b] = w[32 * i + b] & 15, to[64 * i + 32 + b] = w[32 * i + b] >> 4;
}
static inline void dots_u4(const int8_t *const *x, const int32_t *total, int n_rows, const uint8_t *w,
                           const uint8_t *zeros, int32_t (*sums)[16]) {
  uint8_t bytes[512];
  unpack_u4(w, bytes);
  dots_u8(x, total, n_rows, bytes, zeros, sums);
}

/* 2^(code / 16 - 15) (1 + code % 16 / 16), whose bits are the code itself: 16 octaves in steps of 1/16. */
static inline void load_i4_scales(const uint8_t *codes, float *scale) {
  for (int j = 0; j < 16; j++) {
    uint32_t bits = ((uint32_t)codes[j] << 19) + ((127 - 15) << 23);
    memcpy(&scale[j], &bits, sizeof bits);
  }
}
