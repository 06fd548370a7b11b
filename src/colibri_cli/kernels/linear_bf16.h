/* Linear layers over bfloat16 weights: linear.h, a widening more. Included by ops.h. */

/* Twice the chains for each output, so half the outputs: one row or two in two panels, or more in one. */
static inline __attribute__((always_inline)) void linear_in_blocks(const clb_input *a, int n_rows, const clb_panels *b,
                                                                   int n_panels, const float *init, float *c,
                                                                   ptrdiff_t ldc) {
  ptrdiff_t ldi = init ? 0 : ldc;
  if (!init) init = c;
  int panel = 0;
  if (n_rows <= 2 && LANES > 1)
    for (; panel + 2 <= n_panels; panel += 2) tiles(CLB_BF16, 1, a, n_rows, b, panel, 2, 2, init, ldi, c, ldc);
  for (; panel < n_panels; panel++) tiles(CLB_BF16, 1, a, n_rows, b, panel, 1, BLOCK_TILE, init, ldi, c, ldc);
}

void KERNEL(linear_bf16)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                         ptrdiff_t ldc) {
  if (a->in_blocks && a->k > 0) linear_in_blocks(a, n_rows, b, n_panels, init, c, ldc);
  else linear(CLB_BF16, a, n_rows, b, n_panels, init, c, ldc);
}
