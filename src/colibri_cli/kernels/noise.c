/* Gumbel noise on the logits: top-k of noisy logits samples experts without replacement in proportion to their
 * softmax. The generator and the logarithm are Colibri's own, in doubles without contraction, so that a seed gives the
 * same choices everywhere. */
#include <string.h>

#include "kernels.h"

/* splitmix64 (G. Steele, D. Lea, C. Flood 2014), the usual way to seed xorshift128+: never two zero words. */
static uint64_t splitmix(uint64_t *x) {
  uint64_t z = (*x += UINT64_C(0x9e3779b97f4a7c15));
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

void clb_seed(uint64_t seed, uint64_t state[2]) {
  state[0] = splitmix(&seed);
  state[1] = splitmix(&seed);
}

/* xorshift128+ with shifts 23, 18, 5 (S. Vigna 2017). */
static uint64_t next(uint64_t state[2]) {
  uint64_t s1 = state[0], s0 = state[1], result = s0 + s1;
  state[0] = s0;
  s1 ^= s1 << 23;
  state[1] = s1 ^ s0 ^ (s1 >> 18) ^ (s0 >> 5);
  return result;
}

/* Uniform in (0, 1): the upper 52 bits, centred in their cell, so neither end is reached. */
static double uniform(uint64_t state[2]) { return ((double)(next(state) >> 12) + 0.5) * 0x1p-52; }

/* log(x) of a positive normal x: x = 2^e m, sqrt(1/2) <= m < sqrt(2), log m = 2 atanh((m - 1) / (m + 1)) by its
 * series; the first term left out is below 1e-17. */
static double logarithm(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t e = (int64_t)(bits >> 52) - 1023;
  bits = (bits & UINT64_C(0xfffffffffffff)) | UINT64_C(0x3ff0000000000000);
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) m *= 0.5, e++;
  double s = (m - 1.0) / (m + 1.0), z = s * s, p = 0.0;
  for (int n = 21; n > 0; n -= 2) p = p * z + 1.0 / n;
  return (double)e * 0.69314718055994530942 + 2.0 * s * p;
}

void clb_gumbel(uint64_t state[2], float temperature, float *logits, ptrdiff_t ldl, int n_experts, ptrdiff_t n_tokens) {
  for (ptrdiff_t t = 0; t < n_tokens; t++)
    for (int e = 0; e < n_experts; e++)
      logits[t * ldl + e] += temperature * (float)-logarithm(-logarithm(uniform(state)));
}
