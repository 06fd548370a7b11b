/* The best of many, one after the other: list[0..n), of at most limit, is kept by falling key and rising id. */
#include <stdint.h>

/* Inserts i; returns the list's new length. */
static __attribute__((noinline)) int insert(int32_t *list, int n, int limit, int i, const float *keys) {
  int at = n;
  while (at > 0 && (keys[i] > keys[list[at - 1]] || (keys[i] == keys[list[at - 1]] && i < list[at - 1]))) at--;
  if (at == limit) return n;
  int last = n < limit ? n : limit - 1;
  for (int j = last; j > at; j--) list[j] = list[j - 1];
  list[at] = i;
  return n < limit ? n + 1 : n;
}

/* Likewise, i being larger than any id before: most are turned away at once. */
static inline __attribute__((always_inline)) int insert_next(int32_t *list, int n, int limit, int i,
                                                             const float *keys) {
  return n < limit || keys[i] > keys[list[n - 1]] ? insert(list, n, limit, i, keys) : n;
}
