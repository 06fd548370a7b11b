/* The kernel contract: everything that _core may call, and nothing that knows Python. api.c makes colibri.h of it.
 *
 * Sizes are counts of elements. Pointers are caller-owned; no kernel allocates, fails, or reads past the last
 * element of an input (a mapped file ends at a page). Outputs never overlap inputs. Alignment is never required.
 *
 * Numerics (docs/numerics.md): each output of a linear layer is one chain of fused multiply-adds over the input
 * index, ascending, starting at the bias, or where asked for a sum of blocks (CLB_BLOCK). Every kernel is written once
 * over the lanes of simd_<isa>.h, so an instruction set changes how many outputs advance together and never the
 * operations of one output.
 *
 * A panel is a block of CLB_PANEL output columns stored [k][CLB_PANEL], zero beyond the last column.
 */
#ifndef CLB_KERNELS_H
#define CLB_KERNELS_H

#include "../include/colibri.h" /* the public names: what a router and an expert can be */

enum {
  CLB_PANEL = CLB_ROUTER_WIDTH_STEP, /* output columns in a panel */
  CLB_ROW_BLOCK = 96,              /* rows that one pass over a panel serves; 96 rows of 2048 floats fit an L2 cache */
  CLB_STATES = 11 * CLB_ROW_BLOCK, /* slots whose intermediate states are held at once */
  CLB_STREAM_AHEAD = 16384,        /* bytes by which a pass over weights asks for them ahead */
  CLB_IN_PLACE_ROWS = 4,           /* rows that linear_in_place serves at once, if not one */
  CLB_UNIT = 4,                    /* panels that one row streams at once: enough chains to hide the FMA's latency */
  CLB_MAX_SEGMENTS = 64            /* inputs that one chain may be made of */
};

/* How weights are held:
 *   F32   panel row i: 16 floats
 *   BF16  panel row i: 16 bfloat16, columns 0 8 1 9 2 10 ...: even and odd halves of a 32-bit word are two vectors
 *   I8    for each group of 64 inputs: pairs of inputs x 16 columns x 2 int8, then 16 bfloat16 scales
 *   I4    for each group of 32 inputs: 8 quads of inputs x 8 columns x 4 bytes, low nibble columns 0..7, high nibble
 *         columns 8..15, then 16 scale codes, then 16 zero codes z; a weight is base x scale x (q - z / 16), and the
 *         scale's bits are its code's: 16 octaves in steps of 1/16, from 2^-15
 *   F16   only in place (clb_place): its panels are widened to F32 as they are filled
 * Inputs of I8 and I4 are zeros from the last one to the end of its chunk, which is where a last group ends. */
enum { CLB_CHUNK = 32, CLB_I4_GROUP = CLB_CHUNK, CLB_I8_GROUP = 2 * CLB_CHUNK }; /* inputs; a group shares a scale */
enum { CLB_LINE = 64 };                                                          /* bytes of a cache line */
/* What one matrix instruction sums: c + (even + odd), each a chain from 0 over a block's even or odd inputs. Blocks
 * begin at multiples of it. */
enum { CLB_BLOCK = 32 };
#define CLB_SMALLEST 1e-35f /* I8 and I4 weights below this are held as 0: 1 / scale must stay finite */

/* Where linear_pairs and linear_tiles may be used: bfloat16 activations (float32 bits), weights (bits) and starts of
 * chains that are 0 or at least this large. Every sum on the way is then a multiple of 2^-126, so there are no
 * denormals. */
enum { CLB_LEAST_INPUT = (127 - 60) << 23, CLB_LEAST_WEIGHT = (127 - 52) << 7 };
#define CLB_LEAST_START 0x1p-103f

/* The input of a linear layer: n_segments pieces of k values each, chained in order. Row r of segment s starts at
 * rows[s * segment_stride + r]. One segment is the usual case; the context mixer has one for each offset.
 * F32 and BF16 weights take rows of floats, I8 and I4 rows that quantize has made. */
typedef struct {
  const float *const *rows;
  ptrdiff_t segment_stride; /* row pointers from one segment to the next */
  int n_segments;
  int k;
  int in_blocks; /* BF16: sums of blocks (CLB_BLOCK) instead of one chain; one segment */
} clb_input;

