/* Linear layers over int8 and int4 weights. A group's products are summed exactly in int32, then scaled and chained in
 * ascending order of groups; only the exact part (dots_*, unpack_* in simd_<isa>.h) differs between instruction sets.
 */

enum { UNPACKED_GROUPS = 8 }; /* groups unpacked at a time for many rows: 8 KiB of int16, in L1 */

#define GROUP_BYTES(dtype) \
  (dtype == CLB_I8 ? CLB_GROUP * CLB_PANEL + 2 * CLB_PANEL : CLB_GROUP * CLB_PANEL / 2 + 2 * CLB_PANEL)
#define UNPACKED_BYTES(dtype) \
  (dtype == CLB_I8 ? CLB_GROUP * CLB_PANEL * 2 + CLB_PANEL * 4 : CLB_GROUP * CLB_PANEL + CLB_PANEL * 8)

/* A weight is scale q (I8) or scale q + zero (I4). */
static inline __attribute__((always_inline)) void scales_of_group(clb_dtype dtype, const char *w, float base, vf *scale,
                                                                  vf *zero) {
  if (dtype == CLB_I8) {
    vf_load_bf16(w + CLB_GROUP * CLB_PANEL, scale);
  } else {
    vf_load_i4(w + CLB_GROUP * CLB_PANEL / 2, scale, zero);
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      scale[v] = vf_mul(scale[v], vf_set1(base));
      zero[v] = vf_mul(zero[v], scale[v]);
    }
  }
}

/* Integers as wide as the activations', then scales, then zeros. */
static inline __attribute__((always_inline)) void unpack_group(clb_dtype dtype, const char *w, float base, char *to) {
  vf scale[VECTORS], zero[VECTORS];
  if (dtype == CLB_I8) unpack_i8(w, to), to += CLB_GROUP * CLB_PANEL * 2;
  else unpack_u4(w, to), to += CLB_GROUP * CLB_PANEL;
  scales_of_group(dtype, w, base, scale, zero);
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    vf_store((float *)to + v * LANES, scale[v]);
    if (dtype == CLB_I4) vf_store((float *)to + CLB_PANEL + v * LANES, zero[v]);
  }
}

static inline float float_at(const char *p) {
  float x;
  memcpy(&x, p, sizeof x);
  return x;
}

/* A tile of rows: n_rows x 1 panel, groups first..end - 1, from c and back to c. w is the first group's weights, or,
 * where unpacked, groups that unpack_group has made. next, unless NULL, is what to ask memory for meanwhile. */
static inline __attribute__((always_inline)) void tile_quant(clb_dtype dtype, const clb_input *a, int row, int n_rows,
                                                             const char *w, float base, int unpacked, int first,
                                                             int end, const char *next, float *c, ptrdiff_t ldc) {
  enum { I8_BYTES = 2 * CLB_GROUP, I4_BYTES = CLB_GROUP };
  int q_bytes = dtype == CLB_I8 ? I8_BYTES : I4_BYTES, x_bytes = q_bytes + (dtype == CLB_I8 ? 4 : 8);
  const char *x[QUANT_ROWS];
  vf acc[QUANT_ROWS][VECTORS];
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    x[r] = (const char *)a->rows[row + r] + (ptrdiff_t)first * x_bytes;
    UNROLL
    for (int v = 0; v < VECTORS; v++) acc[r][v] = vf_load(c + (row + r) * ldc + v * LANES);
  }
  for (int g = first; g < end; g++) {
    vi sums[QUANT_ROWS][VECTORS];
    vf scale[VECTORS], zero[VECTORS];
    if (next) { /* of int8, the scales alone: the dots ask for the rest */
      for (int i = dtype == CLB_I8 ? 512 : 0; i < GROUP_BYTES(dtype); i += 64) __builtin_prefetch(next + i, 0, 2);
    }
    if (unpacked) {
      if (dtype == CLB_I8) dots_i16(x, n_rows, w, next, sums);
      else dots_u8(x, n_rows, w, sums);
      const float *scales = (const float *)(w + q_bytes * CLB_PANEL);
      UNROLL
      for (int v = 0; v < VECTORS; v++) {
        scale[v] = vf_load(scales + v * LANES);
        if (dtype == CLB_I4) zero[v] = vf_load(scales + CLB_PANEL + v * LANES);
      }
      w += UNPACKED_BYTES(dtype);
    } else {
      if (dtype == CLB_I8) dots_i8(x, n_rows, w, next, sums);
      else dots_u4(x, n_rows, w, sums);
      scales_of_group(dtype, w, base, scale, zero);
      w += GROUP_BYTES(dtype);
    }
    UNROLL
    for (int r = 0; r < n_rows; r++) {
      vf x_scale = vf_set1(float_at(x[r] + q_bytes));
      UNROLL
      for (int v = 0; v < VECTORS; v++) {
        acc[r][v] = vf_fma(vf_of(sums[r][v]), vf_mul(scale[v], x_scale), acc[r][v]);
        if (dtype == CLB_I4) acc[r][v] = vf_fma(zero[v], vf_set1(float_at(x[r] + q_bytes + 4)), acc[r][v]);
      }
      x[r] += x_bytes;
    }
    if (next) next += GROUP_BYTES(dtype);
  }
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    UNROLL
    for (int v = 0; v < VECTORS; v++) vf_store(c + (row + r) * ldc + v * LANES, acc[r][v]);
  }
}

