/* Eight outputs whose weights lie as [output][input], for rows so few that filling panels would not pay: squares of
 * 32-bit words, each an input or two of bfloat16, are transposed in registers and used at once. Included by ops.h where
 * there are eight lanes. */

/* The weights of an input, one by one. */
static inline vf weights_at(int size, const char *const *outputs, int i) {
  float w[LANES] = {0};
  for (int o = 0; o < LANES; o++)
    memcpy((char *)&w[o] + sizeof *w - size, outputs[o] + (ptrdiff_t)i * size, (size_t)size);
  return vf_load(w);
}

/* Inputs from..to - 1, less than a block. */
static __attribute__((noinline, noclone)) void chain_elements(int size, int in_blocks, const float *const *x,
                                                              int n_rows, const char *const *outputs, int from, int to,
                                                              float *c, ptrdiff_t ldc) {
  for (int r = 0; r < n_rows; r++, c += ldc) {
    vf sum = vf_load(c), halves[2] = {vf_set1(0), vf_set1(0)};
    for (int i = from; i < to; i++) {
      vf *chain = in_blocks ? &halves[i % 2] : &sum;
      *chain = vf_fma(vf_set1(x[r][i]), weights_at(size, outputs, i), *chain);
    }
    vf_store(c, in_blocks && from < to ? vf_add(sum, vf_add(halves[0], halves[1])) : sum);
  }
}

/* Goes on with all rows' chains, which do not wait for each other, by a word of each output, inputs from i on. */
static inline __attribute__((always_inline)) void chain_word(int halves, vf word, const float *const *x, int n_rows,
                                                             int i, vf *first, vf *second) {
  vf inputs[2] = {word};
  if (halves > 1) vf_widen_bf16(word, inputs);
  UNROLL
  for (int h = 0; h < halves; h++) {
    vf *acc = h ? second : first;
    UNROLL
    for (int r = 0; r < n_rows; r++) acc[r] = vf_fma(vf_set1(x[r][i + h]), inputs[h], acc[r]);
  }
}

/* Goes as far as squares do, or whole blocks, and returns how far. size, in_blocks and n_rows are compile-time
 * constants in every use. The fewer instructions, the more of what memory is asked for a processor sees ahead:
 * unrolled, one row reads 1.2 times as much a second; more rows would take twice the code for a few percent. */
static inline __attribute__((always_inline)) int chain_squares(int size, int in_blocks, const float *const *x,
                                                               int n_rows, const char *const *outputs, int k, float *c,
                                                               ptrdiff_t ldc) {
  enum { AHEAD = 512 }; /* bytes; 256 are as good, none 3 % worse, 1,024 more so */
  int i = 0, halves = (int)sizeof(float) / size, step = LANES * halves;
  vf acc[CLB_IN_PLACE_ROWS], even[CLB_IN_PLACE_ROWS], odd[CLB_IN_PLACE_ROWS];
  vf *first = in_blocks ? even : acc, *second = in_blocks ? odd : acc;
  UNROLL
  for (int r = 0; r < n_rows; r++) acc[r] = vf_load(c + r * ldc), even[r] = odd[r] = vf_set1(0);
  if (in_blocks) k -= k % CLB_BLOCK;
  for (; i + step <= k; i += step) {
    vf w[LANES];
    UNROLL
    for (int o = 0; o < LANES; o++) {
      const char *at = outputs[o] + (ptrdiff_t)i * size;
      if (n_rows == 1 && halves == 1) __builtin_prefetch(at + AHEAD);
      w[o] = vf_load((const float *)at);
    }
    vf_transpose(w);
    if (n_rows == 1) {
      UNROLL
      for (int l = 0; l < LANES; l++) chain_word(halves, w[l], x, n_rows, i + halves * l, first, second);
    } else {
#pragma GCC unroll 1
      for (int l = 0; l < LANES; l++) chain_word(halves, w[l], x, n_rows, i + halves * l, first, second);
    }
    if (in_blocks && i % CLB_BLOCK != 0) { /* a block is two squares */
      UNROLL
      for (int r = 0; r < n_rows; r++) acc[r] = vf_add(acc[r], vf_add(even[r], odd[r])), even[r] = odd[r] = vf_set1(0);
    }
  }
  UNROLL
  for (int r = 0; r < n_rows; r++) vf_store(c + r * ldc, acc[r]);
  return i;
}

static inline __attribute__((always_inline)) void in_place(int size, int in_blocks, const float *const *x, int n_rows,
                                                           const char *const *outputs, int k, float *c, ptrdiff_t ldc) {
  int i = n_rows == 1 ? chain_squares(size, in_blocks, x, 1, outputs, k, c, ldc)
                      : chain_squares(size, in_blocks, x, CLB_IN_PLACE_ROWS, outputs, k, c, ldc);
  chain_elements(size, in_blocks, x, n_rows, outputs, i, k, c, ldc);
}

void KERNEL(linear_in_place_f32)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                                 ptrdiff_t ldc) {
  in_place(sizeof(float), 0, x, n_rows, outputs, k, c, ldc);
}

void KERNEL(linear_in_place_bf16)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                                  ptrdiff_t ldc) {
  in_place(sizeof(uint16_t), 0, x, n_rows, outputs, k, c, ldc);
}

void KERNEL(linear_in_place_blocks)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                                    ptrdiff_t ldc) {
  in_place(sizeof(uint16_t), 1, x, n_rows, outputs, k, c, ldc);
}
