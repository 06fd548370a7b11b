/* Half a panel of activations under rows of weights: eight of these at once, since a chain alone waits for its last
 * FMA. Included by ops.h. */

void KERNEL(linear_eight)(const float *const *weights, int n_outputs, int k, const char *x, ptrdiff_t x_stride,
                          float *sums, ptrdiff_t lds) {
  enum { ROWS = 8, HALF = 8 / LANES };
  for (; n_outputs > 0; n_outputs -= ROWS, weights += ROWS, sums += ROWS * lds) {
    vf acc[ROWS][HALF];
    UNROLL
    for (int o = 0; o < ROWS; o++) {
      UNROLL
      for (int v = 0; v < HALF; v++) acc[o][v] = vf_load(sums + o * lds + v * LANES);
    }
    const char *x_i = x;
    for (int i = 0; i < k; i++, x_i += x_stride) {
      UNROLL
      for (int o = 0; o < ROWS; o++) {
        vf w = vf_set1(weights[o][i]);
        UNROLL
        for (int v = 0; v < HALF; v++) acc[o][v] = vf_fma(w, vf_load((const float *)x_i + v * LANES), acc[o][v]);
      }
    }
    UNROLL
    for (int o = 0; o < ROWS; o++) {
      UNROLL
      for (int v = 0; v < HALF; v++) vf_store(sums + o * lds + v * LANES, acc[o][v]);
    }
  }
}
