/* colibri.h over kernels.h: every argument that can be checked is checked here, before anything is written. */
#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

/* ---------------------------------------------------------------- the library */

int clb_abi_version(void) { return CLB_ABI_VERSION; }

const char *clb_error_name(int error) {
  static const char names[][sizeof "CLB_ERROR_NOT_FINITE"] = {"CLB_OK",
                                                              "CLB_ERROR_NULL",
                                                              "CLB_ERROR_STRUCT",
                                                              "CLB_ERROR_SIZE",
                                                              "CLB_ERROR_OPTION",
                                                              "CLB_ERROR_ID",
                                                              "CLB_ERROR_EXPERT",
                                                              "CLB_ERROR_ROOM",
                                                              "CLB_ERROR_ALIGNMENT",
                                                              "CLB_ERROR_OVERLAP",
                                                              "CLB_ERROR_NOT_FINITE",
                                                              "CLB_ERROR_FORMAT",
                                                              "CLB_ERROR_CHECKSUM",
                                                              "CLB_ERROR_ISA",
                                                              "CLB_ERROR"};
  enum { UNKNOWN = sizeof names / sizeof *names - 1 };
  return names[error >= 0 && error < UNKNOWN ? error : UNKNOWN];
}

static const clb_kernels *_Atomic chosen; /* NULL: the best */

static const clb_kernels *kernels_in_use(void) {
  const clb_kernels *k = atomic_load_explicit(&chosen, memory_order_relaxed);
  return k ? k : clb_kernels_best();
}

const char *clb_isa(void) { return kernels_in_use()->isa; }

int clb_use_isa(const char *name) {
  const clb_kernels *k = name && *name ? clb_kernels_by_name(name) : clb_kernels_best();
  if (!k) return CLB_ERROR_ISA;
  atomic_store_explicit(&chosen, k, memory_order_relaxed);
  return CLB_OK;
}

/* Starts the threads that calls of this width need, and asks the pool's lock only if they may not be there. */
static void reserve(int n_threads) {
  static atomic_int reserved = 1;
  if (n_threads <= atomic_load_explicit(&reserved, memory_order_relaxed)) return;
  clb_pool_reserve(n_threads);
  atomic_store_explicit(&reserved, n_threads, memory_order_relaxed);
}

/* ---------------------------------------------------------------- checks */

#define IN(x, low, high) ((x) >= (low) && (x) <= (high))

static int is_finite(float x) { return x - x == 0.0f; }

/* The memory that a call is given: pointers that must be there and aligned, and what must not overlap. */
typedef struct {
  int error, n;
  struct {
    uintptr_t begin, end;
  } at[6];
} areas;

/* n rows of n_bytes, stride bytes from row to row. */
static void take(areas *a, const void *rows, int64_t n, int64_t stride, size_t n_bytes) {
  uintptr_t begin = (uintptr_t)rows, end = begin + n_bytes;
  int64_t far = (n - 1) * stride;
  if (!a->error) a->error = !rows ? CLB_ERROR_NULL : begin & 3 ? CLB_ERROR_ALIGNMENT : CLB_OK;
  *(far < 0 ? &begin : &end) += (uintptr_t)far;
  a->at[a->n].begin = begin, a->at[a->n++].end = end;
}

/* n values of 4 bytes. */
static void take_values(areas *a, const void *values, size_t n) { take(a, values, 1, 0, n * sizeof(float)); }

/* A matrix of n outputs from m inputs. */
static void take_matrix(areas *a, const void *w, int n, int m, const ptrdiff_t stride[2]) {
  int64_t wide = (m - 1) * (int64_t)stride[1];
  const char *begin = wide < 0 ? (const char *)w + wide : w;
  take(a, w ? begin : w, n, stride[0], (size_t)(wide < 0 ? -wide : wide) + sizeof(float));
}

/* The first n_written are written to. */
static int check_areas(const areas *a, int n_written) {
  if (a->error) return a->error;
  for (int i = 0; i < n_written; i++)
    for (int j = i + 1; j < a->n; j++)
      if (a->at[i].begin < a->at[j].end && a->at[j].begin < a->at[i].end) return CLB_ERROR_OVERLAP;
  return CLB_OK;
}