/* Panels of weights: panel p of segment s at data + s * segment_stride + p * panel_stride bytes, its row i (F32, BF16)
 * row_stride bytes after row i - 1. */
typedef struct {
  const void *data;
  ptrdiff_t segment_stride, panel_stride, row_stride;
  const float *bases; /* I4: what the scales of each panel are relative to */
  int streamed;       /* whether they come from memory, and more follows them: to be asked for ahead of time */
  /* F32 and BF16: where in memory begins what is wanted after each panel, its rows here at next_at bytes from there, to
   * be asked for meanwhile; NULL: nothing. */
  const char *const *next;
  ptrdiff_t next_at;
} clb_panels;

/* How an expert's intermediate activation is formed from gate g and up u (u absent in an ungated expert):
 * g = min(g, limit), u = clamp(u, -limit, limit), silu: (u + beta) * g * sigmoid(alpha * g). */
typedef struct {
  clb_activation kind;
  int gated;
  float alpha, beta, limit; /* limit = INFINITY: no clamp */
} clb_activation_rule;

/* How a token's experts are chosen and weighed from its logits: by_score, by score.c; else by gate_f32, which knows the
 * two kinds of softmax and nothing below by_score. */
typedef struct {
  int n_experts, top_k;
  clb_gate_kind kind;
  clb_exp_kind gating;
  int renormalize;
  float scale; /* of the weights, at the end */
  int by_score;
  float epsilon;            /* added to the sum that renormalises */
  const float *correction;  /* [n_experts], added to what experts are chosen by */
  int n_groups, top_groups; /* experts outside a token's top groups are chosen by `masked` instead: 0 or -INFINITY */
  int group_sums;           /* a group counts for the sum of its best two experts, else for its best */
  float masked;
} clb_gate_rule;

/* c[r][16 p + j] = chain from init[16 p + j] over the input; r < n_rows <= CLB_ROW_BLOCK, p < n_panels. c has a row
 * stride of ldc >= 16 n_panels. I8 and I4 sum a group exactly in int32 and chain over groups. F32 and BF16 without init
 * (NULL) go on from what c holds: a chain cut anywhere has the same bits. */
typedef void (*clb_linear)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init,
                           float *c, ptrdiff_t ldc);

/* c[r][16 p + o] from init[16 p + o], for n_rows <= CLB_ROW_BLOCK rows r in lanes and outputs o < n_outputs[p] of one
 * panel or two: sums in blocks of k inputs, whole blocks. Weights are in panels, or in place `output` bytes from one
 * output's inputs to the next's. Lanes are panels of words of pair_up's: [k / 2][16], the last panel as wide as it has
 * lanes; 60 bytes beyond it are read as well. next: what to ask memory for after each panel. */
typedef struct {
  const char *weights[2], *next[2];
  int in_place;
  ptrdiff_t output;
  int n_outputs[2], k, n_rows;
  const char *lanes;
  const float *init;
  float *c;
  ptrdiff_t ldc;
} clb_tiles;

typedef void (*clb_linear_in_place)(const float *const *x, int n_rows, const char *const *outputs, int k, float *c,
                                    ptrdiff_t ldc);

