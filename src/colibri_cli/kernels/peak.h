/* The most that an instruction set can do. Included by ops.h. */

enum { PEAK_CHAINS = 12 }; /* two FMA ports of latency 4 need 8; with two operands they fit 16 registers */

/* Chains of fused multiply-adds that never leave the registers. */
int KERNEL(peak_f32)(int n_rounds, float *sink) {
  vf chain[PEAK_CHAINS], a = vf_set1(sink[0]), b = vf_set1(sink[1]);
  for (int c = 0; c < PEAK_CHAINS; c++) chain[c] = vf_set1((float)c);
  for (int i = 0; i < n_rounds; i++)
#pragma GCC unroll 12
    for (int c = 0; c < PEAK_CHAINS; c++) chain[c] = vf_fma(chain[c], a, b);
  for (int c = 1; c < PEAK_CHAINS; c++) chain[0] = vf_add(chain[0], chain[c]);
  vf_store(sink, chain[0]);
  return 2 * PEAK_CHAINS * LANES;
}
