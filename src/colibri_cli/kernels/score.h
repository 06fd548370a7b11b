/* What a gate may choose by instead of a softmax, element by element. Included by ops.h. */

/* log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x| <= 1, and log(1 + t) = 2 atanh(s) with s = t / (2 + t) <= 1/3;
 * the first term left out of atanh's series is below 2e-8 of the sum. */
static inline vf softplus(vf x) {
  vf zero = vf_set1(0.0f), t = exp_exact(vf_sub(zero, vf_abs(x)));
  vf s = vf_div(t, vf_add(t, vf_set1(2.0f))), z = vf_mul(s, s);
  vf p = vf_set1(1.0f / 13);
  p = vf_fma(p, z, vf_set1(1.0f / 11));
  p = vf_fma(p, z, vf_set1(1.0f / 9));
  p = vf_fma(p, z, vf_set1(1.0f / 7));
  p = vf_fma(p, z, vf_set1(1.0f / 5));
  p = vf_fma(p, z, vf_set1(1.0f / 3));
  p = vf_fma(p, z, vf_set1(1.0f));
  return vf_fma(vf_add(s, s), p, vf_max(x, zero));
}

void KERNEL(score_f32)(clb_gate_kind kind, const float *logits, int n, float *scores) {
  for (int i = 0; i < n; i += LANES) {
    vf x = vf_load(logits + i);
    vf_store(scores + i, kind == CLB_SQRTSOFTPLUS_TOPK ? vf_sqrt(softplus(x)) : sigmoid(x));
  }
}
