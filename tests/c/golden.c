/* Every kernel of every instruction set in this build, over odd sizes, as one hash each: the same on every machine.
 *
 * usage: golden          prints "<instruction set> <hash>" a line
 *
 * Built from the kernels alone, so that it runs where Python does not: natively, and for Arm under qemu-user. Inputs
 * come from a xorshift in integers; the hash is FNV-1a over the output bytes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

enum { ROWS = 13, MOST_INPUTS = 100, MOST_PANELS = 4 };

static uint64_t state, hash;

static float number(void) { /* a multiple of 2^-21 in (-2, 2) */
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (float)((int64_t)(state >> 42) - (1 << 21)) / (1 << 20);
}

static void add(const void *data, size_t n_bytes) {
  for (size_t i = 0; i < n_bytes; i++) hash = (hash ^ ((const unsigned char *)data)[i]) * UINT64_C(1099511628211);
}

static void add_linear(const clb_kernels *k, clb_dtype dtype, int n_rows, int n_inputs, int n_panels) {
  clb_linear linear[] = {k->linear_f32, k->linear_bf16, k->linear_i8, k->linear_i4};
  int quantised = dtype == CLB_I8 || dtype == CLB_I4;
  int n_outputs = n_panels * CLB_PANEL - 3;
  size_t panel_bytes = clb_panel_bytes(dtype, n_inputs), row_bytes = clb_row_bytes(dtype, n_inputs);
  float x[ROWS][MOST_INPUTS], w[MOST_PANELS * CLB_PANEL][MOST_INPUTS], init[MOST_PANELS * CLB_PANEL];
  float bases[MOST_PANELS] = {0};
  float c[ROWS][MOST_PANELS * CLB_PANEL];
  const float *rows[ROWS];
  char *panels = calloc((size_t)n_panels, panel_bytes), *quants = calloc((size_t)n_rows, row_bytes);
  for (int r = 0; r < n_rows; r++)
    for (int i = 0; i < n_inputs; i++) x[r][i] = number();
  for (int j = 0; j < n_outputs; j++)
    for (int i = 0; i < n_inputs; i++) w[j][i] = number();
  for (int j = 0; j < n_panels * CLB_PANEL; j++) init[j] = number();
  clb_pack_panels(k, dtype, &w[0][0], MOST_INPUTS, 1, n_outputs, n_inputs, panels, (ptrdiff_t)panel_bytes, bases, 1, 1);
  add(panels, (size_t)n_panels * panel_bytes), add(bases, sizeof bases);
  for (int r = 0; r < n_rows; r++) {
    rows[r] = x[r];
    if (quantised) {
      k->quantize(dtype, x[r], n_inputs, quants + r * row_bytes);
      rows[r] = (const float *)(quants + r * row_bytes);
    }
  }
  clb_input a = {.rows = rows, .n_segments = 1, .k = n_inputs};
  ptrdiff_t row_stride = CLB_PANEL * (dtype == CLB_BF16 ? sizeof(uint16_t) : sizeof(float));
  clb_panels b = {.data = panels, .panel_stride = (ptrdiff_t)panel_bytes, .row_stride = row_stride, .bases = bases};
  linear[dtype](&a, n_rows, &b, n_panels, init, &c[0][0], MOST_PANELS * CLB_PANEL);
  for (int r = 0; r < n_rows; r++) add(c[r], (size_t)n_panels * CLB_PANEL * sizeof(float));
  if (dtype == CLB_BF16) {
    a.in_blocks = 1;
    k->linear_bf16(&a, n_rows, &b, n_panels, init, &c[0][0], MOST_PANELS * CLB_PANEL);
    for (int r = 0; r < n_rows; r++) add(c[r], (size_t)n_panels * CLB_PANEL * sizeof(float));
  }
  free(panels), free(quants);
}

