/* The processor's floating-point mode is a thread's own, and libraries built for fast mathematics change it (flushing
 * denormals, above all): with another mode the same operations give other bits. */
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum { DEFAULT_MODE = 0x1f80 }; /* nearest, denormals kept, no exception traps */

int clb_float_mode(void) {
  int before = (int)_mm_getcsr();
  if ((before & ~0x3f) != DEFAULT_MODE) _mm_setcsr(DEFAULT_MODE); /* the low bits are sticky flags */
  return before;
}
void clb_restore_float_mode(int before) {
  if ((before & ~0x3f) != DEFAULT_MODE) _mm_setcsr((unsigned)before);
}
#elif defined(__aarch64__)
int clb_float_mode(void) {
  uint64_t before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  if (before != 0) __asm__ volatile("msr fpcr, %0" ::"r"(UINT64_C(0)));
  return (int)before;
}
void clb_restore_float_mode(int before) {
  if (before != 0) __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)(unsigned)before));
}
#else
int clb_float_mode(void) { return 0; }
void clb_restore_float_mode(int before) { (void)before; }
#endif