static int check_shape(const clb_shape *shape) {
  if (!shape) return CLB_ERROR_NULL;
  if (shape->struct_size != sizeof *shape) return CLB_ERROR_STRUCT;
  if (!IN(shape->hidden_size, 1, CLB_MAX_SIZE) || !IN(shape->intermediate_size, 1, CLB_MAX_SIZE)) return CLB_ERROR_SIZE;
  if (!IN(shape->dtype, CLB_F32, CLB_F16) || !IN(shape->activation, CLB_RELU, CLB_GELU_TANH) ||
      !IN(shape->gated, 0, 1) || !is_finite(shape->alpha) || !is_finite(shape->beta) || !(shape->limit > 0.0f))
    return CLB_ERROR_OPTION;
  return CLB_OK;
}

/* float16 weights are run where they are, and not packed. */
static int check_packed(const clb_shape *shape) {
  int error = check_shape(shape);
  return error || shape->dtype != CLB_F16 ? error : CLB_ERROR_OPTION;
}

static clb_experts_shape shape_of(const clb_shape *s) {
  return (clb_experts_shape){
      s->hidden_size,
      s->intermediate_size,
      (clb_dtype)s->dtype,
      {(clb_activation)s->activation, s->gated, s->alpha, s->beta, s->limit},
      0,
  };
}

/* ---------------------------------------------------------------- experts */

/* What is in a clb_expert. The stamp tells one from zeros, and from other memory. */
typedef struct {
  uint64_t stamp;
  clb_shape shape;
  clb_expert_pointers pointers;
} made_expert;
_Static_assert(sizeof(made_expert) <= sizeof(clb_expert), "");
enum { STAMP = 0x436c6245 };

static void make(clb_expert *expert, const clb_shape *shape, const clb_expert_pointers *pointers) {
  made_expert made;
  memset(&made, 0, sizeof made);
  made.stamp = STAMP, made.shape = *shape, made.pointers = *pointers;
  memset(expert, 0, sizeof *expert);
  memcpy(expert, &made, sizeof made);
}

/* docs/formats.md has it. */
typedef struct {
  char magic[8];
  uint32_t version, header_size, hidden_size, intermediate_size;
  uint8_t dtype, activation, gated, biased;
  float alpha, beta, limit;
  uint64_t payload_size;
  uint32_t checksum, reserved[3];
} file_header;
_Static_assert(sizeof(file_header) == 64 && offsetof(file_header, checksum) == 48, "");

static file_header header_of(const clb_shape *s, int biased) {
  file_header h = {.magic = {'C', 'L', 'B', 'E', 'X', 'P', 'R', 'T'}, .version = 1, .header_size = sizeof h};
  h.hidden_size = (uint32_t)s->hidden_size, h.intermediate_size = (uint32_t)s->intermediate_size;
  h.dtype = (uint8_t)s->dtype, h.activation = (uint8_t)s->activation, h.gated = (uint8_t)s->gated;
  h.biased = (uint8_t)biased, h.alpha = s->alpha, h.beta = s->beta, h.limit = s->limit;
  return h;
}

/* Points into the file of a shape, unless it is NULL, and returns its size. */
static size_t lay_out(const clb_shape *shape, int biased, const char *file, clb_expert_pointers *e) {
  clb_experts_shape s = shape_of(shape);
  return sizeof(file_header) + clb_lay_out(&s, biased, file ? file + sizeof(file_header) : NULL, e);
}

