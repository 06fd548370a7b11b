/* Expert FFNs over dispatched slots: y[t] += weight * down(activation(up(x[t]))).
 *
 * Alone, a thread takes expert after expert, so that intermediate states stay in its cache. Several threads first
 * project up, split over (expert, block of panels), and then down, split over the columns of y, for as many experts at
 * a time as have CLB_STATES slots: no sum is ever shared between threads, and each y[t][j] sees its experts in
 * ascending order either way. */
#include <stdatomic.h>
#include <string.h>

#include "projection.h"

enum {
  WORK_PER_TASK = 1 << 16, /* multiply-adds: about 1 us */
  ALONE = 1 << 18,         /* multiply-adds that one thread finishes before another could be of much help */
  TASKS_PER_THREAD = 16    /* enough to even out threads that are not equally fast */
};

static int pairs_up(const clb_kernels *k, const clb_experts_shape *s) { return s->narrow_states && k->pair_up; }

size_t clb_up_panels(const clb_experts_shape *s) {
  return (size_t)clb_blocks_of(s->intermediate_size, CLB_PANEL) * (s->rule.gated ? 2 : 1);
}
size_t clb_down_panels(const clb_experts_shape *s) { return (size_t)clb_blocks_of(s->hidden_size, CLB_PANEL); }
size_t clb_input_bytes(const clb_experts_shape *s) {
  if (s->narrow_states) return clb_pairs_bytes(s->hidden_size);
  return clb_quantised(s->dtype) ? clb_row_bytes(s->dtype, s->hidden_size) : 0;
}
/* Whole panels of floats. */
static size_t state_floats(const clb_experts_shape *s) {
  return (size_t)clb_blocks_of(s->intermediate_size, CLB_PANEL) * CLB_PANEL;
}
/* Quantised states take their floats' place, which the least of them outgrow: a chunk and its scale. */
static size_t state_bytes(const clb_experts_shape *s) {
  size_t quantised = clb_quantised(s->dtype) ? clb_row_bytes(s->dtype, s->intermediate_size) : 0;
  size_t bytes = state_floats(s) * sizeof(float);
  return bytes > quantised ? bytes : quantised;
}
/* Narrow states are held in pairs as well, behind all of the floats. */
static size_t pairs_bytes(const clb_experts_shape *s) {
  return s->narrow_states ? state_floats(s) * sizeof(uint16_t) : 0;
}
static size_t slots_held(size_t n_slots) { return n_slots < CLB_STATES ? n_slots : CLB_STATES; }
size_t clb_states_bytes(const clb_experts_shape *s, size_t n_slots) {
  return slots_held(n_slots) * (state_bytes(s) + pairs_bytes(s));
}

/* Where the states of some slots are. */
typedef struct {
  char *floats, *pairs;
} states;

static states states_at(const clb_experts_job *job, int slot) {
  const clb_experts_shape *s = job->shape;
  char *pairs = (char *)job->activations + slots_held((size_t)job->n_tokens * job->top_k) * state_bytes(s);
  return (states){(char *)job->activations + slot * state_bytes(s), pairs + slot * pairs_bytes(s)};
}

size_t clb_lay_out(const clb_experts_shape *s, int biased, const char *payload, clb_expert_pointers *e) {
  size_t n_up = clb_up_panels(s), n_down = clb_down_panels(s), inter = (size_t)s->intermediate_size;
  size_t down = n_up * clb_panel_bytes(s->dtype, s->hidden_size);
  size_t bases = down + n_down * clb_panel_bytes(s->dtype, s->intermediate_size);
  size_t up_bias = bases + (s->dtype == CLB_I4 ? (n_up + n_down) * sizeof(float) : 0);
  size_t down_bias = up_bias + (inter << s->rule.gated) * sizeof(float);
  if (payload) {
    memset(e, 0, sizeof *e);
    e->up = payload, e->down = payload + down;
    e->up_bases = (const float *)(payload + bases), e->down_bases = e->up_bases + n_up;
    e->up_place.bias = e->down_place.bias = sizeof(float);
    e->up_place.up_bias = (ptrdiff_t)(inter * sizeof(float));
    if (biased) e->up_bias = payload + up_bias, e->down_bias = payload + down_bias;
  }
  return biased ? down_bias + (size_t)s->hidden_size * sizeof(float) : up_bias;
}

/* Slots whose states are held at once, in the order of experts. */
typedef struct {
  int first, end;
} window;

static window slots_of(const clb_experts_job *job, int expert, window in) {
  int first = job->offsets[expert], end = job->offsets[expert + 1];
  return (window){first > in.first ? first : in.first, end < in.end ? end : in.end};
}

