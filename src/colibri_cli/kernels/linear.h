/* Linear layers over panels. Written once over the lanes of a simd_<isa>.h; included by ops.h. */

enum {
  VECTORS = CLB_PANEL / LANES,   /* vectors in one row of a panel */
  ROW_TILE = 6,                  /* the most rows of a tile of any instruction set */
  BLOCK_TILE = LANES > 1 ? 4 : 1 /* and of one in blocks; of four rows eight lanes have a register too few */
};

static inline __attribute__((always_inline)) void load_panel_row(clb_dtype dtype, const void *w, vf *row) {
  if (dtype == CLB_BF16) {
    vf_load_bf16(w, row);
  } else {
    UNROLL
    for (int v = 0; v < VECTORS; v++) row[v] = vf_load((const float *)w + v * LANES);
  }
}

/* What a tile asks memory for, so that it works while the registers do: step by step, for each panel. */
typedef struct {
  const char *from;
  ptrdiff_t apart, step;
} request;

/* One input's part of a tile, which asks for a place of each panel's. */
static inline __attribute__((always_inline)) void step(clb_dtype dtype, const float *const *x, ptrdiff_t i, int n_rows,
                                                       const char *w, ptrdiff_t panel_stride, int n_panels,
                                                       const char *ask, ptrdiff_t apart, vf acc[][CLB_UNIT * VECTORS]) {
  vf w_i[CLB_UNIT * VECTORS];
  UNROLL
  for (int p = 0; LANES > 1 && p < n_panels; p++) __builtin_prefetch(ask + p * apart, 0, 2);
  UNROLL
  for (int p = 0; p < n_panels; p++) load_panel_row(dtype, w + p * panel_stride, w_i + p * VECTORS);
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    vf x_ri = vf_set1(x[r][i]);
    UNROLL
    for (int v = 0; v < n_panels * VECTORS; v++) acc[r][v] = vf_fma(x_ri, w_i[v], acc[r][v]);
  }
}

/* n_rows x n_panels outputs held in registers over the whole chain; both counts are compile-time constants in every
 * use, so the loops over them vanish. */
static inline __attribute__((always_inline)) void tile(clb_dtype dtype, const clb_input *a, int row, int n_rows,
                                                       const clb_panels *b, int panel, int n_panels, request ask,
                                                       const float *init, ptrdiff_t ldi, float *c, ptrdiff_t ldc) {
  const ptrdiff_t row_bytes = CLB_PANEL * (dtype == CLB_BF16 ? sizeof(uint16_t) : sizeof(float));
  const int unrolled = LANES == 8 && n_rows >= (dtype == CLB_F32 ? 4 : 5);
  vf acc[ROW_TILE][CLB_UNIT * VECTORS];
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    UNROLL
    for (int v = 0; v < n_panels * VECTORS; v++) acc[r][v] = vf_load(init + (row + r) * ldi + v * LANES);
  }

  for (int s = 0; s < a->n_segments; s++) {
    const float *const *rows = a->rows + s * a->segment_stride + row;
    const float *x[ROW_TILE];
    UNROLL
    for (int r = 0; r < n_rows; r++) x[r] = rows[r];
    const char *w = (const char *)b->data + s * b->segment_stride + panel * b->panel_stride;
    ptrdiff_t i = 0, k = a->k;
    if (unrolled && b->row_stride == row_bytes) { /* another thread on the core leaves few instructions a cycle */
#pragma GCC unroll 2
      for (; i < k; i++, w += row_bytes, ask.from += ask.step)
        step(dtype, x, i, n_rows, w, b->panel_stride, n_panels, ask.from, ask.apart, acc);
    }
    for (; i < k; i++, w += b->row_stride, ask.from += ask.step)
      step(dtype, x, i, n_rows, w, b->panel_stride, n_panels, ask.from, ask.apart, acc);
  }

  UNROLL
  for (int r = 0; r < n_rows; r++) {
    UNROLL
    for (int v = 0; v < n_panels * VECTORS; v++) vf_store(c + (row + r) * ldc + v * LANES, acc[r][v]);
  }
}

/* The same in blocks: chains over the even and the odd inputs side by side, half as many outputs. */
static inline __attribute__((always_inline)) void tile_in_blocks(const clb_input *a, int row, int n_rows,
                                                                 const clb_panels *b, int panel, int n_panels,
                                                                 request ask, const float *init, ptrdiff_t ldi,
                                                                 float *c, ptrdiff_t ldc) {
  const float *x[BLOCK_TILE];
  const char *w = (const char *)b->data + panel * b->panel_stride;
  UNROLL
  for (int r = 0; r < n_rows; r++) x[r] = a->rows[row + r];
  init += row * ldi, c += row * ldc;
  for (ptrdiff_t i = 0, k = a->k; i < k; init = c, ldi = ldc) {
    ptrdiff_t end = k - i < CLB_BLOCK ? k : i + CLB_BLOCK;
    vf even[ROW_TILE][CLB_UNIT * VECTORS], odd[ROW_TILE][CLB_UNIT * VECTORS];
    UNROLL
    for (int r = 0; r < n_rows; r++) {
      UNROLL
      for (int v = 0; v < n_panels * VECTORS; v++) even[r][v] = odd[r][v] = vf_set1(0);
    }
#pragma GCC unroll 1
    for (; i + 1 < end; i += 2) {
      step(CLB_BF16, x, i, n_rows, w, b->panel_stride, n_panels, ask.from, ask.apart, even);
      w += b->row_stride, ask.from += ask.step;
      step(CLB_BF16, x, i + 1, n_rows, w, b->panel_stride, n_panels, ask.from, ask.apart, odd);
      w += b->row_stride, ask.from += ask.step;
    }
    if (i < end) step(CLB_BF16, x, i++, n_rows, w, b->panel_stride, n_panels, ask.from, ask.apart, even);
    UNROLL
    for (int r = 0; r < n_rows; r++) {
      UNROLL
      for (int v = 0; v < n_panels * VECTORS; v++)
        vf_store(c + r * ldc + v * LANES, vf_add(vf_load(init + r * ldi + v * LANES), vf_add(even[r][v], odd[r][v])));
    }
  }
}

