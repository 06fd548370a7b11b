/* Eight outputs whose weights lie as [output][input], for rows so few that filling panels would not pay: squares of
 * 32-bit words, each an input or two of bfloat16, are transposed in registers and used at once. Included by ops.h where
 * there are eight lanes. */

/* Inputs from..to - 1, one by one. */
static __attribute__((noinline, noclone)) void chain_elements(int size, const float *const *x, int n_rows,
                                                              const char *const *outputs, int from, int to, float *c,
                                                              ptrdiff_t ldc) {
  for (int i = from; i < to; i++) {
    float w[LANES] = {0};
    for (int o = 0; o < LANES; o++)
      memcpy((char *)&w[o] + sizeof *w - size, outputs[o] + (ptrdiff_t)i * size, (size_t)size);
    for (int r = 0; r < n_rows; r++) vf_store(c + r * ldc, vf_fma(vf_set1(x[r][i]), vf_load(w), vf_load(c + r * ldc)));
  }
}

/* Goes on with all rows' chains, which do not wait for each other, by a word of each output, inputs from i on. */
static inline __attribute__((always_inline)) void chain_word(int halves, vf word, const float *const *x, int n_rows,
                                                             int i, vf *acc) {
  vf inputs[2] = {word};
  if (halves > 1) vf_widen_bf16(word, inputs);
  UNROLL
  for (int h = 0; h < halves; h++) {
    UNROLL
    for (int r = 0; r < n_rows; r++) acc[r] = vf_fma(vf_set1(x[r][i + h]), inputs[h], acc[r]);
  }
}

/* Goes as far as squares do and returns how far. size and n_rows are compile-time constants in every use. The fewer
 * instructions, the more of what memory is asked for a processor sees ahead: unrolled, one row reads 1.2 times as much
 * a second; more rows would take twice the code for a few percent. */
static inline __attribute__((always_inline)) int chain_squares(int size, const float *const *x, int n_rows,
                                                               const char *const *outputs, int k, float *c,
                                                               ptrdiff_t ldc) {
  enum { AHEAD = 512 }; /* bytes; 256 are as good, none 3 % worse, 1,024 more so */
  int i = 0, halves = (int)sizeof(float) / size, step = LANES * halves;
  vf acc[CLB_IN_PLACE_ROWS];
  UNROLL
  for (int r = 0; r < n_rows; r++) acc[r] = vf_load(c + r * ldc);
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
      for (int l = 0; l < LANES; l++) chain_word(halves, w[l], x, n_rows, i + halves * l, acc);
    } else {
#pragma GCC unroll 1
      for (int l = 0; l < LANES; l++) chain_word(halves, w[l], x, n_rows, i + halves * l, acc);
    }
  }
  UNROLL
  for (int r = 0; r < n_rows; r++) vf_store(c + r * ldc, acc[r]);
  return i;
}

static inline __attribute__((always_inline)) void in_place(int size, const float *const *x, int n_rows,
                                                           const char *const *outputs, int k, float *c, ptrdiff_t ldc) {
  int i = n_rows == 1 ? chain_squares(size, x, 1, outputs, k, c, ldc)
                      : chain_squares(size, x, CLB_IN_PLACE_ROWS, outputs, k, c, ldc);
  chain_elements(size, x, n_rows, outputs, i, k, c, ldc);
}

void KERNEL(linear_in_place_f32)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                                 ptrdiff_t ldc) {
  in_place(sizeof(float), x, n_rows, outputs, k, c, ldc);
}

void KERNEL(linear_in_place_bf16)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                                  ptrdiff_t ldc) {
  in_place(sizeof(uint16_t), x, n_rows, outputs, k, c, ldc);
}