static void add_activations(const clb_kernels *k, int n_rows) {
  float t[ROWS][4 * CLB_PANEL], h[ROWS][4 * CLB_PANEL];
  for (int kind = CLB_RELU; kind <= CLB_GELU_TANH; kind++)
    for (int gated = 0; gated < 2; gated++)
      for (int clamped = 0; clamped < 2; clamped++) {
        clb_activation_rule rule = {(clb_activation)kind, gated, clamped ? 1.702f : 1.0f, clamped ? 1.0f : 0.0f,
                                    clamped ? 7.0f : INFINITY};
        for (int r = 0; r < n_rows; r++)
          for (int j = 0; j < 4 * CLB_PANEL; j++) t[r][j] = number() * (j % 5 ? 3.0f : 40.0f);
        k->activate_f32(&rule, &t[0][0], n_rows, 4 * CLB_PANEL, 4, &h[0][0], 4 * CLB_PANEL);
        for (int r = 0; r < n_rows; r++) add(h[r], (gated ? 2 : 4) * CLB_PANEL * sizeof(float));
      }
}

static void add_gate(const clb_kernels *k, int n_rows, int n_experts, int top_k) {
  float logits[ROWS][4 * CLB_PANEL] = {{0}}, weights[ROWS * 4 * CLB_PANEL], out[ROWS][4 * CLB_PANEL];
  int32_t ids[ROWS * 4 * CLB_PANEL];
  for (int r = 0; r < n_rows; r++)
    for (int e = 0; e < n_experts; e++) logits[r][e] = floorf(number() * 64.0f) / 16.0f; /* with ties */
  for (int variant = 0; variant < 8; variant++) {
    clb_gate_rule rule = {.n_experts = n_experts,
                          .top_k = top_k,
                          .kind = (clb_gate_kind)(variant & 1),
                          .gating = (clb_exp_kind)(variant >> 1 & 1),
                          .renormalize = variant >> 2,
                          .scale = 1.0f};
    k->gate_f32(&rule, &logits[0][0], 4 * CLB_PANEL, n_rows, ids, weights);
    add(ids, (size_t)(n_rows * top_k) * sizeof *ids), add(weights, (size_t)(n_rows * top_k) * sizeof *weights);
  }
  for (int gating = CLB_EXACT; gating <= CLB_TAYLOR; gating++) {
    k->softmax_f32((clb_exp_kind)gating, &logits[0][0], 4 * CLB_PANEL, n_experts, n_rows, &out[0][0], 4 * CLB_PANEL);
    for (int r = 0; r < n_rows; r++) add(out[r], (size_t)n_experts * sizeof(float));
  }
}

static void add_gate_by_score(const clb_kernels *k, int n_rows, int n_experts, int top_k) {
  enum { WIDTH = 4 * CLB_PANEL };
  float logits[ROWS][WIDTH] = {{0}}, correction[WIDTH] = {0}, weights[ROWS * WIDTH];
  int32_t ids[ROWS * WIDTH];
  for (int e = 0; e < n_experts; e++) correction[e] = floorf(number() * 16.0f) / 16.0f;
  for (int r = 0; r < n_rows; r++)
    for (int e = 0; e < n_experts; e++) logits[r][e] = floorf(number() * 64.0f) / (r % 3 ? 16.0f : 0.5f);
  int in_groups = n_experts % 4 == 0 && top_k <= n_experts / 2;
  for (int variant = 0; variant < 16; variant++) {
    clb_gate_rule rule = {.n_experts = n_experts,
                          .top_k = top_k,
                          .kind = (clb_gate_kind[]){CLB_SOFTMAX_TOPK, CLB_SIGMOID_TOPK, CLB_SQRTSOFTPLUS_TOPK,
                                                    CLB_TOPK_SIGMOID}[variant & 3],
                          .renormalize = variant >> 2 & 1,
                          .scale = 2.5f,
                          .by_score = 1,
                          .epsilon = 1e-20f,
                          .correction = correction,
                          .n_groups = in_groups ? 4 : 1,
                          .top_groups = in_groups ? 2 : 1,
                          .group_sums = variant >> 3,
                          .masked = variant >> 3 ? -INFINITY : 0.0f};
    clb_gate_by_score(k, &rule, &logits[0][0], WIDTH, n_rows, ids, weights);
    add(ids, (size_t)(n_rows * top_k) * sizeof *ids), add(weights, (size_t)(n_rows * top_k) * sizeof *weights);
  }
}

