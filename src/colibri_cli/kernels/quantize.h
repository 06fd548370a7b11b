/* Activations as linear_i8 and linear_i4 take them, quantised by group: to 16 bits for int8 weights (their own error is
 * 256 times smaller than the weights'), to 8 bits for int4. Included by ops.h. */

/* One group of one row: n <= CLB_GROUP floats to integers within +-most, zeros beyond n. */
static inline float quantize_group(const float *x, int n, float most, int32_t *q) {
  float padded[CLB_GROUP] = {0}, lanes[LANES], nonfinite[LANES];
  memcpy(padded, x, (size_t)n * sizeof(float));
  vf top = vf_set1(0.0f), zero = vf_set1(0.0f);
  for (int i = 0; i < CLB_GROUP; i += LANES) {
    vf v = vf_load(padded + i);
    top = vf_max(vf_abs(v), top);
    zero = vf_fma(v, vf_set1(0.0f), zero); /* NaN if any is infinite or NaN */
  }
  vf_store(lanes, top), vf_store(nonfinite, zero);
  float largest = 0.0f, bad = 0.0f;
  for (int i = 0; i < LANES; i++) {
    if (lanes[i] > largest) largest = lanes[i];
    bad += nonfinite[i];
  }
  if (bad != 0.0f || !(largest > 1e-30f)) { /* nothing to hold; a NaN scale keeps a NaN in its row */
    for (int i = 0; i < CLB_GROUP; i++) q[i] = 0;
    return bad != 0.0f ? NAN : 0.0f;
  }
  vf inverse = vf_set1(most / largest);
  for (int i = 0; i < CLB_GROUP; i += LANES) vi_store(q + i, vi_of(vf_round(vf_mul(vf_load(padded + i), inverse))));
  return largest / most;
}

void KERNEL(quantize)(clb_dtype dtype, const float *x, int n_inputs, void *groups) {
  int32_t q[CLB_GROUP];
  for (char *to = groups; n_inputs > 0; x += CLB_GROUP, n_inputs -= CLB_GROUP) {
    int n = n_inputs < CLB_GROUP ? n_inputs : CLB_GROUP;
    if (dtype == CLB_I8) {
      float scale = quantize_group(x, n, 32767.0f, q);
      for (int i = 0; i < CLB_GROUP; i++) ((int16_t *)to)[i] = (int16_t)q[i];
      memcpy(to + CLB_GROUP * sizeof(int16_t), &scale, sizeof scale);
      to += CLB_GROUP * sizeof(int16_t) + sizeof scale;
    } else {
      float scales[2] = {quantize_group(x, n, 127.0f, q), 0.0f};
      int32_t sum = 0;
      for (int i = 0; i < CLB_GROUP; i++) ((int8_t *)to)[i] = (int8_t)q[i], sum += q[i];
      scales[1] = scales[0] * (float)sum;
      memcpy(to + CLB_GROUP, scales, sizeof scales);
      to += CLB_GROUP + sizeof scales;
    }
  }
}
