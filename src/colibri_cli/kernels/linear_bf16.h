/* Linear layers over bfloat16 weights: linear.h, a widening more. Included by ops.h. */

void KERNEL(linear_bf16)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                         ptrdiff_t ldc) {
  linear(CLB_BF16, a, n_rows, b, n_panels, init, c, ldc);
}
