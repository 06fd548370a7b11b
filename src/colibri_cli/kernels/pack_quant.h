/* One group of a panel, inputs of 16 columns, to int8 and int4: a scale (and a zero) for each column by a search for
 * a small squared error. Columns are lanes, and nothing is fused, so that software without FMA is not slowed. Included
 * by ops.h.
 *
 * int4 holds scale (q - zero), q = 0..15. Which scale and zero fit 32 weights best is a question of luck: of how near
 * to the lattice the weights happen to lie. So several scales are looked at, and the zero that suits each is computed
 * rather than searched: the weights' places between two lattice points, as angles on a circle, have a mean direction,
 * which is the zero's fraction, and a resultant, which is longer the better they agree. */

static inline vf clamped(vf x, float low, float high) { return vf_min(vf_max(x, vf_set1(low)), vf_set1(high)); }

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The bfloat16 nearest to largest / 127, or number k above it. */
static float i8_scale(float largest, int k) {
  uint32_t bits;
  largest /= 127.0f;
  memcpy(&bits, &largest, sizeof bits);
  return float_of(((bits + 0x7fff + (bits >> 16 & 1)) >> 16 << 16) + ((uint32_t)k << 16));
}

static vf i8_of(const float *w, vf inverse) { return clamped(vf_round(vf_mul(vf_load(w), inverse)), -127.0f, 127.0f); }

static void pack_i8(const float *w, int n_inputs, uint8_t *to) {
  enum { SCALES = 8 };
  float sizes[CLB_PANEL], scales[CLB_PANEL], chosen[CLB_PANEL];
  int32_t q[CLB_I8_GROUP][CLB_PANEL];
  for (int j = 0; j < CLB_PANEL; j += LANES) {
    vf largest = vf_set1(0.0f), least = vf_set1(INFINITY), scale = vf_set1(0.0f);
    for (int i = 0; i < n_inputs; i++) largest = vf_max(vf_abs(vf_load(w + i * CLB_PANEL + j)), largest);
    vf_store(sizes + j, largest);
    for (int k = 0; k < SCALES; k++) {
      for (int l = j; l < j + LANES; l++) scales[l] = i8_scale(sizes[l], k);
      vf trial = vf_load(scales + j), inverse = vf_div(vf_set1(1.0f), trial), error = vf_set1(0.0f);
      for (int i = 0; i < n_inputs; i++) {
        const float *x = w + i * CLB_PANEL + j;
        vf d = vf_sub(vf_mul(vf_load(x), inverse), i8_of(x, inverse));
        error = vf_add(error, vf_mul(d, d));
      }
      vf relative = vf_div(trial, largest); /* squares of scales could overflow */
      error = vf_mul(error, vf_mul(relative, relative));
      scale = vf_select(vf_gt(least, error), trial, scale), least = vf_min(error, least);
    }
    vm held = vf_gt(largest, vf_set1(CLB_SMALLEST));
    vf inverse = vf_select(held, vf_div(vf_set1(1.0f), scale), vf_set1(0.0f));
    vf_store(chosen + j, vf_select(held, scale, vf_set1(0.0f)));
    for (int i = 0; i < n_inputs; i++) vi_store(q[i] + j, vi_of(i8_of(w + i * CLB_PANEL + j, inverse)));
  }
  for (int i = 0; i < n_inputs; i += 2)
    for (int j = 0; j < 2 * CLB_PANEL; j++) *to++ = (uint8_t)q[i + j % 2][j / 2];
  for (int j = 0; j < CLB_PANEL; j++, to += 2) { /* columns 0 8 1 9 2 10 ... */
    uint32_t bits;
    memcpy(&bits, &chosen[j / 2 + j % 2 * CLB_PANEL / 2], sizeof bits);
    to[0] = (uint8_t)(bits >> 16), to[1] = (uint8_t)(bits >> 24);
  }
}

