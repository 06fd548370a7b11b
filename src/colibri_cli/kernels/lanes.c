/* A projection with rows of activations in lanes. Weights that lie as [output][input] are to linear_f32 what rows of
 * activations are, and rows of activations, once they are in panels, what weights are. So the weights are read where
 * they lie and never put in order; each sum is the same chain. The price is what no row fills of the last panel
 * (docs/decisions/0003). */
#include <string.h>

#include "projection.h"

enum { OUTPUTS = 2 * CLB_PANEL, HALF = CLB_PANEL / 2 };

size_t clb_lanes_bytes(const clb_experts_shape *s) {
  int most = s->hidden_size > s->intermediate_size ? s->hidden_size : s->intermediate_size;
  return s->dtype == CLB_F32 ? (size_t)most * CLB_ROW_BLOCK * sizeof(float) : 0;
}

int clb_lanes_may(const clb_kernels *k, const clb_projection *w) {
  uintptr_t off = (uintptr_t)w->weights | (uintptr_t)w->place->output | (uintptr_t)w->place->up;
  return w->dtype == CLB_F32 && w->place->in_place && !clb_in_columns(w) && off % sizeof(float) == 0 && k->linear_eight;
}

/* Putting weights in panels takes as long as some eight rows and a sixteenth more; half a panel at the end as long as
 * eleven, and before it one or two whole ones leave memory waiting. */
int clb_lanes_suit(const clb_kernels *k, const clb_projection *w, int n_rows) {
  enum { LEAST_WITH_HALF = 36 };
  int left = n_rows % CLB_PANEL, half = left > 0 && left <= HALF;
  return n_rows >= (half ? LEAST_WITH_HALF : CLB_LANES_LEAST) && clb_lanes_may(k, w);
}

size_t clb_lanes_fill(const clb_kernels *k, const clb_row_block *rows, int n_inputs, char *lanes) {
  const char *from[CLB_ROW_BLOCK];
  int n_panels = clb_blocks_of(rows->n, CLB_PANEL), left = rows->n % CLB_PANEL;
  for (int r = 0; r < n_panels * CLB_PANEL; r++) from[r] = (const char *)rows->x[r < rows->n ? r : rows->n - 1];
  k->fill_panels(CLB_F32, from, n_panels, sizeof(float), 0, n_inputs, NULL, lanes);
  float *last = (float *)lanes + (ptrdiff_t)(rows->n - left) * n_inputs;
  for (ptrdiff_t i = 0; left && i < n_inputs; i++) memmove(last + i * left, last + i * CLB_PANEL, left * sizeof *last);
  return (size_t)rows->n * n_inputs * sizeof(float);
}

void clb_project_lanes(const clb_kernels *k, const clb_projection *w, int panel, int n_panels,
                       const clb_row_block *rows, float *c, ptrdiff_t ldc) {
  const float *weights[OUTPUTS];
  const char *next[CLB_ROW_BLOCK / CLB_PANEL + 1];
  float init[OUTPUTS], sums[OUTPUTS * CLB_ROW_BLOCK];
  clb_places at = clb_places_of(w, panel, n_panels);
  int n_outputs = n_panels * CLB_PANEL, n_whole = rows->n / CLB_PANEL, left = rows->n % CLB_PANEL;
  clb_start_of(w, panel, n_panels, 1, init);
  for (int o = 0; o < n_outputs; o++) {
    weights[o] = (const float *)at.outputs[o];
    for (int r = 0; r < CLB_ROW_BLOCK; r++) sums[o * CLB_ROW_BLOCK + r] = init[o];
  }
  for (int p = 0; p <= n_whole; p++) next[p] = at.next[p % n_panels];
  clb_input a = {weights, 0, 1, w->n_inputs};
  clb_panels x = {.data = rows->lanes,
                  .panel_stride = (ptrdiff_t)w->n_inputs * CLB_PANEL * (ptrdiff_t)sizeof(float),
                  .row_stride = CLB_PANEL * sizeof(float),
                  .next = next};
  k->linear_f32(&a, n_outputs, &x, n_whole, NULL, sums, CLB_ROW_BLOCK);
  x.data = rows->lanes + n_whole * x.panel_stride, x.next += n_whole;
  x.row_stride = left * (ptrdiff_t)sizeof(float); /* what lanes beyond it have is never looked at */
  float *last = sums + n_whole * CLB_PANEL;
  if (left > HALF) k->linear_f32(&a, n_outputs, &x, 1, NULL, last, CLB_ROW_BLOCK);
  else if (left) k->linear_eight(weights, n_outputs, w->n_inputs, x.data, x.row_stride, last, CLB_ROW_BLOCK);
  for (int r = 0; r < rows->n; r++)
    for (int o = 0; o < n_outputs; o++) c[r * ldc + o] = sums[o * CLB_ROW_BLOCK + r];
}
