/* Linear layers over int8 and int4 weights. A group's products are summed exactly in int32, then scaled and chained in
 * ascending order of groups; only the exact part (dots_i8, dots_i4 in simd_<isa>.h) differs between instruction sets.
 * Included by ops.h.
 *
 * Activations are quantised by group as well: to 16 bits for int8 weights (their own error is 256 times smaller than
 * the weights'), to 8 bits for int4. */

enum {
  I8_GROUP_BYTES = CLB_GROUP * CLB_PANEL + 2 * CLB_PANEL,
  I4_GROUP_BYTES = CLB_GROUP * CLB_PANEL / 2 + 2 * CLB_PANEL,
  I4_WEIGHTS = CLB_GROUP * CLB_PANEL / 2, /* where a group's scale codes begin */
  QUANT_ROWS = 4,                         /* rows in one tile: 8 int32 accumulators and what feeds them */
  UNPACKED_GROUPS = 8                     /* groups unpacked at a time for many rows: 8 KiB, in L1 */
};

/* One group of one row: n <= CLB_GROUP floats to integers within +-most, zeros beyond n. */
static inline float quantize_group(const float *x, int n, float most, int32_t *q) {
  float padded[CLB_GROUP] = {0}, lanes[LANES], nonfinite[LANES];
  memcpy(padded, x, (size_t)n * sizeof(float));
  vf top = vf_set1(0.0f), zero = vf_set1(0.0f);
  for (int i = 0; i < CLB_GROUP; i += LANES) {
    vf v = vf_load(padded + i);
    top = vf_max(vf_abs(v), top);
    zero = vf_fma(v, vf_set1(0.0f), zero); /* NaN if any is infinite or NaN */
  }
  vf_store(lanes, top), vf_store(nonfinite, zero);
  float largest = 0.0f, bad = 0.0f;
  for (int i = 0; i < LANES; i++) {
    if (lanes[i] > largest) largest = lanes[i];
    bad += nonfinite[i];
  }
  if (bad != 0.0f || !(largest > 1e-30f)) { /* nothing to hold; a NaN scale keeps a NaN in its row */
    for (int i = 0; i < CLB_GROUP; i++) q[i] = 0;
    return bad != 0.0f ? NAN : 0.0f;
  }
  vf inverse = vf_set1(most / largest);
  for (int i = 0; i < CLB_GROUP; i += LANES) vi_store(q + i, vi_of(vf_round(vf_mul(vf_load(padded + i), inverse))));
  return largest / most;
}

static void quantize(clb_dtype dtype, const float *x, int n, int first, int n_groups, void *row) {
  int32_t q[CLB_GROUP];
  for (int g = first; n > 0; g++, x += CLB_GROUP, n -= CLB_GROUP) {
    int m = n < CLB_GROUP ? n : CLB_GROUP;
    if (dtype == CLB_I8) {
      int16_t *to = (int16_t *)row + g * CLB_GROUP;
      ((float *)((int16_t *)row + n_groups * CLB_GROUP))[g] = quantize_group(x, m, 32767.0f, q);
      for (int i = 0; i < CLB_GROUP; i++) to[i] = (int16_t)q[i];
    } else {
      int8_t *to = (int8_t *)row + g * CLB_GROUP;
      float *scales = (float *)((int8_t *)row + n_groups * CLB_GROUP);
      int32_t sum = 0;
      scales[g] = quantize_group(x, m, 127.0f, q);
      for (int i = 0; i < CLB_GROUP; i++) to[i] = (int8_t)q[i], sum += q[i];
      ((int32_t *)(scales + n_groups))[g] = sum;
    }
  }
}

/* What a tile of rows shares: where their integers, scales and sums are. */
typedef struct {
  const void *q[QUANT_ROWS];
  const float *scales[QUANT_ROWS];
  const int32_t *sums[QUANT_ROWS];
} quant_rows;

static inline quant_rows rows_of(clb_dtype dtype, const clb_input *a, int row, int n_rows, int n_groups) {
  quant_rows x;
  for (int r = 0; r < n_rows; r++) {
    x.q[r] = a->rows[row + r];
    x.scales[r] = (const float *)((const char *)x.q[r] + (dtype == CLB_I8 ? 2 : 1) * n_groups * CLB_GROUP);
    x.sums[r] = (const int32_t *)(x.scales[r] + n_groups);
  }
  return x;
}

/* c += the groups first..end - 1 of one panel; weights are unpacked groups where unpacked is set. */
static inline __attribute__((always_inline)) void tile_i8(const quant_rows *x, int n_rows, const char *w,
                                                          const int16_t *unpacked, int first, int end, float *c,
                                                          ptrdiff_t ldc) {
  for (int g = first; g < end; g++, w += I8_GROUP_BYTES) {
    int32_t sums[QUANT_ROWS][CLB_PANEL];
    const int16_t *q[QUANT_ROWS];
    for (int r = 0; r < n_rows; r++) q[r] = (const int16_t *)x->q[r] + g * CLB_GROUP;
    if (unpacked) dots_i16(q, n_rows, unpacked + (g - first) * CLB_GROUP * CLB_PANEL, sums);
    else dots_i8(q, n_rows, (const int8_t *)w, sums);
    vf scale[VECTORS];
    vf_load_bf16(w + CLB_GROUP * CLB_PANEL, scale);
    for (int r = 0; r < n_rows; r++)
      for (int v = 0; v < VECTORS; v++) {
        float *to = c + r * ldc + v * LANES;
        vf s = vf_mul(scale[v], vf_set1(x->scales[r][g]));
        vf_store(to, vf_fma(vf_from(sums[r] + v * LANES), s, vf_load(to)));
      }
  }
}

