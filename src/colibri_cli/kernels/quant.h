/* Linear layers over int8 and int4 weights. A group's products are summed exactly in int32, then scaled and chained in
 * ascending order of groups; only the exact part (dots_*, unpack_u4 in simd_<isa>.h) differs between instruction sets.
 */

/* Whether many rows want int4 unpacked once, for all: where a product of bytes adds in 16 bits, which is quicker than
 * making the bytes. */
#define UNPACKS (LANES <= 8)

static inline __attribute__((always_inline)) int group_of(clb_dtype dtype) {
  return dtype == CLB_I8 ? CLB_I8_GROUP : CLB_I4_GROUP;
}

/* Bytes of a whole group: of a panel, of int4 unpacked, of a row's activations. */
#define GROUP_BYTES(dtype) \
  (dtype == CLB_I8 ? CLB_I8_GROUP * CLB_PANEL + 2 * CLB_PANEL : CLB_I4_GROUP * CLB_PANEL / 2 + 2 * CLB_PANEL)
#define UNPACKED_BYTES (CLB_I4_GROUP * CLB_PANEL + CLB_PANEL * 2 * (int)sizeof(float))
#define ROW_BYTES(dtype) (dtype == CLB_I8 ? CLB_I8_GROUP * 2 + 4 : CLB_I4_GROUP + 8)

/* How many inputs group g of k's has, in whole chunks: int8's last one may be short. */
static inline __attribute__((always_inline)) int inputs_of(clb_dtype dtype, int g, int k) {
  int left = k - g * group_of(dtype);
  if (dtype == CLB_I4 || left >= CLB_I8_GROUP) return group_of(dtype);
  return (left + CLB_CHUNK - 1) / CLB_CHUNK * CLB_CHUNK;
}

/* A weight is scale q (I8) or scale q + zero (I4). */
static inline __attribute__((always_inline)) void scales_of_group(clb_dtype dtype, const char *scales, float base,
                                                                  vf *scale, vf *zero) {
  if (dtype == CLB_I8) {
    vf_load_bf16(scales, scale);
  } else {
    vf_load_i4(scales, scale, zero);
    UNROLL
    for (int v = 0; v < VECTORS; v++) {
      scale[v] = vf_mul(scale[v], vf_set1(base));
      zero[v] = vf_mul(zero[v], scale[v]);
    }
  }
}

#if UNPACKS
/* A group of int4 as bytes, then scales, then zeros. */
static inline void unpack_group(const char *w, float base, char *to) {
  vf scale[VECTORS], zero[VECTORS];
  unpack_u4(w, to);
  scales_of_group(CLB_I4, w + CLB_I4_GROUP * CLB_PANEL / 2, base, scale, zero);
  UNROLL
  for (int v = 0; v < VECTORS; v++) {
    vf_store((float *)(to + CLB_I4_GROUP * CLB_PANEL) + v * LANES, scale[v]);
    vf_store((float *)(to + CLB_I4_GROUP * CLB_PANEL) + CLB_PANEL + v * LANES, zero[v]);
  }
}
#endif

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
  (void)unpacked;
  const char *x[QUANT_ROWS];
  vf acc[QUANT_ROWS][VECTORS];
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    x[r] = (const char *)a->rows[row + r] + (ptrdiff_t)first * ROW_BYTES(dtype);
    UNROLL
    for (int v = 0; v < VECTORS; v++) acc[r][v] = vf_load(c + (row + r) * ldc + v * LANES);
  }
  for (int g = first; g < end; g++) {
    vi sums[QUANT_ROWS][VECTORS];
    vf scale[VECTORS], zero[VECTORS];
    int n = inputs_of(dtype, g, a->k), q_bytes = dtype == CLB_I8 ? 2 * n : n;
    if (next) { /* of int8, the scales alone: the dots ask for the rest */
      for (int i = dtype == CLB_I8 ? n * CLB_PANEL : 0; i < GROUP_BYTES(dtype); i += CLB_LINE)
        __builtin_prefetch(next + i, 0, 2);
    }
#if UNPACKS
    if (unpacked) {
      dots_u8(x, n_rows, w, sums);
      const float *scales = (const float *)(w + CLB_I4_GROUP * CLB_PANEL);
      UNROLL
      for (int v = 0; v < VECTORS; v++)
        scale[v] = vf_load(scales + v * LANES), zero[v] = vf_load(scales + CLB_PANEL + v * LANES);
      w += UNPACKED_BYTES;
    } else
#endif
    {
      if (dtype == CLB_I8) dots_i8(x, n_rows, w, n, next, sums);
      else dots_u4(x, n_rows, w, sums);
      scales_of_group(dtype, w + q_bytes * CLB_PANEL / 2, base, scale, zero);
      w += GROUP_BYTES(dtype);
    }
    if (next) next += GROUP_BYTES(dtype);
    UNROLL
    for (int r = 0; r < n_rows; r++) {
      vf x_scale = vf_set1(float_at(x[r] + q_bytes));
      UNROLL
      for (int v = 0; v < VECTORS; v++) {
        acc[r][v] = vf_fma(vf_of(sums[r][v]), vf_mul(scale[v], x_scale), acc[r][v]);
        if (dtype == CLB_I4) acc[r][v] = vf_fma(zero[v], vf_set1(float_at(x[r] + q_bytes + 4)), acc[r][v]);
      }
      x[r] += ROW_BYTES(dtype);
    }
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
  enum { UNPACKED = 8, CHUNKS = 32 }; /* so many groups of int4 unpacked, or chunks as they are, stay in the L1 cache */
  int n_groups = (a->k + group_of(dtype) - 1) / group_of(dtype);
  /* One tile reads the weights as they stream by; more tiles take some groups in turn. */
  int many = n_rows > QUANT_ROWS, unpacks = UNPACKS && many && dtype == CLB_I4;
  int step = unpacks ? UNPACKED : many ? CHUNKS * CLB_CHUNK / group_of(dtype) : n_groups;
  for (int p = 0; p < n_panels; p++, init += CLB_PANEL, c += CLB_PANEL) {
    const char *w = (const char *)b->data + p * b->panel_stride;
    float base = dtype == CLB_I4 ? float_at((const char *)(b->bases + p)) : 0.0f;
    for (int r = 0; r < n_rows; r++) memcpy(c + r * ldc, init, CLB_PANEL * sizeof(float));
    for (int g = 0; g < n_groups; g += step, w += (ptrdiff_t)step * GROUP_BYTES(dtype)) {
      int end = g + step < n_groups ? g + step : n_groups, row = 0;
      /* One row of int8 in 16 lanes finds its weights through the hardware's prefetcher. */
      const char *next = b->streamed && !(dtype == CLB_I8 && LANES > 8 && n_rows == 1) ? w + CLB_STREAM_AHEAD : NULL;
#if UNPACKS
      _Alignas(64) char unpacked[UNPACKED * UNPACKED_BYTES];
      if (unpacks) {
        for (int i = 0; i < end - g; i++) unpack_group(w + i * GROUP_BYTES(dtype), base, unpacked + i * UNPACKED_BYTES);
        for (; row + QUANT_ROWS <= n_rows; row += QUANT_ROWS, next = NULL)
          tile_quant(dtype, a, row, QUANT_ROWS, unpacked, base, 1, g, end, next, c, ldc);
      }
#endif
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
