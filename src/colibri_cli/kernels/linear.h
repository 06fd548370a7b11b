/* Linear layers over panels. Written once over the lanes of a simd_<isa>.h; included by ops.h. */

enum { VECTORS = CLB_PANEL / LANES }; /* vectors in one row of a panel */

static inline __attribute__((always_inline)) void load_panel_row(clb_dtype dtype, const void *w, vf *row) {
  if (dtype == CLB_BF16) {
    vf_load_bf16(w, row);
  } else {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) row[v] = vf_load((const float *)w + v * LANES);
  }
}

/* n_rows x n_panels outputs held in registers over the whole chain; both counts are compile-time constants in every
 * use, so the loops over them vanish. ROW_TILE rows by one panel, or one row by CLB_UNIT panels (8 accumulators at 8
 * lanes), keep both FMA ports busy: 8 chains or more against a latency of 4 cycles. The last rows of a panel ask for
 * the next one, ahead bytes further, so that memory works while the registers do: with 16 rows a panel is otherwise
 * waited for, and then computed. */
static inline __attribute__((always_inline)) void tile(clb_dtype dtype, const clb_input *a, int row, int n_rows,
                                                       const clb_panels *b, int panel, int n_panels, ptrdiff_t ahead,
                                                       const float *init, ptrdiff_t ldi, float *c, ptrdiff_t ldc) {
  vf acc[ROW_TILE][CLB_UNIT * VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 64
    for (int v = 0; v < n_panels * VECTORS; v++) acc[r][v] = vf_load(init + (row + r) * ldi + v * LANES);

  for (int s = 0; s < a->n_segments; s++) {
    const float *const *rows = a->rows + s * a->segment_stride + row;
    const float *x[ROW_TILE];
#pragma GCC unroll 16
    for (int r = 0; r < n_rows; r++) x[r] = rows[r];
    const char *w = (const char *)b->data + s * b->segment_stride + panel * b->panel_stride;
    for (ptrdiff_t i = 0, k = a->k; i < k; i++, w += b->row_stride) {
      vf w_i[CLB_UNIT * VECTORS];
      if (dtype == CLB_BF16 && n_panels == 1) __builtin_prefetch(w + ahead, 0, 2);
#pragma GCC unroll 16
      for (int p = 0; p < n_panels; p++) load_panel_row(dtype, w + p * b->panel_stride, w_i + p * VECTORS);
#pragma GCC unroll 16
      for (int r = 0; r < n_rows; r++) {
        vf x_ri = vf_set1(x[r][i]);
#pragma GCC unroll 64
        for (int v = 0; v < n_panels * VECTORS; v++) acc[r][v] = vf_fma(x_ri, w_i[v], acc[r][v]);
      }
    }
  }

#pragma GCC unroll 16
  for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 64
    for (int v = 0; v < n_panels * VECTORS; v++) vf_store(c + (row + r) * ldc + v * LANES, acc[r][v]);
}

static inline __attribute__((always_inline)) void linear(clb_dtype dtype, const clb_input *a, int n_rows,
                                                         const clb_panels *b, int n_panels, const float *init, float *c,
                                                         ptrdiff_t ldc) {
  ptrdiff_t ldi = init ? 0 : ldc; /* from one row's start of its chains to the next row's */
  if (!init) init = c;
#if ROW_TILE > 1
  /* Few rows: several panels at once, or the chains are too few to fill the latency. */
  int panel = 0;
  if (n_rows == 1)
    for (; panel + 4 <= n_panels; panel += 4)
      tile(dtype, a, 0, 1, b, panel, 4, 0, init + panel * CLB_PANEL, ldi, c + panel * CLB_PANEL, ldc);
  if (n_rows <= 3)
    for (; panel + 2 <= n_panels; panel += 2) {
      const float *from = init + panel * CLB_PANEL;
      float *to = c + panel * CLB_PANEL;
      if (n_rows == 1) tile(dtype, a, 0, 1, b, panel, 2, 0, from, ldi, to, ldc);
      if (n_rows == 2) tile(dtype, a, 0, 2, b, panel, 2, 0, from, ldi, to, ldc);
      if (n_rows == 3) tile(dtype, a, 0, 3, b, panel, 2, 0, from, ldi, to, ldc);
    }
  for (; panel < n_panels; panel++) {
    const float *from = init + panel * CLB_PANEL;
    float *to = c + panel * CLB_PANEL;
    int row = 0, left = n_rows;
    while (left > 0) {
      /* 7 to 11 rows go as two even halves: 4 + 4 keeps more chains in flight than 6 + 2. */
      int n = left >= 2 * ROW_TILE ? ROW_TILE : left > ROW_TILE ? (left + 1) / 2 : left;
      ptrdiff_t ahead = n == left ? b->panel_stride : 0;
      switch (n) {
        case 6: tile(dtype, a, row, 6, b, panel, 1, ahead, from, ldi, to, ldc); break;
        case 5: tile(dtype, a, row, 5, b, panel, 1, ahead, from, ldi, to, ldc); break;
        case 4: tile(dtype, a, row, 4, b, panel, 1, ahead, from, ldi, to, ldc); break;
        case 3: tile(dtype, a, row, 3, b, panel, 1, ahead, from, ldi, to, ldc); break;
        case 2: tile(dtype, a, row, 2, b, panel, 1, ahead, from, ldi, to, ldc); break;
        default: tile(dtype, a, row, 1, b, panel, 1, ahead, from, ldi, to, ldc);
      }
      row += n, left -= n;
    }
  }
#else
  for (int panel = 0; panel < n_panels; panel++)
    for (int row = 0; row < n_rows; row++)
      tile(dtype, a, row, 1, b, panel, 1, 0, init + panel * CLB_PANEL, ldi, c + panel * CLB_PANEL, ldc);
#endif
}

static void linear_f32(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                       ptrdiff_t ldc) {
  linear(CLB_F32, a, n_rows, b, n_panels, init, c, ldc);
}

static void linear_bf16(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                        ptrdiff_t ldc) {
  linear(CLB_BF16, a, n_rows, b, n_panels, init, c, ldc);
}

static void accumulate_f32(float w, const float *t, int n, float *y) {
  int j = 0;
  for (vf w_all = vf_set1(w); j + LANES <= n; j += LANES)
    vf_store(y + j, vf_fma(w_all, vf_load(t + j), vf_load(y + j)));
  for (; j < n; j++) y[j] = fmaf(w, t[j], y[j]);
}
