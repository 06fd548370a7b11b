/* Activations as linear_i8 and linear_i4 take them, quantised by group: to 16 bits for int8 weights (their own error is
 * 256 times smaller than the weights'), to 8 bits for int4. Included by ops.h. */

/* n floats, whole chunks, to integers within +-most; returns the scale. */
static inline float quantize_group(const float *x, int n, float most, int32_t *q) {
  float lanes[LANES], nonfinite[LANES];
  vf top = vf_set1(0.0f), zero = vf_set1(0.0f);
#pragma GCC unroll 1
  for (int i = 0; i < n; i += LANES) {
    vf v = vf_load(x + i);
    top = vf_max(vf_abs(v), top);
    zero = vf_fma(v, vf_set1(0.0f), zero); /* NaN if any is infinite or NaN */
  }
  vf_store(lanes, top), vf_store(nonfinite, zero);
  float largest = 0.0f, bad = 0.0f;
#pragma GCC unroll 1
  for (int i = 0; i < LANES; i++) {
    if (lanes[i] > largest) largest = lanes[i];
    bad += nonfinite[i];
  }
  if (bad != 0.0f || !(largest > 1e-30f)) { /* nothing to hold; a NaN scale keeps a NaN in its row */
    memset(q, 0, (size_t)n * sizeof *q);
    return bad != 0.0f ? NAN : 0.0f;
  }
  vf inverse = vf_set1(most / largest);
#pragma GCC unroll 1
  for (int i = 0; i < n; i += LANES) vi_store(q + i, vi_of(vf_round(vf_mul(vf_load(x + i), inverse))));
  return largest / most;
}

void KERNEL(quantize)(clb_dtype dtype, const float *x, int n_inputs, void *groups) {
  int most = dtype == CLB_I8 ? CLB_I8_GROUP : CLB_I4_GROUP;
  char *to = groups;
  for (int left = n_inputs; left > 0; x += most, left -= most) {
    float padded[CLB_I8_GROUP], scales[2];
    int32_t q[CLB_I8_GROUP], sum = 0;
    int n = left < most ? left : most, whole = (n + CLB_CHUNK - 1) / CLB_CHUNK * CLB_CHUNK;
    memcpy(padded, x, (size_t)n * sizeof *x); /* before their place is written to */
    memset(padded + n, 0, (size_t)(whole - n) * sizeof *x);
    scales[0] = quantize_group(padded, whole, dtype == CLB_I8 ? 32767.0f : 127.0f, q);
    for (int chunk = 0; chunk < whole; chunk += CLB_CHUNK)
      if (dtype == CLB_I8) {
        int16_t narrow[CLB_CHUNK];
        for (int i = 0; i < CLB_CHUNK; i++) narrow[i] = (int16_t)q[chunk + i];
        memcpy(to, narrow, sizeof narrow);
        to += sizeof narrow;
      } else {
        int8_t narrow[CLB_CHUNK];
        for (int i = 0; i < CLB_CHUNK; i++) narrow[i] = (int8_t)q[chunk + i], sum += q[chunk + i];
        memcpy(to, narrow, sizeof narrow);
        to += sizeof narrow;
      }
    int n_scales = dtype == CLB_I8 ? 1 : 2;
    scales[1] = scales[0] * (float)sum;
    memcpy(to, scales, n_scales * sizeof *scales);
    to += n_scales * sizeof *scales;
  }
}
