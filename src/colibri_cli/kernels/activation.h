/* Activations of an expert's intermediate states. Included by ops.h. */

/* g sigmoid(z), where z falls with g. Below -88 the factor is no longer held small enough to outweigh a large g: the
 * product is 0 there, or NaN for an infinite or NaN g. */
static inline vf times_sigmoid(vf g, vf z) {
  return vf_select(vf_gt(z, vf_set1(-EXP_HIGHEST)), vf_mul(g, sigmoid(z)), vf_sub(g, g));
}

static inline __attribute__((always_inline)) vf activation(clb_activation kind, vf g, float alpha) {
  vf half = vf_set1(0.5f), z, tail;
  switch (kind) {
    case CLB_RELU: return vf_max(vf_set1(0.0f), g); /* NaN stays: the second operand */
    case CLB_RELU2: z = vf_max(vf_set1(0.0f), g); return vf_mul(z, z);
    case CLB_SILU: return times_sigmoid(g, vf_mul(vf_set1(alpha), g));
    case CLB_GELU: /* g Phi(g), Phi(g) = erfc(-g / sqrt 2) / 2 */
      z = vf_mul(g, vf_set1(0.707106781186547524f));
      tail = vf_mul(half, erfc_positive(vf_abs(z)));
      return vf_mul(g, vf_select(vf_gt(z, vf_set1(0.0f)), vf_sub(vf_set1(1.0f), tail), tail));
    default: /* CLB_GELU_TANH: (1 + tanh u) / 2 = sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3) */
      z = vf_mul(vf_set1(1.59576912160573071f), vf_fma(vf_mul(vf_mul(g, g), g), vf_set1(0.044715f), g));
      return times_sigmoid(g, z);
  }
}

static inline __attribute__((always_inline)) void activate(clb_activation kind, const clb_activation_rule *rule,
                                                           const float *t, int n_rows, ptrdiff_t ldt, int n_panels,
                                                           float *h, ptrdiff_t ldh) {
  vf limit = vf_set1(rule->limit), floor = vf_set1(-rule->limit), beta = vf_set1(rule->beta);
  int step = rule->gated ? 2 : 1;
  for (int r = 0; r < n_rows; r++)
    for (int p = 0; p < n_panels; p += step)
      for (int v = 0; v < CLB_PANEL; v += LANES) {
        const float *from = t + r * ldt + p * CLB_PANEL + v;
        /* The clamp's operands stand so that NaN passes through. */
        vf out = activation(kind, vf_min(limit, vf_load(from)), rule->alpha);
        if (rule->gated) {
          vf u = vf_max(floor, vf_min(limit, vf_load(from + CLB_PANEL)));
          out = vf_mul(vf_add(u, beta), out);
        }
        vf_store(h + r * ldh + p / step * CLB_PANEL + v, out);
      }
}

void KERNEL(activate_f32)(const clb_activation_rule *rule, const float *t, int n_rows, ptrdiff_t ldt, int n_panels,
                          float *h, ptrdiff_t ldh) {
  switch (rule->kind) {
    case CLB_RELU: activate(CLB_RELU, rule, t, n_rows, ldt, n_panels, h, ldh); break;
    case CLB_RELU2: activate(CLB_RELU2, rule, t, n_rows, ldt, n_panels, h, ldh); break;
    case CLB_SILU: activate(CLB_SILU, rule, t, n_rows, ldt, n_panels, h, ldh); break;
    case CLB_GELU: activate(CLB_GELU, rule, t, n_rows, ldt, n_panels, h, ldh); break;
    case CLB_GELU_TANH: activate(CLB_GELU_TANH, rule, t, n_rows, ldt, n_panels, h, ldh); break;
  }
}
