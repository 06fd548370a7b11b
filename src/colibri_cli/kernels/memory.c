/* Aligned memory, on huge pages where the system grants them: a layer's weights span many more 4 KiB pages than a TLB
 * holds. */
#include <stdlib.h>
#include <sys/mman.h>

#include "kernels.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 1 << 21 };

void *clb_alloc(size_t bytes) {
  void *memory = NULL;
  size_t alignment = bytes >= HUGE_PAGE ? HUGE_PAGE : CACHE_LINE;
  if (bytes > SIZE_MAX - HUGE_PAGE) return NULL;
  bytes = (bytes + alignment - 1) / alignment * alignment;
  if (posix_memalign(&memory, alignment, bytes ? bytes : alignment) != 0) return NULL;
  if (alignment == HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE); /* advice: refusal changes nothing */
  return memory;
}

void clb_free(void *memory) { free(memory); }
