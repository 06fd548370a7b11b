/* What `colibri bench` measures where the kernels run: no Python and no GIL between two clock reads. */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "kernels.h"

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Makes the call n_calls times between two clock reads, n_samples times. */
#define SAMPLE(s, call)                      \
  for (int i = 0; i < (s)->n_samples; i++) { \
    int64_t start = now();                   \
    for (int c = 0; c < (s)->n_calls; c++) { \
      call;                                  \
    }                                        \
    (s)->ns[i] = (double)(now() - start);    \
  }

void clb_time_clock(double *ns, int n_samples) {
  clb_samples s = {ns, n_samples, 0};
  SAMPLE(&s, )
}

void clb_time_route(const clb_kernels *k, const clb_route_job *batch, int n_tokens, const clb_samples *s) {
  clb_route_job job = *batch;
  job.n_tokens = n_tokens;
  int at = 0;
  SAMPLE(s, {
    clb_route_batch(k, &job, 1);
    at = at + 2 * n_tokens <= batch->n_tokens ? at + n_tokens : 0;
    job.x = batch->x + at * batch->x_stride;
    job.ids = batch->ids + at * batch->rule.top_k;
    job.weights = batch->weights + at * batch->rule.top_k;
  })
}

void clb_time_softmax(const clb_kernels *k, clb_exp_kind gating, const float *logits, int n_columns, int n_tokens,
                      float *out, const clb_samples *s) {
  SAMPLE(s, k->softmax_f32(gating, logits, n_columns, n_columns, n_tokens, out, n_columns))
}

void clb_time_dispatch(const int32_t *ids, int n_tokens, int top_k, int n_experts, int32_t *offsets, int32_t *order,
                       const clb_samples *s) {
  int at = 0;
  SAMPLE(s, {
    clb_dispatch(ids + at * top_k, top_k, n_experts, offsets, order);
    at = at + 1 < n_tokens ? at + 1 : 0;
  })
}

void clb_time_expert(const clb_kernels *k, const clb_experts_job *job, int expert, const clb_samples *s) {
  SAMPLE(s, clb_experts_add(k, job, expert, expert + 1, 1))
}

/* The metering table: the kernels of another one, and how long a thread was in those that do a matrix's work. */
static const clb_kernels *metered;
static clb_kernels metering;
static _Thread_local clb_meter meter;

static void metered_linear(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init,
                           float *c, ptrdiff_t ldc) {
  int64_t start = now();
  metered->linear_f32(a, n_rows, b, n_panels, init, c, ldc);
  meter.linear_ns += now() - start;
  meter.linear_calls++;
}

static void metered_fill(clb_dtype dtype, const char *const *outputs, int n_panels, ptrdiff_t input_stride, int first,
                         int k, const char *const *next, void *panels) {
  int64_t start = now();
  metered->fill_panels(dtype, outputs, n_panels, input_stride, first, k, next, panels);
  meter.fill_ns += now() - start;
  meter.fill_calls++;
}

static void metered_in_place(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                             ptrdiff_t ldc) {
  int64_t start = now();
  metered->linear_in_place_f32(x, n_rows, outputs, k, c, ldc);
  meter.linear_ns += now() - start;
  meter.linear_calls++;
}

static void metered_eight(const float *const *weights, int n_outputs, int k, const char *x, ptrdiff_t x_stride,
                          float *sums, ptrdiff_t lds) {
  int64_t start = now();
  metered->linear_eight(weights, n_outputs, k, x, x_stride, sums, lds);
  meter.linear_ns += now() - start;
  meter.linear_calls++;
}

const clb_kernels *clb_meter_start(const clb_kernels *k) {
  metered = k;
  metering = *k;
  metering.linear_f32 = metered_linear;
  metering.fill_panels = metered_fill;
  if (metered->linear_in_place_f32) metering.linear_in_place_f32 = metered_in_place;
  if (metered->linear_eight) metering.linear_eight = metered_eight;
  meter = (clb_meter){0};
  return &metering;
}

clb_meter clb_meter_read(void) { return meter; }

