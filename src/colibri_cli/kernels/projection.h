/* One projection of one expert over a block of rows, whatever holds its weights. */
#ifndef CLB_PROJECTION_H
#define CLB_PROJECTION_H

#include "kernels.h"

/* The activations of a block of rows: as the weights take them, where bfloat16 holds them in pairs as well, and where
 * not NULL in lanes. */
typedef struct {
  const float *x[CLB_ROW_BLOCK];
  const char *pairs[CLB_ROW_BLOCK];
  int n, paired;
  const char *lanes;
} clb_row_block;

/* One projection of one expert: n_outputs columns from n_inputs. */
typedef struct {
  clb_dtype dtype;
  const char *weights, *bias;
  const clb_place *place;
  const float *bases;
  int n_outputs, n_inputs, n_halves;
  int in_blocks;    /* clb_input */
  const char *then; /* what is read after this projection */
} clb_projection;

/* Panels that are made together: n_runs runs of n neighbours, `apart` panels from one run's first to the next's. */
typedef struct {
  int first, n_runs, n, apart;
} clb_block;

static inline int clb_blocks_of(int n, int block) { return (n + block - 1) / block; }
static inline int clb_quantised(clb_dtype dtype) { return dtype == CLB_I8 || dtype == CLB_I4; }

/* In a gated expert's up projection, n_halves = 2, even panels are gate and odd panels up. */
static inline int clb_column_of(const clb_projection *w, int panel) { return (panel >> (w->n_halves - 1)) * CLB_PANEL; }
static inline int clb_half_of(const clb_projection *w, int panel) { return panel & (w->n_halves - 1); }

static inline int clb_weight_bytes(const clb_projection *w) {
  return w->dtype == CLB_BF16 || w->dtype == CLB_F16 ? sizeof(uint16_t) : sizeof(float);
}

/* What comes when `done` of the panels from first to end - 1 have been made. */
clb_block clb_block_after(const clb_kernels *k, const clb_projection *w, int n_rows, int first, int end, int done);

/* c[r][...] = a block's panels, run after run. */
void clb_project(const clb_kernels *k, const clb_projection *w, const clb_block *b, const clb_row_block *rows, float *c,
                 ptrdiff_t ldc);

/* c[r][...] = n_panels of w's over the rows' inputs first..first + n - 1; first is even, or a block's. */
void clb_linear_rows(const clb_kernels *k, const clb_projection *w, const clb_row_block *rows, int first, int n,
                     const clb_panels *panels, int n_panels, const float *init, float *c, ptrdiff_t ldc);

/* The start of the chains of n_panels, so many apart: biases, 0 beyond the last or where there are none. */
void clb_start_of(const clb_projection *w, int panel, int n_panels, int apart, float *init);

/* in_place.c */

/* In the caller's memory: where panels' outputs are, and for each panel where memory begins that is wanted after it. */
typedef struct {
  const char *outputs[CLB_UNIT * CLB_PANEL], *next[CLB_UNIT];
} clb_places;
clb_places clb_places_of(const clb_projection *w, int panel, int n_panels);

/* Whether an input's outputs are side by side in the caller's memory: a long row, of which all panels take their part
 * before the next rows. */
int clb_in_columns(const clb_projection *w);

/* Whether so few rows take weights as they lie, from runs of outputs that are the longer the more panels are made at
 * once. */
int clb_in_runs(const clb_kernels *k, const clb_projection *w, int n_rows);

/* c[r][...] = n_panels from panel. */
void clb_project_in_place(const clb_kernels *k, const clb_projection *w, int panel, int n_panels,
                          const clb_row_block *rows, float *c, ptrdiff_t ldc);

/* lanes.c */

int clb_lanes_may(const clb_kernels *k, const clb_projection *w); /* whether some blocks of rows might go in lanes */
int clb_lanes_suit(const clb_kernels *k, const clb_projection *w,
                   const clb_row_block *rows); /* whether this one should */
/* Puts rows in lanes into `lanes`, clb_lanes_bytes() of it: in panels, the last of them as wide as it has rows, so that
 * all are as large as the rows themselves. Returns how many bytes that is. */
size_t clb_lanes_fill(const clb_kernels *k, const clb_projection *w, const clb_row_block *rows, char *lanes);
/* c[r][...] = at most two panels, over rows->lanes. Returns whether the weights allow it. */
int clb_project_lanes(const clb_kernels *k, const clb_projection *w, int panel, int n_panels, const clb_row_block *rows,
                      float *c, ptrdiff_t ldc);

#endif
