/* A projection with rows of activations in lanes. Weights that lie as [output][input] are to linear_f32 what rows of
 * activations are, and rows of activations, once they are in panels, what weights are. So the weights are read where
 * they lie and never put in order; each sum is the same chain. The price is what no row fills of the last panel
 * (docs/decisions/0003). For bfloat16 in blocks a lane's word is a pair, and matrix instructions sum
 * (docs/decisions/0015). */
#include <string.h>

#include "projection.h"

enum {
  OUTPUTS = 2 * CLB_PANEL,
  HALF = CLB_PANEL / 2,
  LEAST = 13,         /* rows that go in lanes */
  LEAST_IN_TILES = 7, /* fewer are taken in runs of panels */
};

size_t clb_lanes_bytes(const clb_experts_shape *s) {
  int most = s->hidden_size > s->intermediate_size ? s->hidden_size : s->intermediate_size;
  size_t bytes = s->dtype == CLB_F32 ? sizeof(float) : s->narrow_states ? sizeof(uint16_t) : 0;
  return most * CLB_ROW_BLOCK * bytes;
}

int clb_lanes_wanted(const clb_kernels *k, const clb_experts_shape *s, int in_place, size_t n_slots) {
  if (s->dtype == CLB_F32) return in_place && n_slots >= LEAST;
  return s->narrow_states && k->linear_tiles && n_slots >= LEAST_IN_TILES;
}

static int in_tiles(const clb_kernels *k, const clb_projection *w) {
  return w->in_blocks && k->linear_tiles && w->n_inputs % CLB_BLOCK == 0 && !clb_in_columns(w);
}

int clb_lanes_may(const clb_kernels *k, const clb_projection *w) {
  uintptr_t off = (uintptr_t)w->weights | (uintptr_t)w->place->output | (uintptr_t)w->place->up;
  if (w->dtype != CLB_F32) return in_tiles(k, w);
  return w->place->in_place && !clb_in_columns(w) && off % sizeof(float) == 0 && k->linear_eight;
}

/* Putting weights in panels takes as long as some eight rows and a sixteenth more; half a panel at the end as long as
 * eleven, and before it one or two whole ones leave memory waiting. */
int clb_lanes_suit(const clb_kernels *k, const clb_projection *w, const clb_row_block *rows) {
  enum { LEAST_WITH_HALF = 36 };
  int left = rows->n % CLB_PANEL, half = left > 0 && left <= HALF;
  if (!clb_lanes_may(k, w)) return 0;
  if (w->dtype != CLB_F32) return rows->n >= LEAST_IN_TILES && rows->paired;
  return rows->n >= (half ? LEAST_WITH_HALF : LEAST);
}

size_t clb_lanes_fill(const clb_kernels *k, const clb_projection *w, const clb_row_block *rows, char *lanes) {
  const char *from[CLB_ROW_BLOCK];
  int n_panels = clb_blocks_of(rows->n, CLB_PANEL), left = rows->n % CLB_PANEL, pairs = w->dtype != CLB_F32;
  ptrdiff_t n = w->n_inputs >> pairs;
  for (int i = 0; i < n_panels * CLB_PANEL; i++) {
    int r = i < rows->n ? i : rows->n - 1;
    from[i] = pairs ? rows->pairs[r] : (const char *)rows->x[r];
  }
  k->fill_panels(CLB_F32, from, n_panels, sizeof(float), 0, (int)n, NULL, lanes);
  float *last = (float *)lanes + (rows->n - left) * n;
  for (ptrdiff_t i = 0; left && i < n; i++) memmove(last + i * left, last + i * CLB_PANEL, left * sizeof *last);
  return (size_t)rows->n * n * sizeof(float);
}

static int project_in_tiles(const clb_kernels *k, const clb_projection *w, int panel, int n_panels,
                            const clb_row_block *rows, const float *init, float *c, ptrdiff_t ldc) {
  ptrdiff_t bytes = (ptrdiff_t)clb_panel_bytes(w->dtype, w->n_inputs);
  clb_tiles t = {.in_place = w->place->in_place,
                 .output = w->place->output,
                 .k = w->n_inputs,
                 .n_rows = rows->n,
                 .lanes = rows->lanes,
                 .init = init,
                 .c = c,
                 .ldc = ldc};
  clb_places at;
  if (t.in_place) at = clb_places_of(w, panel, n_panels);
  for (int p = 0; p < n_panels; p++) {
    int left = w->n_outputs - clb_column_of(w, panel + p);
    t.n_outputs[p] = t.in_place && left < CLB_PANEL ? left : CLB_PANEL;
    t.weights[p] = t.in_place ? at.outputs[p * CLB_PANEL] : w->weights + (panel + p) * bytes;
    t.next[p] = t.in_place ? at.next[p] : t.weights[p] + n_panels * bytes;
  }
  return k->linear_tiles(&t);
}

int clb_project_lanes(const clb_kernels *k, const clb_projection *w, int panel, int n_panels, const clb_row_block *rows,
                      float *c, ptrdiff_t ldc) {
  const float *weights[OUTPUTS];
  const char *next[CLB_ROW_BLOCK / CLB_PANEL + 1];
  float init[OUTPUTS], sums[OUTPUTS * CLB_ROW_BLOCK];
  int n_outputs = n_panels * CLB_PANEL, n_whole = rows->n / CLB_PANEL, left = rows->n % CLB_PANEL;
  clb_start_of(w, panel, n_panels, 1, init);
  if (w->dtype != CLB_F32) return project_in_tiles(k, w, panel, n_panels, rows, init, c, ldc);
  clb_places at = clb_places_of(w, panel, n_panels);
  for (int o = 0; o < n_outputs; o++) {
    weights[o] = (const float *)at.outputs[o];
    for (int r = 0; r < CLB_ROW_BLOCK; r++) sums[o * CLB_ROW_BLOCK + r] = init[o];
  }
  for (int p = 0; p <= n_whole; p++) next[p] = at.next[p % n_panels];
  clb_input a = {.rows = weights, .n_segments = 1, .k = w->n_inputs};
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
  return 1;
}
