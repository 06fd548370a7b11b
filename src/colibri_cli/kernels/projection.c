/* One projection of one expert: panels in memory of ours, or weights in the caller's. */
#include <string.h>

#include "half.h"
#include "projection.h"

enum { FEW = 4 }; /* rows: fewer share a weight in place */

static clb_linear linear_of(const clb_kernels *k, clb_dtype dtype) {
  switch (dtype) {
    case CLB_BF16: return k->linear_bf16;
    case CLB_I8: return k->linear_i8;
    case CLB_I4: return k->linear_i4;
    default: return k->linear_f32;
  }
}

/* c[r][...] = n_panels of b over the rows' inputs first..first + n - 1; first is even. linear_pairs goes as far as it
 * may; FMAs do what is left, and a last odd input. */
static void linear_rows(const clb_kernels *k, clb_dtype dtype, const clb_row_block *rows, int first, int n,
                        const clb_panels *panels, int n_panels, const float *init, float *c, ptrdiff_t ldc) {
  const float *x[CLB_ROW_BLOCK];
  clb_input a = {x, 0, 1, n & ~1};
  int done = 0;
  if (rows->paired && n > 1) {
    for (int r = 0; r < rows->n; r++) x[r] = (const float *)(rows->pairs[r] + first * sizeof(uint16_t));
    done = k->linear_pairs(&a, rows->n, panels, n_panels, init, c, ldc);
  }
  for (int r = 0; r < rows->n; r++) x[r] = rows->x[r] + first;
  if (n % 2 && done) {
    clb_panels last = *panels;
    last.data = (const char *)last.data + (n - 1) * last.row_stride;
    for (int r = 0; r < rows->n; r++) x[r] += n - 1;
    a.k = 1;
    k->linear_bf16(&a, rows->n, &last, done, NULL, c, ldc);
    for (int r = 0; r < rows->n; r++) x[r] -= n - 1;
  }
  if (done == n_panels) return;
  a.k = n;
  clb_panels b = *panels;
  b.data = (const char *)b.data + done * b.panel_stride;
  if (b.bases) b.bases += done;
  if (b.next) b.next += done;
  linear_of(k, dtype)(&a, rows->n, &b, n_panels - done, init ? init + done * CLB_PANEL : NULL, c + done * CLB_PANEL,
                      ldc);
}

static int narrow(clb_dtype dtype) { return dtype == CLB_BF16 || dtype == CLB_F16; }
static int weight_bytes(const clb_projection *w) { return narrow(w->dtype) ? sizeof(uint16_t) : sizeof(float); }

/* Whether an input's outputs are side by side: a long row, of which all panels take their part before the next rows. */
static int in_columns(const clb_projection *w) { return w->place->in_place && w->place->input != weight_bytes(w); }

/* In a gated expert's up projection, n_halves = 2, even panels are gate and odd panels up. */
static int half_of(const clb_projection *w, int panel) { return panel & (w->n_halves - 1); }

