/* A panel of float32 weights that lie as [output][input], for rows so few that filling panels would not pay: squares of
 * weights are transposed in registers and used at once. Included by ops.h and isa_avx512.c. */

/* Inputs from..to - 1, one by one. */
static __attribute__((noinline)) void chain_elements(const float *const *x, int n_rows, const char *const *outputs,
                                                     int from, int to, float *c, ptrdiff_t ldc) {
  for (int i = from; i < to; i++) {
    float w[CLB_PANEL];
    for (int j = 0; j < CLB_PANEL; j++) memcpy(&w[j], outputs[j] + i * (ptrdiff_t)sizeof *w, sizeof *w);
    for (int r = 0; r < n_rows; r++) {
      float *c_r = c + r * ldc;
      for (int j = 0; j < CLB_PANEL; j += LANES)
        vf_store(c_r + j, vf_fma(vf_set1(x[r][i]), vf_load(w + j), vf_load(c_r + j)));
    }
  }
}

void KERNEL(linear_in_place)(const float *const *x, int n_rows, const char *const *outputs, int k, const char *next,
                             float *c, ptrdiff_t ldc) {
  enum { STEP = CLB_LINE / sizeof(float) };
  int i = (int)(-(uintptr_t)outputs[0] % CLB_LINE / sizeof(float)); /* where a line begins */
  if (i > k) i = k;
  chain_elements(x, n_rows, outputs, 0, i, c, ldc);
  for (; i + STEP <= k; i += STEP, next += CLB_PANEL * CLB_LINE)
    for (int j = 0; j < CLB_PANEL; j += LANES) {
      for (int line = 0; line < LANES; line++) __builtin_prefetch(next + (j + line) * CLB_LINE, 0, 2);
      for (int at = i; at < i + STEP; at += LANES) {
        vf w[LANES];
        UNROLL
        for (int o = 0; o < LANES; o++) w[o] = vf_load((const float *)outputs[j + o] + at);
        vf_transpose(w);
        for (int r = 0; r < n_rows; r++) {
          vf acc = vf_load(c + r * ldc + j);
          UNROLL
          for (int l = 0; l < LANES; l++) acc = vf_fma(vf_set1(x[r][at + l]), w[l], acc);
          vf_store(c + r * ldc + j, acc);
        }
      }
    }
  chain_elements(x, n_rows, outputs, i, k, c, ldc);
}