int clb_expert_open(const void *file, size_t size, clb_shape *shape, clb_expert *expert) {
  file_header h, wanted;
  clb_expert_pointers pointers;
  clb_shape found = CLB_SHAPE_INIT;
  if (!file || !expert) return CLB_ERROR_NULL;
  if (shape && shape->struct_size != sizeof *shape) return CLB_ERROR_STRUCT;
  if ((uintptr_t)file & 3) return CLB_ERROR_ALIGNMENT;
  if (size < sizeof h) return CLB_ERROR_FORMAT;
  memcpy(&h, file, sizeof h);
  found.hidden_size = h.hidden_size > CLB_MAX_SIZE ? 0 : (int)h.hidden_size;
  found.intermediate_size = h.intermediate_size > CLB_MAX_SIZE ? 0 : (int)h.intermediate_size;
  found.dtype = h.dtype, found.activation = h.activation, found.gated = h.gated;
  found.alpha = h.alpha, found.beta = h.beta, found.limit = h.limit;
  if (h.biased > 1 || check_packed(&found)) return CLB_ERROR_FORMAT;
  /* Everything else follows from these fields. */
  wanted = header_of(&found, h.biased);
  wanted.payload_size = lay_out(&found, h.biased, file, &pointers) - sizeof h, wanted.checksum = h.checksum;
  if (memcmp(&h, &wanted, sizeof h) != 0 || size - sizeof h != wanted.payload_size) return CLB_ERROR_FORMAT;
  make(expert, &found, &pointers);
  if (shape) *shape = found;
  return CLB_OK;
}

/* CRC-32 as zlib's, eight bytes at a time. */
static uint32_t crc_of(const uint8_t *at, size_t n) {
  uint32_t table[8][256], crc = ~UINT32_C(0);
  for (uint32_t i = 0; i < 256; i++) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; bit++) c = c >> 1 ^ (UINT32_C(0xedb88320) & -(c & 1));
    table[0][i] = c;
  }
  for (int k = 1; k < 8; k++)
    for (int i = 0; i < 256; i++) table[k][i] = table[k - 1][i] >> 8 ^ table[0][table[k - 1][i] & 255];
  for (size_t i = 0; i < n;) {
    if (i + 8 <= n && i >= sizeof(file_header)) {
      uint64_t word;
      memcpy(&word, at + i, sizeof word), word ^= crc, crc = 0;
      for (int k = 0; k < 8; k++) crc ^= table[7 - k][word >> 8 * k & 255];
      i += sizeof word;
    } else {
      size_t from_checksum = i - offsetof(file_header, checksum); /* whose bytes count as zeros */
      uint32_t byte = from_checksum < sizeof(uint32_t) ? 0 : at[i];
      crc = crc >> 8 ^ table[0][(crc ^ byte) & 255];
      i++;
    }
  }
  return ~crc;
}

int clb_expert_seal(void *file, size_t size) {
  clb_expert expert;
  int error = clb_expert_open(file, size, NULL, &expert);
  if (error) return error;
  uint32_t crc = crc_of(file, size);
  memcpy((char *)file + offsetof(file_header, checksum), &crc, sizeof crc);
  return CLB_OK;
}

int clb_expert_verify(const void *file, size_t size) {
  clb_expert expert;
  int error = clb_expert_open(file, size, NULL, &expert);
  if (error) return error;
  uint32_t crc = crc_of(file, size);
  return memcmp((const char *)file + offsetof(file_header, checksum), &crc, sizeof crc) ? CLB_ERROR_CHECKSUM : CLB_OK;
}

/* clb_arrays as it is run: strides filled in, and where the second half of a gated expert's up projection begins. */
typedef struct {
  ptrdiff_t up[2], down[2], half, bias, bias_half;
} strides;

static int check_strides(const ptrdiff_t given[2], ptrdiff_t n_inputs, ptrdiff_t size, ptrdiff_t stride[2]) {
  enum { MOST = CLB_MAX_STRIDE };
  stride[0] = given[0], stride[1] = given[1];
  if (!given[0] && !given[1]) stride[0] = n_inputs * size, stride[1] = size;
  return IN(stride[0], -4 * (int64_t)MOST, 4 * (int64_t)MOST) && IN(stride[1], -4 * (int64_t)MOST, 4 * (int64_t)MOST);
}

static int runs_in_place(int dtype) { return dtype == CLB_F32 || dtype == CLB_BF16 || dtype == CLB_F16; }
static int size_of(int dtype) { return dtype == CLB_F32 ? 4 : 2; }

