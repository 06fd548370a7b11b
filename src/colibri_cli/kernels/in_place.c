/* A projection of weights in the caller's memory: put in panels block by block, or taken as they lie. */
#include <string.h>

#include "projection.h"

enum {
  FEW = 4,    /* rows: fewer share a weight */
  OUTPUTS = 8 /* of linear_in_place */
};

int clb_in_columns(const clb_projection *w) { return w->place->in_place && w->place->input != clb_weight_bytes(w); }

/* Where the weights of a panel's first output are in place; beyond the last panel, those of the last output. */
static const char *panel_at(const clb_projection *w, int panel) {
  int column = clb_column_of(w, panel), last = w->n_outputs - 1;
  return w->weights + clb_half_of(w, panel) * w->place->up + (column < last ? column : last) * w->place->output;
}

clb_places clb_places_of(const clb_projection *w, int panel, int n_panels) {
  clb_places found;
  ptrdiff_t stride = w->place->output, panel_bytes = (ptrdiff_t)CLB_PANEL * clb_weight_bytes(w) * w->n_inputs;
  int last = clb_column_of(w, panel + n_panels) >= w->n_outputs;
  for (int p = 0; p < n_panels; p++) {
    const char *from = panel_at(w, panel + p);
    int n = w->n_outputs - clb_column_of(w, panel + p);
#pragma GCC unroll 1
    for (int j = 0; j < CLB_PANEL; j++) found.outputs[p * CLB_PANEL + j] = from + (j < n ? j : n - 1) * stride;
    found.next[p] = last ? w->then : panel_at(w, panel + n_panels + p);
    if (last || stride == 2 * w->place->up) found.next[p] = found.next[0] + p * panel_bytes; /* all of it in a row */
  }
  return found;
}

/* Goes on with c by inputs begin..end - 1, through a block of panels that stays in the L1 cache. Rows are read a cache
 * line at a time where few x share them: more at once from so many rows sets off prefetchers that are wrong. The panels
 * after these are asked for meanwhile, in the order of memory: by the multiply-adds where there are enough of them,
 * which make half the block do, else by the filling. */
static __attribute__((noinline)) void add_by_panels(const clb_kernels *k, const clb_projection *w, int panel,
                                                    int n_panels, const clb_row_block *rows, int begin, int end,
                                                    float *c, ptrdiff_t ldc, const float *init) {
  enum { MOST_LINES = 32 };
  _Alignas(CLB_LINE) char panels[CLB_PANEL * MOST_LINES * CLB_LINE];
  clb_places at = clb_places_of(w, panel, n_panels);
  int asks = rows->n >= FEW && !clb_in_columns(w) && w->dtype != CLB_F16;
  int widens = w->dtype == CLB_F16, size = clb_weight_bytes(w), row_bytes = CLB_PANEL * size << widens;
  int small = n_panels * (ptrdiff_t)row_bytes * w->n_inputs <= (ptrdiff_t)sizeof panels;
  int most =
      (rows->n < FEW ? 1 : (clb_in_columns(w) ? MOST_LINES : MOST_LINES / 2) / n_panels >> widens) * CLB_LINE / size;
  int n = (int)(-(uintptr_t)at.outputs[0] % CLB_LINE) / 4 * 4 / size; /* the first block ends where a line does */
  if (small) most = w->n_inputs;
  if (n == 0 || small || w->in_blocks || clb_in_columns(w)) n = most;
  clb_panels b = {.data = panels, .row_stride = row_bytes, .next = asks ? at.next : NULL};
  for (int i = begin; i < end; i += n, n = most, init = NULL) {
    if (n > end - i) n = end - i;
    b.panel_stride = n * row_bytes, b.next_at = (ptrdiff_t)i * row_bytes;
    char *filled = panels + (widens ? n_panels * n * row_bytes / 2 : 0);
    k->fill_panels(w->dtype, at.outputs, n_panels, w->place->input, i, n, asks ? NULL : at.next, filled);
    if (widens) k->widen_f16((const uint16_t *)filled, n_panels * n, (float *)panels);
    clb_linear_rows(k, w, rows, i, n, &b, n_panels, init, c, ldc);
  }
}

