/* Expert FFNs over dispatched slots: y[t] += weight * down(activation(up(x[t]))).
 *
 * Alone, a thread takes expert after expert, so that intermediate states stay in its cache. Several threads first
 * project up, split over (expert, block of panels), and then down, split over the columns of y: no sum is ever shared
 * between threads, and each y[t][j] sees its experts in ascending order either way. */
#include <string.h>

#include "kernels.h"

enum {
  WORK_PER_TASK = 1 << 16, /* multiply-adds: about 1 us */
  ALONE = 1 << 18,         /* multiply-adds that one thread finishes before another could be of much help */
  TASKS_PER_THREAD = 8     /* enough to even out threads that are not equally fast */
};

static int blocks_of(int n, int block) { return (n + block - 1) / block; }

static int quantised(clb_dtype dtype) { return dtype == CLB_I8 || dtype == CLB_I4; }

size_t clb_up_panels(const clb_experts_shape *s) {
  return (size_t)blocks_of(s->intermediate_size, CLB_PANEL) * (s->rule.gated ? 2 : 1);
}
size_t clb_down_panels(const clb_experts_shape *s) { return (size_t)blocks_of(s->hidden_size, CLB_PANEL); }
size_t clb_input_bytes(const clb_experts_shape *s) {
  return quantised(s->dtype) ? clb_row_bytes(s->dtype, s->hidden_size) : 0;
}
size_t clb_activation_bytes(const clb_experts_shape *s) {
  return quantised(s->dtype) ? clb_row_bytes(s->dtype, s->intermediate_size)
                             : (size_t)blocks_of(s->intermediate_size, CLB_PANEL) * CLB_PANEL * sizeof(float);
}
size_t clb_unpacked_floats(const clb_experts_shape *s) {
  size_t k = (size_t)(s->hidden_size > s->intermediate_size ? s->hidden_size : s->intermediate_size);
  return s->layout == CLB_LAYOUT_ROWS ? CLB_UNIT * CLB_PANEL * k : 0;
}

static clb_linear linear_of(const clb_kernels *k, clb_dtype dtype) {
  switch (dtype) {
    case CLB_BF16: return k->linear_bf16;
    case CLB_I8: return k->linear_i8;
    case CLB_I4: return k->linear_i4;
    default: return k->linear_f32;
  }
}

/* One projection of one expert: n_outputs columns from n_inputs, as panels or as rows. In a gated expert's up
 * projection (n_halves = 2) even panels are gate, odd panels up, and the up rows follow the gate rows. */
typedef struct {
  const clb_experts_shape *shape;
  const void *weights;
  const float *bias;
  const float *bases;
  int n_outputs, n_inputs, n_halves;
} projection;

static void panels_of(const clb_kernels *k, const projection *w, int panel, int n_panels, float *unpacked,
                      clb_panels *b, float *init) {
  int rows = w->shape->layout == CLB_LAYOUT_ROWS;
  clb_dtype dtype = w->shape->dtype;
  ptrdiff_t panel_bytes = (ptrdiff_t)clb_panel_bytes(dtype, w->n_inputs);
  b->data = rows ? (const char *)unpacked : (const char *)w->weights + panel * panel_bytes;
  b->segment_stride = 0, b->panel_stride = panel_bytes;
  b->bases = w->bases ? w->bases + panel : NULL;
  b->row_stride = CLB_PANEL * (dtype == CLB_BF16 ? sizeof(uint16_t) : sizeof(float));
  for (int p = 0; p < n_panels; p++) {
    int half = (panel + p) % w->n_halves, column = (panel + p) / w->n_halves * CLB_PANEL;
    int n = w->n_outputs - column < CLB_PANEL ? w->n_outputs - column : CLB_PANEL;
    ptrdiff_t row = (ptrdiff_t)half * w->n_outputs + column;
    if (rows)
      k->transpose_f32((const float *)w->weights + row * w->n_inputs, w->n_inputs, n, w->n_inputs,
                       unpacked + (ptrdiff_t)p * w->n_inputs * CLB_PANEL);
    for (int j = 0; j < CLB_PANEL; j++) init[p * CLB_PANEL + j] = w->bias && j < n ? w->bias[row + j] : 0.0f;
  }
}

/* Panels that one pass takes: a single row streams several at once, more rows find their chains in one or two. Where
 * intermediate states are quantised a pass makes whole groups of them, from two panels or two pairs. */
static int panels_at_once(int n_rows, int in_groups) { return n_rows == 1 || in_groups ? CLB_UNIT : 2; }