static int check_arrays(const clb_shape *shape, const clb_arrays *a, strides *s) {
  int error = check_shape(shape);
  if (error) return error;
  if (!a) return CLB_ERROR_NULL;
  if (a->struct_size != sizeof *a) return CLB_ERROR_STRUCT;
  if (!a->up || !a->down) return CLB_ERROR_NULL;
  if (!runs_in_place(a->dtype) || !runs_in_place(a->bias_dtype) || !IN(a->interleaved, 0, shape->gated))
    return CLB_ERROR_OPTION;
  ptrdiff_t size = size_of(a->dtype), inter = shape->intermediate_size;
  if (!check_strides(a->up_stride, shape->hidden_size, size, s->up) ||
      !check_strides(a->down_stride, inter, size, s->down))
    return CLB_ERROR_SIZE;
  s->bias = size_of(a->bias_dtype);
  s->half = s->up[0] * inter, s->bias_half = s->bias * inter;
  if (a->interleaved) s->half = s->up[0], s->bias_half = s->bias, s->up[0] *= 2, s->bias *= 2;
  return CLB_OK;
}

/* Whether an output's inputs, or an input's outputs, lie side by side. */
static int side_by_side(const ptrdiff_t stride[2], ptrdiff_t size, int n_outputs, int n_inputs) {
  return stride[0] == size || stride[1] == size || n_outputs == 1 || n_inputs == 1;
}

int clb_expert_in_place(const clb_shape *shape, const clb_arrays *arrays, clb_expert *expert) {
  strides s;
  int error = check_arrays(shape, arrays, &s);
  if (error) return error;
  if (!expert) return CLB_ERROR_NULL;
  if (arrays->dtype != shape->dtype) return CLB_ERROR_OPTION;
  int size = size_of(shape->dtype), hidden = shape->hidden_size, inter = shape->intermediate_size;
  ptrdiff_t up[] = {arrays->interleaved ? s.half : s.up[0], s.up[1]};
  if (!side_by_side(up, size, inter << shape->gated, hidden) || !side_by_side(s.down, size, hidden, inter))
    return CLB_ERROR_SIZE;
  clb_dtype biases = (clb_dtype)arrays->bias_dtype;
  clb_expert_pointers pointers = {
      .up = arrays->up,
      .up_bias = arrays->up_bias,
      .down = arrays->down,
      .down_bias = arrays->down_bias,
      .up_place = {1, biases, s.up[0], s.up[1], s.half, s.bias, s.bias_half},
      .down_place = {1, biases, s.down[0], s.down[1], 0, size_of(biases), 0},
  };
  make(expert, shape, &pointers);
  return CLB_OK;
}

size_t clb_expert_size(const clb_shape *shape, int biased) {
  return check_packed(shape) ? 0 : lay_out(shape, biased, NULL, NULL);
}

static int all_finite(const char *at, int n, ptrdiff_t stride, int m, ptrdiff_t step) {
  for (ptrdiff_t j = 0; j < n; j++)
    for (ptrdiff_t i = 0; i < m; i++)
      if (!is_finite(*(const float *)(at + j * stride + i * step))) return 0;
  return 1;
}