static clb_projection up_of(const clb_experts_job *job, int expert) {
  const clb_experts_shape *s = job->shape;
  const clb_expert_pointers *e = &job->experts[expert];
  return (clb_projection){.dtype = s->dtype,
                          .weights = e->up,
                          .bias = e->up_bias,
                          .place = &e->up_place,
                          .bases = e->up_bases,
                          .n_outputs = s->intermediate_size,
                          .n_inputs = s->hidden_size,
                          .n_halves = s->rule.gated ? 2 : 1,
                          .in_blocks = s->narrow_states,
                          .then = e->down};
}

static clb_projection down_of(const clb_experts_job *job, int expert, const char *then) {
  const clb_experts_shape *s = job->shape;
  const clb_expert_pointers *e = &job->experts[expert];
  return (clb_projection){.dtype = s->dtype,
                          .weights = e->down,
                          .bias = e->down_bias,
                          .place = &e->down_place,
                          .bases = e->down_bases,
                          .n_outputs = s->hidden_size,
                          .n_inputs = s->intermediate_size,
                          .n_halves = 1,
                          .in_blocks = s->narrow_states,
                          .then = then};
}

static int fewer(int n, int most) { return n < most ? n : most; }

/* n rows of inputs from a slot on. */
static void take_inputs(const clb_kernels *k, const clb_experts_job *job, int slot, int n, clb_row_block *rows) {
  const clb_experts_shape *s = job->shape;
  size_t input_bytes = clb_input_bytes(s);
  rows->n = n, rows->paired = pairs_up(k, s) && n > 1, rows->lanes = NULL;
  for (int i = 0; i < n; i++) {
    ptrdiff_t token = job->order[slot + i] / job->top_k;
    const char *input = (const char *)job->inputs + token * input_bytes;
    rows->x[i] = clb_quantised(s->dtype) ? (const float *)input : job->x + token * job->x_stride;
    rows->pairs[i] = input;
    rows->paired = rows->paired && clb_paired(input, s->hidden_size);
  }
}

/* n rows of states from the r-th of h on, as project_up leaves them. */
static void take_states(const clb_kernels *k, const clb_experts_job *job, states h, int r, int n, clb_row_block *rows) {
  const clb_experts_shape *s = job->shape;
  rows->n = n, rows->paired = pairs_up(k, s) && n > 1, rows->lanes = NULL;
  for (int i = 0; i < n; i++) {
    rows->x[i] = (const float *)(h.floats + (r + i) * state_bytes(s));
    rows->pairs[i] = h.pairs + (r + i) * pairs_bytes(s);
  }
}

