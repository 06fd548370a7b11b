/* Linear layers over bfloat16 weights in blocks, by matrix instructions. Included by isa_amx.c.
 *
 * tdpbf16ps adds to each of 16 x 16 sums what a block adds: the chain from 0 over the even inputs of 16 pairs, plus the
 * one over the odd ones (Intel's manual, volume 2; isa.c holds the processor to it). Weights are its rows, lanes of
 * activations its columns. Denormals are zeros to it, so small weights and starts are left to FMAs. */

enum {
  AT_ONCE = 8,               /* blocks of weights that stay in the L1 cache, with their lanes */
  ROW_BYTES = 2 * CLB_BLOCK, /* of a tile: a block of one output's weights, or 16 words */
  TILE_BYTES = 16 * ROW_BYTES,
  SUMS_APART = CLB_ROW_BLOCK * (int)sizeof(float)
};

/* What _tile_loadconfig takes (Intel's manual, volume 1, 18.2): 8 tiles of 16 rows. It takes as long as four blocks, so
 * all are as large as they can be, whatever is in them. Sums are tiles 0 to 3, weights 4 and 5, lanes 6 and 7. */
static const struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} shapes = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static inline __m512i least_of(__m512i least, __m512i weights) {
  __m512i size = _mm512_and_si512(weights, _mm512_set1_epi16(0x7fff));
  return _mm512_min_epu16(least, _mm512_add_epi16(size, _mm512_set1_epi16(-1))); /* 0 becomes the largest */
}

/* 16 rows of 16 words: row i's word j and row j's word i change places. */
static inline __attribute__((always_inline)) void transpose_words(__m512i r[16]) {
  __m512i s[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2)
    s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]), s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + j + 2]);
      r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    s[j] = _mm512_shuffle_i32x4(r[j], r[j + 4], 0x88), s[j + 4] = _mm512_shuffle_i32x4(r[j], r[j + 4], 0xdd);
    s[j + 8] = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0x88),
          s[j + 12] = _mm512_shuffle_i32x4(r[j + 8], r[j + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    r[j] = _mm512_shuffle_i32x4(s[j], s[j + 8], 0x88), r[j + 8] = _mm512_shuffle_i32x4(s[j], s[j + 8], 0xdd);
    r[j + 4] = _mm512_shuffle_i32x4(s[j + 4], s[j + 12], 0x88),
          r[j + 12] = _mm512_shuffle_i32x4(s[j + 4], s[j + 12], 0xdd);
  }
}

/* A block of a panel, columns 0 8 1 9 ..., as rows of outputs. Asks for another meanwhile: beside matrix instructions
 * requests would make their loads wait. */
static __attribute__((noinline)) __m512i turn_block(const char *panel, const char *ask, char *rows, __m512i least) {
  const __m512i columns = _mm512_set_epi16(31, 15, 29, 13, 27, 11, 25, 9, 23, 7, 21, 5, 19, 3, 17, 1, 30, 14, 28, 12,
                                           26, 10, 24, 8, 22, 6, 20, 4, 18, 2, 16, 0);
  __m512i words[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) {
    __builtin_prefetch(ask + i * ROW_BYTES, 0, 2);
    words[i] = _mm512_permutexvar_epi16(columns, _mm512_loadu_si512(panel + i * ROW_BYTES));
    least = least_of(least, words[i]);
  }
  transpose_words(words);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_si512(rows + i * ROW_BYTES, words[i]);
  return least;
}

/* Goes on with the sums by n blocks, for the lanes of one panel or two, the first from l on. Where the last has fewer,
 * its tiles hold some of the next inputs' as well, and its sums what nobody looks at. */
static void add_tiles(const clb_tiles *t, char (*weights)[AT_ONCE * TILE_BYTES], int first, int n_blocks, int l,
                      float (*sums)[CLB_ROW_BLOCK]) {
  int left = t->n_rows - l, two = left > 16, both = t->n_outputs[1] > 0;
  ptrdiff_t width = left < 16 ? left : 16, second_width = left < 32 ? left - 16 : 16;
  const char *lanes = t->lanes + (ptrdiff_t)l * t->k * 2 + first * width * ROW_BYTES;
  const char *second = t->lanes + (ptrdiff_t)(l + 16) * t->k * 2 + first * second_width * ROW_BYTES;
  const char *w = weights[0], *v = weights[1];
  float *above = sums[0] + l, *below = sums[CLB_PANEL] + l;
  _tile_loadd(0, above, SUMS_APART);
  if (two) _tile_loadd(1, above + 16, SUMS_APART);
  if (both) _tile_loadd(2, below, SUMS_APART);
  if (both && two) _tile_loadd(3, below + 16, SUMS_APART);
  for (int i = 0; i < n_blocks; i++) {
    _tile_loadd(4, w, ROW_BYTES);
    _tile_loadd(6, lanes, width * sizeof(float));
    _tile_dpbf16ps(0, 4, 6);
    if (two) {
      _tile_loadd(7, second, second_width * sizeof(float));
      _tile_dpbf16ps(1, 4, 7);
    }
    if (both) {
      _tile_loadd(5, v, ROW_BYTES);
      _tile_dpbf16ps(2, 5, 6);
      if (two) _tile_dpbf16ps(3, 5, 7);
    }
    w += TILE_BYTES, v += TILE_BYTES, lanes += width * ROW_BYTES, second += second_width * ROW_BYTES;
  }
  _tile_stored(0, above, SUMS_APART);
  if (two) _tile_stored(1, above + 16, SUMS_APART);
  if (both) _tile_stored(2, below, SUMS_APART);
  if (both && two) _tile_stored(3, below + 16, SUMS_APART);
}