int clb_expert_pack(const clb_shape *shape, const clb_arrays *arrays, void *file, size_t size, int n_threads) {
  strides s;
  clb_expert_pointers e;
  int error = check_arrays(shape, arrays, &s);
  if (!error) error = check_packed(shape);
  if (error) return error;
  if (!IN(n_threads, 1, CLB_MAX_THREADS)) return CLB_ERROR_SIZE;
  if (arrays->dtype != CLB_F32 || arrays->bias_dtype != CLB_F32) return CLB_ERROR_OPTION;
  if ((s.up[0] | s.up[1] | s.down[0] | s.down[1]) & 3) return CLB_ERROR_ALIGNMENT;
  int hidden = shape->hidden_size, inter = shape->intermediate_size, halves = 1 << shape->gated;
  int biased = arrays->up_bias || arrays->down_bias;
  size_t n_bytes = lay_out(shape, biased, file, &e);
  const char *up[] = {arrays->up, (const char *)arrays->up + s.half}, *down = arrays->down;
  areas all = {0};
  take(&all, file, 1, 0, n_bytes);
  for (int half = 0; half < halves; half++) take_matrix(&all, up[half], inter, hidden, s.up);
  take_matrix(&all, down, hidden, inter, s.down);
  if (arrays->up_bias) take_values(&all, arrays->up_bias, (size_t)(inter * halves));
  if (arrays->down_bias) take_values(&all, arrays->down_bias, (size_t)hidden);
  error = check_areas(&all, 1);
  if (error) return error;
  if (size < n_bytes) return CLB_ERROR_ROOM;
  clb_dtype dtype = (clb_dtype)shape->dtype;
  if (dtype == CLB_I8 || dtype == CLB_I4) {
    for (int half = 0; half < halves; half++)
      if (!all_finite(up[half], inter, s.up[0], hidden, s.up[1])) return CLB_ERROR_NOT_FINITE;
    if (!all_finite(down, hidden, s.down[0], inter, s.down[1])) return CLB_ERROR_NOT_FINITE;
  }
  reserve(n_threads);
  int before = clb_float_mode();
  const clb_kernels *k = kernels_in_use();
  ptrdiff_t panel = (ptrdiff_t)clb_panel_bytes(dtype, hidden);
  for (int half = 0; half < halves; half++)
    clb_pack_panels(k, dtype, (const float *)up[half], s.up[0] / 4, s.up[1] / 4, inter, hidden,
                    (char *)e.up + half * panel, halves * panel, (float *)e.up_bases + half, halves, n_threads);
  clb_pack_panels(k, dtype, (const float *)down, s.down[0] / 4, s.down[1] / 4, hidden, inter, (char *)e.down,
                  (ptrdiff_t)clb_panel_bytes(dtype, inter), (float *)e.down_bases, 1, n_threads);
  clb_restore_float_mode(before);
  if (biased) {
    float *to = (float *)e.up_bias;
    memset(to, 0, (size_t)(inter * halves + hidden) * sizeof(float));
    for (int half = 0; half < halves && arrays->up_bias; half++)
      for (int j = 0; j < inter; j++)
        memcpy(to++, (const char *)arrays->up_bias + half * s.bias_half + j * s.bias, sizeof(float));
    if (arrays->down_bias) memcpy((float *)e.down_bias, arrays->down_bias, (size_t)hidden * sizeof(float));
  }
  file_header h = header_of(shape, biased);
  h.payload_size = n_bytes - sizeof h;
  memcpy(file, &h, sizeof h);
  return CLB_OK;
}

/* A workspace: first what a call needs, then states, then what each of the tokens needs that it takes at a time. */
typedef struct {
  size_t pointers, fixed, input, token;
} room;
enum { LINE = 64 };

static size_t in_lines(size_t n) { return (n + LINE - 1) / LINE * LINE; }

static room room_for(const clb_experts_shape *s, int n_experts, int top_k) {
  room r = {.pointers = in_lines((size_t)n_experts * sizeof(clb_expert_pointers)), .input = clb_input_bytes(s)};
  r.fixed = r.pointers + in_lines((size_t)(n_experts + 1) * sizeof(int32_t));
  r.token = r.input + (size_t)top_k * sizeof(int32_t);
  return r;
}

/* Tokens that n_bytes beyond the fixed ones hold: with states for each of their slots, or for as many as there can be.
 */
static size_t tokens_in(const clb_experts_shape *s, const room *r, int top_k, size_t n_bytes) {
  size_t most = clb_states_bytes(s, CLB_STATES), few = n_bytes / (r->token + (size_t)top_k * clb_states_bytes(s, 1));
  size_t many = n_bytes > most ? (n_bytes - most) / r->token : 0;
  return many > few ? many : few;
}

