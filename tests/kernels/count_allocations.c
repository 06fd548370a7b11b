/* Preloaded under a Python process: counts what asks for memory, in any thread, between two marks. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static atomic_int counting;
static atomic_long counted;

void count_start(void) { atomic_store(&counted, 0), atomic_store(&counting, 1); }
long count_stop(void) {
  atomic_store(&counting, 0);
  return atomic_load(&counted);
}
static void count(void) {
  if (atomic_load(&counting)) atomic_fetch_add(&counted, 1);
}

void *malloc(size_t n) { return count(), __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return count(), __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return count(), __libc_realloc(p, n); }
void *memalign(size_t alignment, size_t n) { return count(), __libc_memalign(alignment, n); }
void *aligned_alloc(size_t alignment, size_t n) { return count(), __libc_memalign(alignment, n); }
int posix_memalign(void **p, size_t alignment, size_t n) {
  count();
  return (*p = __libc_memalign(alignment, n)) ? 0 : ENOMEM;
}
void *mmap(void *at, size_t n, int protection, int flags, int file, off_t offset) {
  static void *(*next)(void *, size_t, int, int, int, off_t);
  count();
  if (!next) *(void **)&next = dlsym(RTLD_NEXT, "mmap");
  return next(at, n, protection, flags, file, offset);
}
