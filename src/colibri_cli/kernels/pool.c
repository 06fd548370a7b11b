/* The thread pool: one a process, shared by every engine in it.
 *
 * A call posts its job and works on it itself; idle threads join the job with the fewest of them, up to the call's own
 * width, so concurrent callers share the pool evenly and none waits for another to finish. Tasks lie in as many shares
 * as the call is wide: a thread empties its own first, so that call after call it meets the same weights, in its own
 * cache and on its own node, and then helps the others. A thread that runs out of work looks for more during
 * SPIN_ROUNDS (10 to 20 us), which is when the next phase of a layer arrives, and then sleeps: an idle pool costs
 * nothing.
 *
 * A thread may run its calls on a host's team instead. OpenMP's threads spin for milliseconds after a parallel region,
 * on the very cores that the pool's threads would want. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

#include "kernels.h"

#ifdef __x86_64__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("yield")
#endif

enum { MAX_THREADS = CLB_MAX_THREADS, SPIN_ROUNDS = 500, STACK_BYTES = 1 << 20 };

typedef struct {
  _Alignas(64) atomic_int next; /* the next task to take */
  int end;
} share;

typedef struct job {
  clb_task task;
  void *arg;
  share *shares; /* [n_shares] */
  int n_shares;
  int n_joined;         /* under lock: helpers, fewer than n_shares */
  atomic_int n_working; /* helpers now inside the job; falls under lock */
  struct job *link;
  pthread_t caller;     /* of a team's job */
  atomic_int n_arrived; /* likewise: members besides the caller */
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER, left = PTHREAD_COND_INITIALIZER;
static job *jobs;            /* under lock */
static int n_threads;        /* under lock: threads besides the callers */
static int widest;           /* under lock: what was ever reserved, for a forked child */
static int n_sleeping;       /* under lock */
static atomic_uint n_posted; /* jobs ever posted: what a spinning thread watches */

static _Thread_local clb_team borrowed;

void clb_pool_borrow(clb_team team) { borrowed = team; }

static void work(job *j, int worker, int home) {
  for (int i = 0; i < j->n_shares; i++) {
    share *from = &j->shares[(home + i) % j->n_shares];
    int index;
    while ((index = atomic_fetch_add_explicit(&from->next, 1, memory_order_relaxed)) < from->end)
      j->task(j->arg, index, worker);
  }
}

static int has_tasks(const job *j) {
  for (int i = 0; i < j->n_shares; i++)
    if (atomic_load_explicit(&j->shares[i].next, memory_order_relaxed) < j->shares[i].end) return 1;
  return 0;
}

/* The open job with the fewest helpers; NULL: none can use one more. Under lock. */
static job *find(void) {
  job *best = NULL;
  for (job *j = jobs; j; j = j->link)
    if (j->n_joined + 1 < j->n_shares && (!best || j->n_joined < best->n_joined) && has_tasks(j)) best = j;
  return best;
}

static void *thread_main(void *home) { /* 1, 2, ...; callers have 0 */
  clb_float_mode();
  pthread_mutex_lock(&lock);
  for (;;) {
    job *j = find();
    if (!j) {
      unsigned seen = atomic_load_explicit(&n_posted, memory_order_relaxed);
      pthread_mutex_unlock(&lock);
      for (int i = 0; i < SPIN_ROUNDS && seen == atomic_load_explicit(&n_posted, memory_order_relaxed); i++) PAUSE();
      pthread_mutex_lock(&lock);
      while (!(j = find())) {
        n_sleeping++;
        pthread_cond_wait(&posted, &lock);
        n_sleeping--;
      }
    }
    int worker = ++j->n_joined;
    atomic_fetch_add_explicit(&j->n_working, 1, memory_order_relaxed);
    pthread_mutex_unlock(&lock);
    work(j, worker, (int)(intptr_t)home);
    pthread_mutex_lock(&lock);
    /* After this the job may be gone: it lives on its caller's stack. */
    if (atomic_fetch_sub_explicit(&j->n_working, 1, memory_order_release) == 1) pthread_cond_broadcast(&left);
  }
  return NULL;
}

/* A forked child has the caller's thread alone; the lock is held across the fork, so what it guards is whole. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_child(void) {
  pthread_mutex_init(&lock, NULL);
  pthread_cond_init(&posted, NULL);
  pthread_cond_init(&left, NULL);
  jobs = NULL, n_threads = 0, n_sleeping = 0;
}
static void watch_forks(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

void clb_pool_reserve(int wanted) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (wanted > MAX_THREADS) wanted = MAX_THREADS;
  pthread_once(&once, watch_forks);
  pthread_mutex_lock(&lock);
  if (widest < wanted) widest = wanted;
  if (n_threads < wanted - 1) {
    /* Signals are the host program's: no thread of the pool takes one, but for those that its own accesses raise. */
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    sigdelset(&all, SIGBUS), sigdelset(&all, SIGSEGV), sigdelset(&all, SIGILL), sigdelset(&all, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_t thread;
    /* A system that gives no more threads leaves the work to those there are; the answer is the same. */
    while (n_threads < wanted - 1 &&
           pthread_create(&thread, &attributes, thread_main, (void *)(intptr_t)(n_threads + 1)) == 0)
      n_threads++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
  }
  pthread_mutex_unlock(&lock);
}