/* Slots are counted in int, and their multiply-adds in int64_t. */
static int64_t most_slots(const clb_experts_shape *s) {
  int64_t n_outputs = (int64_t)(clb_up_panels(s) + clb_down_panels(s)) * CLB_PANEL;
  int64_t n = (INT64_C(1) << 60) / (n_outputs * ((int64_t)s->hidden_size + s->intermediate_size));
  return n < 1 << 30 ? n : 1 << 30;
}

size_t clb_workspace_size(const clb_shape *shape, int n_experts, int n_tokens, int top_k) {
  if (check_shape(shape) || !IN(n_experts, 0, CLB_MAX_EXPERTS) || n_tokens < 0 || !IN(top_k, 1, CLB_MAX_TOP_K))
    return 0;
  clb_experts_shape s = shape_of(shape);
  room r = room_for(&s, n_experts, top_k);
  return LINE + r.fixed + clb_states_bytes(&s, (size_t)n_tokens * (size_t)top_k) + (size_t)n_tokens * r.token;
}

/* Puts the experts that the slots name side by side, by id. */
static int gather_experts(const clb_shape *shape, const clb_expert *experts, int n_experts, const int32_t *ids,
                          size_t n_slots, clb_expert_pointers *to) {
  unsigned char named[CLB_MAX_EXPERTS] = {0};
  for (size_t i = 0; i < n_slots; i++) {
    if (!IN(ids[i], -1, n_experts - 1)) return CLB_ERROR_ID;
    if (ids[i] >= 0) named[ids[i]] = 1;
  }
  for (int e = 0; e < n_experts; e++) {
    made_expert made;
    if (!named[e]) continue;
    memcpy(&made, &experts[e], sizeof made);
    if (made.stamp != STAMP || memcmp(&made.shape, shape, sizeof made.shape) != 0) return CLB_ERROR_EXPERT;
    to[e] = made.pointers;
  }
  return CLB_OK;
}

int clb_experts_run(const clb_shape *shape, const clb_expert *experts, int n_experts, const float *x,
                    ptrdiff_t x_stride, const int32_t *ids, const float *weights, int n_tokens, int top_k, float *y,
                    ptrdiff_t y_stride, void *workspace, size_t workspace_size, int n_threads) {
  int error = check_shape(shape);
  if (error) return error;
  if (!IN(n_experts, 0, CLB_MAX_EXPERTS) || n_tokens < 0 || !IN(top_k, 1, CLB_MAX_TOP_K) ||
      !IN(x_stride, -CLB_MAX_STRIDE, CLB_MAX_STRIDE) || !IN(y_stride, shape->hidden_size, CLB_MAX_STRIDE) ||
      !IN(n_threads, 1, CLB_MAX_THREADS))
    return CLB_ERROR_SIZE;
  if (n_tokens == 0) return CLB_OK;
  clb_experts_shape s = shape_of(shape);
  size_t row = (size_t)s.hidden_size * sizeof(float), n_slots = (size_t)n_tokens * (size_t)top_k;
  areas all = {0};
  take(&all, y, n_tokens, y_stride * 4, row);
  take(&all, (char *)workspace - ((uintptr_t)workspace & 3), 1, 0, workspace_size);
  take(&all, x, n_tokens, x_stride * 4, row);
  take_values(&all, ids, n_slots);
  take_values(&all, weights, n_slots);
  if (n_experts) take(&all, experts, n_experts, sizeof *experts, sizeof *experts);
  error = check_areas(&all, 2);
  if (error) return error;

  room r = room_for(&s, n_experts, top_k);
  char *at = (char *)workspace + (-(uintptr_t)workspace & (LINE - 1)); /* LINE of its size is for this */
  size_t chunk = workspace_size < LINE + r.fixed ? 0 : tokens_in(&s, &r, top_k, workspace_size - LINE - r.fixed);
  if (chunk == 0) return CLB_ERROR_ROOM;
  if (chunk > (size_t)(most_slots(&s) / top_k)) chunk = (size_t)(most_slots(&s) / top_k);
  if (chunk > (size_t)n_tokens) chunk = (size_t)n_tokens;
  if (chunk == 0) return CLB_ERROR_SIZE;
  error = gather_experts(shape, experts, n_experts, ids, n_slots, (clb_expert_pointers *)at);
  if (error) return error;

  char *inputs = at + r.fixed + clb_states_bytes(&s, chunk * (size_t)top_k);
  int32_t *offsets = (int32_t *)(at + r.pointers), *order = (int32_t *)(inputs + chunk * r.input);
  clb_experts_job job = {.shape = &s,
                         .experts = (const clb_expert_pointers *)at,
                         .top_k = top_k,
                         .offsets = offsets,
                         .order = order,
                         .x_stride = x_stride,
                         .y_stride = y_stride,
                         .activations = at + r.fixed,
                         .inputs = inputs};
  const clb_kernels *k = kernels_in_use();
  reserve(n_threads);
  int before = clb_float_mode();
  for (ptrdiff_t first = 0; first < n_tokens; first += job.n_tokens) {
    job.n_tokens = n_tokens - first < (ptrdiff_t)chunk ? (int)(n_tokens - first) : (int)chunk;
    job.x = x + first * x_stride, job.y = y + first * y_stride, job.slot_weights = weights + first * top_k;
    for (ptrdiff_t t = 0; t < job.n_tokens; t++) memset(job.y + t * y_stride, 0, row);
    clb_dispatch(ids + first * top_k, job.n_tokens * top_k, n_experts, offsets, order);
    clb_experts_begin(k, &job, n_threads);
    clb_experts_add(k, &job, 0, n_experts, n_threads);
  }
  clb_restore_float_mode(before);
  return CLB_OK;
}

