/* One projection of one expert over a block of rows, whatever holds its weights. */
#ifndef CLB_PROJECTION_H
#define CLB_PROJECTION_H

#include "kernels.h"

/* The activations of a block of rows: as the weights take them, and where bfloat16 holds them, in pairs as well. */
typedef struct {
  const float *x[CLB_ROW_BLOCK];
  const char *pairs[CLB_ROW_BLOCK];
  int n, paired;
} clb_row_block;

/* One projection of one expert: n_outputs columns from n_inputs. */
typedef struct {
  clb_dtype dtype;
  const char *weights, *bias;
  const clb_place *place;
  const float *bases;
  int n_outputs, n_inputs, n_halves;
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

/* What comes when `done` of the panels from first to end - 1 have been made. */
clb_block clb_block_after(const clb_projection *w, int n_rows, int first, int end, int done);

/* c[r][...] = a block's panels, run after run. */
void clb_project(const clb_kernels *k, const clb_projection *w, const clb_block *b, const clb_row_block *rows, float *c,
                 ptrdiff_t ldc);

#endif
