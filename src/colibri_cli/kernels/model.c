/* The two ends of a token classifier: neighbours mixed into each token's hidden state, and its class. */
#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

/* Work over tokens: one task a thread, in blocks of rows; the work of tokens is equal. */
typedef struct span {
  const clb_kernels *k;
  const void *job;
  void (*body)(struct span *s, int first, int n); /* n <= CLB_ROW_BLOCK */
  int n_tokens, tokens_per_task;
  _Atomic ptrdiff_t bad; /* the first token with a logit that is not finite, or n_tokens */
} span;

static void span_task(void *arg, int index, int worker) {
  (void)worker;
  span *s = arg;
  int first = index * s->tokens_per_task, left = s->n_tokens - first;
  if (left > s->tokens_per_task) left = s->tokens_per_task;
  for (; left > 0; first += CLB_ROW_BLOCK, left -= CLB_ROW_BLOCK)
    s->body(s, first, left < CLB_ROW_BLOCK ? left : CLB_ROW_BLOCK);
}

static void run_over_tokens(span *s, int n_threads) {
  enum { LEAST = 64 }; /* tokens worth waking a thread for */
  int n_tasks = s->n_tokens / LEAST < n_threads ? s->n_tokens / LEAST : n_threads;
  if (n_tasks < 1) n_tasks = 1;
  s->tokens_per_task = (s->n_tokens + n_tasks - 1) / n_tasks;
  clb_pool_run(span_task, s, n_tasks, n_threads);
}

static void mix(span *s, int t, int n) {
  const clb_mix_job *job = s->job;
  int hidden = job->hidden_size, n_offsets = 2 * job->context + 1;
  int full = hidden / CLB_PANEL, tail = hidden % CLB_PANEL, n_panels = full + (tail > 0);
  ptrdiff_t panel = (ptrdiff_t)hidden * CLB_PANEL, bytes = panel * (ptrdiff_t)sizeof(float);
  static const float no_bias[CLB_UNIT * CLB_PANEL];
  const float *rows[CLB_MAX_SEGMENTS * CLB_ROW_BLOCK];
  for (int o = 0; o < n_offsets; o++)
    for (int r = 0; r < n; r++) {
      int at = t + r + o - job->context;
      rows[o * CLB_ROW_BLOCK + r] =
          at < 0 || at >= job->n_tokens ? job->zeros : job->embedding + (ptrdiff_t)job->ids[at] * hidden;
    }
  clb_input a = {.rows = rows, .segment_stride = CLB_ROW_BLOCK, .n_segments = n_offsets, .k = hidden};
  float *x = job->x + (ptrdiff_t)t * hidden;
  for (int p = 0; p < full; p += CLB_UNIT) {
    clb_panels b = {.data = job->mixer + p * panel,
                    .segment_stride = n_panels * bytes,
                    .panel_stride = bytes,
                    .row_stride = CLB_PANEL * sizeof(float)};
    s->k->linear_f32(&a, n, &b, full - p < CLB_UNIT ? full - p : CLB_UNIT, no_bias, x + p * CLB_PANEL, hidden);
  }
  if (tail) {
    float edge[CLB_ROW_BLOCK * CLB_PANEL];
    clb_panels b = {.data = job->mixer + full * panel,
                    .segment_stride = n_panels * bytes,
                    .panel_stride = bytes,
                    .row_stride = CLB_PANEL * sizeof(float)};
    s->k->linear_f32(&a, n, &b, 1, no_bias, edge, CLB_PANEL);
    for (int r = 0; r < n; r++)
      memcpy(x + (ptrdiff_t)r * hidden + full * CLB_PANEL, edge + r * CLB_PANEL, (size_t)tail * sizeof(float));
  }
}

void clb_mix_context(const clb_kernels *k, const clb_mix_job *job, int n_threads) {
  span s = {.k = k, .job = job, .body = mix, .n_tokens = job->n_tokens};
  run_over_tokens(&s, n_threads);
}

static void classify(span *s, int t, int n) {
  const clb_head_job *job = s->job;
  int n_panels = (job->n_classes + CLB_PANEL - 1) / CLB_PANEL, width = n_panels * CLB_PANEL;
  const float *rows[CLB_ROW_BLOCK];
  float logits[CLB_MAX_EXPERTS]; /* a few rows at a time: one in the widest case */
  int step = CLB_MAX_EXPERTS / width;
  for (int first = 0; first < n; first += step) {
    int m = n - first < step ? n - first : step;
    for (int r = 0; r < m; r++) rows[r] = job->h + (ptrdiff_t)(t + first + r) * job->hidden_size;
    clb_input a = {.rows = rows, .n_segments = 1, .k = job->hidden_size};
    clb_panels b = {.data = job->panels,
                    .panel_stride = (ptrdiff_t)clb_panel_bytes(CLB_F32, job->hidden_size),
                    .row_stride = CLB_PANEL * sizeof(float)};
    s->k->linear_f32(&a, m, &b, n_panels, job->bias, logits, width);
    for (int r = 0; r < m; r++) {
      const float *row = logits + r * width;
      int best = 0;
      float finite = 0.0f; /* 0 x is NaN for an infinite or NaN x */
      for (int c = 0; c < job->n_classes; c++) {
        finite += 0.0f * row[c];
        if (row[c] > row[best]) best = c;
      }
      if (finite != 0.0f) {
        ptrdiff_t seen = atomic_load(&s->bad), token = t + first + r;
        while (token < seen && !atomic_compare_exchange_weak(&s->bad, &seen, token)) {
        }
      }
      job->classes[t + first + r] = best;
    }
    s->k->softmax_f32(CLB_EXACT, logits, width, job->n_classes, m,
                      job->probabilities + (ptrdiff_t)(t + first) * job->n_classes, job->n_classes);
  }
}

ptrdiff_t clb_head(const clb_kernels *k, const clb_head_job *job, int n_threads) {
  span s = {.k = k, .job = job, .body = classify, .n_tokens = job->n_tokens, .bad = job->n_tokens};
  run_over_tokens(&s, n_threads);
  ptrdiff_t bad = atomic_load(&s.bad);
  return bad < job->n_tokens ? bad : -1;
}