static clb_linear_in_place kernel_of(const clb_kernels *k, const clb_projection *w) {
  if (w->in_blocks) return k->linear_in_place_blocks;
  return w->dtype == CLB_F32 ? k->linear_in_place_f32 : w->dtype == CLB_BF16 ? k->linear_in_place_bf16 : NULL;
}

/* bfloat16's chains are twice as long for its bytes: from an L2 cache panels, which have more chains at once, are
 * quicker. Beside 16 lanes they always are, but for a single row in blocks, which has two chains an output. */
int clb_in_runs(const clb_kernels *k, const clb_projection *w, int n_rows) {
  enum { OF_A_CACHE = 1 << 19 };
  int most = w->in_blocks && !k->linear_in_place_bf16 ? 1 : CLB_IN_PLACE_ROWS;
  if (n_rows > most || !w->place->in_place || clb_in_columns(w) || !kernel_of(k, w)) return 0;
  ptrdiff_t bytes = (ptrdiff_t)w->n_halves * w->n_outputs * w->n_inputs * clb_weight_bytes(w);
  return w->dtype == CLB_F32 || bytes >= OF_A_CACHE;
}

/* Eight outputs at a time, each from a run of its own: what a processor's prefetchers follow best is a few streams that
 * go on for long (docs/decisions/0003). A column that a last, shorter run lacks is made as the first run's. */
static void project_runs(const clb_kernels *k, const clb_projection *w, int panel, int n_panels,
                         const clb_row_block *rows, float *c, ptrdiff_t ldc) {
  const char *weights = panel_at(w, panel), *outputs[OUTPUTS];
  int n = n_panels / w->n_halves * CLB_PANEL, n_left = w->n_outputs - clb_column_of(w, panel);
  if (n > n_left) n = n_left;
  int length = clb_blocks_of(n, OUTPUTS / w->n_halves);
  int n_rows = rows->n == 1 ? 1 : CLB_IN_PLACE_ROWS;
  const float *x[CLB_IN_PLACE_ROWS];
  float sums[CLB_IN_PLACE_ROWS * OUTPUTS] = {0};
  for (int r = 0; r < n_rows; r++) x[r] = rows->x[r < rows->n ? r : 0]; /* what is too many is made for nothing */
  clb_start_of(w, panel, n_panels, 1, c);
  for (int r = 1; r < rows->n; r++) memcpy(c + r * ldc, c, (size_t)n_panels * CLB_PANEL * sizeof *c);
  for (int i = 0; i < length; i++) {
    int at[OUTPUTS];
    for (int lane = 0; lane < OUTPUTS; lane++) {
      int half = lane & (w->n_halves - 1), column = lane / w->n_halves * length + i;
      if (column >= n) column = i;
      outputs[lane] = weights + half * w->place->up + column * w->place->output;
      at[lane] = (column / CLB_PANEL * w->n_halves + half) * CLB_PANEL + column % CLB_PANEL;
      for (int r = 0; r < rows->n; r++) sums[r * OUTPUTS + lane] = c[r * ldc + at[lane]];
    }
    kernel_of(k, w)(x, n_rows, outputs, w->n_inputs, sums, OUTPUTS);
    for (int r = 0; r < rows->n; r++)
      for (int lane = 0; lane < OUTPUTS; lane++) c[r * ldc + at[lane]] = sums[r * OUTPUTS + lane];
  }
}

void clb_project_in_place(const clb_kernels *k, const clb_projection *w, int panel, int n_panels,
                          const clb_row_block *rows, float *c, ptrdiff_t ldc) {
  if (clb_in_runs(k, w, rows->n)) {
    project_runs(k, w, panel, n_panels, rows, c, ldc);
    return;
  }
  float init[CLB_UNIT * CLB_PANEL];
  int n = !clb_in_columns(w) ? w->n_inputs : rows->n < FEW ? CLB_BLOCK : 256;
  for (int i = 0; i < w->n_inputs; i += n)
    for (int p = 0; p < n_panels; p += CLB_UNIT) {
      int n_now = n_panels - p < CLB_UNIT ? n_panels - p : CLB_UNIT, end = w->n_inputs - i < n ? w->n_inputs : i + n;
      if (i == 0) clb_start_of(w, panel + p, n_now, 1, init);
      add_by_panels(k, w, panel + p, n_now, rows, i, end, c + p * CLB_PANEL, ldc, i ? NULL : init);
    }
}
