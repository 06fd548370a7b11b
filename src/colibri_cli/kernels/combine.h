/* An expert's outputs into a token's sum. Included by ops.h. */

void KERNEL(accumulate_f32)(float w, const float *t, int n, float *y) {
  int j = 0;
  for (vf w_all = vf_set1(w); j + LANES <= n; j += LANES)
    vf_store(y + j, vf_fma(w_all, vf_load(t + j), vf_load(y + j)));
  for (; j < n; j++) y[j] = fmaf(w, t[j], y[j]);
}
