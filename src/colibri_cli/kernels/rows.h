/* Rows of weights into a panel, and rows of outputs into sums. Included by ops.h. */

void KERNEL(transpose_f32)(const float *w, ptrdiff_t row_stride, int n_columns, int k, float *panel) {
  int j = 0;
  for (; j + LANES <= n_columns; j += LANES) {
    int i = 0;
    for (; i + LANES <= k; i += LANES) {
      vf block[LANES];
      for (int r = 0; r < LANES; r++) block[r] = vf_load(w + (j + r) * row_stride + i);
      vf_transpose(block);
      for (int r = 0; r < LANES; r++) vf_store(panel + (ptrdiff_t)(i + r) * CLB_PANEL + j, block[r]);
    }
    for (; i < k; i++)
      for (int r = 0; r < LANES; r++) panel[(ptrdiff_t)i * CLB_PANEL + j + r] = w[(j + r) * row_stride + i];
  }
  for (; j < CLB_PANEL; j++)
    for (int i = 0; i < k; i++) panel[(ptrdiff_t)i * CLB_PANEL + j] = j < n_columns ? w[j * row_stride + i] : 0.0f;
}

void KERNEL(accumulate_f32)(float w, const float *t, int n, float *y) {
  int j = 0;
  for (vf w_all = vf_set1(w); j + LANES <= n; j += LANES)
    vf_store(y + j, vf_fma(w_all, vf_load(t + j), vf_load(y + j)));
  for (; j < n; j++) y[j] = fmaf(w, t[j], y[j]);
}