/* The sums of one panel as rows of outputs. */
static __attribute__((noinline)) void turn_sums(float (*sums)[CLB_ROW_BLOCK], int n_rows, float *c, ptrdiff_t ldc) {
  for (int l = 0; l < n_rows; l += 16) {
    __m512i words[16];
#pragma GCC unroll 16
    for (int o = 0; o < 16; o++) words[o] = _mm512_loadu_si512(&sums[o][l]);
    transpose_words(words);
    for (int r = 0; r < 16 && l + r < n_rows; r++) _mm512_storeu_si512(c + (l + r) * ldc, words[r]);
  }
}

/* Rows that a power of two of bytes lies between share few lines of an L1 cache, so they are copied. */
static __m512i copy_blocks(const char *w, ptrdiff_t output, int n_outputs, int n_blocks, char *rows, __m512i least) {
  for (int o = 0; o < n_outputs; o++)
    for (int i = 0; i < n_blocks; i++) {
      __m512i words = _mm512_loadu_si512(w + o * output + i * ROW_BYTES);
      least = least_of(least, words);
      _mm512_store_si512(rows + i * TILE_BYTES + o * ROW_BYTES, words);
    }
  return least;
}

int KERNEL(linear_tiles)(const clb_tiles *t) {
  _Alignas(CLB_LINE) char rows[2][AT_ONCE * TILE_BYTES];
  _Alignas(CLB_LINE) float sums[2 * CLB_PANEL][CLB_ROW_BLOCK];
  __m512i least = _mm512_set1_epi16(-1);
  int n_panels = 1 + (t->n_outputs[1] > 0), allowed = 1;
  for (int o = 0; o < n_panels * CLB_PANEL; o++) {
    if (t->init[o] != 0.0f && __builtin_fabsf(t->init[o]) < CLB_LEAST_START) return 0;
    for (int l = 0; l < CLB_ROW_BLOCK; l += 16) _mm512_store_ps(&sums[o][l], _mm512_set1_ps(t->init[o]));
  }
  for (int p = 0; p < n_panels; p++)
    if (t->n_outputs[p] < 16) memset(rows[p], 0, sizeof rows[p]);
  _tile_loadconfig(&shapes);
  for (int first = 0, n_blocks = t->k / CLB_BLOCK, n; allowed && first < n_blocks; first += n) {
    n = n_blocks - first < AT_ONCE ? n_blocks - first : AT_ONCE;
    for (int p = 0; p < n_panels; p++) {
      const char *w = t->weights[p] + (ptrdiff_t)first * (t->in_place ? ROW_BYTES : TILE_BYTES);
      const char *ask = first + n < n_blocks ? w + n * TILE_BYTES : t->next[p];
      if (t->in_place) least = copy_blocks(w, t->output, t->n_outputs[p], n, rows[p], least);
      for (int i = 0; !t->in_place && i < n; i++)
        least = turn_block(w + i * TILE_BYTES, ask + i * TILE_BYTES, rows[p] + i * TILE_BYTES, least);
    }
    allowed = !_mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(CLB_LEAST_WEIGHT - 1));
    for (int l = 0; allowed && l < t->n_rows; l += 32) add_tiles(t, rows, first, n, l, sums);
  }
  _tile_release();
  for (int p = 0; allowed && p < n_panels; p++)
    turn_sums(sums + p * CLB_PANEL, t->n_rows, t->c + p * CLB_PANEL, t->ldc);
  return allowed;
}

/* As they lie: the upper halves of floats. */
void KERNEL(pair_up)(const float *x, int n, void *row) {
  int32_t exact = 1;
  for (int i = 0; i < n && exact; i += 16) {
    __mmask16 there = (__mmask16)(n - i < 16 ? (1 << (n - i)) - 1 : 0xffff);
    __m512i bits = _mm512_maskz_loadu_epi32(there, x + i), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __mmask16 below = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xffff));
    __mmask16 small =
        _mm512_mask_cmplt_epi32_mask(_mm512_test_epi32_mask(size, size), size, _mm512_set1_epi32(CLB_LEAST_INPUT));
    exact = !(below | small);
    _mm512_mask_cvtepi32_storeu_epi16((uint16_t *)row + i, there, _mm512_srli_epi32(bits, 16));
  }
  memcpy((char *)row + clb_pairs_bytes(n) - sizeof exact, &exact, sizeof exact);
}