static inline __attribute__((always_inline)) void linear_quant(clb_dtype dtype, const clb_input *a, int n_rows,
                                                               const clb_panels *b, int n_panels, const float *init,
                                                               float *c, ptrdiff_t ldc) {
  int n_groups = (a->k + CLB_GROUP - 1) / CLB_GROUP;
  /* One tile reads the weights as they stream by; more tiles unpack some groups once, for all. */
  int many = n_rows > QUANT_ROWS, step = many ? UNPACKED_GROUPS : n_groups;
  _Alignas(64) char unpacked[UNPACKED_GROUPS * UNPACKED_BYTES(CLB_I8)];
  for (int p = 0; p < n_panels; p++, init += CLB_PANEL, c += CLB_PANEL) {
    const char *w = (const char *)b->data + p * b->panel_stride;
    float base = dtype == CLB_I4 ? float_at((const char *)(b->bases + p)) : 0.0f;
    for (int r = 0; r < n_rows; r++) memcpy(c + r * ldc, init, CLB_PANEL * sizeof(float));
    for (int g = 0; g < n_groups; g += step, w += (ptrdiff_t)step * GROUP_BYTES(dtype)) {
      int end = g + step < n_groups ? g + step : n_groups, row = 0;
      if (many) {
        for (int i = 0; i < end - g; i++)
          unpack_group(dtype, w + i * GROUP_BYTES(dtype), base, unpacked + i * UNPACKED_BYTES(dtype));
        for (; row + QUANT_ROWS <= n_rows; row += QUANT_ROWS) {
          const char *next = row == 0 ? w + CLB_STREAM_AHEAD : NULL; /* the groups here are unpacked already */
          tile_quant(dtype, a, row, QUANT_ROWS, unpacked, 0, 1, g, end, next, c, ldc);
        }
      }
      /* One row of int8 in 16 lanes finds its weights through the hardware's prefetcher. */
      const char *next =
          many || !b->streamed || (dtype == CLB_I8 && LANES > 8 && n_rows == 1) ? NULL : w + CLB_STREAM_AHEAD;
      while (row < n_rows) {
        int left = n_rows - row, n = left > 4 && left < 8 ? (left + 1) / 2 : left; /* 3 + 3 is quicker than 4 + 2 */
#define TILE(n) tile_quant(dtype, a, row, n, w, base, 0, g, end, next, c, ldc)
#if QUANT_ROWS >= 4
        if (QUANT_ROWS >= 8 && n >= 8) TILE(n = QUANT_ROWS);
        else if (n >= 4) TILE(n = 4);
        else if (n == 3) TILE(3);
        else if (n == 2) TILE(2);
        else
#endif
          TILE(n = 1);
#undef TILE
        row += n, next = NULL;
      }
    }
  }
}

void KERNEL(linear_i8)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                       ptrdiff_t ldc) {
  linear_quant(CLB_I8, a, n_rows, b, n_panels, init, c, ldc);
}

void KERNEL(linear_i4)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                       ptrdiff_t ldc) {
  linear_quant(CLB_I4, a, n_rows, b, n_panels, init, c, ldc);
}
