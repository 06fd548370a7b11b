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

/* Goes as far as squares do and returns how far. size and n_rows are compile-time constants in every use. Each input
 * goes to all rows' chains in turn, which do not wait for each other. */
static inline __attribute__((always_inline)) int chain_squares(int size, const float *const *x, int n_rows,
                                                               const char *const *outputs, int k, float *c,
                                                               ptrdiff_t ldc) {
  int i = 0, halves = (int)sizeof(float) / size, step = LANES * halves;
  vf acc[CLB_IN_PLACE_ROWS];
  UNROLL
  for (int r = 0; r < n_rows; r++) acc[r] = vf_load(c + r * ldc);
  for (; i + step <= k; i += step) {
    vf w[LANES];
    UNROLL
    for (int o = 0; o < LANES; o++) w[o] = vf_load((const float *)(outputs[o] + (ptrdiff_t)i * size));
    vf_transpose(w);
#pragma GCC unroll 1
    for (int l = 0; l < LANES; l++) { /* unrolled: twice the code, a few percent */
      vf inputs[2] = {w[l]};
      if (halves > 1) vf_widen_bf16(w[l], inputs);
      UNROLL
      for (int h = 0; h < halves; h++) {
        UNROLL
        for (int r = 0; r < n_rows; r++) acc[r] = vf_fma(vf_set1(x[r][i + halves * l + h]), inputs[h], acc[r]);
      }
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