/* 2^(code / 16 - 15) (1 + code % 16 / 16): the scale of a code, 0..255, where the base is 1. */
static float i4_scale(int code) { return float_of(((uint32_t)code << 19) + ((127 - 15) << 23)); }

/* The largest code whose scale is at most x; 0 and 255 beyond the ends. */
static int i4_code(float x) {
  uint32_t bits;
  if (!(x > i4_scale(0))) return 0;
  memcpy(&bits, &x, sizeof bits);
  uint32_t code = (bits - ((127 - 15) << 23)) >> 19;
  return code > 255 ? 255 : (int)code;
}

typedef struct {
  vf error, scale, zero;
} i4_choice;

static inline vf i4_zero(vf z) {
  return vf_mul(clamped(vf_round(vf_mul(z, vf_set1(16.0f))), 0.0f, 255.0f), vf_set1(0.0625f));
}

static inline vf i4_of(vf t) { return clamped(vf_round(t), 0.0f, 15.0f); }

static inline i4_choice select_i4(vm m, i4_choice a, i4_choice b) {
  i4_choice c = {vf_select(m, a.error, b.error), vf_select(m, a.scale, b.scale), vf_select(m, a.zero, b.zero)};
  return c;
}

static inline i4_choice better(i4_choice a, i4_choice b) { return select_i4(vf_gt(a.error, b.error), b, a); }

/* The squared error with this scale and zero. */
static i4_choice i4_try(const float *w, vf scale, vf zero) {
  vf inverse = vf_div(vf_set1(1.0f), scale), error = vf_set1(0.0f);
  for (int i = 0; i < CLB_I4_GROUP; i++) {
    vf t = vf_add(vf_mul(vf_load(w + i * CLB_PANEL), inverse), zero), d = vf_sub(t, i4_of(t));
    error = vf_add(error, vf_mul(d, d));
  }
  i4_choice choice = {vf_mul(error, vf_mul(scale, scale)), scale, zero};
  return choice;
}

/* The zero that suits a scale, and about how large the squared error is then. A parabola stands for the sine and a
 * triangle for the cosine, a diamond for the circle: near enough to choose by. */
static i4_choice i4_guess(const float *w, vf low, vf high, vf scale) {
  vf inverse = vf_div(vf_set1(1.0f), scale), half = vf_set1(0.5f), none = vf_set1(0.0f);
  vf centred = vf_sub(vf_set1(7.5f), vf_mul(vf_mul(half, vf_add(low, high)), inverse));
  vf sines = none, sizes = none;
  for (int i = 0; i < CLB_I4_GROUP; i++) {
    vf t = vf_add(vf_mul(vf_load(w + i * CLB_PANEL), inverse), centred), d = vf_sub(t, vf_round(t)), size = vf_abs(d);
    sines = vf_add(sines, vf_mul(d, vf_sub(half, size)));
    sizes = vf_add(sizes, size);
  }
  vf cosine = vf_mul(vf_set1(5.08f), vf_sub(vf_set1(CLB_I4_GROUP / 4.0f), sizes)), x = vf_abs(cosine);
  vf y = vf_mul(vf_set1(16.0f), vf_abs(sines)), more = vf_max(x, y), less = vf_min(x, y);
  vf quarters = vf_div(y, vf_add(vf_add(x, y), vf_set1(1e-20f)));
  quarters = vf_select(vf_gt(none, cosine), vf_sub(vf_set1(2.0f), quarters), quarters);
  vf turn = vf_mul(quarters, vf_select(vf_gt(none, sines), vf_set1(-0.25f), vf_set1(0.25f)));
  vf resultant = vf_max(more, vf_add(vf_mul(vf_set1(0.9f), more), vf_mul(vf_set1(0.485f), less)));
  /* Weights at both ends are clipped by about this many steps; the rest, were they anywhere, have a twelfth each. */
  vf beyond = vf_max(vf_mul(half, vf_sub(vf_mul(vf_sub(high, low), inverse), vf_set1(15.5f))), none);
  vf error = vf_sub(vf_set1(CLB_I4_GROUP / 12.0f), vf_mul(resultant, vf_set1(0.1013f)));
  error = vf_add(error, vf_mul(vf_set1(2.0f), vf_mul(beyond, beyond)));
  i4_choice choice = {vf_mul(error, vf_mul(scale, scale)), scale, i4_zero(vf_sub(centred, turn))};
  return choice;
}

