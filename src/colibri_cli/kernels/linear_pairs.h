/* Linear layers in blocks over bfloat16 weights and activations that bfloat16 holds, two inputs a step. Included by
 * isa_avx512.c.
 *
 * vdpbf16ps adds a pair's two products to a float32 one after the other, the upper half's first, and rounds after each:
 * two links of a chain, at the price of one FMA. A block's chains are over even and over odd inputs, so pairs are of
 * inputs i and i + 2. It takes denormals for zeros and makes none; so weights, activations and starts so small that any
 * could arise are left to linear_bf16. isa.c holds the processor to this. */

/* From the panel rows of four inputs, columns 0 8 1 9 ..., two by two: words of the even or the odd ones, the first in
 * the upper half. */
static inline __m512i pairs_of(__m512i first, __m512i second, int odd) {
  const __m512i columns = _mm512_set_epi16(15, 47, 13, 45, 11, 43, 9, 41, 7, 39, 5, 37, 3, 35, 1, 33, 14, 46, 12, 44,
                                           10, 42, 8, 40, 6, 38, 4, 36, 2, 34, 0, 32);
  return _mm512_permutex2var_epi16(first, _mm512_add_epi16(columns, _mm512_set1_epi16((short)(odd * CLB_PANEL))),
                                   second);
}

static inline __m512i least_of(__m512i least, __m512i weights) {
  __m512i size = _mm512_and_si512(weights, _mm512_set1_epi16(0x7fff));
  return _mm512_min_epu16(least, _mm512_add_epi16(size, _mm512_set1_epi16(-1))); /* 0 becomes the largest */
}

/* Two panels; n_rows is a compile-time constant, as in linear.h. Returns whether the weights allow it; else c is as it
 * was. */
static inline __attribute__((always_inline)) int tile_pairs(const clb_input *a, int row, int n_rows,
                                                            const clb_panels *b, int panel, request ask,
                                                            const float *init, ptrdiff_t ldi, float *c, ptrdiff_t ldc) {
  enum { INPUTS = 4, ROW_BYTES = CLB_PANEL * sizeof(uint16_t) };
  __m512 sum[SINGLE_TILE][2];
  const char *x[SINGLE_TILE], *w = (const char *)b->data + panel * b->panel_stride;
  __m512i least = _mm512_set1_epi16(-1);
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    x[r] = (const char *)a->rows[row + r];
    UNROLL
    for (int p = 0; p < 2; p++) sum[r][p] = _mm512_loadu_ps(init + (row + r) * ldi + p * LANES);
  }
  for (ptrdiff_t i = 0; i < a->k;) {
    __m512 even[SINGLE_TILE][2], odd[SINGLE_TILE][2];
    UNROLL
    for (int r = 0; r < n_rows; r++) {
      UNROLL
      for (int p = 0; p < 2; p++) even[r][p] = odd[r][p] = _mm512_setzero_ps();
    }
#pragma GCC unroll 1
    for (ptrdiff_t end = i + CLB_BLOCK; i < end; i += INPUTS, w += INPUTS * ROW_BYTES, ask.from += INPUTS * ask.step) {
      __m512i evens[2], odds[2];
      UNROLL
      for (int p = 0; p < 2; p++) {
        const char *next = ask.from + p * ask.apart;
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + 2 * ask.step, 0, 2);
        __m512i first = _mm512_loadu_si512(w + p * b->panel_stride);
        __m512i second = _mm512_loadu_si512(w + p * b->panel_stride + 2 * ROW_BYTES);
        evens[p] = pairs_of(first, second, 0), odds[p] = pairs_of(first, second, 1);
        least = least_of(least_of(least, first), second);
      }
      UNROLL
      for (int r = 0; r < n_rows; r++) {
        __m512bh x_even = (__m512bh)broadcast_4_bytes(x[r] + 2 * i);
        __m512bh x_odd = (__m512bh)broadcast_4_bytes(x[r] + 2 * i + 4);
        UNROLL
        for (int p = 0; p < 2; p++) {
          even[r][p] = _mm512_dpbf16_ps(even[r][p], x_even, (__m512bh)evens[p]);
          odd[r][p] = _mm512_dpbf16_ps(odd[r][p], x_odd, (__m512bh)odds[p]);
        }
      }
    }
    UNROLL
    for (int r = 0; r < n_rows; r++) {
      UNROLL
      for (int p = 0; p < 2; p++) sum[r][p] = _mm512_add_ps(sum[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
    }
  }
  if (_mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(CLB_LEAST_WEIGHT - 1))) return 0;
  UNROLL
  for (int r = 0; r < n_rows; r++) {
    UNROLL
    for (int p = 0; p < 2; p++) _mm512_storeu_ps(c + (row + r) * ldc + p * LANES, sum[r][p]);
  }
  return 1;
}

