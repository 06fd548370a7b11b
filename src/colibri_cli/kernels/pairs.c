/* Rows of activations as linear_pairs takes them, and a processor's answer to whether it may be used. */
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

/* Knuth's MMIX generator; its upper bits are the good ones. */
#define NEXT ((bits = bits * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407)) >> 16)
__attribute__((cold)) int clb_pairs_are_chains(const clb_kernels *k) {
  enum { INPUTS = 8, ROWS = 3, PANELS = 2, WIDTH = PANELS * CLB_PANEL, TRIES = 256 };
  uint64_t bits = 1;
  for (int try = 0; try < TRIES; try++) {
    uint16_t w[INPUTS * WIDTH];
    float x[ROWS][INPUTS], init[WIDTH], chains[ROWS * WIDTH], sums[ROWS * WIDTH];
    char pairs[ROWS][INPUTS * sizeof(uint16_t) + sizeof(uint32_t)];
    const float *rows[ROWS], *paired[ROWS];
    for (int i = 0; i < INPUTS * WIDTH; i++) w[i] = (uint16_t)any_number(NEXT, try % 4);
    for (int j = 0; j < WIDTH; j++) init[j] = (float)(int64_t)(NEXT - (UINT64_C(1) << 47)) * 0x1p-40f;
    for (int r = 0; r < ROWS; r++) {
      for (int i = 0; i < INPUTS; i++) {
        uint32_t number = any_number(NEXT, try % 4) << 16;
        memcpy(&x[r][i], &number, sizeof number);
      }
      k->pair_up(x[r], INPUTS, pairs[r]);
      rows[r] = x[r], paired[r] = (const float *)pairs[r];
    }
    clb_input a = {rows, 0, 1, INPUTS}, b = {paired, 0, 1, INPUTS};
    clb_panels panels = {.data = w, .panel_stride = sizeof w / PANELS, .row_stride = CLB_PANEL * sizeof(uint16_t)};
    k->linear_bf16(&a, ROWS, &panels, PANELS, init, chains, WIDTH);
    if (k->linear_pairs(&b, ROWS, &panels, PANELS, init, sums, WIDTH) != PANELS) return 0;
    for (int i = 0; i < ROWS * WIDTH; i++) {
      float chain = chains[i], sum = sums[i];
      if (memcmp(&chain, &sum, sizeof chain) != 0 && (chain == chain || sum == sum)) return 0; /* NaN is NaN */
    }
  }
  return 1;
}