/* One instruction set's kernels. */
typedef struct {
  const char *isa;
  int inputs_at_once; /* of packed float32 panels, where many rows share them; 0: all */

  clb_linear linear_f32, linear_bf16, linear_i8, linear_i4;

  /* linear_bf16 in blocks, whole ones, for rows that pair_up has made; NULL: not here. Returns how many panels are
   * done; it stops before one whose weights or starts are too small (CLB_LEAST_WEIGHT). */
  int (*linear_pairs)(const clb_input *a, int n_rows, const clb_panels *b, int n_panels, const float *init, float *c,
                      ptrdiff_t ldc);

  /* linear_bf16 in blocks for rows in lanes; NULL: not here. Returns whether the weights and starts allow it; if not, c
   * is as it was. */
  int (*linear_tiles)(const clb_tiles *tiles);

  /* A row of n activations as words of two bfloat16, as linear_pairs or linear_tiles takes them, and at its end whether
   * that is exact and nothing too small (clb_paired); if not, the words are anything. */
  void (*pair_up)(const float *x, int n, void *row);

  /* One row as linear_i8 and linear_i4 take it, in groups like the weights': int16 and a float scale (I8), or int8, a
   * float scale and scale x sum (I4). groups may be where x is. */
  void (*quantize)(clb_dtype dtype, const float *x, int n_inputs, void *groups);

  /* panel[i][j] = w[j * row_stride + i] for j < n_columns <= CLB_PANEL, 0 beyond; i < k. */
  void (*transpose_f32)(const float *w, ptrdiff_t row_stride, int n_columns, int k, float *panel);

  /* One group of an I8 or I4 panel from w[n_inputs][CLB_PANEL], whole chunks. */
  void (*pack_group)(clb_dtype dtype, const float *w, int n_inputs, float base, uint8_t *to);

  /* Panels of k inputs from first, as linear_f32 and linear_bf16 take them, from weights that lie otherwise, at any
   * address: output j's input i at outputs[j] + i * input_stride bytes. first is even, and k but for the last inputs.
   * Where each output's inputs are side by side, next[panel] is where memory begins that is wanted soon: the calls over
   * all inputs together ask for a panel's bytes from there. It need not be readable. NULL asks for nothing. */
  void (*fill_panels)(clb_dtype dtype, const char *const *outputs, int n_panels, ptrdiff_t input_stride, int first,
                      int k, const char *const *next, void *panels);

  /* rows[i][0..16) from the IEEE 754 half-precision columns 0 8 1 9 2 10 ... of halves[i], which may be the second half
   * of the same memory. */
  void (*widen_f16)(const uint16_t *halves, int n_rows, float *rows);

  /* Goes on with c[r][0..8) by all k inputs of eight outputs, which lie as for fill_panels, each output's side by
   * side; n_rows is 1 or CLB_IN_PLACE_ROWS. _blocks: bfloat16 in blocks. NULL: not here. */
  clb_linear_in_place linear_in_place_f32, linear_in_place_bf16, linear_in_place_blocks;

  /* Goes on with sums[o][0..8) by all k inputs of n_outputs float32 weights, a multiple of 8, over eight lanes of x,
   * which has as many at every x_stride bytes. What linear_f32 does with half a panel. NULL: not here. */
  void (*linear_eight)(const float *const *weights, int n_outputs, int k, const char *x, ptrdiff_t x_stride,
                       float *sums, ptrdiff_t lds);

  /* h[r][16 p + j] from t: gated, t holds panels gate, up, gate, up, ... and n_panels is even; else t is the gate. */
  void (*activate_f32)(const clb_activation_rule *rule, const float *t, int n_rows, ptrdiff_t ldt, int n_panels,
                       float *h, ptrdiff_t ldh);

  /* Rounds x[r][0..n), n a multiple of CLB_PANEL, to bfloat16, and to 0 what pairs could not hold; where there is a
   * pair_up, row r's words go to pairs + r * pairs_bytes. */
  void (*narrow_f32)(float *x, int n_rows, ptrdiff_t ldx, int n, char *pairs, ptrdiff_t pairs_bytes);

  /* y[j] = fma(w, t[j], y[j]) for j < n. */
  void (*accumulate_f32)(float w, const float *t, int n, float *y);

  /* out[t][e] = softmax over e of logits[t][e]; the sum runs over ascending e. ldl is a multiple of CLB_PANEL, or
   * n_columns is a multiple of 8. */
  void (*softmax_f32)(clb_exp_kind gating, const float *logits, ptrdiff_t ldl, int n_columns, int n_tokens, float *out,
                      ptrdiff_t ldo);

  /* Sigmoid or sqrt(softplus) of n logits, a multiple of CLB_PANEL. */
  void (*score_f32)(clb_gate_kind kind, const float *logits, int n, float *scores);

  /* ids[t][0..K) by falling logit, ties to the lower id; weights[t][0..K). Stops at the first token with a logit
   * that is not finite and returns its index, else returns -1. ldl as in softmax_f32. */
  ptrdiff_t (*gate_f32)(const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl, int n_tokens, int32_t *ids,
                        float *weights);

  /* n_rounds of independent chains x = x sink[0] + sink[1] in registers, written to sink (CLB_PANEL floats) at the end.
   * Returns the floating-point operations of a round. */
  int (*peak_f32)(int n_rounds, float *sink);
} clb_kernels;