/* ---------------------------------------------------------------- router */

static int width_of(int n_experts) { return (n_experts + CLB_PANEL - 1) / CLB_PANEL * CLB_PANEL; }

size_t clb_router_table_size(int n_experts, int hidden_size) {
  if (!IN(n_experts, 1, CLB_MAX_EXPERTS) || !IN(hidden_size, 1, CLB_MAX_TABLE / width_of(n_experts))) return 0;
  return (size_t)width_of(n_experts) * (size_t)hidden_size * sizeof(float);
}

int clb_router_pack(const float *weights, ptrdiff_t stride, int n_experts, int hidden_size, float *table, size_t size) {
  size_t n_bytes = clb_router_table_size(n_experts, hidden_size), width = (size_t)width_of(n_experts);
  areas all = {0};
  if (n_bytes == 0 || !IN(stride, -CLB_MAX_STRIDE, CLB_MAX_STRIDE)) return CLB_ERROR_SIZE;
  take(&all, table, 1, 0, n_bytes);
  take(&all, weights, n_experts, stride * 4, (size_t)hidden_size * sizeof(float));
  int error = check_areas(&all, 1);
  if (error) return error;
  if (size < n_bytes) return CLB_ERROR_ROOM;
  memset(table, 0, n_bytes);
  for (ptrdiff_t e = 0; e < n_experts; e++)
    for (ptrdiff_t i = 0; i < hidden_size; i++) table[i * (ptrdiff_t)width + e] = weights[e * stride + i];
  return CLB_OK;
}

