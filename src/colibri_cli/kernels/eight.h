/* Half a panel of activations under rows of weights: eight of these at once, since a chain alone waits for its last
 * FMA. Included by ops.h where there are eight lanes. */

void KERNEL(linear_eight)(const float *const *weights, int n_outputs, int k, const char *x, ptrdiff_t x_stride,
                          float *sums, ptrdiff_t lds) {
  enum { ROWS = 8 };
  for (; n_outputs > 0; n_outputs -= ROWS, weights += ROWS, sums += ROWS * lds) {
    vf acc[ROWS];
    UNROLL
    for (int o = 0; o < ROWS; o++) acc[o] = vf_load(sums + o * lds);
    const char *x_i = x;
    for (int i = 0; i < k; i++, x_i += x_stride) {
      vf lanes = vf_load((const float *)x_i);
      UNROLL
      for (int o = 0; o < ROWS; o++) acc[o] = vf_fma(vf_set1(weights[o][i]), lanes, acc[o]);
    }
    UNROLL
    for (int o = 0; o < ROWS; o++) vf_store(sums + o * lds, acc[o]);
  }
}
