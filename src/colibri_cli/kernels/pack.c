/* Weights into panels, as kernels.h lays them out. Written in plain arithmetic, without contraction, so that a
 * checkpoint packs to the same bytes everywhere. */
#include <math.h>
#include <string.h>

#include "kernels.h"

enum { COLUMNS_OF_HALF = 8 };

#define SMALLEST 1e-35f /* weights below this, and bases, are held as 0: 1 / scale must stay finite */

static int groups_of(int n_inputs) { return (n_inputs + CLB_GROUP - 1) / CLB_GROUP; }

size_t clb_panel_bytes(clb_dtype dtype, int n_inputs) {
  size_t n = (size_t)n_inputs, groups = (size_t)groups_of(n_inputs);
  switch (dtype) {
    case CLB_BF16: return n * CLB_PANEL * sizeof(uint16_t);
    case CLB_I8: return groups * (CLB_GROUP * CLB_PANEL + CLB_PANEL * sizeof(uint16_t));
    case CLB_I4: return groups * (CLB_GROUP * CLB_PANEL / 2 + 2 * CLB_PANEL);
    default: return n * CLB_PANEL * sizeof(float);
  }
}

size_t clb_row_bytes(clb_dtype dtype, int n_inputs) {
  size_t groups = (size_t)groups_of(n_inputs);
  switch (dtype) {
    case CLB_I8: return groups * (CLB_GROUP * sizeof(int16_t) + sizeof(float));
    case CLB_I4: return groups * (CLB_GROUP * sizeof(int8_t) + 2 * sizeof(float));
    default: return (size_t)n_inputs * sizeof(float);
  }
}

/* Where column j of a panel stands among 16 bfloat16. */
static int bf16_place(int j) { return j % COLUMNS_OF_HALF * 2 + j / COLUMNS_OF_HALF; }

/* To nearest, ties to even; a NaN stays one. */
static uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (isnan(x)) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* To nearest, ties to even, for |x| < 2^22; unlike rintf, in a form that every compiler vectorises. */
static float nearest(float x) {
  volatile const float magic = 12582912.0f;
  return (x + magic) - magic;
}

static float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

/* One column of one group: 32 weights to int8 and a bfloat16 scale, nearest to max / 127 or the next above. */
static uint16_t quantize_i8(const float *w, int8_t *q) {
  float largest = 0.0f, best_error = INFINITY;
  for (int i = 0; i < CLB_GROUP; i++) largest = fmaxf(largest, fabsf(w[i]));
  uint16_t scale = to_bf16(largest / 127.0f), best = 0;
  memset(q, 0, CLB_GROUP);
  if (!(largest > SMALLEST)) return 0;
  for (int step = -1; step <= 1; step++) {
    float s = from_bf16((uint16_t)(scale + step)), error = 0.0f;
    int8_t trial[CLB_GROUP];
    for (int i = 0; i < CLB_GROUP; i++) {
      float n = clamp(nearest(w[i] / s), -127.0f, 127.0f), d = w[i] / largest - s / largest * n; /* never overflows */
      trial[i] = (int8_t)n;
      error += d * d;
    }
    if (error < best_error) {
      best_error = error, best = (uint16_t)(scale + step);
      memcpy(q, trial, CLB_GROUP);
    }
  }
  return best;
}