/* gate_rule.py's rules, which say why. */
static int check_rule(const clb_router *r, clb_gate_rule *rule) {
  static const float lost = 1e-11f; /* an epsilon up to here is lost beside the best expert's share */
  int by_softmax = r->kind == CLB_SOFTMAX_TOPK || r->kind == CLB_TOPK_SOFTMAX;
  int by_logits = r->kind == CLB_TOPK_SOFTMAX || r->kind == CLB_TOPK_SIGMOID;
  if (!IN(r->kind, CLB_SOFTMAX_TOPK, CLB_TOPK_SIGMOID) ||
      !IN(r->gating, CLB_EXACT, by_softmax ? CLB_TAYLOR : CLB_EXACT) || !IN(r->renormalize, 0, 1) ||
      !IN(r->group_score, CLB_GROUP_MAX, CLB_GROUP_TOP2) || !(r->scale > 0.0f) || !is_finite(r->scale) ||
      !(r->epsilon >= 0.0f) || !is_finite(r->epsilon) || !(r->masked_score == 0.0f || r->masked_score == -INFINITY))
    return CLB_ERROR_OPTION;
  if (!IN(r->top_k, 1, r->n_experts) || !IN(r->n_groups, 1, r->n_experts) || !IN(r->topk_groups, 1, r->n_groups))
    return CLB_ERROR_SIZE;
  if (r->kind == CLB_TOPK_SOFTMAX && (r->correction || r->epsilon > lost)) return CLB_ERROR_OPTION;
  int masks = r->topk_groups < r->n_groups, in_group = r->n_experts / r->n_groups;
  if (r->n_groups > 1) {
    if (by_logits) return CLB_ERROR_OPTION;
    if (r->n_experts % r->n_groups || (masks && in_group < 1 + r->group_score) || r->top_k > r->topk_groups * in_group)
      return CLB_ERROR_SIZE;
  }
  *rule = (clb_gate_rule){.n_experts = r->n_experts,
                          .top_k = r->top_k,
                          .kind = (clb_gate_kind)r->kind,
                          .gating = (clb_exp_kind)r->gating,
                          .renormalize = r->renormalize,
                          .scale = r->scale,
                          .by_score = !by_softmax || r->correction || masks || (r->renormalize && r->epsilon > lost),
                          .epsilon = r->epsilon,
                          .n_groups = r->n_groups,
                          .top_groups = r->topk_groups,
                          .group_sums = r->group_score,
                          .masked = r->masked_score};
  return CLB_OK;
}

int clb_route(const clb_router *r, const float *x, ptrdiff_t x_stride, int n_tokens, int32_t *ids, float *weights,
              int *bad_token, int n_threads) {
  clb_route_job job = {.n_tokens = n_tokens, .x = x, .x_stride = x_stride, .ids = ids, .weights = weights};
  float bias[CLB_MAX_EXPERTS] = {0}, correction[CLB_MAX_EXPERTS] = {0};
  if (!r) return CLB_ERROR_NULL;
  if (r->struct_size != sizeof *r) return CLB_ERROR_STRUCT;
  size_t n_bytes = clb_router_table_size(r->n_experts, r->hidden_size);
  if (n_bytes == 0 || !IN(n_tokens, 0, 1 << 30) || !IN(x_stride, -CLB_MAX_STRIDE, CLB_MAX_STRIDE) ||
      !IN(n_threads, 1, CLB_MAX_THREADS))
    return CLB_ERROR_SIZE;
  int error = check_rule(r, &job.rule);
  if (error) return error;
  if (n_tokens == 0) return CLB_OK;
  size_t n_slots = (size_t)n_tokens * (size_t)r->top_k, n_biases = (size_t)r->n_experts;
  areas all = {0};
  take_values(&all, ids, n_slots);
  take_values(&all, weights, n_slots);
  take(&all, x, n_tokens, x_stride * 4, (size_t)r->hidden_size * sizeof(float));
  take(&all, r->table, 1, 0, n_bytes);
  if (r->bias) take_values(&all, r->bias, n_biases);
  if (r->correction) take_values(&all, r->correction, n_biases);
  error = check_areas(&all, 2);
  if (error) return error;
  if (r->bias) memcpy(bias, r->bias, n_biases * sizeof(float));
  if (r->correction) memcpy(correction, r->correction, n_biases * sizeof(float));
  job.hidden_size = r->hidden_size, job.table = r->table, job.width = width_of(r->n_experts);
  job.bias = bias, job.rule.correction = correction;
  reserve(n_threads);
  int before = clb_float_mode();
  ptrdiff_t bad = clb_route_batch(kernels_in_use(), &job, n_threads);
  clb_restore_float_mode(before);
  if (bad < 0) return CLB_OK;
  if (bad_token) *bad_token = (int)bad;
  return CLB_ERROR_NOT_FINITE;
}
