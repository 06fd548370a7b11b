/* Aligned memory, on huge pages where the system grants them: a layer's weights span many more 4 KiB pages than a TLB
 * holds. Large blocks come from the system and go back to it. On malloc's heap, advice given for them would stay with
 * whatever lies there next. */
#include <stdlib.h>
#include <sys/mman.h>

#include "kernels.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 1 << 21 };

static size_t blocks_of(size_t bytes, size_t block) { return (bytes + block - 1) / block * block; }

void *clb_alloc(size_t bytes) {
  void *memory = NULL;
  if (bytes > PTRDIFF_MAX - 2 * HUGE_PAGE) return NULL;
  if (bytes < HUGE_PAGE)
    return posix_memalign(&memory, CACHE_LINE, bytes ? blocks_of(bytes, CACHE_LINE) : CACHE_LINE) ? NULL : memory;
  bytes = blocks_of(bytes, HUGE_PAGE);
  memory = mmap(NULL, bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return NULL;
  size_t before = -(uintptr_t)memory % HUGE_PAGE;
  if (before) munmap(memory, before);
  munmap((char *)memory + before + bytes, HUGE_PAGE - before);
  memory = (char *)memory + before;
  madvise(memory, bytes, MADV_HUGEPAGE); /* advice: refusal changes nothing */
  return memory;
}

void clb_free(void *memory, size_t bytes) {
  if (bytes < HUGE_PAGE) free(memory);
  else munmap(memory, blocks_of(bytes, HUGE_PAGE));
}
