/* Panels of weights that lie otherwise: what runs PyTorch's arrays where they are. Moves and widens; rounds nothing.
 * Written once over the lanes of a simd_<isa>.h; included by ops.h. */

static int place_in_row(int size, int j) { return size == sizeof(float) ? j : j % 8 * 2 + j / 8; }

/* Inputs from..k - 1, one by one. */
static inline __attribute__((always_inline)) void fill_elements(int size, const char *const *outputs,
                                                                ptrdiff_t input_stride, ptrdiff_t first, int from,
                                                                int k, char *panel) {
  for (int i = from; i < k; i++)
#pragma GCC unroll 1
    for (int j = 0; j < CLB_PANEL; j++)
      memcpy(panel + ((ptrdiff_t)i * CLB_PANEL + place_in_row(size, j)) * size, outputs[j] + (first + i) * input_stride,
             (size_t)size);
}

#if LANES > 1
enum { AHEAD = 16 }; /* rows of inputs that are asked for ahead of time */

/* Inputs side by side: squares of 32-bit words, each an input or two of bfloat16; returns the inputs done. Eight
 * outputs at a time: the lines of more that are a power of two apart would not fit the ways of an L1 cache. The words
 * of the first eight wait in the panel for those of the others, which then halve them both. */
static inline __attribute__((always_inline)) int fill_squares(int size, const char *const *outputs, int n_panels,
                                                              ptrdiff_t first, int k, const char *const *next,
                                                              char *panels) {
  int step = LANES * 4 / size, done = k / step * step;
  for (int j = 0; j < n_panels * CLB_PANEL; j += 8) {
    int second = j % CLB_PANEL;
    const char *rows[8],
        *ahead = next ? next[j / CLB_PANEL] + (first * CLB_PANEL + (ptrdiff_t)k * second) * size : NULL;
    for (int r = 0; r < 8; r++) rows[r] = outputs[j + r] + first * size;
    for (int i = 0; i < done; i += step) {
      ptrdiff_t at = (ptrdiff_t)i * size;
      float *panel = (float *)(panels + ((ptrdiff_t)(j / CLB_PANEL) * k + i) * CLB_PANEL * size);
      if (next && at % CLB_LINE == 0)
        for (int line = 0; line < 8; line++) __builtin_prefetch(ahead + at * 8 + line * CLB_LINE, 0, 2);
      for (int c = 0; c < 8; c += LANES) {
        vf block[LANES];
        for (int r = 0; r < LANES; r++) block[r] = vf_load((const float *)(rows[c + r] + at));
        vf_transpose(block);
        for (int r = 0; r < LANES; r++) {
          float *row = panel + r * CLB_PANEL + c;
          if (size == 4) {
            vf_store(row + second, block[r]);
          } else if (!second) {
            vf_store(row, block[r]);
          } else {
            vf words = vf_load(row);
            vf_store(row, vf_low_pairs(words, block[r]));
            vf_store(row + 8, vf_high_pairs(words, block[r]));
          }
        }
      }
    }
  }
  return done;
}

/* Outputs side by side: a row is as it should be, or to be zipped. */
static inline __attribute__((always_inline)) void fill_rows(int size, const char *w, ptrdiff_t input_stride, int k,
                                                            char *panel) {
  for (; k > 0; k--, w += input_stride, panel += CLB_PANEL * size) {
    __builtin_prefetch(w + AHEAD * input_stride, 0, 2);
    if (size == 2) vf_zip_row(w, panel);
    else
      for (int j = 0; j < CLB_PANEL; j += LANES) vf_store((float *)panel + j, vf_load((const float *)w + j));
  }
}

/* A gate's bfloat16 outputs and an up projection's in turn: 32-bit words of both. */
static inline void fill_pairs(const char *w, ptrdiff_t input_stride, int k, float *gate, float *up) {
  for (; k > 0; k--, w += input_stride, gate += 8, up += 8) {
    __builtin_prefetch(w + AHEAD * input_stride, 0, 2);
    for (int j = 0; j < 8; j += LANES) {
      vf a = vf_load((const float *)w + j), b = vf_load((const float *)w + j + 8);
      vf_store(gate + j, vf_low_pairs(a, b));
      vf_store(up + j, vf_high_pairs(a, b));
    }
  }
}
#endif

static inline
    __attribute__((always_inline)) void fill(int size, const char *const *outputs, int n_panels, ptrdiff_t input_stride,
                                             ptrdiff_t first, int k, const char *const *next, char *panels) {
  ptrdiff_t panel_bytes = (ptrdiff_t)k * CLB_PANEL * size;
  int from = 0;
#if LANES > 1
  if (input_stride == size) from = fill_squares(size, outputs, n_panels, first, k, next, panels);
#else
  (void)next;
#endif
  for (int p = 0; p < n_panels; p++, outputs += CLB_PANEL, panels += panel_bytes) {
#if LANES > 1
    ptrdiff_t step = outputs[1] - outputs[0];
    int in_step = input_stride != size && outputs[CLB_PANEL - 1] - outputs[0] == step * (CLB_PANEL - 1);
    const char *w = outputs[0] + first * input_stride;
    if (in_step && step == size) {
      fill_rows(size, w, input_stride, k, panels);
      continue;
    }
    if (size == 2 && in_step && step == 4 && p + 1 < n_panels && outputs[CLB_PANEL] - outputs[0] == 2) {
      fill_pairs(w, input_stride, k, (float *)panels, (float *)(panels + panel_bytes));
      p++, outputs += CLB_PANEL, panels += panel_bytes;
      continue;
    }
#endif
    fill_elements(size, outputs, input_stride, first, from, k, panels);
  }
}

__attribute__((noinline, noclone)) void KERNEL(fill_panels)(clb_dtype dtype, const char *const *outputs, int n_panels,
                                                            ptrdiff_t input_stride, int first, int k,
                                                            const char *const *next, void *panels) {
  if (dtype == CLB_F32) fill(4, outputs, n_panels, input_stride, first, k, next, panels);
  else fill(2, outputs, n_panels, input_stride, first, k, next, panels);
}

void KERNEL(widen_f16)(const uint16_t *halves, int n_rows, float *rows) {
  for (; n_rows > 0; n_rows--, halves += CLB_PANEL, rows += CLB_PANEL) vf_widen_row(halves, rows);
}

void KERNEL(transpose_f32)(const float *w, ptrdiff_t row_stride, int n_columns, int k, float *panel) {
  const char *outputs[CLB_PANEL];
  for (int j = 0; j < CLB_PANEL; j++) outputs[j] = (const char *)(w + (j < n_columns ? j : 0) * row_stride);
  KERNEL(fill_panels)(CLB_F32, outputs, 1, sizeof(float), 0, k, outputs, panel);
  for (ptrdiff_t i = 0; i < k && n_columns < CLB_PANEL; i++)
    memset(panel + i * CLB_PANEL + n_columns, 0, (size_t)(CLB_PANEL - n_columns) * sizeof(float));
}