/* The start of n_panels' chains: biases, 0 beyond the last or where there are none. */
static void start_of(const clb_projection *w, int panel, int n_panels, float init[CLB_UNIT * CLB_PANEL]) {
  const clb_place *at = w->place;
  for (int p = 0; p < n_panels; p++, init += CLB_PANEL) {
    memset(init, 0, CLB_PANEL * sizeof(float));
    if (!w->bias) continue;
    int column = clb_column_of(w, panel + p), n = w->n_outputs - column;
    const char *bias = w->bias + half_of(w, panel + p) * at->up_bias + column * at->bias;
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

/* Panels that one run takes at once: a single row streams several, more rows find their chains in one or two. */
static int panels_at_once(const clb_projection *w, int n_rows) {
  if (in_columns(w)) return n_rows < CLB_ROW_BLOCK ? CLB_ROW_BLOCK / n_rows * CLB_UNIT : CLB_UNIT;
  return n_rows == 1 || clb_quantised(w->dtype) ? CLB_UNIT : 2;
}

/* What comes when `done` of the panels from first to end - 1 have been made; what does not fill the runs is last. */
clb_block clb_block_after(const clb_projection *w, int n_rows, int first, int end, int done) {
  int n_runs = runs_for(w, n_rows), length = (end - first) / (n_runs * w->n_halves) * w->n_halves;
  if (n_runs > 1 && done < n_runs * length) return (clb_block){first + done / n_runs, n_runs, w->n_halves, length};
  int left = end - first - done, most = panels_at_once(w, n_rows);
  return (clb_block){first + done, 1, left < most ? left : most, 0};
}

/* c[r][...] = n_panels of the projection in memory of ours, from the first, so many apart. */
static __attribute__((noinline)) void project_packed(const clb_kernels *k, const clb_projection *w, int first,
                                                     int n_panels, int apart, const clb_row_block *rows, float *c,
                                                     ptrdiff_t ldc) {
  float init[CLB_UNIT * CLB_PANEL];
  ptrdiff_t bytes = (ptrdiff_t)clb_panel_bytes(w->dtype, w->n_inputs);
  clb_panels b = {.data = w->weights + first * bytes,
                  .panel_stride = apart * bytes,
                  .row_stride = CLB_PANEL * weight_bytes(w),
                  .bases = w->bases ? w->bases + first : NULL,
                  .streamed = 1};
  for (int p = 0; p < n_panels; p++) start_of(w, first + p * apart, 1, init + p * CLB_PANEL);
  linear_rows(k, w->dtype, rows, 0, w->n_inputs, &b, n_panels, init, c, ldc);
}

/* Where the weights of a panel's first output are in place; beyond the last panel, those of the last output. */
static const char *panel_at(const clb_projection *w, int panel) {
  int column = clb_column_of(w, panel), last = w->n_outputs - 1;
  return w->weights + half_of(w, panel) * w->place->up + (column < last ? column : last) * w->place->output;
}

/* In the caller's memory: where panels' outputs are, and for each panel where memory begins that is wanted after it. */
typedef struct {
  const char *outputs[CLB_UNIT * CLB_PANEL], *next[CLB_UNIT];
} places;

static places places_of(const clb_projection *w, int panel, int n_panels) {
  places found;
  ptrdiff_t stride = w->place->output, panel_bytes = (ptrdiff_t)CLB_PANEL * weight_bytes(w) * w->n_inputs;
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
  places at = places_of(w, panel, n_panels);
  int asks = rows->n >= FEW && !in_columns(w) && w->dtype != CLB_F16;
  int widens = w->dtype == CLB_F16, size = weight_bytes(w), row_bytes = CLB_PANEL * size << widens;
  int small = n_panels * (ptrdiff_t)row_bytes * w->n_inputs <= (ptrdiff_t)sizeof panels;
  int most = (rows->n < FEW ? 1 : (in_columns(w) ? MOST_LINES : MOST_LINES / 2) / n_panels >> widens) * CLB_LINE / size;
  int n = (int)(-(uintptr_t)at.outputs[0] % CLB_LINE) / 4 * 4 / size; /* the first block ends where a line does */
  if (small) most = w->n_inputs;
  if (n == 0 || small || in_columns(w)) n = most;
  clb_panels b = {.data = panels, .row_stride = row_bytes, .next = asks ? at.next : NULL};
  for (int i = begin; i < end; i += n, n = most, init = NULL) {
    if (n > end - i) n = end - i;
    b.panel_stride = n * row_bytes, b.next_at = (ptrdiff_t)i * row_bytes;
    char *filled = panels + (widens ? n_panels * n * row_bytes / 2 : 0);
    k->fill_panels(w->dtype, at.outputs, n_panels, w->place->input, i, n, asks ? NULL : at.next, filled);
    if (widens) k->widen_f16((const uint16_t *)filled, n_panels * n, (float *)panels);
    linear_rows(k, w->dtype, rows, i, n, &b, n_panels, init, c, ldc);
  }
}

/* Whether so few rows take weights as they lie: from memory that is quicker by up to two thirds, from a cache for one
 * and two rows alone no slower. bfloat16, whose chains are twice as long for its bytes, gains nothing. */
static int directly(const clb_kernels *k, const clb_projection *w, int n_rows) {
  enum { MOST = 2 };
  return w->dtype == CLB_F32 && !in_columns(w) && n_rows <= MOST && k->linear_in_place;
}

/* c[r][...] = n_panels from panel of weights in the caller's memory. */
static void project_in_place(const clb_kernels *k, const clb_projection *w, int panel, int n_panels,
                             const clb_row_block *rows, float *c, ptrdiff_t ldc) {
  float init[CLB_UNIT * CLB_PANEL];
  if (directly(k, w, rows->n)) {
    places at = places_of(w, panel, n_panels);
    start_of(w, panel, n_panels, init);
    for (int r = 0; r < rows->n; r++) memcpy(c + r * ldc, init, n_panels * CLB_PANEL * sizeof *c);
    for (int p = 0; p < n_panels; p++)
      k->linear_in_place(rows->x, rows->n, at.outputs + p * CLB_PANEL, w->n_inputs, at.next[p], c + p * CLB_PANEL, ldc);
    return;
  }
  int n = !in_columns(w) ? w->n_inputs : rows->n < FEW ? 16 : 256, group = in_columns(w) ? CLB_UNIT : n_panels;
  for (int i = 0; i < w->n_inputs; i += n)
    for (int p = 0; p < n_panels; p += group) {
      int n_now = n_panels - p < group ? n_panels - p : group, end = w->n_inputs - i < n ? w->n_inputs : i + n;
      if (i == 0) start_of(w, panel + p, n_now, init);
      add_by_panels(k, w, panel + p, n_now, rows, i, end, c + p * CLB_PANEL, ldc, i ? NULL : init);
    }
}

/* c[r][...] = a block's panels, run after run. */
void clb_project(const clb_kernels *k, const clb_projection *w, const clb_block *b, const clb_row_block *rows, float *c,
                 ptrdiff_t ldc) {
  if (w->place->in_place) {
    project_in_place(k, w, b->first, b->n, rows, c, ldc);
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