static inline __attribute__((always_inline)) void tile_i4(const quant_rows *x, int n_rows, const char *w, float base,
                                                          const uint8_t *unpacked, int first, int end, float *c,
                                                          ptrdiff_t ldc) {
  for (int g = first; g < end; g++, w += I4_GROUP_BYTES) {
    int32_t sums[QUANT_ROWS][CLB_PANEL];
    const int8_t *q[QUANT_ROWS];
    int32_t total[QUANT_ROWS];
    for (int r = 0; r < n_rows; r++) {
      q[r] = (const int8_t *)x->q[r] + g * CLB_GROUP;
      total[r] = x->sums[r][g];
    }
    /* 16 sum(q a) - zero sum(a): exact, and below 2^24, so the conversion is exact too. */
    const uint8_t *codes = (const uint8_t *)w + I4_WEIGHTS;
    if (unpacked) dots_u8(q, total, n_rows, unpacked + (g - first) * CLB_GROUP * CLB_PANEL, codes + CLB_PANEL, sums);
    else dots_u4(q, total, n_rows, (const uint8_t *)w, codes + CLB_PANEL, sums);
    vf scale[VECTORS];
    vf_load_i4_scales(codes, scale);
    for (int r = 0; r < n_rows; r++)
      for (int v = 0; v < VECTORS; v++) {
        float *to = c + r * ldc + v * LANES;
        vf s = vf_mul(scale[v], vf_set1(base * 0.0625f * x->scales[r][g]));
        vf_store(to, vf_fma(vf_from(sums[r] + v * LANES), s, vf_load(to)));
      }
  }
}

static inline __attribute__((always_inline)) void linear_quant(clb_dtype dtype, const clb_input *a, int n_rows,
                                                               const clb_panels *b, int n_panels, const float *init,
                                                               float *c, ptrdiff_t ldc) {
  int n_groups = (a->k + CLB_GROUP - 1) / CLB_GROUP, group_bytes = dtype == CLB_I8 ? I8_GROUP_BYTES : I4_GROUP_BYTES;
  /* Few rows read the weights as they stream by; more rows unpack some groups once, for all. */
  int step = n_rows < QUANT_ROWS ? n_groups : UNPACKED_GROUPS;
  int16_t unpacked[UNPACKED_GROUPS * CLB_GROUP * CLB_PANEL]; /* int4 needs half of it */
  for (int p = 0; p < n_panels; p++, init += CLB_PANEL, c += CLB_PANEL) {
    const char *w = (const char *)b->data + p * b->panel_stride;
    for (int r = 0; r < n_rows; r++) memcpy(c + r * ldc, init, CLB_PANEL * sizeof(float));
    for (int g = 0; g < n_groups; g += step) {
      int end = g + step < n_groups ? g + step : n_groups;
      const char *from = w + (ptrdiff_t)g * group_bytes;
      int many = n_rows >= QUANT_ROWS;
      for (int i = g; many && i < end; i++) {
        if (dtype == CLB_I8)
          unpack_i8((const int8_t *)from + (i - g) * group_bytes, unpacked + (i - g) * CLB_GROUP * CLB_PANEL);
        else
          unpack_u4((const uint8_t *)from + (i - g) * group_bytes,
                    (uint8_t *)unpacked + (i - g) * CLB_GROUP * CLB_PANEL);
      }
      const int16_t *wide = many ? unpacked : NULL;
      for (int r = 0; r < n_rows; r += QUANT_ROWS) {
        int n = n_rows - r < QUANT_ROWS ? n_rows - r : QUANT_ROWS;
        quant_rows x = rows_of(dtype, a, r, n, n_groups);
        float *to = c + r * ldc;
        if (dtype == CLB_I8) {
          if (n == 4 && many) tile_i8(&x, 4, from, wide, g, end, to, ldc);
          else if (n == 3) tile_i8(&x, 3, from, wide, g, end, to, ldc);
          else if (n == 2) tile_i8(&x, 2, from, wide, g, end, to, ldc);
          else tile_i8(&x, 1, from, wide, g, end, to, ldc);
        } else {
          const uint8_t *bytes = (const uint8_t *)wide;
          if (n == 4 && many) tile_i4(&x, 4, from, b->bases[p], bytes, g, end, to, ldc);
          else if (n == 3) tile_i4(&x, 3, from, b->bases[p], bytes, g, end, to, ldc);
          else if (n == 2) tile_i4(&x, 2, from, b->bases[p], bytes, g, end, to, ldc);
          else tile_i4(&x, 1, from, b->bases[p], bytes, g, end, to, ldc);
        }
      }
    }
  }
}

static void linear_i8(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                      ptrdiff_t ldc) {
  linear_quant(CLB_I8, a, n_rows, b, n_panels, init, c, ldc);
}

static void linear_i4(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                      ptrdiff_t ldc) {
  linear_quant(CLB_I4, a, n_rows, b, n_panels, init, c, ldc);
}