#ifdef __has_feature /* clang's way to say it */
#define SANITIZED __has_feature(address_sanitizer)
#elif defined __SANITIZE_ADDRESS__
#define SANITIZED 1
#else
#define SANITIZED 0
#endif
int clb_sanitized(void) { return SANITIZED; }

typedef struct {
  const clb_kernels *k;
  int n_rounds;
} peak_job;

static void peak_task(void *arg, int index, int worker) {
  (void)index, (void)worker;
  const peak_job *job = arg;
  float sink[CLB_PANEL] = {0.5f};
  job->k->peak_f32(job->n_rounds, sink);
}

double clb_peak_gflops(const clb_kernels *k, int n_threads) {
  enum { ROUNDS = 4000, ENOUGH_NS = 2000000 };
  float sink[CLB_PANEL] = {0.5f};
  int64_t start = now();
  int64_t flops_a_round = k->peak_f32(ROUNDS, sink);
  peak_job job = {k, (int)((int64_t)ROUNDS * ENOUGH_NS / (now() - start + 1)) + 1};
  start = now();
  clb_pool_run(peak_task, &job, n_threads, n_threads);
  return (double)(flops_a_round * job.n_rounds * n_threads) / (double)(now() - start);
}

/* Two of these are a cache line; compiled for the baseline, which is wide enough for memory. */
typedef uint64_t half_line __attribute__((vector_size(32)));

/* Reads n_streams equal parts in turn, a line each: prefetchers follow several streams further than one. */
static inline __attribute__((always_inline)) uint64_t read_streams(const char *data, size_t n_bytes, int n_streams) {
  size_t part = n_bytes / (size_t)n_streams / 64 * 64;
  half_line sum[2] = {{0}};
  for (size_t at = 0; at < part; at += 64)
#pragma GCC unroll 8
    for (int s = 0; s < n_streams; s++) {
      const half_line *line = (const half_line *)(data + (size_t)s * part + at);
      sum[0] ^= line[0], sum[1] ^= line[1];
    }
  sum[0] ^= sum[1];
  return sum[0][0] ^ sum[0][1] ^ sum[0][2] ^ sum[0][3];
}

typedef struct {
  char *memory;
  size_t part; /* bytes a task, whole pages */
  int n_streams;
  _Atomic uint64_t sum; /* keeps the reads from being optimised away */
} read_job;

static void fill_task(void *arg, int index, int worker) {
  (void)worker;
  const read_job *job = arg;
  memset(job->memory + (size_t)index * job->part, 1, job->part);
}

static void read_task(void *arg, int index, int worker) {
  (void)worker;
  read_job *job = arg;
  const char *data = job->memory + (size_t)index * job->part;
  uint64_t sum;
  switch (job->n_streams) {
    case 1: sum = read_streams(data, job->part, 1); break;
    case 2: sum = read_streams(data, job->part, 2); break;
    case 4: sum = read_streams(data, job->part, 4); break;
    default: sum = read_streams(data, job->part, 8);
  }
  atomic_fetch_xor(&job->sum, sum);
}

double clb_read_bandwidth(char *memory, size_t n_bytes, int n_threads, int n_tries) {
  enum { MOST = 15 };
  read_job job = {memory, n_bytes / (size_t)n_threads / 4096 * 4096, 1, 0};
  double best = 0, rates[MOST];
  if (n_tries > MOST) n_tries = MOST;
  clb_pool_run(fill_task, &job, n_threads, n_threads);
  for (; job.n_streams <= 8; job.n_streams *= 2) {
    for (int n = 0; n < n_tries; n++) { /* sorted as they come */
      int64_t start = now();
      clb_pool_run(read_task, &job, n_threads, n_threads);
      double rate = (double)job.part * n_threads / (double)(now() - start);
      int i = n;
      for (; i > 0 && rates[i - 1] > rate; i--) rates[i] = rates[i - 1];
      rates[i] = rate;
    }
    if (rates[n_tries / 2] > best) best = rates[n_tries / 2];
  }
  return best;
}