/* Every half, a panel row at a time, from the memory that the row is written to. Ends the program at a wrong one. */
static void check_widening(const clb_kernels *k) {
  for (int first = 0; first < 1 << 16; first += CLB_PANEL) {
    float row[CLB_PANEL];
    uint16_t halves[CLB_PANEL], *from = (uint16_t *)row + CLB_PANEL;
    for (int j = 0; j < CLB_PANEL; j++) halves[j % 8 * 2 + j / 8] = (uint16_t)(first + j);
    memcpy(from, halves, sizeof halves);
    k->widen_f16(from, 1, row);
    for (int j = 0; j < CLB_PANEL; j++) {
      int half = first + j, exponent = half >> 10 & 31, fraction = half & 1023;
      float value = ldexpf((float)(fraction + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
      if (exponent == 31) value = fraction ? NAN : INFINITY;
      value = copysignf(value, half >> 15 ? -1.0f : 1.0f);
      if (isnan(value) ? isnan(row[j]) : memcmp(&row[j], &value, sizeof value) == 0) continue;
      fprintf(stderr, "%s: half %04x widened to %g\n", k->isa, (unsigned)half, (double)row[j]);
      exit(1);
    }
  }
}

/* Panels filled from rows, from columns, and from a gate's and an up projection's columns in turn are the packed ones,
 * and a chain that is cut goes on. Ends the program where that is not so. */
static void check_in_place(const clb_kernels *k, clb_dtype dtype, int in_blocks, int n_rows, int n_inputs) {
  enum { OUTPUTS = 2 * CLB_PANEL, EIGHT = 8 };
  int size = dtype == CLB_BF16 ? 2 : 4, cut = n_inputs / 2, alike = 1;
  if (in_blocks) cut -= cut % CLB_BLOCK;
  float w[OUTPUTS][MOST_INPUTS], x[ROWS][MOST_INPUTS], init[OUTPUTS], whole[ROWS][OUTPUTS], parts[ROWS][OUTPUTS];
  char lying[3][OUTPUTS * MOST_INPUTS * 4 + 1], packed[OUTPUTS * MOST_INPUTS * 4], filled[OUTPUTS * MOST_INPUTS * 4];
  const float *rows[ROWS], *later[ROWS];
  for (int j = 0; j < OUTPUTS; j++) {
    init[j] = number();
    for (int i = 0; i < n_inputs; i++) {
      uint32_t bits;
      w[j][i] = number();
      memcpy(&bits, &w[j][i], 4);
      if (size == 2) bits &= 0xffff0000;
      memcpy(&w[j][i], &bits, 4);
      const char *value = (const char *)&bits + 4 - size;
      int turn = j % CLB_PANEL * 2 + j / CLB_PANEL; /* gate 0, up 0, gate 1, ... */
      memcpy(lying[0] + 1 + (j * n_inputs + i) * size, value, (size_t)size);
      memcpy(lying[1] + 1 + (i * OUTPUTS + j) * size, value, (size_t)size);
      memcpy(lying[2] + 1 + (i * OUTPUTS + turn) * size, value, (size_t)size);
    }
  }
  ptrdiff_t panel_bytes = (ptrdiff_t)clb_panel_bytes(dtype, n_inputs);
  clb_pack_panels(k, dtype, &w[0][0], MOST_INPUTS, 1, OUTPUTS, n_inputs, packed, panel_bytes, NULL, 0, 1);
  for (int way = 0; way < 3; way++) {
    const char *outputs[OUTPUTS], *next[2] = {lying[way], lying[way]};
    for (int j = 0; j < OUTPUTS; j++) {
      int place = way == 0 ? j * n_inputs : way == 1 ? j : j % CLB_PANEL * 2 + j / CLB_PANEL;
      outputs[j] = lying[way] + 1 + place * size;
    }
    k->fill_panels(dtype, outputs, 2, way == 0 ? size : OUTPUTS * size, 0, n_inputs, next, filled);
    alike &= memcmp(filled, packed, 2 * (size_t)panel_bytes) == 0;
  }
  for (int r = 0; r < n_rows; r++) {
    for (int i = 0; i < n_inputs; i++) x[r][i] = number();
    rows[r] = x[r], later[r] = x[r] + cut;
  }
  clb_linear linear = dtype == CLB_BF16 ? k->linear_bf16 : k->linear_f32;
  clb_panels b = {.data = packed, .panel_stride = panel_bytes, .row_stride = CLB_PANEL * size};
  clb_input all = {.rows = rows, .n_segments = 1, .k = n_inputs, .in_blocks = in_blocks}, first = all, rest = all;
  first.k = cut, rest.rows = later, rest.k = n_inputs - cut;
  linear(&all, n_rows, &b, 2, init, &whole[0][0], OUTPUTS);
  linear(&first, n_rows, &b, 2, init, &parts[0][0], OUTPUTS);
  b.data = packed + cut * CLB_PANEL * size;
  linear(&rest, n_rows, &b, 2, NULL, &parts[0][0], OUTPUTS);
  alike &= memcmp(whole, parts, (size_t)n_rows * sizeof *whole) == 0;
  for (int r = 0; r < n_rows; r++) memcpy(parts[r], init, sizeof init);
  clb_linear_in_place in_place = in_blocks           ? k->linear_in_place_blocks
                                 : dtype == CLB_BF16 ? k->linear_in_place_bf16
                                                     : k->linear_in_place_f32;
  for (int p = 0; p < OUTPUTS && in_place; p += EIGHT) {
    const char *outputs[EIGHT];
    for (int j = 0; j < EIGHT; j++) outputs[j] = lying[0] + 1 + (p + j) * n_inputs * size;
    for (int r = 0, n; r < n_rows; r += n) {
      n = n_rows - r < CLB_IN_PLACE_ROWS ? 1 : CLB_IN_PLACE_ROWS;
      in_place(rows + r, n, outputs, n_inputs, &parts[r][p], OUTPUTS);
    }
  }
  if (in_place) alike &= memcmp(whole, parts, (size_t)n_rows * sizeof *whole) == 0;
  if (!alike) {
    fprintf(stderr, "%s, dtype %d, %d rows, %d inputs: not the packed bits\n", k->isa, dtype, n_rows, n_inputs);
    exit(1);
  }
}

/* Pairs of inputs give what one after the other gives, and so do tiles; pairs stop before a panel whose weights are too
 * small for it, and tiles do nothing there. */
static void check_pairs(const clb_kernels *k, int n_rows, int n_inputs) {
  enum { PANELS = 5, OUTPUTS = PANELS * CLB_PANEL };
  float x[ROWS][MOST_INPUTS], init[OUTPUTS], chains[ROWS][OUTPUTS], sums[ROWS][OUTPUTS];
  uint16_t w[OUTPUTS * MOST_INPUTS];
  char pairs[ROWS][MOST_INPUTS * sizeof(uint16_t) + sizeof(uint32_t)];
  const float *rows[ROWS], *paired[ROWS];
  int alike = 1, panel_bytes = n_inputs * CLB_PANEL * (int)sizeof *w;
  for (int i = 0; i < n_inputs * OUTPUTS; i++) w[i] = (uint16_t)(0x3c00 + (int)(number() * 255.0f));
  for (int j = 0; j < OUTPUTS; j++) init[j] = number();
  for (int r = 0; r < n_rows; r++) {
    for (int i = 0; i < n_inputs; i++) x[r][i] = rintf(number() * 64.0f) / (float)(1 << i % 8);
    k->pair_up(x[r], n_inputs, pairs[r]);
    alike &= clb_paired(pairs[r], n_inputs);
    rows[r] = x[r], paired[r] = (const float *)pairs[r];
  }
  int whole = n_inputs - n_inputs % CLB_BLOCK;
  clb_input a = {.rows = rows, .n_segments = 1, .k = whole, .in_blocks = 1}, b = a;
  b.rows = paired;
  clb_panels panels = {.data = w, .panel_stride = panel_bytes, .row_stride = CLB_PANEL * sizeof *w, .streamed = 1};
  k->linear_bf16(&a, n_rows, &panels, PANELS, init, &chains[0][0], OUTPUTS);
  for (int small = 0; small < 2; small++) {
    if (small) w[3 * panel_bytes / (int)sizeof *w + 5] = small = CLB_LEAST_WEIGHT - 1;
    int done = small ? 2 : PANELS / 2 * 2;
    if (k->linear_pairs) alike &= k->linear_pairs(&b, n_rows, &panels, PANELS, init, &sums[0][0], OUTPUTS) == done;
    for (int p = 0; p < PANELS && k->linear_tiles; p += 2)
      for (int in_place = 0; in_place < 2; in_place++) {
        char lanes[MOST_INPUTS / 2 * (ROWS + 16) * sizeof(uint32_t)]; /* which tiles may read beyond the last one */
        uint16_t lying[2 * CLB_PANEL * MOST_INPUTS];
        const char *first = (const char *)w + p * panel_bytes;
        int n = p + 1 < PANELS ? CLB_PANEL - 3 * in_place : 0, too_small = small && p == 2;
        for (int i = 0; i < whole / 2; i++)
          for (int r = 0; r < n_rows; r++) memcpy(lanes + (i * n_rows + r) * 4, pairs[r] + i * 4, 4);
        for (int j = 0; j < (n ? 2 : 1) * CLB_PANEL; j++) /* columns 0 8 1 9 ... */
          for (int i = 0; i < whole; i++)
            lying[j * whole + i] = w[((p + j / CLB_PANEL) * n_inputs + i) * CLB_PANEL + j % 8 * 2 + j / 8 % 2];
        clb_tiles t = {.weights = {first, first + panel_bytes},
                       .next = {first, first},
                       .n_outputs = {CLB_PANEL, n},
                       .k = whole,
                       .n_rows = n_rows,
                       .lanes = lanes,
                       .init = init + p * CLB_PANEL,
                       .c = &sums[0][p * CLB_PANEL],
                       .ldc = OUTPUTS};
        if (in_place) {
          t.weights[0] = (const char *)lying, t.weights[1] = (const char *)(lying + CLB_PANEL * whole);
          t.in_place = 1, t.output = whole * (ptrdiff_t)sizeof *lying;
        }
        alike &= k->linear_tiles(&t) == !too_small;
        for (int r = 0; r < n_rows && !too_small; r++)
          alike &= memcmp(&chains[r][p * CLB_PANEL], &sums[r][p * CLB_PANEL], (CLB_PANEL + n) * sizeof(float)) == 0;
      }
    for (int r = 0; r < n_rows && k->linear_pairs; r++)
      alike &= memcmp(chains[r], sums[r], (size_t)done * CLB_PANEL * sizeof(float)) == 0;
  }
  if (!alike) {
    fprintf(stderr, "%s, %d rows, %d inputs: pairs are not blocks\n", k->isa, n_rows, n_inputs);
    exit(1);
  }
}

int main(void) {
  for (const char *const *name = clb_isa_names(); *name; name++) {
    const clb_kernels *k = clb_kernels_by_name(*name);
    if (!k) continue; /* not on this processor */
    state = UINT64_C(88172645463325252), hash = UINT64_C(14695981039346656037);
    for (int dtype = CLB_F32; dtype <= CLB_I4; dtype++)
      for (int n_rows = 1; n_rows <= ROWS; n_rows++)
        for (int n_panels = 1; n_panels <= MOST_PANELS; n_panels++)
          add_linear(k, (clb_dtype)dtype, n_rows, 1 + (n_rows * 31 + n_panels * 17) % MOST_INPUTS, n_panels);
    for (int n_rows = 1; n_rows <= ROWS; n_rows++) {
      add_activations(k, n_rows);
      for (int n_experts = 1; n_experts <= 4 * CLB_PANEL; n_experts += 7)
        add_gate(k, n_rows, n_experts, 1 + n_rows * 3 % n_experts);
    }
    for (int n_rows = 1; n_rows <= ROWS; n_rows++) {
      for (int n_experts = 1; n_experts <= 4 * CLB_PANEL; n_experts += 7)
        add_gate_by_score(k, n_rows, n_experts, 1 + n_rows * 3 % n_experts);
    }
    for (int n_rows = 1; n_rows <= ROWS; n_rows++)
      for (int n_inputs = 1; n_inputs < MOST_INPUTS; n_inputs += 3)
        for (int way = 0; way < 3; way++) check_in_place(k, way ? CLB_BF16 : CLB_F32, way == 2, n_rows, n_inputs);
    for (int n_rows = 2; k->pair_up && n_rows <= ROWS; n_rows++)
      for (int n_inputs = CLB_BLOCK; n_inputs < MOST_INPUTS; n_inputs += 3) check_pairs(k, n_rows, n_inputs);
    check_widening(k);
    printf("%s %016llx\n", k->isa, (unsigned long long)hash);
  }
  return 0;
}