/* This tile's share of what is next. */
static inline request share_of_next(const clb_panels *b, int panel, int n_panels, int k, int row, int n, int n_rows) {
  const char *const *next = b->next + panel;
  return (request){next[0] + b->next_at + k * b->row_stride * row / n_rows, next[n_panels - 1] - next[0],
                   b->row_stride * n / n_rows + 1};
}

/* Row after row of tiles over n_panels panels, at most `most` rows a tile. */
static inline __attribute__((always_inline)) void tiles(clb_dtype dtype, int in_blocks, const clb_input *a, int n_rows,
                                                        const clb_panels *b, int panel, int n_panels, int most,
                                                        const float *init, ptrdiff_t ldi, float *c, ptrdiff_t ldc) {
  init += panel * CLB_PANEL, c += panel * CLB_PANEL;
  for (int row = 0, n; row < n_rows; row += n) {
    int left = n_rows - row;
    /* As even as may be: 4 + 4 keeps more chains in flight than 6 + 2. */
    int n_tiles = in_blocks && left != 4 ? (left + 2) / 3 : (left + most - 1) / most;
    n = (left + n_tiles - 1) / n_tiles;
    /* The first tile asks for what it comes to next, the last for the panels after these: either alone leaves memory
     * waiting. The hardware's prefetcher serves one tile better alone, where it has several panels or one row. */
    int alone = !in_blocks && n == n_rows && (dtype == CLB_BF16 ? n == 1 : n_panels > 1);
    ptrdiff_t ahead = row == 0 ? CLB_STREAM_AHEAD : n == left ? n_panels * b->panel_stride : 0;
    if (alone || !b->streamed) ahead = 0;
    request ask = {(const char *)b->data + panel * b->panel_stride + ahead, b->panel_stride, b->row_stride};
    if (most >= (in_blocks ? 3 : 4) && b->next) ask = share_of_next(b, panel, n_panels, a->k, row, n, n_rows);
    if (in_blocks && BLOCK_TILE >= 4 && most >= 4 && n == 4)
      tile_in_blocks(a, row, 4, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (in_blocks && BLOCK_TILE >= 3 && most >= 3 && n == 3)
      tile_in_blocks(a, row, 3, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (in_blocks && BLOCK_TILE >= 3 && most >= 2 && n == 2)
      tile_in_blocks(a, row, 2, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (in_blocks) tile_in_blocks(a, row, n = 1, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (most >= 6 && n == 6) tile(dtype, a, row, 6, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (most >= 6 && n == 5) tile(dtype, a, row, 5, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (most >= 6 && n == 4) tile(dtype, a, row, 4, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (most >= 3 && n == 3) tile(dtype, a, row, 3, b, panel, n_panels, ask, init, ldi, c, ldc);
    else if (most >= 2 && n == 2) tile(dtype, a, row, 2, b, panel, n_panels, ask, init, ldi, c, ldc);
    else tile(dtype, a, row, n = 1, b, panel, n_panels, ask, init, ldi, c, ldc);
  }
}

/* An FMA's latency of 4 cycles and two of them a cycle want 8 accumulators of 8 lanes: one row has them in CLB_UNIT
 * panels, more in one or two. Three rows of two widened panels would be a register too many. */
static inline __attribute__((always_inline)) void linear(clb_dtype dtype, const clb_input *a, int n_rows,
                                                         const clb_panels *b, int n_panels, const float *init, float *c,
                                                         ptrdiff_t ldc) {
  ptrdiff_t ldi = init ? 0 : ldc; /* from one row's start of its chains to the next row's */
  if (!init) init = c;
  int panel = 0;
#if PAIR_TILE > 0
  const int pair = dtype == CLB_BF16 && PAIR_TILE == 3 ? 2 : PAIR_TILE;
  if (n_rows == 1)
    for (; panel + CLB_UNIT <= n_panels; panel += CLB_UNIT)
      tiles(dtype, 0, a, 1, b, panel, CLB_UNIT, 1, init, ldi, c, ldc);
  if (n_rows <= pair || pair >= SINGLE_TILE)
    for (; panel + 2 <= n_panels; panel += 2) tiles(dtype, 0, a, n_rows, b, panel, 2, pair, init, ldi, c, ldc);
#endif
  for (; panel < n_panels; panel++) tiles(dtype, 0, a, n_rows, b, panel, 1, SINGLE_TILE, init, ldi, c, ldc);
}

void KERNEL(linear_f32)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                        ptrdiff_t ldc) {
  linear(CLB_F32, a, n_rows, b, n_panels, init, c, ldc);
}
