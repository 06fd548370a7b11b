/* Activations as linear_i8 and linear_i4 take them, quantised by group: to 16 bits for int8 weights (their own error is
 * 256 times smaller than the weights'), to 8 bits for int4. Included by ops.h. */

/* n floats, whole chunks, to integers within +-most; returns the scale. Sizes are compared as integers, in whose order
 * they are, with infinity and NaN above all of them. */
static inline float quantize_group(const float *x, int n, float most, int32_t *q) {
  vi tops = vi_bits(vf_set1(0.0f));
#pragma GCC unroll 1
  for (int i = 0; i < n; i += LANES) tops = vi_max(vi_bits(vf_abs(vf_load(x + i))), tops);
  int32_t top = vi_highest(tops);
  float largest;
  memcpy(&largest, &top, sizeof largest);
  if (!(largest > 1e-30f && largest < INFINITY)) { /* nothing to hold; a NaN scale keeps a NaN in its row */
    memset(q, 0, (size_t)n * sizeof *q);
    return largest <= 1e-30f ? 0.0f : NAN;
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
    const float *group = x;
    int32_t q[CLB_I8_GROUP], sum = 0; /* all of them before their floats' place is written to */
    int n = left < most ? left : most, whole = (n + CLB_CHUNK - 1) / CLB_CHUNK * CLB_CHUNK;
    if (n < whole) {
      memset(padded, 0, sizeof padded);
      group = memcpy(padded, x, (size_t)n * sizeof *x);
    }
    scales[0] = quantize_group(group, whole, dtype == CLB_I8 ? 32767.0f : 127.0f, q);
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
