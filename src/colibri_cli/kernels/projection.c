/* One projection of one expert, from panels in memory of ours or from wherever else its weights are. */
#include <string.h>

#include "half.h"
#include "projection.h"

static clb_linear linear_of(const clb_kernels *k, clb_dtype dtype) {
  switch (dtype) {
    case CLB_BF16: return k->linear_bf16;
    case CLB_I8: return k->linear_i8;
    case CLB_I4: return k->linear_i4;
    default: return k->linear_f32;
  }
}

/* linear_pairs goes as far as it may; FMAs do what is left, and the last inputs, a part of a block. */
void clb_linear_rows(const clb_kernels *k, const clb_projection *w, const clb_row_block *rows, int first, int n,
                     const clb_panels *panels, int n_panels, const float *init, float *c, ptrdiff_t ldc) {
  const float *x[CLB_ROW_BLOCK];
  int done = 0, whole = n - n % CLB_BLOCK;
  clb_input a = {.rows = x, .n_segments = 1, .k = whole, .in_blocks = w->in_blocks};
  if (rows->paired && whole && k->linear_pairs) {
    for (int r = 0; r < rows->n; r++) x[r] = (const float *)(rows->pairs[r] + first * sizeof(uint16_t));
    done = k->linear_pairs(&a, rows->n, panels, n_panels, init, c, ldc);
  }
  for (int r = 0; r < rows->n; r++) x[r] = rows->x[r] + first;
  if (whole < n && done) {
    clb_panels last = *panels;
    last.data = (const char *)last.data + whole * last.row_stride;
    for (int r = 0; r < rows->n; r++) x[r] += whole;
    a.k = n - whole;
    k->linear_bf16(&a, rows->n, &last, done, NULL, c, ldc);
    for (int r = 0; r < rows->n; r++) x[r] -= whole;
  }
  if (done == n_panels) return;
  a.k = n;
  clb_panels b = *panels;
  b.data = (const char *)b.data + done * b.panel_stride;
  if (b.bases) b.bases += done;
  if (b.next) b.next += done;
  linear_of(k, w->dtype)(&a, rows->n, &b, n_panels - done, init ? init + done * CLB_PANEL : NULL, c + done * CLB_PANEL,
                         ldc);
}

void clb_start_of(const clb_projection *w, int panel, int n_panels, int apart, float *init) {
  const clb_place *at = w->place;
  memset(init, 0, n_panels * CLB_PANEL * sizeof(float));
  for (int end = panel + n_panels * apart; w->bias && panel < end; panel += apart, init += CLB_PANEL) {
    int column = clb_column_of(w, panel), n = w->n_outputs - column;
    const char *bias = w->bias + clb_half_of(w, panel) * at->up_bias + column * at->bias;
    if (n >= CLB_PANEL && at->bias == sizeof(float) && at->biases == CLB_F32) {
      memcpy(init, bias, CLB_PANEL * sizeof(float));
      continue;
    }
    for (int j = 0; j < CLB_PANEL && j < n; j++, bias += at->bias)
      if (at->biases == CLB_BF16) memcpy((char *)&init[j] + sizeof(uint16_t), bias, sizeof(uint16_t));
      else if (at->biases == CLB_F16) init[j] = widened(bias);
      else memcpy(&init[j], bias, sizeof(float));
  }
}

/* Runs that are read side by side. Few rows wait for memory, whose prefetcher follows a few long runs, each taken from
 * start to end, better than ever new short ones (docs/decisions/0009). */
enum { MOST_IN_RUNS = 6 };
static int runs_for(const clb_projection *w, int n_rows) {
  int most = clb_quantised(w->dtype) || w->place->in_place ? 0 : w->dtype == CLB_BF16 ? MOST_IN_RUNS : 4;
  return n_rows > most ? 1 : n_rows == 1 ? CLB_UNIT : 2;
}

/* Inputs of packed panels that rows are taken over at once. For many rows as many as stay in the L1 cache, while rows
 * come from the L2 cache and their tiles ask for the panel that is next. */