static void project_up(const clb_kernels *k, const clb_experts_job *job, int expert, int panel, int end, char *h,
                       float *unpacked) {
  const clb_experts_shape *s = job->shape;
  const clb_expert *e = &job->experts[expert];
  projection w = {s, e->up, e->up_bias, e->up_bases, s->intermediate_size, s->hidden_size, s->rule.gated ? 2 : 1};
  clb_linear linear = linear_of(k, s->dtype);
  size_t input_bytes = clb_input_bytes(s), h_bytes = clb_activation_bytes(s);
  int first = job->offsets[expert], n_rows = job->offsets[expert + 1] - first;
  for (int step = panels_at_once(n_rows, input_bytes > 0); panel < end; panel += step) {
    int n_panels = end - panel < step ? end - panel : step, ldt = n_panels * CLB_PANEL;
    int column = panel / w.n_halves * CLB_PANEL, width = ldt / w.n_halves;
    if (width > s->intermediate_size - column) width = s->intermediate_size - column;
    clb_panels b;
    float init[CLB_UNIT * CLB_PANEL];
    panels_of(k, &w, panel, n_panels, unpacked, &b, init);
    for (int r = 0; r < n_rows; r += CLB_ROW_BLOCK) {
      const float *rows[CLB_ROW_BLOCK];
      float t[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
      int n = n_rows - r < CLB_ROW_BLOCK ? n_rows - r : CLB_ROW_BLOCK;
      for (int i = 0; i < n; i++) {
        ptrdiff_t token = job->order[first + r + i] / job->top_k;
        rows[i] = input_bytes ? (const float *)((const char *)job->inputs + token * input_bytes)
                              : job->x + token * job->x_stride;
      }
      clb_input a = {rows, 0, 1, s->hidden_size};
      linear(&a, n, &b, n_panels, init, t, ldt);
      if (input_bytes) {
        float states[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
        k->activate_f32(&s->rule, t, n, ldt, n_panels, states, ldt);
        for (int i = 0; i < n; i++)
          k->quantize(s->dtype, states + i * ldt, width, h + (r + i) * h_bytes + clb_row_bytes(s->dtype, column));
      } else {
        k->activate_f32(&s->rule, t, n, ldt, n_panels, (float *)(h + r * h_bytes) + column, h_bytes / sizeof(float));
      }
    }
  }
}

static void project_down(const clb_kernels *k, const clb_experts_job *job, int expert, int panel, int end,
                         const char *h, float *unpacked) {
  const clb_experts_shape *s = job->shape;
  const clb_expert *e = &job->experts[expert];
  projection w = {s, e->down, e->down_bias, e->down_bases, s->hidden_size, s->intermediate_size, 1};
  clb_linear linear = linear_of(k, s->dtype);
  size_t h_bytes = clb_activation_bytes(s);
  int first = job->offsets[expert], n_rows = job->offsets[expert + 1] - first;
  for (int step = panels_at_once(n_rows, 0); panel < end; panel += step) {
    int n_panels = end - panel < step ? end - panel : step, ldt = n_panels * CLB_PANEL, column = panel * CLB_PANEL;
    int n_columns = s->hidden_size - column < ldt ? s->hidden_size - column : ldt;
    clb_panels b;
    float init[CLB_UNIT * CLB_PANEL];
    panels_of(k, &w, panel, n_panels, unpacked, &b, init);
    for (int r = 0; r < n_rows; r += CLB_ROW_BLOCK) {
      const float *rows[CLB_ROW_BLOCK];
      float t[CLB_ROW_BLOCK * 2 * CLB_PANEL];
      int n = n_rows - r < CLB_ROW_BLOCK ? n_rows - r : CLB_ROW_BLOCK;
      for (int i = 0; i < n; i++) rows[i] = (const float *)(h + (r + i) * h_bytes);
      clb_input a = {rows, 0, 1, s->intermediate_size};
      linear(&a, n, &b, n_panels, init, t, ldt);
      for (int i = 0; i < n; i++) {
        int slot = job->order[first + r + i];
        k->accumulate_f32(job->slot_weights[slot], t + i * ldt, n_columns,
                          job->y + slot / job->top_k * job->y_stride + column);
      }
    }
  }
}

/* Where an expert's intermediate states are when several experts' are kept at once. */
static char *states_of(const clb_experts_job *job, int begin, int expert) {
  return (char *)job->activations + (job->offsets[expert] - job->offsets[begin]) * clb_activation_bytes(job->shape);
}

typedef struct {
  const clb_kernels *k;
  const clb_experts_job *job;
  int begin, end;  /* experts */
  int n_parts;     /* blocks of panels that one projection is split into */
  int16_t *active; /* [n_active]: experts with slots, for the up projection */
  int n_active;
  size_t unpacked_each; /* floats of scratch for one thread */
} split;

/* Part i of n of n_panels, in whole units so that a single row still streams CLB_UNIT panels at once. */
static int part_start(int n_panels, int i, int n) {
  int64_t units = blocks_of(n_panels, CLB_UNIT);
  int start = (int)(units * i / n) * CLB_UNIT;
  return start < n_panels ? start : n_panels;
}

static void up_task(void *arg, int index, int worker) {
  const split *s = arg;
  /* By part, then by expert: whichever experts are active, a thread meets the same parts of them. */
  int expert = s->active[index % s->n_active], part = index / s->n_active;
  int n_panels = (int)clb_up_panels(s->job->shape);
  project_up(s->k, s->job, expert, part_start(n_panels, part, s->n_parts), part_start(n_panels, part + 1, s->n_parts),
             states_of(s->job, s->begin, expert), s->job->unpacked + worker * s->unpacked_each);
}

static void down_task(void *arg, int index, int worker) {
  const split *s = arg;
  int n_panels = (int)clb_down_panels(s->job->shape);
  for (int e = s->begin; e < s->end; e++)
    if (s->job->offsets[e + 1] > s->job->offsets[e])
      project_down(s->k, s->job, e, part_start(n_panels, index, s->n_parts),
                   part_start(n_panels, index + 1, s->n_parts), states_of(s->job, s->begin, e),
                   s->job->unpacked + worker * s->unpacked_each);
}

static int parts_for(int64_t work, int n_panels, int n_groups, int n_threads) {
  int64_t parts = work / WORK_PER_TASK / n_groups;
  int enough = blocks_of(TASKS_PER_THREAD * n_threads, n_groups);
  if (parts > enough) parts = enough;
  if (parts > blocks_of(n_panels, CLB_UNIT)) parts = blocks_of(n_panels, CLB_UNIT);
  return parts < 1 ? 1 : (int)parts;
}

static void begin_task(void *arg, int index, int worker) {
  (void)worker;
  const split *s = arg;
  const clb_experts_job *job = s->job;
  int hidden = job->shape->hidden_size, first = (int)((int64_t)job->n_tokens * index / s->n_parts);
  int end = (int)((int64_t)job->n_tokens * (index + 1) / s->n_parts);
  for (ptrdiff_t t = first; t < end; t++)
    s->k->quantize(job->shape->dtype, job->x + t * job->x_stride, hidden,
                   (char *)job->inputs + t * clb_input_bytes(job->shape));
}

void clb_experts_begin(const clb_kernels *k, const clb_experts_job *job, int n_threads) {
  enum { VALUES_PER_TASK = 1 << 16 };
  if (!quantised(job->shape->dtype)) return;
  int64_t parts = (int64_t)job->n_tokens * job->shape->hidden_size / VALUES_PER_TASK;
  split s = {.k = k, .job = job, .n_parts = parts < 1 ? 1 : parts < n_threads ? (int)parts : n_threads};
  clb_pool_run(begin_task, &s, s.n_parts, n_threads);
}

void clb_experts_run(const clb_kernels *k, const clb_experts_job *job, int begin, int end, int n_threads) {
  const clb_experts_shape *shape = job->shape;
  int n_up = (int)clb_up_panels(shape), n_down = (int)clb_down_panels(shape);
  int n_slots = job->offsets[end] - job->offsets[begin];
  int64_t up_work = (int64_t)n_slots * n_up * CLB_PANEL * shape->hidden_size;
  int64_t down_work = (int64_t)n_slots * n_down * CLB_PANEL * shape->intermediate_size;
  if (n_threads <= 1 || up_work + down_work < ALONE) {
    for (int e = begin; e < end; e++)
      if (job->offsets[e + 1] > job->offsets[e]) {
        project_up(k, job, e, 0, n_up, job->activations, job->unpacked);
        project_down(k, job, e, 0, n_down, job->activations, job->unpacked);
      }
    return;
  }
  int16_t active[CLB_MAX_EXPERTS];
  int n_active = 0;
  for (int e = begin; e < end; e++)
    if (job->offsets[e + 1] > job->offsets[e]) active[n_active++] = (int16_t)e;
  split s = {
      k, job, begin, end, parts_for(up_work, n_up, n_active, n_threads), active, n_active, clb_unpacked_floats(shape)};
  clb_pool_run(up_task, &s, n_active * s.n_parts, n_threads);
  s.n_parts = parts_for(down_work, n_down, 1, n_threads);
  clb_pool_run(down_task, &s, s.n_parts, n_threads);
}