/* The name of a kernel where CLB_ISA says whose it is: clb_<op>_<type>_<isa>. */
#define CLB_JOIN_(a, b) a##b
#define CLB_JOIN(a, b) CLB_JOIN_(a, b)
#define KERNEL(op) CLB_JOIN(clb_##op##_, CLB_ISA)

/* isa.c */
const clb_kernels *clb_kernels_by_name(const char *isa); /* NULL: unknown, or this processor cannot run it */
const clb_kernels *clb_kernels_best(void);
const char *const *clb_isa_names(void); /* every instruction set in this build, ending in NULL */

/* memory.c: 64-byte aligned (2 MiB aligned from 2 MiB on); NULL where there is no memory. */
void *clb_alloc(size_t bytes);
void clb_free(void *memory, size_t bytes); /* as many as asked for */

/* mapping.c: pages of files that may be cut short. A region of at most 16,384, or -1: there is no room to watch it. */
int clb_watch(const void *start, size_t n_bytes);
void clb_unwatch(int region);
int clb_lost(int region); /* whether pages of it were gone when they were read, and zeros were read instead */

/* float_mode.c: round to nearest and keep denormals on this thread, whatever another library has set. Returns what was
 * set before, for clb_restore_float_mode. */
int clb_float_mode(void);
void clb_restore_float_mode(int before);

/* pool.c: run task(arg, index, worker) for index < n_tasks on the caller and up to max_threads - 1 pool threads;
 * worker < max_threads is unique among the threads at work on this call. Returns when every task is done. */
typedef void (*clb_task)(void *arg, int index, int worker);
void clb_pool_reserve(int n_threads); /* start the threads that calls of this width need */
void clb_pool_run(clb_task task, void *arg, int n_tasks, int max_threads);
/* Runs member(arg) on the caller and up to n_threads - 1 others, and returns when all are done: GOMP_parallel's type.
 */
typedef void (*clb_team)(void (*member)(void *arg), void *arg, unsigned n_threads, unsigned flags);
void clb_pool_borrow(clb_team team); /* what this thread's calls run on from now on; NULL: the pool */

/* route.c: hidden states -> logits -> experts. */
typedef struct {
  const float *x; /* [n_tokens] rows of hidden_size floats */
  ptrdiff_t x_stride;
  int n_tokens, hidden_size;
  const float *table; /* [hidden_size][width], width = experts padded to CLB_PANEL */
  const float *bias;  /* [width] */
  int width;
  clb_gate_rule rule;
  float *logits; /* [n_tokens][width], or NULL: not kept */
  int32_t *ids;  /* [n_tokens][top_k], or NULL: logits alone */
  float *weights;
} clb_route_job;
/* Returns the first token whose logits are not finite, or -1. */
ptrdiff_t clb_route_batch(const clb_kernels *k, const clb_route_job *job, int n_threads);
/* Chooses again from job->logits, which the caller has changed. */
ptrdiff_t clb_choose(const clb_kernels *k, const clb_route_job *job);

/* score.c: gates that choose by scores. scores[t][e] from logits[t][e], both of row stride ldl, a multiple of
 * CLB_PANEL; of columns beyond the experts, anything. */
void clb_scores(const clb_kernels *k, const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl, int n_tokens,
                float *scores);
/* What one token's experts are chosen by; -INFINITY: not at all. Returns 0 where a logit is not finite. */
int clb_choices(const clb_gate_rule *rule, const float *logits, const float *scores, float *choice);
void clb_score_weights(const clb_gate_rule *rule, const float *scores, const int32_t *ids, float *weights);
/* gate_f32's contract; ids by falling choice. */
ptrdiff_t clb_gate_by_score(const clb_kernels *k, const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl,
                            int n_tokens, int32_t *ids, float *weights);

/* isa_scalar.c: the weights of one token's experts, however they were chosen; gate_f32's bits. */
void clb_gate_weights(const clb_gate_rule *rule, const float *logits, const int32_t *ids, float *weights);

/* router_builtin.c: [hidden_size][width] in read-only data. */
typedef struct {
  const float *table;
  int hidden_size, width;
} clb_router_table;
extern const clb_router_table clb_builtin_router;

/* balance.c: the state of load balancing (balance.py has the rule). Fixed point: one routing weight w is round(w *
 * 2^24). */