static int inputs_at_once(const clb_kernels *k, const clb_projection *w, int n_rows) {
  enum { MANY = 7 };
  int n = w->dtype == CLB_F32 && n_rows >= MANY ? k->inputs_at_once : 0;
  return n ? n : w->n_inputs;
}

/* Panels that one run takes at once: a single row streams several, more rows find their chains in one or two, and come
 * to several while they are in the L2 cache. */
static int panels_at_once(const clb_kernels *k, const clb_projection *w, int n_rows) {
  if (clb_in_columns(w) || clb_in_runs(k, w, n_rows))
    return n_rows < CLB_ROW_BLOCK ? CLB_ROW_BLOCK / n_rows * CLB_UNIT : CLB_UNIT;
  int in_blocks = !w->place->in_place && inputs_at_once(k, w, n_rows) < w->n_inputs;
  return n_rows == 1 || clb_quantised(w->dtype) || in_blocks ? CLB_UNIT : 2;
}

/* What comes when `done` of the panels from first to end - 1 have been made; what does not fill the runs is last. */
clb_block clb_block_after(const clb_kernels *k, const clb_projection *w, int n_rows, int first, int end, int done) {
  int n_runs = runs_for(w, n_rows), length = (end - first) / (n_runs * w->n_halves) * w->n_halves;
  if (n_runs > 1 && done < n_runs * length) return (clb_block){first + done / n_runs, n_runs, w->n_halves, length};
  int left = end - first - done, most = panels_at_once(k, w, n_rows);
  return (clb_block){first + done, 1, left < most ? left : most, 0};
}

/* c[r][...] = n_panels of the projection in memory of ours, from the first, so many apart. */
static __attribute__((noinline)) void project_packed(const clb_kernels *k, const clb_projection *w, int first,
                                                     int n_panels, int apart, const clb_row_block *rows, float *c,
                                                     ptrdiff_t ldc) {
  float init[CLB_UNIT * CLB_PANEL];
  const char *next[CLB_UNIT];
  ptrdiff_t bytes = (ptrdiff_t)clb_panel_bytes(w->dtype, w->n_inputs);
  const char *weights = w->weights + first * bytes;
  int n = inputs_at_once(k, w, rows->n);
  clb_panels b = {.panel_stride = apart * bytes,
                  .row_stride = CLB_PANEL * clb_weight_bytes(w),
                  .bases = w->bases ? w->bases + first : NULL,
                  .streamed = 1,
                  .next = n < w->n_inputs ? next : NULL};
  clb_start_of(w, first, n_panels, apart, init);
  for (int i = 0, left = w->n_inputs; left > 0; i += n, left -= n) {
    const char *at = weights + i * b.row_stride;
    for (int p = 0; p + 1 < n_panels; p++) next[p] = at + (p + 1) * bytes;
    next[n_panels - 1] = left > n ? at + n * b.row_stride : weights + n_panels * bytes;
    b.data = at;
    clb_linear_rows(k, w, rows, i, n < left ? n : left, &b, n_panels, i ? NULL : init, c, ldc);
  }
}

/* c[r][...] = a block's panels, run after run. */
void clb_project(const clb_kernels *k, const clb_projection *w, const clb_block *b, const clb_row_block *rows, float *c,
                 ptrdiff_t ldc) {
  if (rows->lanes && clb_project_lanes(k, w, b->first, b->n, rows, c, ldc)) return;
  if (w->place->in_place) {
    clb_project_in_place(k, w, b->first, b->n, rows, c, ldc);
  } else if (b->n_runs == 1) {
    project_packed(k, w, b->first, b->n, 1, rows, c, ldc);
  } else { /* a panel of each run at a time */
    float pass[MOST_IN_RUNS * CLB_UNIT * CLB_PANEL];
    int ld = b->n_runs * CLB_PANEL;
    for (int i = 0; i < b->n; i++) {
      project_packed(k, w, b->first + i, b->n_runs, b->apart, rows, pass, ld);
      for (int r = 0; r < rows->n; r++)
        for (int run = 0; run < b->n_runs; run++)
          memcpy(c + r * ldc + (run * b->n + i) * CLB_PANEL, pass + r * ld + run * CLB_PANEL,
                 CLB_PANEL * sizeof(float));
    }
  }
}
