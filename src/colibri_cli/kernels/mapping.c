/* Mapped files that are cut short while they are in use.
 *
 * Reading a mapped page that its file no longer holds raises SIGBUS, which ends the process. For the regions watched
 * here the handler puts a page of zeros in the gap and marks the region as lost; whoever called the kernel looks at the
 * mark afterwards and refuses the answer. Asking the system for the file's size before each call would cost more than
 * a small layer (1 to 2 us a file) and leave the time between question and use open. Any other SIGBUS goes to the
 * handler that was there before. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels.h"

enum { MAX_REGIONS = 1 << 14 };

/* end is set last and cleared first: a region with an end is whole. */
static struct {
  _Atomic uintptr_t start, end;
  atomic_int lost;
} regions[MAX_REGIONS];
static atomic_int n_used; /* regions ever used: as far as the handler looks */
static struct sigaction before;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void on_bus_error(int number, siginfo_t *info, void *context) {
  uintptr_t at = (uintptr_t)info->si_addr, page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (int i = 0, n = atomic_load(&n_used); i < n; i++)
    if (at < atomic_load(&regions[i].end) && at >= atomic_load(&regions[i].start) &&
        mmap((void *)(at / page * page), page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
            MAP_FAILED) {
      atomic_store(&regions[i].lost, 1);
      return;
    }
  if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
  else sigaction(SIGBUS, &before, NULL); /* the access is tried again, and ends the process */
}

/* With each new region, since another library may have put its own handler over this one. Under lock. */
static void handle_bus_errors(void) {
  struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK}, present;
  if (sigaction(SIGBUS, NULL, &present) != 0 || present.sa_sigaction == on_bus_error) return;
  before = present;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, NULL);
}

int clb_watch(const void *start, size_t n_bytes) {
  int i = 0;
  pthread_mutex_lock(&lock);
  handle_bus_errors();
  while (i < MAX_REGIONS && atomic_load(&regions[i].end) != 0) i++;
  if (i < MAX_REGIONS) {
    atomic_store(&regions[i].lost, 0);
    atomic_store(&regions[i].start, (uintptr_t)start);
    atomic_store(&regions[i].end, (uintptr_t)start + n_bytes);
    if (i >= atomic_load(&n_used)) atomic_store(&n_used, i + 1);
  }
  pthread_mutex_unlock(&lock);
  return i < MAX_REGIONS ? i : -1;
}

void clb_unwatch(int region) {
  if (region >= 0) atomic_store(&regions[region].end, 0);
}

int clb_lost(int region) { return region >= 0 && atomic_load_explicit(&regions[region].lost, memory_order_relaxed); }
