/* Weights into panels, as kernels.h lays them out: the same bytes on every machine. */
#include <math.h>
#include <string.h>

#include "kernels.h"

static size_t blocks_of(int n, int block) { return ((size_t)n + block - 1) / block; }

size_t clb_panel_bytes(clb_dtype dtype, int n_inputs) {
  size_t n = (size_t)n_inputs, chunks = blocks_of(n_inputs, CLB_CHUNK), groups = blocks_of(n_inputs, CLB_I8_GROUP);
  switch (dtype) {
    case CLB_BF16: return n * CLB_PANEL * sizeof(uint16_t);
    case CLB_I8: return chunks * CLB_CHUNK * CLB_PANEL + groups * CLB_PANEL * sizeof(uint16_t);
    case CLB_I4: return chunks * (CLB_CHUNK * CLB_PANEL / 2 + 2 * CLB_PANEL);
    default: return n * CLB_PANEL * sizeof(float);
  }
}

size_t clb_row_bytes(clb_dtype dtype, int n_inputs) {
  size_t chunks = blocks_of(n_inputs, CLB_CHUNK), groups = blocks_of(n_inputs, CLB_I8_GROUP);
  switch (dtype) {
    case CLB_I8: return chunks * CLB_CHUNK * sizeof(int16_t) + groups * sizeof(float);
    case CLB_I4: return chunks * (CLB_CHUNK * sizeof(int8_t) + 2 * sizeof(float));
    default: return (size_t)n_inputs * sizeof(float);
  }
}

/* To nearest, ties to even; a NaN stays one. */
static inline uint32_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Columns 0 8 1 9 2 10 ...: the halves of a word are columns of two vectors. */
static void pack_bf16(float (*w)[CLB_PANEL], int n_inputs, uint8_t *to) {
  for (int i = 0; i < n_inputs; i++) {
    uint32_t words[CLB_PANEL / 2];
    for (int j = 0; j < CLB_PANEL / 2; j++) words[j] = to_bf16(w[i][j]) | to_bf16(w[i][j + CLB_PANEL / 2]) << 16;
    memcpy(to + i * sizeof words, words, sizeof words);
  }
}

/* What int4's scales are relative to, a quarter of the power of two in the largest weight: room above the scale of that
 * weight's group, and 14 octaves below it. One a panel, so that an outlier coarsens nothing further away; a power of
 * two, so that it changes no code that it does not cut. */
static float i4_base(const float *w, ptrdiff_t output_stride, ptrdiff_t input_stride, int n, int n_inputs) {
  if (output_stride < input_stride) return i4_base(w, input_stride, output_stride, n_inputs, n); /* along memory */
  uint32_t largest = 0;
  for (ptrdiff_t j = 0; j < n; j++)
    for (ptrdiff_t i = 0; i < n_inputs; i++) {
      uint32_t bits;
      memcpy(&bits, &w[j * output_stride + i * input_stride], sizeof bits);
      bits &= 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
  float size, power;
  memcpy(&size, &largest, sizeof size);
  largest &= 0x7f800000;
  memcpy(&power, &largest, sizeof power);
  return size > CLB_SMALLEST ? 0.25f * power : 0.0f;
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
  uint8_t *to = (uint8_t *)s->panels + panel * s->panel_stride;
  if (s->dtype == CLB_F32 && s->input_stride == 1) {
    s->k->transpose_f32(w, s->output_stride, n, s->n_inputs, (float *)to);
    return;
  }
  float g[CLB_I8_GROUP][CLB_PANEL] = {{0}}, base = 0.0f;
  int group = s->dtype == CLB_I8 ? CLB_I8_GROUP : CLB_I4_GROUP; /* of the others, so many at a time */
  if (s->dtype == CLB_I4)
    base = s->bases[panel * s->base_stride] = i4_base(w, s->output_stride, s->input_stride, n, s->n_inputs);
  for (int i = 0; i < s->n_inputs; i += group, w += group * s->input_stride) {
    int n_inputs = s->n_inputs - i;
    if (n_inputs < group) memset(g, 0, sizeof g);
    else n_inputs = group;
    if (s->input_stride == 1) s->k->transpose_f32(w, s->output_stride, n, n_inputs, g[0]);
    else
      for (int k = 0; k < n_inputs; k++) {
        const float *from = w + k * s->input_stride;
        for (int j = 0; j < n; j++, from += s->output_stride) memcpy(&g[k][j], from, sizeof *from);
      }
    if (s->dtype == CLB_F32) memcpy(to, g, (size_t)n_inputs * sizeof g[0]);
    else if (s->dtype == CLB_BF16) pack_bf16(g, n_inputs, to);
    else s->k->pack_group(s->dtype, g[0], (int)blocks_of(n_inputs, CLB_CHUNK) * CLB_CHUNK, base, to);
    to += clb_panel_bytes(s->dtype, group);
  }
}

void clb_pack_panels(const clb_kernels *k, clb_dtype dtype, const float *w, ptrdiff_t output_stride,
                     ptrdiff_t input_stride, int n_outputs, int n_inputs, void *panels, ptrdiff_t panel_stride,
                     float *bases, ptrdiff_t base_stride, int n_threads) {
  pack_job job = {k,      dtype,        w,     output_stride, input_stride, n_outputs, n_inputs,
                  panels, panel_stride, bases, base_stride};
  clb_pool_run(pack_panel, &job, (n_outputs + CLB_PANEL - 1) / CLB_PANEL, n_threads);
}