typedef struct {
  int n_experts, window, position;
  int32_t *ring; /* [window][n_experts] */
  int64_t *sums; /* [n_experts], the sum of each expert's ring */
  double threshold;
  int candidates;
  int prefer_emptiest;
} clb_balancer;
void clb_balance(const clb_kernels *k, clb_balancer *state, const clb_gate_rule *rule, const float *logits,
                 ptrdiff_t ldl, ptrdiff_t n_tokens, int32_t *ids, float *weights);

/* noise.c: adds temperature * Gumbel(0, 1) to each logit, tokens in order, experts in order. */
void clb_seed(uint64_t seed, uint64_t state[2]);
void clb_gumbel(uint64_t state[2], float temperature, float *logits, ptrdiff_t ldl, int n_experts, ptrdiff_t n_tokens);

/* dispatch.c: one counting sort. order[0..n) lists the slots with an expert, by expert, then by slot;
 * offsets[e]..offsets[e+1] are expert e's. Ids are -1 (skipped) or in 0..n_experts-1. */
void clb_dispatch(const int32_t *ids, int n_slots, int n_experts, int32_t *offsets, int32_t *order);

/* pack.c: weights into panels. Strided source: output column j, input i of w at w[j * output_stride + i *
 * input_stride]. Panel p goes to panels + p * panel_stride bytes, its base (I4) to bases[p * base_stride]. Quantised
 * types choose each group's scale (and zero) to make the squared error small. */
size_t clb_panel_bytes(clb_dtype dtype, int n_inputs);
size_t clb_row_bytes(clb_dtype dtype, int n_inputs); /* of one row of activations as linear_<dtype> takes it */
void clb_pack_panels(const clb_kernels *k, clb_dtype dtype, const float *w, ptrdiff_t output_stride,
                     ptrdiff_t input_stride, int n_outputs, int n_inputs, void *panels, ptrdiff_t panel_stride,
                     float *bases, ptrdiff_t base_stride, int n_threads);

/* pairs.c: rows that pair_up has made of n activations. */
size_t clb_pairs_bytes(int n);
int clb_paired(const void *row, int n);
/* Whether linear_pairs and linear_tiles, as far as they are there, give linear_bf16's bits on this processor. */
int clb_pairs_are_blocks(const clb_kernels *k);

/* experts.c */

/* Where one projection's weights and biases are. In place (F32, BF16, F16): output j, input i at j * output + i * input
 * bytes, the up projection of a gated expert up bytes behind the gate. Else in [panels] over the inputs; gated: gate,
 * up, gate, up, ... Bias j is at j * bias bytes, up's at up_bias further, of the type `biases`: CLB_F32, or in place
 * CLB_BF16 or CLB_F16. */
typedef struct {
  int in_place;
  clb_dtype biases;
  ptrdiff_t output, input, up, bias, up_bias;
} clb_place;

typedef struct {
  const void *up;
  const void *up_bias; /* or NULL */
  const void *down;
  const void *down_bias;
  const float *up_bases, *down_bases; /* I4: one a panel */
  clb_place up_place, down_place;
} clb_expert_pointers;

typedef struct {
  int hidden_size, intermediate_size;
  clb_dtype dtype;
  clb_activation_rule rule;
  int narrow_states; /* BF16: intermediate states are rounded by narrow_f32 */
} clb_experts_shape;

typedef struct {
  const clb_experts_shape *shape;
  const clb_expert_pointers *experts; /* by id; those without slots are not looked at */
  int n_tokens, top_k;
  const int32_t *offsets, *order; /* from clb_dispatch */
  const float *slot_weights;      /* [n_tokens * top_k] */
  const float *x;
  ptrdiff_t x_stride;
  float *y; /* [n_tokens][hidden_size]; each expert's weighted output is added by ascending expert id */
  ptrdiff_t y_stride;
  void *inputs;      /* scratch: n_tokens * clb_input_bytes() */
  void *activations; /* scratch: clb_states_bytes() of n_tokens * top_k slots */
  char *lanes;       /* scratch: clb_lanes_bytes() a thread, right behind activations, which are overread; or NULL */
} clb_experts_job;
/* Points into a payload, unless it is NULL: panels up, panels down, int4's bases likewise, and where biased both
 * biases. Returns its bytes. */
