/* Level 1 of the routing: logits of a block of tokens, then their experts. */
#include <stdatomic.h>

#include "kernels.h"

enum {
  LOGITS_PER_BLOCK = 4096, /* on the stack: what a block computes is chosen from while it is in L1 */
  WORK_PER_TASK = 1 << 17  /* multiply-adds worth waking a thread for */
};

typedef struct {
  const clb_kernels *k;
  const clb_route_job *job;
  int block;             /* tokens a task */
  _Atomic ptrdiff_t bad; /* the first token with a logit that is not finite, or n_tokens */
} route_state;

static void note_bad(_Atomic ptrdiff_t *bad, ptrdiff_t token) {
  ptrdiff_t seen = atomic_load(bad);
  while (token < seen && !atomic_compare_exchange_weak(bad, &seen, token)) {
  }
}

static ptrdiff_t choose(const clb_kernels *k, const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl, int n,
                        int32_t *ids, float *weights) {
  if (rule->by_score) return clb_gate_by_score(k, rule, logits, ldl, n, ids, weights);
  return k->gate_f32(rule, logits, ldl, n, ids, weights);
}

static void route_rows(route_state *s, int first, int n, float *logits, ptrdiff_t ldl) {
  const clb_route_job *job = s->job;
  const float *rows[CLB_ROW_BLOCK];
  for (int r = 0; r < n; r++) rows[r] = job->x + (first + r) * job->x_stride;
  clb_input a = {.rows = rows, .n_segments = 1, .k = job->hidden_size};
  clb_panels b = {
      .data = job->table, .panel_stride = CLB_PANEL * sizeof(float), .row_stride = job->width * sizeof(float)};
  s->k->linear_f32(&a, n, &b, job->width / CLB_PANEL, job->bias, logits, ldl);
  if (!job->ids) return;
  ptrdiff_t at = (ptrdiff_t)first * job->rule.top_k;
  ptrdiff_t bad = choose(s->k, &job->rule, logits, ldl, n, job->ids + at, job->weights + at);
  if (bad >= 0) note_bad(&s->bad, first + bad);
}

static void route_task(void *arg, int index, int worker) {
  (void)worker;
  route_state *s = arg;
  const clb_route_job *job = s->job;
  float stack[LOGITS_PER_BLOCK];
  int rows = job->logits ? CLB_ROW_BLOCK : LOGITS_PER_BLOCK / job->width;
  if (rows > CLB_ROW_BLOCK) rows = CLB_ROW_BLOCK;
  int end = (index + 1) * s->block < job->n_tokens ? (index + 1) * s->block : job->n_tokens;
  for (int t = index * s->block; t < end; t += rows) {
    float *logits = job->logits ? job->logits + (ptrdiff_t)t * job->width : stack;
    route_rows(s, t, end - t < rows ? end - t : rows, logits, job->width);
  }
}

ptrdiff_t clb_route_batch(const clb_kernels *k, const clb_route_job *job, int n_threads) {
  if (job->n_tokens == 0) return -1;
  route_state s = {.k = k, .job = job, .bad = job->n_tokens};
  int64_t work = (int64_t)job->n_tokens * job->hidden_size * job->width;
  int64_t tasks = work / WORK_PER_TASK;
  int most = (job->n_tokens + CLB_ROW_BLOCK - 1) / CLB_ROW_BLOCK;
  int n_tasks = n_threads <= 1 || tasks < 2 ? 1 : tasks < most ? (int)tasks : most < n_threads ? n_threads : most;
  s.block = (job->n_tokens + n_tasks - 1) / n_tasks;
  clb_pool_run(route_task, &s, (job->n_tokens + s.block - 1) / s.block, n_threads);
  ptrdiff_t bad = atomic_load(&s.bad);
  return bad < job->n_tokens ? bad : -1;
}

ptrdiff_t clb_choose(const clb_kernels *k, const clb_route_job *job) {
  return choose(k, &job->rule, job->logits, job->width, job->n_tokens, job->ids, job->weights);
}
