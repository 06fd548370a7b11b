/* exp and its relatives: Colibri's own polynomials in one fixed order of operations, never libm's. Included by ops.h.
 */

#define EXP_LOWEST -86.5f /* below this exp is held at 2.7e-38: the result stays a normal number */
#define EXP_HIGHEST 88.0f

/* exp(x) by x = n ln 2 + f, |f| <= ln 2 / 2; the polynomial is Cephes' expf (S. Moshier). Within 2 ulp between
 * EXP_LOWEST and EXP_HIGHEST, clamped beyond; a NaN becomes exp(EXP_LOWEST). */
static inline vf exp_exact(vf x) {
  x = vf_min(vf_max(x, vf_set1(EXP_LOWEST)), vf_set1(EXP_HIGHEST));
  vf n = vf_round(vf_mul(x, vf_set1(1.44269504088896341f)));
  vf f = vf_fnma(n, vf_set1(0.693359375f), x);
  f = vf_fnma(n, vf_set1(-2.12194440e-4f), f);
  vf p = vf_set1(1.9875691500e-4f);
  p = vf_fma(p, f, vf_set1(1.3981999507e-3f));
  p = vf_fma(p, f, vf_set1(8.3334519073e-3f));
  p = vf_fma(p, f, vf_set1(4.1665795894e-2f));
  p = vf_fma(p, f, vf_set1(1.6666665459e-1f));
  p = vf_fma(p, f, vf_set1(5.0000001201e-1f));
  p = vf_fma(p, vf_mul(f, f), f);
  return vf_scale(vf_add(p, vf_set1(1.0f)), vi_of(n));
}

/* exp(x) for x <= 0 by x = n ln 2 / 2 + f, |f| <= ln 2 / 4, and the second-order Taylor polynomial of exp(f): off by
 * less than one part in a thousand. */
static inline vf exp_taylor(vf x) {
  /* Adding 1.5 2^23 rounds to a whole number and leaves it in the low bits. */
  vf magic = vf_set1(12582912.0f);
  x = vf_max(x, vf_set1(EXP_LOWEST));
  vf shifted = vf_fma(x, vf_set1(2.88539008177792681f), magic);
  vf f = vf_fnma(vf_sub(shifted, magic), vf_set1(0.346573590279972655f), x);
  vf p = vf_fma(vf_fma(f, vf_set1(0.5f), vf_set1(1.0f)), f, vf_set1(1.0f));
  vi n = vi_bits(shifted);
  p = vf_mul(p, vf_select(vi_odd(n), vf_set1(1.41421356237309505f), vf_set1(1.0f)));
  return vf_scale(p, vi_half(n)); /* what lies above the low bits is shifted out */
}

static inline vf sigmoid(vf x) {
  return vf_div(vf_set1(1.0f), vf_add(vf_set1(1.0f), exp_exact(vf_sub(vf_set1(0.0f), x))));
}

/* The normal distribution's upper tail times two, erfc(z), z >= 0: W. Press et al., Numerical Recipes, "erfcc"; a
 * fractional error below 1.2e-7 before rounding. */
static inline vf erfc_positive(vf z) {
  vf t = vf_div(vf_set1(1.0f), vf_fma(z, vf_set1(0.5f), vf_set1(1.0f)));
  vf p = vf_set1(0.17087277f);
  p = vf_fma(p, t, vf_set1(-0.82215223f));
  p = vf_fma(p, t, vf_set1(1.48851587f));
  p = vf_fma(p, t, vf_set1(-1.13520398f));
  p = vf_fma(p, t, vf_set1(0.27886807f));
  p = vf_fma(p, t, vf_set1(-0.18628806f));
  p = vf_fma(p, t, vf_set1(0.09678418f));
  p = vf_fma(p, t, vf_set1(0.37409196f));
  p = vf_fma(p, t, vf_set1(1.00002368f));
  p = vf_fma(p, t, vf_set1(-1.26551223f));
  return vf_mul(t, exp_exact(vf_fnma(z, z, p)));
}
