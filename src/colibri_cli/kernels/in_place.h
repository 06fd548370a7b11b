/* Eight float32 outputs whose weights lie as [output][input], for rows so few that filling panels would not pay:
 * squares of weights are transposed in registers and used at once. Included by ops.h where there are eight lanes. */

/* Inputs from..to - 1, one by one. */
static __attribute__((noinline)) void chain_elements(const float *const *x, int n_rows, const char *const *outputs,
                                                     int from, int to, float *c, ptrdiff_t ldc) {
  for (int i = from; i < to; i++) {
    float w[LANES];
    for (int o = 0; o < LANES; o++) memcpy(&w[o], outputs[o] + i * (ptrdiff_t)sizeof *w, sizeof *w);
    for (int r = 0; r < n_rows; r++) vf_store(c + r * ldc, vf_fma(vf_set1(x[r][i]), vf_load(w), vf_load(c + r * ldc)));
  }
}

/* n_rows is a compile-time constant in every use. Each input goes to all rows' chains, which wait for each other less
 * than inputs of one chain do. */
static inline __attribute__((always_inline)) void chain_squares(const float *const *x, int n_rows,
                                                                const char *const *outputs, int k, float *c,
                                                                ptrdiff_t ldc) {
  int i = (int)(-(uintptr_t)outputs[0] % CLB_LINE / sizeof(float)); /* where a line begins */
  if (i > k) i = k;
  chain_elements(x, n_rows, outputs, 0, i, c, ldc);
  vf acc[CLB_IN_PLACE_ROWS];
  UNROLL
  for (int r = 0; r < n_rows; r++) acc[r] = vf_load(c + r * ldc);
  for (; i + LANES <= k; i += LANES) {
    vf w[LANES];
    UNROLL
    for (int o = 0; o < LANES; o++) w[o] = vf_load((const float *)outputs[o] + i);
    vf_transpose(w);
    UNROLL
    for (int l = 0; l < LANES; l++) {
      UNROLL
      for (int r = 0; r < n_rows; r++) acc[r] = vf_fma(vf_set1(x[r][i + l]), w[l], acc[r]);
    }
  }
  UNROLL
  for (int r = 0; r < n_rows; r++) vf_store(c + r * ldc, acc[r]);
  chain_elements(x, n_rows, outputs, i, k, c, ldc);
}

void KERNEL(linear_in_place)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                             ptrdiff_t ldc) {
  switch (n_rows) {
    case 1: chain_squares(x, 1, outputs, k, c, ldc); break;
    case 2: chain_squares(x, 2, outputs, k, c, ldc); break;
    case 3: chain_squares(x, 3, outputs, k, c, ldc); break;
    case 4: chain_squares(x, 4, outputs, k, c, ldc); break;
    case 5: chain_squares(x, 5, outputs, k, c, ldc); break;
  }
}