/* What each member of a team does. A host may give fewer than were asked for: all shares are emptied all the same. */
static void join(void *arg) {
  static atomic_int n_members;
  static _Thread_local int home;
  job *j = arg;
  int mode = clb_float_mode(), worker = 0;
  if (!pthread_equal(j->caller, pthread_self())) {
    worker = 1 + atomic_fetch_add_explicit(&j->n_arrived, 1, memory_order_relaxed);
    if (home == 0) home = 1 + atomic_fetch_add_explicit(&n_members, 1, memory_order_relaxed);
  }
  work(j, worker, worker ? home : 0);
  clb_restore_float_mode(mode);
}

void clb_pool_run(clb_task task, void *arg, int n_tasks, int max_threads) {
  if (max_threads > n_tasks) max_threads = n_tasks;
  if (max_threads > MAX_THREADS) max_threads = MAX_THREADS;
  if (max_threads <= 1) {
    for (int i = 0; i < n_tasks; i++) task(arg, i, 0);
    return;
  }
  share shares[MAX_THREADS];
  for (int64_t i = 0; i < max_threads; i++) {
    atomic_init(&shares[i].next, (int)(n_tasks * i / max_threads));
    shares[i].end = (int)(n_tasks * (i + 1) / max_threads);
  }
  job j = {.task = task, .arg = arg, .shares = shares, .n_shares = max_threads, .caller = pthread_self()};
  if (borrowed) {
    borrowed(join, &j, (unsigned)max_threads, 0);
    return;
  }
  pthread_mutex_lock(&lock);
  if (n_threads == 0) { /* in a forked child */
    int wanted = widest > max_threads ? widest : max_threads;
    pthread_mutex_unlock(&lock);
    clb_pool_reserve(wanted);
    pthread_mutex_lock(&lock);
  }
  j.link = jobs, jobs = &j;
  atomic_fetch_add_explicit(&n_posted, 1, memory_order_relaxed);
  for (int i = 1; i < max_threads && i <= n_sleeping; i++) pthread_cond_signal(&posted);
  pthread_mutex_unlock(&lock);

  work(&j, 0, 0);

  pthread_mutex_lock(&lock);
  job **link = &jobs;
  while (*link != &j) link = &(*link)->link;
  *link = j.link;
  pthread_mutex_unlock(&lock);
  /* The last helper is inside its last task: nearly done. */
  for (int i = 0; i < SPIN_ROUNDS && atomic_load_explicit(&j.n_working, memory_order_acquire) > 0; i++) PAUSE();
  if (atomic_load_explicit(&j.n_working, memory_order_acquire) == 0) return;
  pthread_mutex_lock(&lock);
  while (atomic_load_explicit(&j.n_working, memory_order_acquire) > 0) pthread_cond_wait(&left, &lock);
  pthread_mutex_unlock(&lock);
}
