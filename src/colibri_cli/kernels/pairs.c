/* Rows of activations as linear_pairs and linear_tiles take them, and a processor's answer to whether it may be used.
 */
#include <string.h>

#include "kernels.h"

size_t clb_pairs_bytes(int n) { return ((size_t)n + 1) / 2 * sizeof(uint32_t) + sizeof(uint32_t); }

int clb_paired(const void *row, int n) {
  int32_t exact;
  memcpy(&exact, (const char *)row + clb_pairs_bytes(n) - sizeof exact, sizeof exact);
  return exact;
}

/* A bfloat16 of either sign: 0, infinite or NaN at times, else from 2^-17 to 2^14, so that sums cancel, round and tie.
 */
static __attribute__((cold)) uint32_t any_number(uint64_t bits, int finite) {
  uint32_t kind = bits >> 32 & 15, sign = (uint32_t)(bits >> 16 & 0x8000), fraction = bits & 127;
  if (kind == 0) return sign;
  if (kind == 1 && !finite) return sign | 0x7f80 | (bits >> 8 & 1 ? fraction : 0);
  return sign | (uint32_t)(110 + (bits >> 40 & 31)) << 7 | fraction;
}

enum { ROWS = 3, PANELS = 2, WIDTH = PANELS * CLB_PANEL, INPUTS = 2 * CLB_BLOCK };

/* NaN is NaN. */
static int same(const float *a, const float *b) {
  for (int i = 0; i < ROWS * WIDTH; i++)
    if (memcmp(&a[i], &b[i], sizeof *a) != 0 && (a[i] == a[i] || b[i] == b[i])) return 0;
  return 1;
}

/* A linear layer of odd numbers, the rows as floats and as pairs. */
typedef struct {
  uint16_t w[INPUTS * WIDTH];
  float x[ROWS][INPUTS], init[WIDTH];
  char pairs[ROWS][INPUTS * sizeof(uint16_t) + sizeof(uint32_t)];
  const float *rows[ROWS], *paired[ROWS];
  clb_panels panels;
} trial;

/* Knuth's MMIX generator; its upper bits are the good ones. */
#define NEXT ((bits = bits * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407)) >> 16)
static __attribute__((cold)) uint64_t begin_trial(const clb_kernels *k, uint64_t bits, int finite, trial *t) {
  for (int i = 0; i < INPUTS * WIDTH; i++) t->w[i] = (uint16_t)any_number(NEXT, finite);
  for (int j = 0; j < WIDTH; j++) t->init[j] = (float)(int64_t)(NEXT - (UINT64_C(1) << 47)) * 0x1p-40f;
  for (int r = 0; r < ROWS; r++) {
    for (int i = 0; i < INPUTS; i++) {
      uint32_t number = any_number(NEXT, finite) << 16;
      memcpy(&t->x[r][i], &number, sizeof number);
    }
    k->pair_up(t->x[r], INPUTS, t->pairs[r]);
    t->rows[r] = t->x[r], t->paired[r] = (const float *)t->pairs[r];
  }
  ptrdiff_t row = CLB_PANEL * sizeof(uint16_t);
  t->panels = (clb_panels){.data = t->w, .panel_stride = INPUTS * row, .row_stride = row};
  return bits;
}

__attribute__((cold)) int clb_pairs_are_blocks(const clb_kernels *k) {
  enum { TRIES = 16 };
  uint64_t bits = 1;
  for (int try = 0; try < TRIES; try++) {
    trial t;
    uint32_t lanes[INPUTS / 2 + CLB_PANEL][ROWS]; /* and what is read beyond */
    float blocks[ROWS * WIDTH], sums[ROWS * WIDTH];
    memset(lanes, 0, sizeof lanes);
    bits = begin_trial(k, bits, try % 4, &t);
    for (int r = 0; r < ROWS; r++)
      for (int i = 0; i < INPUTS / 2; i++) memcpy(&lanes[i][r], t.pairs[r] + i * sizeof **lanes, sizeof **lanes);
    clb_input a = {.rows = t.rows, .n_segments = 1, .k = INPUTS, .in_blocks = 1}, b = a;
    b.rows = t.paired;
    const char *first = (const char *)t.w, *second = first + t.panels.panel_stride;
    clb_tiles tiles = {.weights = {first, second},
                       .next = {first, second},
                       .n_outputs = {CLB_PANEL, CLB_PANEL},
                       .k = INPUTS,
                       .n_rows = ROWS,
                       .lanes = (const char *)lanes,
                       .init = t.init,
                       .c = sums,
                       .ldc = WIDTH};
    k->linear_bf16(&a, ROWS, &t.panels, PANELS, t.init, blocks, WIDTH);
    if (k->linear_pairs &&
        (k->linear_pairs(&b, ROWS, &t.panels, PANELS, t.init, sums, WIDTH) != PANELS || !same(blocks, sums)))
      return 0;
    if (k->linear_tiles && (!k->linear_tiles(&tiles) || !same(blocks, sums))) return 0;
  }
  return 1;
}