size_t clb_lay_out(const clb_experts_shape *shape, int biased, const char *payload, clb_expert_pointers *e);
size_t clb_up_panels(const clb_experts_shape *shape);
size_t clb_down_panels(const clb_experts_shape *shape);
size_t clb_input_bytes(const clb_experts_shape *shape); /* one token's input as weights want it, or 0: as it is */
/* Of the intermediate states that are held at once: of n_slots slots, or of as many as there are room for. */
size_t clb_states_bytes(const clb_experts_shape *shape, size_t n_slots);
size_t clb_lanes_bytes(const clb_experts_shape *shape); /* of a block of rows in lanes (lanes.c) */
/* Whether a call with so many slots might put rows in lanes, some experts being in place. */
int clb_lanes_wanted(const clb_kernels *k, const clb_experts_shape *shape, int in_place, size_t n_slots);
/* Quantises or pairs up x where the weights want that. Before the first clb_experts_add of a job. */
void clb_experts_begin(const clb_kernels *k, const clb_experts_job *job, int n_threads);
/* Adds experts begin..end-1 to y. */
void clb_experts_add(const clb_kernels *k, const clb_experts_job *job, int begin, int end, int n_threads);

/* model.c: the two ends of a token classifier. */
typedef struct {
  const int32_t *ids;
  int n_tokens;
  const float *embedding; /* [vocab_size][hidden_size] */
  int hidden_size, context;
  const float *mixer; /* [2 context + 1][panels][hidden_size][16] */
  const float *zeros; /* [hidden_size] */
  float *x;           /* [n_tokens][hidden_size] */
} clb_mix_job;
void clb_mix_context(const clb_kernels *k, const clb_mix_job *job, int n_threads);

typedef struct {
  const float *h; /* [n_tokens][hidden_size] */
  int n_tokens, hidden_size, n_classes;
  const float *panels, *bias; /* [panels][hidden_size][16], [16 panels] */
  float *probabilities;       /* [n_tokens][n_classes] */
  int32_t *classes;           /* [n_tokens], the largest logit; ties to the lower class */
} clb_head_job;
/* Returns the first token whose logits are not finite, or -1. */
ptrdiff_t clb_head(const clb_kernels *k, const clb_head_job *job, int n_threads);

/* timing.c: sample i is the time of n_calls calls one after the other, and of one clock read. */
typedef struct {
  double *ns; /* [n_samples] */
  int n_samples, n_calls;
} clb_samples;
void clb_time_clock(double *ns, int n_samples); /* clock reads alone */
/* Each call routes the next n_tokens of the batch, which has at least as many. */
void clb_time_route(const clb_kernels *k, const clb_route_job *batch, int n_tokens, const clb_samples *s);
/* logits and out are [n_tokens][n_columns]. */
void clb_time_softmax(const clb_kernels *k, clb_exp_kind gating, const float *logits, int n_columns, int n_tokens,
                      float *out, const clb_samples *s);
/* Each call sorts the slots of one token, the next of n_tokens. */
void clb_time_dispatch(const int32_t *ids, int n_tokens, int top_k, int n_experts, int32_t *offsets, int32_t *order,
                       const clb_samples *s);
void clb_time_expert(const clb_kernels *k, const clb_experts_job *job, int expert, const clb_samples *s);

/* How long the calling thread was in linear_f32, linear_in_place_f32 and linear_eight, and in fill_panels, clock reads
 * included. */
typedef struct {
  int64_t linear_ns, linear_calls, fill_ns, fill_calls;
} clb_meter;
/* Returns k's kernels with a meter, set to 0, around those; the table is good until the next start. */
const clb_kernels *clb_meter_start(const clb_kernels *k);
clb_meter clb_meter_read(void);

int clb_sanitized(void); /* whether this build has the address sanitizer */

/* What this machine can do: fused multiply-adds by peak_f32 on n_threads at once, and bytes read per ns from memory,
 * the best of several loops, each by the median of n_tries; n_bytes, at least a page a thread, are overwritten. */
double clb_peak_gflops(const clb_kernels *k, int n_threads);
double clb_read_bandwidth(char *memory, size_t n_bytes, int n_threads, int n_tries);

#endif
