/* IEEE 754 half precision to single, exactly, where there is no instruction for it. */
#ifndef CLB_HALF_H
#define CLB_HALF_H

#include <stdint.h>
#include <string.h>

static inline float widened(const void *half) {
  uint16_t bits;
  memcpy(&bits, half, sizeof bits);
  uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023, wide;
  float value = (float)fraction * 0x1p-24f; /* 0 or a denormal */
  if (exponent) {
    wide = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    memcpy(&value, &wide, sizeof value);
  }
  return bits >> 15 ? -value : value;
}

#endif