/* Panels `panel` to `end` - 1 over all rows; where those may go in `lanes`, over a block of them after the other. */
static void project_up(const clb_kernels *k, const clb_experts_job *job, int expert, window slots, int panel, int end,
                       states h, char *lanes) {
  const clb_experts_shape *s = job->shape;
  clb_projection w = up_of(job, expert);
  size_t h_bytes = state_bytes(s);
  int in_lanes = lanes && clb_lanes_may(k, &w);
  for (int n_rows, at = 0; slots.first < slots.end; slots.first += n_rows, at += n_rows) {
    clb_block b;
    clb_row_block rows;
    n_rows = fewer(slots.end - slots.first, in_lanes ? CLB_ROW_BLOCK : slots.end);
    for (int done = 0; panel + done < end; done += b.n_runs * b.n) {
      b = clb_block_after(k, &w, n_rows, panel, end, done);
      int ldt = b.n_runs * b.n * CLB_PANEL;
      for (int r = 0; r < n_rows; r += CLB_ROW_BLOCK) {
        float t[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
        if (!in_lanes || done == 0) take_inputs(k, job, slots.first + r, fewer(n_rows - r, CLB_ROW_BLOCK), &rows);
        if (in_lanes && done == 0 && clb_lanes_suit(k, &w, &rows))
          clb_lanes_fill(k, &w, &rows, lanes), rows.lanes = lanes;
        clb_project(k, &w, &b, &rows, t, ldt);
        for (int run = 0; run < b.n_runs; run++) {
          const float *of_run = t + run * b.n * CLB_PANEL;
          int column = clb_column_of(&w, b.first + run * b.apart), width = b.n * CLB_PANEL / w.n_halves;
          float *row = (float *)(h.floats + (at + r) * h_bytes) + column;
          k->activate_f32(&s->rule, of_run, rows.n, ldt, b.n, row, h_bytes / sizeof(float));
          if (s->narrow_states)
            k->narrow_f32(row, rows.n, h_bytes / sizeof(float), width,
                          h.pairs + (at + r) * pairs_bytes(s) + column * sizeof(uint16_t), (ptrdiff_t)pairs_bytes(s));
        }
      }
    }
  }
}

/* A block of states in lanes takes the place of its floats, or of its pairs. */
static char *lanes_at(const clb_experts_shape *s, states h, int r) {
  return s->dtype == CLB_BF16 ? h.pairs + r * pairs_bytes(s) : h.floats + r * state_bytes(s);
}

/* What is left to do for an expert's states when all its columns are there. */
static void finish_states(const clb_kernels *k, const clb_experts_job *job, int expert, window slots, states h,
                          char *lanes) {
  const clb_experts_shape *s = job->shape;
  clb_projection w = down_of(job, expert, NULL);
  int n = slots.end - slots.first;
  for (int i = 0; clb_quantised(s->dtype) && i < n; i++) {
    char *row = h.floats + i * state_bytes(s);
    k->quantize(s->dtype, (const float *)row, s->intermediate_size, row);
  }
  if (!lanes || !clb_lanes_may(k, &w)) return;
  for (int r = 0; r < n; r += CLB_ROW_BLOCK) {
    clb_row_block rows;
    take_states(k, job, h, r, fewer(n - r, CLB_ROW_BLOCK), &rows);
    if (clb_lanes_suit(k, &w, &rows)) memcpy(lanes_at(s, h, r), lanes, clb_lanes_fill(k, &w, &rows, lanes));
  }
}

static void project_down(const clb_kernels *k, const clb_experts_job *job, int expert, window slots, int panel, int end,
                         states h, const char *then) {
  const clb_experts_shape *s = job->shape;
  clb_projection w = down_of(job, expert, then);
  int first = slots.first, n_rows = slots.end - first;
  clb_block b;
  for (int done = 0; panel + done < end; done += b.n_runs * b.n) {
    b = clb_block_after(k, &w, n_rows, panel, end, done);
    int ldt = b.n_runs * b.n * CLB_PANEL;
    for (int r = 0; r < n_rows; r += CLB_ROW_BLOCK) {
      float t[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
      clb_row_block rows;
      take_states(k, job, h, r, fewer(n_rows - r, CLB_ROW_BLOCK), &rows);
      if (job->lanes && clb_lanes_suit(k, &w, &rows)) rows.lanes = lanes_at(s, h, r), rows.paired = 0;
      clb_project(k, &w, &b, &rows, t, ldt);
      for (int i = 0; i < rows.n; i++) {
        int slot = job->order[first + r + i];
        for (int run = 0; run < b.n_runs; run++) {
          int column = (b.first + run * b.apart) * CLB_PANEL, width = b.n * CLB_PANEL;
          k->accumulate_f32(job->slot_weights[slot], t + i * ldt + run * width,
                            width < s->hidden_size - column ? width : s->hidden_size - column,
                            job->y + slot / job->top_k * job->y_stride + column);
        }
      }
    }
  }
}

static char *lanes_of(const clb_experts_job *job, int worker) {
  return job->lanes ? job->lanes + worker * clb_lanes_bytes(job->shape) : NULL;
}

typedef struct {
  const clb_kernels *k;
  const clb_experts_job *job;
  int begin, end; /* experts */
  window slots;
  int n_parts;     /* blocks of panels that one projection is split into */
  int16_t *active; /* [n_active]: experts with slots, for the up projection */
  int n_active;
  _Atomic int *parts_left; /* [n_active] of the up projection: whoever does the last one finishes the states */
} split;

/* Part i of n of n_panels, in whole units so that a single row still streams CLB_UNIT panels at once. */
static int part_start(int n_panels, int i, int n) {
  int64_t units = clb_blocks_of(n_panels, CLB_UNIT);
  int start = (int)(units * i / n) * CLB_UNIT;
  return start < n_panels ? start : n_panels;
}

static void up_task(void *arg, int index, int worker) {
  const split *s = arg;
  /* By part, then by expert: whichever experts are active, a thread meets the same parts of them. */
  int place = index % s->n_active, expert = s->active[place], part = index / s->n_active;
  int n_panels = (int)clb_up_panels(s->job->shape);
  window slots = slots_of(s->job, expert, s->slots);
  states h = states_at(s->job, slots.first - s->slots.first);
  char *lanes = lanes_of(s->job, worker);
  project_up(s->k, s->job, expert, slots, part_start(n_panels, part, s->n_parts),
             part_start(n_panels, part + 1, s->n_parts), h, lanes);
  if (atomic_fetch_sub(&s->parts_left[place], 1) == 1) finish_states(s->k, s->job, expert, slots, h, lanes);
}

static void down_task(void *arg, int index, int worker) {
  (void)worker;
  const split *s = arg;
  int n_panels = (int)clb_down_panels(s->job->shape);
  for (int e = s->begin; e < s->end; e++) {
    window slots = slots_of(s->job, e, s->slots);
    if (slots.end > slots.first)
      project_down(s->k, s->job, e, slots, part_start(n_panels, index, s->n_parts),
                   part_start(n_panels, index + 1, s->n_parts), states_at(s->job, slots.first - s->slots.first),
                   s->job->experts[e].up);
  }
}

static int parts_for(int64_t work, int n_panels, int n_groups, int n_threads) {
  int64_t parts = work / WORK_PER_TASK / n_groups;
  int enough = clb_blocks_of(TASKS_PER_THREAD * n_threads, n_groups);
  if (parts > enough) parts = enough;
  if (parts > clb_blocks_of(n_panels, CLB_UNIT)) parts = clb_blocks_of(n_panels, CLB_UNIT);
  return parts < 1 ? 1 : (int)parts;
}

static void begin_task(void *arg, int index, int worker) {
  (void)worker;
  const split *s = arg;
  const clb_experts_job *job = s->job;
  int hidden = job->shape->hidden_size, first = (int)((int64_t)job->n_tokens * index / s->n_parts);
  int end = (int)((int64_t)job->n_tokens * (index + 1) / s->n_parts);
  for (ptrdiff_t t = first; t < end; t++) {
    const float *x = job->x + t * job->x_stride;
    char *input = (char *)job->inputs + t * clb_input_bytes(job->shape);
    if (clb_quantised(job->shape->dtype)) s->k->quantize(job->shape->dtype, x, hidden, input);
    else s->k->pair_up(x, hidden, input);
  }
}

void clb_experts_begin(const clb_kernels *k, const clb_experts_job *job, int n_threads) {
  enum { VALUES_PER_TASK = 1 << 16 };
  if (!clb_quantised(job->shape->dtype) && !pairs_up(k, job->shape)) return;
  int64_t parts = (int64_t)job->n_tokens * job->shape->hidden_size / VALUES_PER_TASK;
  split s = {.k = k, .job = job, .n_parts = parts < 1 ? 1 : parts < n_threads ? (int)parts : n_threads};
  clb_pool_run(begin_task, &s, s.n_parts, n_threads);
}

static void add_alone(const clb_kernels *k, const clb_experts_job *job, int expert, int then, window slots) {
  states h = states_at(job, 0);
  project_up(k, job, expert, slots, 0, (int)clb_up_panels(job->shape), h, job->lanes);
  finish_states(k, job, expert, slots, h, job->lanes);
  project_down(k, job, expert, slots, 0, (int)clb_down_panels(job->shape), h, job->experts[then].up);
}

static int64_t work_of(const clb_experts_shape *s, int64_t n_slots, int up) {
  return n_slots * CLB_PANEL *
         (up ? (int64_t)clb_up_panels(s) * s->hidden_size : (int64_t)clb_down_panels(s) * s->intermediate_size);
}

static void add_together(const clb_kernels *k, const clb_experts_job *job, int begin, int end, window slots,
                         int n_threads) {
  const clb_experts_shape *shape = job->shape;
  int n_up = (int)clb_up_panels(shape), n_down = (int)clb_down_panels(shape), n_slots = slots.end - slots.first;
  int16_t active[CLB_MAX_EXPERTS];
  _Atomic int parts_left[CLB_MAX_EXPERTS];
  int n_active = 0;
  for (int e = begin; e < end; e++)
    if (job->offsets[e + 1] > job->offsets[e]) active[n_active++] = (int16_t)e;
  int n_parts = parts_for(work_of(shape, n_slots, 1), n_up, n_active, n_threads);
  split s = {k, job, begin, end, slots, n_parts, active, n_active, parts_left};
  for (int i = 0; i < n_active; i++) atomic_init(&parts_left[i], n_parts);
  clb_pool_run(up_task, &s, n_active * n_parts, n_threads);
  s.n_parts = parts_for(work_of(shape, n_slots, 0), n_down, 1, n_threads);
  clb_pool_run(down_task, &s, s.n_parts, n_threads);
}

void clb_experts_add(const clb_kernels *k, const clb_experts_job *job, int begin, int end, int n_threads) {
  const int32_t *offsets = job->offsets;
  int last = offsets[end], n_slots = last - offsets[begin];
  int alone = n_threads <= 1 || work_of(job->shape, n_slots, 0) + work_of(job->shape, n_slots, 1) < ALONE;
  for (window slots = {offsets[begin], offsets[begin]}; slots.first < last; slots.first = slots.end) {
    while (offsets[begin + 1] <= slots.first) begin++;
    int most = slots.first + CLB_STATES, stop = begin + 1, then = stop;
    while (!alone && stop < end && offsets[stop + 1] <= most) stop++;
    slots.end = offsets[stop] < most ? offsets[stop] : most;
    while (then < end && offsets[then + 1] == offsets[then]) then++;
    if (alone) add_alone(k, job, begin, then < end ? then : begin, slots);
    else add_together(k, job, begin, stop, slots, n_threads);
  }
}