/* For two rows or more, and panels two by two. */
int KERNEL(linear_pairs)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                         ptrdiff_t ldc) {
  ptrdiff_t ldi = init ? 0 : ldc;
  if (!init) init = c;
  for (int r = 0; r < (ldi ? n_rows : 1); r++)
    for (int p = 0; p < n_panels; p++) {
      __m512 start = _mm512_abs_ps(_mm512_loadu_ps(init + r * ldi + p * LANES));
      if (_mm512_cmp_ps_mask(start, _mm512_set1_ps(CLB_LEAST_START), _CMP_LT_OQ) &
          _mm512_cmp_ps_mask(start, _mm512_setzero_ps(), _CMP_NEQ_OQ))
        return 0;
    }
  int panel = 0;
  for (; panel + 2 <= n_panels; panel += 2, init += 2 * CLB_PANEL, c += 2 * CLB_PANEL)
    for (int row = 0, n, done; row < n_rows; row += n) {
      int left = n_rows - row;
      n = left >= 2 * SINGLE_TILE ? SINGLE_TILE : left > SINGLE_TILE ? (left + 1) / 2 : left;
      ptrdiff_t ahead = row == 0 ? CLB_STREAM_AHEAD : n == left ? 2 * b->panel_stride : 0; /* as in linear.h */
      if (n == n_rows || !b->streamed) ahead = 0;
      request ask = {(const char *)b->data + panel * b->panel_stride + ahead, b->panel_stride, b->row_stride};
      if (b->next) ask = share_of_next(b, panel, 2, a->k, row, n, n_rows);
#define TILE(n) tile_pairs(a, row, n, b, panel, ask, init, ldi, c, ldc)
      if (n == 6) done = TILE(6);
      else if (n == 5) done = TILE(5);
      else if (n == 4) done = TILE(4);
      else if (n == 3) done = TILE(3);
      else done = TILE(2);
#undef TILE
      if (!done) return panel; /* at the first tile: all rows meet the same weights */
    }
  return panel;
}

/* The two inner ones of four change places; then two floats are 64 bits, of which a pair is the upper half of each. */
void KERNEL(pair_up)(const float *x, int n, void *row) {
  int32_t exact = 1;
  for (int i = 0; i < n && exact; i += LANES) {
    __mmask16 there = (__mmask16)(n - i < LANES ? (1 << (n - i)) - 1 : 0xffff);
    __m512i bits = _mm512_maskz_loadu_epi32(there, x + i), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 below = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xffff));
    __mmask16 small =
        _mm512_mask_cmplt_epi32_mask(_mm512_test_epi32_mask(size, size), size, _mm512_set1_epi32(CLB_LEAST_INPUT));
    exact = !(below | small);
    bits = _mm512_shuffle_epi32(bits, _MM_PERM_DBCA);
    __m512i first = _mm512_and_si512(bits, _mm512_set1_epi64(0xffff0000)), second = _mm512_srli_epi64(bits, 48);
    _mm512_mask_cvtepi64_storeu_epi32((uint16_t *)row + i,
                                      (__mmask8)((1 << ((n - i < LANES ? n - i : LANES) + 1) / 2) - 1),
                                      _mm512_or_si512(first, second));
  }
  memcpy((char *)row + clb_pairs_bytes(n) - sizeof exact, &exact, sizeof exact);
}
