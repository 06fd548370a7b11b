/* Intermediate states rounded to bfloat16. Plain C that compilers make vectors of; included by ops.h, and where there
 * is something to take pairs, which want them in an order of their own. */

void KERNEL(narrow_f32)(float *x, int n_rows, ptrdiff_t ldx, int n, char *pairs, ptrdiff_t pairs_bytes) {
  for (int r = 0; r < n_rows; r++, x += ldx, pairs += pairs_bytes)
    for (int i = 0; i < n; i += CLB_PANEL) {
      int32_t bits[CLB_PANEL];
      memcpy(bits, x + i, sizeof bits);
      for (int j = 0; j < CLB_PANEL; j++) {
        int32_t size = bits[j] & 0x7fffffff, nan = (0x7f800000 - size) >> 31, small = (size - CLB_LEAST_INPUT) >> 31;
        int32_t near = (int32_t)((uint32_t)bits[j] + 0x7fff + ((uint32_t)bits[j] >> 16 & 1)); /* ties to even */
        near = (near & ~nan) | ((bits[j] | 0x400000) & nan);
        bits[j] = near & (int32_t)0xffff0000 & ~(small & 0x7fffffff);
      }
      memcpy(x + i, bits, sizeof bits);
#ifdef FIRST_OF_PAIR
      for (int j = 0; j < CLB_PANEL / 2; j++)
        bits[j] = (int32_t)(PAIR((uint32_t)bits[FIRST_OF_PAIR(j)], (uint32_t)bits[SECOND_OF_PAIR(j)]));
      memcpy(pairs + i * sizeof(uint16_t), bits, sizeof bits / 2);
#endif
    }
}
