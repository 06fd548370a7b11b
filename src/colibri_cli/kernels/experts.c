/* Expert FFNs over dispatched slots: y[t] += weight * down(activation(up(x[t]))).
 *
 * Alone, a thread takes expert after expert, so that intermediate states stay in its cache. Several threads first
 * project up, split over (expert, block of panels), and then down, split over the columns of y: no sum is ever shared
 * between threads, and each y[t][j] sees its experts in ascending order either way. */
#include <string.h>

#include "half.h"
#include "kernels.h"

enum {
  WORK_PER_TASK = 1 << 16, /* multiply-adds: about 1 us */
  ALONE = 1 << 18,         /* multiply-adds that one thread finishes before another could be of much help */
  TASKS_PER_THREAD = 8     /* enough to even out threads that are not equally fast */
};

enum { FEW = 4, MANY = 32 }; /* rows: fewer, or more, share a weight in place */

static int blocks_of(int n, int block) { return (n + block - 1) / block; }

static int quantised(clb_dtype dtype) { return dtype == CLB_I8 || dtype == CLB_I4; }
static int pairs_up(const clb_kernels *k, clb_dtype dtype) { return dtype == CLB_BF16 && k->linear_pairs; }

size_t clb_up_panels(const clb_experts_shape *s) {
  return (size_t)blocks_of(s->intermediate_size, CLB_PANEL) * (s->rule.gated ? 2 : 1);
}
size_t clb_down_panels(const clb_experts_shape *s) { return (size_t)blocks_of(s->hidden_size, CLB_PANEL); }
size_t clb_input_bytes(const clb_experts_shape *s) {
  if (s->dtype == CLB_BF16) return clb_pairs_bytes(s->hidden_size);
  return quantised(s->dtype) ? clb_row_bytes(s->dtype, s->hidden_size) : 0;
}
/* Floats, whole panels of them; behind those, where they are narrow, pairs. */
static size_t state_floats(const clb_experts_shape *s) {
  return (size_t)blocks_of(s->intermediate_size, CLB_PANEL) * CLB_PANEL;
}
size_t clb_activation_bytes(const clb_experts_shape *s) {
  if (quantised(s->dtype)) return clb_row_bytes(s->dtype, s->intermediate_size);
  return state_floats(s) * (s->narrow_states ? sizeof(float) + sizeof(uint16_t) : sizeof(float));
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

static clb_linear linear_of(const clb_kernels *k, clb_dtype dtype) {
  switch (dtype) {
    case CLB_BF16: return k->linear_bf16;
    case CLB_I8: return k->linear_i8;
    case CLB_I4: return k->linear_i4;
    default: return k->linear_f32;
  }
}

/* The activations of a block of rows: as the weights take them, and where bfloat16 holds them, in pairs as well. */
typedef struct {
  const float *x[CLB_ROW_BLOCK];
  const char *pairs[CLB_ROW_BLOCK];
  int n, paired;
} row_block;

/* c[r][...] = n_panels of b over the rows' inputs first..first + n - 1; first is even. linear_pairs goes as far as it
 * may; FMAs do what is left, and a last odd input. */
static void linear_rows(const clb_kernels *k, clb_dtype dtype, const row_block *rows, int first, int n, clb_panels b,
                        int n_panels, const float *init, float *c, ptrdiff_t ldc) {
  const float *x[CLB_ROW_BLOCK];
  clb_input a = {x, 0, 1, n & ~1};
  int done = 0;
  if (rows->paired && n > 1) {
    for (int r = 0; r < rows->n; r++) x[r] = (const float *)(rows->pairs[r] + first * sizeof(uint16_t));
    done = k->linear_pairs(&a, rows->n, &b, n_panels, init, c, ldc);
  }
  for (int r = 0; r < rows->n; r++) x[r] = rows->x[r] + first;
  if (n % 2 && done) {
    clb_panels last = b;
    last.data = (const char *)b.data + (n - 1) * b.row_stride;
    for (int r = 0; r < rows->n; r++) x[r] += n - 1;
    a.k = 1;
    k->linear_bf16(&a, rows->n, &last, done, NULL, c, ldc);
    for (int r = 0; r < rows->n; r++) x[r] -= n - 1;
  }
  if (done == n_panels) return;
  a.k = n;
  b.data = (const char *)b.data + done * b.panel_stride;
  if (b.bases) b.bases += done;
  linear_of(k, dtype)(&a, rows->n, &b, n_panels - done, init ? init + done * CLB_PANEL : NULL, c + done * CLB_PANEL,
                      ldc);
}

/* One projection of one expert: n_outputs columns from n_inputs. */
typedef struct {
  clb_dtype dtype;
  const char *weights, *bias;
  const clb_place *place;
  const float *bases;
  int n_outputs, n_inputs, n_halves;
  const char *then; /* what is read after this projection */
} projection;

static int narrow(clb_dtype dtype) { return dtype == CLB_BF16 || dtype == CLB_F16; }
static int weight_bytes(const projection *w) { return narrow(w->dtype) ? sizeof(uint16_t) : sizeof(float); }

/* Whether an input's outputs are side by side: a long row, of which all panels take their part before the next rows. */
static int in_columns(const projection *w) { return w->place->in_place && w->place->input != weight_bytes(w); }

/* In a gated expert's up projection, n_halves = 2, even panels are gate and odd panels up. */
static int half_of(const projection *w, int panel) { return panel & (w->n_halves - 1); }
static int column_of(const projection *w, int panel) { return (panel >> (w->n_halves - 1)) * CLB_PANEL; }

/* The start of n_panels' chains: biases, 0 beyond the last or where there are none. */
static void start_of(const projection *w, int panel, int n_panels, float init[CLB_UNIT * CLB_PANEL]) {
  const clb_place *at = w->place;
  for (int p = 0; p < n_panels; p++, init += CLB_PANEL) {
    memset(init, 0, CLB_PANEL * sizeof(float));
    if (!w->bias) continue;
    int column = column_of(w, panel + p), n = w->n_outputs - column;
    const char *bias = w->bias + half_of(w, panel + p) * at->up_bias + column * at->bias;
    if (n >= CLB_PANEL && at->bias == sizeof(float) && at->biases == CLB_F32) {
      memcpy(init, bias, CLB_PANEL * sizeof(float));
      continue;
    }
    for (int j = 0; j < CLB_PANEL && j < n; j++, bias += at->bias)
      if (at->biases == CLB_BF16) memcpy((char *)&init[j] + sizeof(uint16_t), bias, sizeof(uint16_t));
      else if (at->biases == CLB_F16) init[j] = widened(bias);
      else memcpy(&init[j], bias, sizeof(float));
  }
}

/* Where the weights of a panel's first output are in place; beyond the last panel, those of the last output. */
static const char *panel_at(const projection *w, int panel) {
  int column = column_of(w, panel), last = w->n_outputs - 1;
  return w->weights + half_of(w, panel) * w->place->up + (column < last ? column : last) * w->place->output;
}

/* Goes on with c by inputs begin..end - 1 of weights in place, through a block of panels that stays in the L1 cache.
 * Rows are read a cache line at a time where few x share them: more at once from so many rows sets off prefetchers that
 * are wrong. The panels after these are asked for meanwhile, in the order of memory. */
static __attribute__((noinline)) void add_in_place(const clb_kernels *k, const projection *w, int panel, int n_panels,
                                                   const row_block *rows, int begin, int end, float *c, ptrdiff_t ldc,
                                                   const float *init) {
  enum { CACHE_LINE = 64, MOST_LINES = 32 };
  _Alignas(CACHE_LINE) char block[CLB_PANEL * MOST_LINES * CACHE_LINE];
  const char *outputs[CLB_UNIT * CLB_PANEL], *next[CLB_UNIT];
  const clb_place *at = w->place;
  int widens = w->dtype == CLB_F16, size = weight_bytes(w), row_bytes = CLB_PANEL * size << widens;
  ptrdiff_t panel_bytes = (ptrdiff_t)CLB_PANEL * size * w->n_inputs;
  int last = column_of(w, panel + n_panels) >= w->n_outputs;
  int small = n_panels * (ptrdiff_t)row_bytes * w->n_inputs <= (ptrdiff_t)sizeof block;
  for (int p = 0; p < n_panels; p++) {
    const char *from = panel_at(w, panel + p);
    int n = w->n_outputs - column_of(w, panel + p);
#pragma GCC unroll 1
    for (int j = 0; j < CLB_PANEL; j++) outputs[p * CLB_PANEL + j] = from + (j < n ? j : n - 1) * at->output;
    next[p] = last ? w->then : panel_at(w, panel + n_panels + p);
    if (last || at->output == 2 * at->up) next[p] = next[0] + p * panel_bytes; /* all of it in a row */
  }
  int most = (rows->n < FEW ? 1 : (rows->n < MANY ? 8 : MOST_LINES >> widens) / n_panels) * CACHE_LINE / size;
  int n = (int)(-(uintptr_t)outputs[0] % CACHE_LINE) / 4 * 4 / size; /* the first block ends where a line does */
  if (small) most = w->n_inputs;
  if (n == 0 || small || in_columns(w)) n = most;
  for (int i = begin; i < end; i += n, n = most, init = NULL) {
    if (n > end - i) n = end - i;
    clb_panels b = {block, 0, n * row_bytes, row_bytes, NULL, 0};
    char *filled = block + (widens ? n_panels * n * row_bytes / 2 : 0);
    k->fill_panels(w->dtype, outputs, n_panels, at->input, i, n, next, filled);
    if (widens) k->widen_f16((const uint16_t *)filled, n_panels * n, (float *)block);
    linear_rows(k, w->dtype, rows, i, n, b, n_panels, init, c, ldc);
  }
}

/* Panels that are made together: n_runs runs of n neighbours, `apart` panels from one run's first to the next's. */
typedef struct {
  int first, n_runs, n, apart;
} block;

static int panels_of(const block *b) { return b->n_runs * b->n; }

/* Runs that are read side by side. Few rows wait for memory, whose prefetcher follows a few long runs, each taken from
 * start to end, better than ever new short ones (docs/decisions/0009). */
enum { MOST_IN_RUNS = 6 };
static int runs_for(const projection *w, int n_rows) {
  int most = quantised(w->dtype) || w->place->in_place ? 0 : w->dtype == CLB_BF16 ? MOST_IN_RUNS : 4;
  return n_rows > most ? 1 : n_rows == 1 ? CLB_UNIT : 2;
}

/* Panels that one run takes at once: a single row streams several, more rows find their chains in one or two. Where
 * intermediate states are quantised this makes whole groups of them, from two panels or two pairs. */
static int panels_at_once(const projection *w, int n_rows) {
  if (in_columns(w)) return n_rows < CLB_ROW_BLOCK ? CLB_ROW_BLOCK / n_rows * CLB_UNIT : CLB_UNIT;
  return n_rows == 1 || quantised(w->dtype) ? CLB_UNIT : 2;
}

/* What comes when `done` of the panels from first to end - 1 have been made; what does not fill the runs is last. */
static block block_after(const projection *w, int n_rows, int first, int end, int done) {
  int n_runs = runs_for(w, n_rows), length = (end - first) / (n_runs * w->n_halves) * w->n_halves;
  if (n_runs > 1 && done < n_runs * length) return (block){first + done / n_runs, n_runs, w->n_halves, length};
  int left = end - first - done, most = panels_at_once(w, n_rows);
  return (block){first + done, 1, left < most ? left : most, 0};
}

/* c[r][...] = n_panels of the projection in memory of ours, from the first, so many apart. */
static void project_packed(const clb_kernels *k, const projection *w, int first, int n_panels, int apart,
                           const row_block *rows, float *c, ptrdiff_t ldc) {
  float init[CLB_UNIT * CLB_PANEL];
  ptrdiff_t bytes = (ptrdiff_t)clb_panel_bytes(w->dtype, w->n_inputs);
  clb_panels b = {w->weights + first * bytes,         0, apart * bytes, CLB_PANEL * weight_bytes(w),
                  w->bases ? w->bases + first : NULL, 1};
  for (int p = 0; p < n_panels; p++) start_of(w, first + p * apart, 1, init + p * CLB_PANEL);
  linear_rows(k, w->dtype, rows, 0, w->n_inputs, b, n_panels, init, c, ldc);
}

/* c[r][...] = the projection's n_panels from panel, in the caller's memory. */
static void project_in_place(const clb_kernels *k, const projection *w, int panel, int n_panels, const row_block *rows,
                             float *c, ptrdiff_t ldc) {
  float init[CLB_UNIT * CLB_PANEL];
  int n = !in_columns(w) ? w->n_inputs : rows->n < FEW ? 16 : 256, group = in_columns(w) ? CLB_UNIT : n_panels;
  for (int i = 0; i < w->n_inputs; i += n)
    for (int p = 0; p < n_panels; p += group) {
      int n_now = n_panels - p < group ? n_panels - p : group, end = w->n_inputs - i < n ? w->n_inputs : i + n;
      if (i == 0) start_of(w, panel + p, n_now, init);
      add_in_place(k, w, panel + p, n_now, rows, i, end, c + p * CLB_PANEL, ldc, i ? NULL : init);
    }
}

/* c[r][...] = a block's panels, run after run. */
static void project(const clb_kernels *k, const projection *w, const block *b, const row_block *rows, float *c,
                    ptrdiff_t ldc) {
  if (w->place->in_place) {
    project_in_place(k, w, b->first, b->n, rows, c, ldc);
  } else if (b->n_runs == 1) {
    project_packed(k, w, b->first, b->n, 1, rows, c, ldc);
  } else { /* a panel of each run at a time */
    float pass[MOST_IN_RUNS * CLB_UNIT * CLB_PANEL];
    int ld = b->n_runs * CLB_PANEL;
    for (int i = 0; i < b->n; i++) {
      project_packed(k, w, b->first + i, b->n_runs, b->apart, rows, pass, ld);
      for (int r = 0; r < rows->n; r++)
        for (int run = 0; run < b->n_runs; run++)
          memcpy(c + r * ldc + (run * b->n + i) * CLB_PANEL, pass + r * ld + run * CLB_PANEL,
                 CLB_PANEL * sizeof(float));
    }
  }
}

static void project_up(const clb_kernels *k, const clb_experts_job *job, int expert, int panel, int end, char *h) {
  const clb_experts_shape *s = job->shape;
  const clb_expert_pointers *e = &job->experts[expert];
  projection w = {s->dtype,       e->up,
                  e->up_bias,     &e->up_place,
                  e->up_bases,    s->intermediate_size,
                  s->hidden_size, s->rule.gated ? 2 : 1,
                  e->down};
  size_t input_bytes = clb_input_bytes(s), h_bytes = clb_activation_bytes(s);
  int quantises = quantised(s->dtype), pairs = pairs_up(k, s->dtype);
  int first = job->offsets[expert], n_rows = job->offsets[expert + 1] - first;
  block b;
  for (int done = 0; panel + done < end; done += panels_of(&b)) {
    b = block_after(&w, n_rows, panel, end, done);
    int ldt = panels_of(&b) * CLB_PANEL;
    for (int r = 0; r < n_rows; r += CLB_ROW_BLOCK) {
      float t[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
      int n = n_rows - r < CLB_ROW_BLOCK ? n_rows - r : CLB_ROW_BLOCK;
      row_block rows;
      rows.n = n, rows.paired = pairs && n > 1;
      for (int i = 0; i < n; i++) {
        ptrdiff_t token = job->order[first + r + i] / job->top_k;
        const char *input = (const char *)job->inputs + token * input_bytes;
        rows.x[i] = quantises ? (const float *)input : job->x + token * job->x_stride;
        rows.pairs[i] = input;
        rows.paired = rows.paired && clb_paired(input, s->hidden_size);
      }
      project(k, &w, &b, &rows, t, ldt);
      for (int run = 0; run < b.n_runs; run++) {
        const float *of_run = t + run * b.n * CLB_PANEL;
        int column = column_of(&w, b.first + run * b.apart), width = b.n * CLB_PANEL / w.n_halves;
        if (quantises) {
          float states[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
          k->activate_f32(&s->rule, of_run, n, ldt, b.n, states, ldt);
          if (width > s->intermediate_size - column) width = s->intermediate_size - column;
          for (int i = 0; i < n; i++)
            k->quantize(s->dtype, states + i * ldt, width, h + (r + i) * h_bytes + clb_row_bytes(s->dtype, column));
        } else {
          float *states = (float *)(h + r * h_bytes) + column;
          k->activate_f32(&s->rule, of_run, n, ldt, b.n, states, h_bytes / sizeof(float));
          if (s->narrow_states)
            k->narrow_f32(states, n, h_bytes / sizeof(float), width, (ptrdiff_t)state_floats(s) - column / 2);
        }
      }
    }
  }
}

static void project_down(const clb_kernels *k, const clb_experts_job *job, int expert, int panel, int end,
                         const char *h, const char *then) {
  const clb_experts_shape *s = job->shape;
  const clb_expert_pointers *e = &job->experts[expert];
  projection w = {s->dtype, e->down, e->down_bias, &e->down_place, e->down_bases, s->hidden_size, s->intermediate_size,
                  1,        then};
  size_t h_bytes = clb_activation_bytes(s);
  int first = job->offsets[expert], n_rows = job->offsets[expert + 1] - first;
  block b;
  for (int done = 0; panel + done < end; done += panels_of(&b)) {
    b = block_after(&w, n_rows, panel, end, done);
    int ldt = panels_of(&b) * CLB_PANEL;
    for (int r = 0; r < n_rows; r += CLB_ROW_BLOCK) {
      float t[CLB_ROW_BLOCK * CLB_UNIT * CLB_PANEL];
      int n = n_rows - r < CLB_ROW_BLOCK ? n_rows - r : CLB_ROW_BLOCK;
      row_block rows;
      rows.n = n, rows.paired = s->narrow_states && pairs_up(k, s->dtype) && n > 1;
      for (int i = 0; i < n; i++) {
        rows.x[i] = (const float *)(h + (r + i) * h_bytes);
        rows.pairs[i] = (const char *)(rows.x[i] + state_floats(s));
      }
      project(k, &w, &b, &rows, t, ldt);
      for (int i = 0; i < n; i++) {
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
} split;

/* Part i of n of n_panels, in whole units so that a single row still streams CLB_UNIT panels at once. */
static int part_start(int n_panels, int i, int n) {
  int64_t units = blocks_of(n_panels, CLB_UNIT);
  int start = (int)(units * i / n) * CLB_UNIT;
  return start < n_panels ? start : n_panels;
}

static void up_task(void *arg, int index, int worker) {
  (void)worker;
  const split *s = arg;
  /* By part, then by expert: whichever experts are active, a thread meets the same parts of them. */
  int expert = s->active[index % s->n_active], part = index / s->n_active;
  int n_panels = (int)clb_up_panels(s->job->shape);
  project_up(s->k, s->job, expert, part_start(n_panels, part, s->n_parts), part_start(n_panels, part + 1, s->n_parts),
             states_of(s->job, s->begin, expert));
}

static void down_task(void *arg, int index, int worker) {
  (void)worker;
  const split *s = arg;
  int n_panels = (int)clb_down_panels(s->job->shape);
  for (int e = s->begin; e < s->end; e++)
    if (s->job->offsets[e + 1] > s->job->offsets[e])
      project_down(s->k, s->job, e, part_start(n_panels, index, s->n_parts),
                   part_start(n_panels, index + 1, s->n_parts), states_of(s->job, s->begin, e), s->job->experts[e].up);
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
  for (ptrdiff_t t = first; t < end; t++) {
    const float *x = job->x + t * job->x_stride;
    char *input = (char *)job->inputs + t * clb_input_bytes(job->shape);
    if (quantised(job->shape->dtype)) s->k->quantize(job->shape->dtype, x, hidden, input);
    else s->k->pair_up(x, hidden, input);
  }
}

void clb_experts_begin(const clb_kernels *k, const clb_experts_job *job, int n_threads) {
  enum { VALUES_PER_TASK = 1 << 16 };
  if (!quantised(job->shape->dtype) && !pairs_up(k, job->shape->dtype)) return;
  int64_t parts = (int64_t)job->n_tokens * job->shape->hidden_size / VALUES_PER_TASK;
  split s = {.k = k, .job = job, .n_parts = parts < 1 ? 1 : parts < n_threads ? (int)parts : n_threads};
  clb_pool_run(begin_task, &s, s.n_parts, n_threads);
}

void clb_experts_add(const clb_kernels *k, const clb_experts_job *job, int begin, int end, int n_threads) {
  const clb_experts_shape *shape = job->shape;
  int n_up = (int)clb_up_panels(shape), n_down = (int)clb_down_panels(shape);
  int n_slots = job->offsets[end] - job->offsets[begin];
  int64_t up_work = (int64_t)n_slots * n_up * CLB_PANEL * shape->hidden_size;
  int64_t down_work = (int64_t)n_slots * n_down * CLB_PANEL * shape->intermediate_size;
  if (n_threads <= 1 || up_work + down_work < ALONE) {
    for (int e = begin; e < end; e++)
      if (job->offsets[e + 1] > job->offsets[e]) {
        project_up(k, job, e, 0, n_up, job->activations);
        int after = e + 1;
        while (after < end && job->offsets[after + 1] == job->offsets[after]) after++;
        project_down(k, job, e, 0, n_down, job->activations, job->experts[after < end ? after : e].up);
      }
    return;
  }
  int16_t active[CLB_MAX_EXPERTS];
  int n_active = 0;
  for (int e = begin; e < end; e++)
    if (job->offsets[e + 1] > job->offsets[e]) active[n_active++] = (int16_t)e;
  split s = {k, job, begin, end, parts_for(up_work, n_up, n_active, n_threads), active, n_active};
  clb_pool_run(up_task, &s, n_active * s.n_parts, n_threads);
  s.n_parts = parts_for(down_work, n_down, 1, n_threads);
  clb_pool_run(down_task, &s, s.n_parts, n_threads);
}