/* 2^(code / 32 - 7) (1 + code % 32 / 32): the scale of a code relative to the base. */
static float i4_scale(int code) {
  uint32_t bits = ((uint32_t)code << 18) + ((127 - 7) << 23);
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The code whose scale is nearest to x from below, 0..255. */
static int i4_code(float x) {
  uint32_t bits;
  if (!(x > i4_scale(0))) return 0;
  memcpy(&bits, &x, sizeof bits);
  uint32_t code = (bits - ((127 - 7) << 23)) >> 18;
  return code > 255 ? 255 : (int)code;
}

typedef struct {
  float error;
  int scale, zero;
  uint8_t q[CLB_GROUP];
} i4_choice;

/* Codes for one scale: the zero starts where the range is centred (or where the last trial left it), and is then set to
 * what minimises the squared error for the codes found, twice. */
static void try_i4(const float *w, int code, float base, float middle, float mean, i4_choice *best) {
  float s = i4_scale(code) * base, inverse = 1.0f / s;
  int zero = (int)clamp(nearest(16.0f * (7.5f - middle * inverse)), 0.0f, 255.0f);
  for (int round = 0; round < 3; round++) {
    float errors[8] = {0}, sum = 0.0f, error = 0.0f, z = (float)zero * 0.0625f, q[CLB_GROUP];
    for (int i = 0; i < CLB_GROUP; i += 8)
      for (int j = 0; j < 8; j++) {
        float t = w[i + j] * inverse + z, n = clamp(nearest(clamp(t, -1.0f, 16.0f)), 0.0f, 15.0f);
        float d = (t - n) * i4_scale(code); /* in units of the base: never overflows */
        q[i + j] = n;
        errors[j] += d * d;
      }
    for (int j = 0; j < 8; j++) error += errors[j];
    for (int i = 0; i < CLB_GROUP; i++) sum += q[i];
    if (error < best->error) {
      best->error = error, best->scale = code, best->zero = zero;
      for (int i = 0; i < CLB_GROUP; i++) best->q[i] = (uint8_t)q[i];
    }
    int next = (int)clamp(nearest(16.0f * (sum / CLB_GROUP - mean * inverse)), 0.0f, 255.0f);
    if (next == zero) return;
    zero = next;
  }
}

static void quantize_i4(const float *w, float base, i4_choice *best) {
  float low = 0.0f, high = 0.0f, mean = 0.0f; /* codes reach from below 0 to above it, whatever the weights do */
  for (int i = 0; i < CLB_GROUP; i++) {
    low = fminf(low, w[i]), high = fmaxf(high, w[i]);
    mean += w[i];
  }
  mean /= CLB_GROUP;
  memset(best, 0, sizeof *best);
  if (!(base > SMALLEST) || !(fmaxf(high, -low) > 0.0f)) return; /* all zero: q = zero = 0 */
  /* At worst all zeros, which a group far below the base is nearer to than to the smallest scale's steps. */
  best->zero = 8 * 16;
  memset(best->q, 8, sizeof best->q);
  for (int i = 0; i < CLB_GROUP; i++) best->error += w[i] / base * (w[i] / base);
  /* Clipping the ends of 32 weights pays down to about two thirds of the full range. */
  float middle = 0.5f * (low + high);
  int widest = i4_code((high - low) / 15.0f / base) + 1, last = i4_code((high - low) * 0.62f / 15.0f / base);
  for (int code = widest < 255 ? widest : 255; code >= last; code -= 3) try_i4(w, code, base, middle, mean, best);
  int near = best->scale;
  for (int code = near - 2; code <= near + 2; code++)
    if (code != near && code >= 0 && code <= 255) try_i4(w, code, base, middle, mean, best);
}

/* The smallest power of two that leaves no group of n <= CLB_PANEL columns a step beyond the largest scale. One a
 * panel, so that an outlier coarsens nothing further away; a power of two, so that it changes no code that it does not
 * cut. */
static float i4_base(const float *w, ptrdiff_t output_stride, ptrdiff_t input_stride, int n, int n_inputs) {
  float widest = 0.0f; /* halved, lest the range of the largest floats be infinite */
  for (ptrdiff_t j = 0; j < n; j++)
    for (int g = 0; g < n_inputs; g += CLB_GROUP) {
      float low = 0.0f, high = 0.0f; /* a group's range takes in the zeros that may pad it */
      for (ptrdiff_t i = g; i < n_inputs && i < g + CLB_GROUP; i++) {
        float x = w[j * output_stride + i * input_stride];
        low = fminf(low, x), high = fmaxf(high, x);
      }
      widest = fmaxf(widest, 0.5f * high - 0.5f * low);
    }
  float base = widest / 7.5f / i4_scale(255);
  uint32_t bits;
  memcpy(&bits, &base, sizeof bits);
  bits = (bits + 0x7fffff) & 0x7f800000;
  memcpy(&base, &bits, sizeof base);
  return base;
}

static void pack_group(clb_dtype dtype, const float *w, ptrdiff_t output_stride, ptrdiff_t input_stride, int n_columns,
                       int n_inputs, float base, uint8_t *to) {
  float column[CLB_GROUP];
  for (int j = 0; j < CLB_PANEL; j++) {
    for (int i = 0; i < CLB_GROUP; i++)
      column[i] = j < n_columns && i < n_inputs ? w[j * output_stride + i * input_stride] : 0.0f;
    if (dtype == CLB_I8) {
      int8_t q[CLB_GROUP];
      uint16_t scale = quantize_i8(column, q);
      for (int i = 0; i < CLB_GROUP; i++) to[i / 2 * 2 * CLB_PANEL + j * 2 + i % 2] = (uint8_t)q[i];
      memcpy(to + CLB_GROUP * CLB_PANEL + 2 * bf16_place(j), &scale, sizeof scale);
    } else {
      i4_choice choice;
      quantize_i4(column, base, &choice);
      for (int i = 0; i < CLB_GROUP; i++) {
        uint8_t *at = to + i / 4 * 4 * COLUMNS_OF_HALF + j % COLUMNS_OF_HALF * 4 + i % 4;
        *at = j < COLUMNS_OF_HALF ? choice.q[i] : (uint8_t)(*at | choice.q[i] << 4);
      }
      to[CLB_GROUP * CLB_PANEL / 2 + j] = (uint8_t)choice.scale;
      to[CLB_GROUP * CLB_PANEL / 2 + CLB_PANEL + j] = (uint8_t)choice.zero;
    }
  }
}

typedef struct {
  const clb_kernels *k;
  clb_dtype dtype;
  const float *w;
  ptrdiff_t output_stride, input_stride;
  int n_outputs, n_inputs;
  char *panels;
  ptrdiff_t panel_stride;
  float *bases;
  ptrdiff_t base_stride;
} pack_job;

static void pack_panel(void *arg, int panel, int worker) {
  (void)worker;
  const pack_job *s = arg;
  int left = s->n_outputs - panel * CLB_PANEL, n = left < CLB_PANEL ? left : CLB_PANEL;
  const float *w = s->w + (ptrdiff_t)panel * CLB_PANEL * s->output_stride;
  char *to = s->panels + panel * s->panel_stride;
  if (s->dtype == CLB_F32 && s->input_stride == 1) {
    s->k->transpose_f32(w, s->output_stride, n, s->n_inputs, (float *)to);
  } else if (s->dtype == CLB_F32 || s->dtype == CLB_BF16) {
    for (ptrdiff_t i = 0; i < s->n_inputs; i++)
      for (int c = 0; c < CLB_PANEL; c++) {
        float x = c < n ? w[c * s->output_stride + i * s->input_stride] : 0.0f;
        if (s->dtype == CLB_F32) ((float *)to)[i * CLB_PANEL + c] = x;
        else ((uint16_t *)to)[i * CLB_PANEL + bf16_place(c)] = to_bf16(x);
      }
  } else {
    ptrdiff_t group_bytes = (ptrdiff_t)clb_panel_bytes(s->dtype, CLB_GROUP);
    float base = s->dtype == CLB_I4 ? i4_base(w, s->output_stride, s->input_stride, n, s->n_inputs) : 0.0f;
    if (s->dtype == CLB_I4) s->bases[panel * s->base_stride] = base;
    for (int i = 0; i < s->n_inputs; i += CLB_GROUP)
      pack_group(s->dtype, w + i * s->input_stride, s->output_stride, s->input_stride, n,
                 s->n_inputs - i < CLB_GROUP ? s->n_inputs - i : CLB_GROUP, base,
                 (uint8_t *)to + i / CLB_GROUP * group_bytes);
  }
}

void clb_pack_panels(const clb_kernels *k, clb_dtype dtype, const float *w, ptrdiff_t output_stride,
                     ptrdiff_t input_stride, int n_outputs, int n_inputs, void *panels, ptrdiff_t panel_stride,
                     float *bases, ptrdiff_t base_stride, int n_threads) {
  pack_job job = {k,      dtype,        w,     output_stride, input_stride, n_outputs, n_inputs,
                  panels, panel_stride, bases, base_stride};
  clb_pool_run(pack_panel, &job, (n_outputs + CLB_PANEL - 1) / CLB_PANEL, n_threads);
}