static void pack_i4(const float *weights, float base, uint8_t *to) {
  enum { SCALES = 8, TRIALS = 4 };
  float w[CLB_I4_GROUP * CLB_PANEL], wide[CLB_PANEL], scales[CLB_PANEL], zeros[CLB_PANEL];
  int32_t q[CLB_I4_GROUP][CLB_PANEL];
  vf inverse_base = vf_set1(base > 0.0f ? 1.0f / base : 0.0f);
  for (int j = 0; j < CLB_PANEL; j += LANES) {
    vf low = vf_set1(0.0f), high = low; /* codes reach from below 0 to above it, whatever the weights do */
    /* At worst all zeros, which weights far below the base are nearest to. */
    i4_choice best = {low, vf_set1(i4_scale(0)), low}, promising[TRIALS];
    for (int i = 0; i < CLB_I4_GROUP; i++) {
      vf x = vf_mul(vf_load(weights + i * CLB_PANEL + j), inverse_base);
      vf_store(w + i * CLB_PANEL + j, x);
      low = vf_min(x, low), high = vf_max(x, high), best.error = vf_add(best.error, vf_mul(x, x));
    }
    /* From a scale whose 12 steps make the range down to one whose 15 do not, so that its ends are clipped. */
    vf_store(wide + j, vf_mul(vf_sub(high, low), vf_set1(1.27f / 15.0f)));
    for (int n = 0; n < TRIALS; n++) promising[n] = best, promising[n].error = vf_set1(INFINITY);
    for (int k = 0; k < SCALES; k++) {
      for (int l = j; l < j + LANES; l++) {
        int code = i4_code(wide[l]) - k;
        scales[l] = i4_scale(code < 0 ? 0 : code);
      }
      i4_choice guess = i4_guess(w + j, low, high, vf_load(scales + j));
      for (int n = 0; n < TRIALS; n++) {
        vm m = vf_gt(promising[n].error, guess.error);
        i4_choice other = promising[n];
        promising[n] = select_i4(m, guess, other), guess = select_i4(m, other, guess);
      }
    }
    for (int n = 0; n < TRIALS; n++) best = better(best, i4_try(w + j, promising[n].scale, promising[n].zero));
    vf zero = best.zero, scale = best.scale;
    for (int step = -1; step <= 1; step += 2)
      best = better(best, i4_try(w + j, scale, i4_zero(vf_add(zero, vf_set1((float)step * 0.0625f)))));
    vf inverse = vf_div(vf_set1(1.0f), best.scale);
    for (int i = 0; i < CLB_I4_GROUP; i++)
      vi_store(q[i] + j, vi_of(i4_of(vf_add(vf_mul(vf_load(w + i * CLB_PANEL + j), inverse), best.zero))));
    vf_store(scales + j, best.scale), vf_store(zeros + j, best.zero);
  }
  for (int i = 0; i < CLB_I4_GROUP; i += 4)
    for (int b = 0; b < 2 * CLB_PANEL; b++)
      *to++ = (uint8_t)(q[i + b % 4][b / 4] | q[i + b % 4][b / 4 + CLB_PANEL / 2] << 4);
  for (int j = 0; j < CLB_PANEL; j++) {
    to[j] = (uint8_t)i4_code(scales[j]);
    to[CLB_PANEL + j] = (uint8_t)(zeros[j] * 16.0f);
  }
}

void KERNEL(pack_group)(clb_dtype dtype, const float *w, int n_inputs, float base, uint8_t *to) {
  if (dtype == CLB_I8) pack_i8(w, n_inputs, to);
  else pack_i4(w, base, to);
}
