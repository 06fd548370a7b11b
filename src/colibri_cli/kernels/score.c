/* Gates that choose by scores: through a sigmoid, with a correction that only chooses, or within groups of experts.
 *
 * A row's scores come from the instruction set's kernels. What is left, a few comparisons an expert, takes little
 * beside the logits of such a layer, so it is written once, in plain C. */
#include <math.h>
#include <string.h>

#include "insert.h"
#include "kernels.h"

enum { SCORES_PER_BLOCK = 4096 }; /* on the stack: at least four rows */

static uint32_t magnitude(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff; /* 0x7f800000 and above: infinite or NaN */
}

void clb_scores(const clb_kernels *k, const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl, int n_tokens,
                float *scores) {
  if (rule->kind == CLB_SOFTMAX_TOPK) k->softmax_f32(rule->gating, logits, ldl, rule->n_experts, n_tokens, scores, ldl);
  else k->score_f32(rule->kind, logits, n_tokens * (int)ldl, scores);
}

static void mask_groups(const clb_gate_rule *rule, float *choice) {
  int size = rule->n_experts / rule->n_groups, n_kept = 0;
  float worth[CLB_MAX_EXPERTS];
  int32_t kept[CLB_MAX_EXPERTS];
  unsigned char is_kept[CLB_MAX_EXPERTS] = {0};
  for (int g = 0; g < rule->n_groups; g++) {
    float best = -INFINITY, second = -INFINITY;
    for (int e = g * size; e < (g + 1) * size; e++) {
      float x = choice[e], lower = x < best ? x : best; /* no branches: they would be guessed wrong */
      second = lower > second ? lower : second;
      best = x > best ? x : best;
    }
    worth[g] = rule->group_sums ? best + second : best;
    n_kept = insert_next(kept, n_kept, rule->top_groups, g, worth);
  }
  for (int i = 0; i < n_kept; i++) is_kept[kept[i]] = 1;
  for (int g = 0; g < rule->n_groups; g++)
    for (int e = g * size; !is_kept[g] && e < (g + 1) * size; e++) choice[e] = rule->masked;
}

int clb_choices(const clb_gate_rule *rule, const float *logits, const float *scores, float *choice) {
  const float *from = rule->kind == CLB_TOPK_SIGMOID ? logits : scores;
  uint32_t largest = 0;
  for (int e = 0; e < rule->n_experts; e++) {
    choice[e] = from[e] + rule->correction[e];
    uint32_t logit = magnitude(logits[e]), sum = magnitude(choice[e]);
    uint32_t larger = logit > sum ? logit : sum;
    largest = larger > largest ? larger : largest;
  }
  if (largest >= 0x7f800000) return 0;
  if (rule->top_groups < rule->n_groups) mask_groups(rule, choice);
  return 1;
}

void clb_score_weights(const clb_gate_rule *rule, const float *scores, const int32_t *ids, float *weights) {
  float sum = 0.0f;
  for (int j = 0; j < rule->top_k; j++) sum += weights[j] = scores[ids[j]];
  float divisor = rule->renormalize ? sum + rule->epsilon : 1.0f;
  for (int j = 0; j < rule->top_k; j++) weights[j] = weights[j] / divisor * rule->scale;
}

ptrdiff_t clb_gate_by_score(const clb_kernels *k, const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl,
                            int n_tokens, int32_t *ids, float *weights) {
  float scores[SCORES_PER_BLOCK], choice[CLB_MAX_EXPERTS];
  int rows = SCORES_PER_BLOCK / (int)ldl;
  for (int t = 0; t < n_tokens; t++, logits += ldl, ids += rule->top_k, weights += rule->top_k) {
    float *row = scores + t % rows * ldl;
    if (row == scores) clb_scores(k, rule, logits, ldl, n_tokens - t < rows ? n_tokens - t : rows, scores);
    if (!clb_choices(rule, logits, row, choice)) return t;
    for (int e = 0, n = 0; e < rule->n_experts; e++) n = insert_next(ids, n, rule->top_k, e, choice);
    clb_score_weights(rule, row, ids, weights);
  }
  return -1;
}
