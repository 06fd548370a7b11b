/* Level 2 of the routing: a window over the last tokens keeps any expert from running hot.
 *
 * The state is integers alone (one routing weight is round(w * 2^24)), so sums never drift and a saved state goes on
 * exactly. Tokens are taken in order: each choice depends on all before it. */
#include <math.h>

#include "insert.h"
#include "kernels.h"

static int overloaded(const clb_balancer *s, int e, int64_t total) {
  return (double)s->sums[e] * s->n_experts > s->threshold * (double)total;
}

/* As insert, by rising ring sum and rising id. */
static int insert_by_load(int32_t *list, int n, int limit, int e, const int64_t *sums) {
  int at = n;
  while (at > 0 && (sums[e] < sums[list[at - 1]] || (sums[e] == sums[list[at - 1]] && e < list[at - 1]))) at--;
  if (at == limit) return n;
  int last = n < limit ? n : limit - 1;
  for (int j = last; j > at; j--) list[j] = list[j - 1];
  list[at] = e;
  return n < limit ? n + 1 : n;
}

/* by: the logits, or what a gate chooses by instead; -INFINITY keeps an expert out. At least top_k are not out. */
static void choose(const clb_balancer *s, const float *by, int top_k, int32_t *chosen) {
  int n_experts = s->n_experts, n_candidates = 0, n_left = 0;
  int32_t candidates[CLB_MAX_EXPERTS], left[CLB_MAX_EXPERTS];
  int64_t total = 0;
  for (int e = 0; e < n_experts; e++) {
    total += s->sums[e];
    if (by[e] > -INFINITY) n_candidates = insert_next(candidates, n_candidates, s->candidates, e, by);
  }
  for (int c = 0; c < n_candidates; c++)
    if (!overloaded(s, candidates[c], total)) left[n_left++] = candidates[c];

  int32_t taken[CLB_MAX_EXPERTS];
  int n_taken = 0;
  if (n_left >= top_k) {
    for (int c = 0; c < n_left; c++)
      n_taken = s->prefer_emptiest ? insert_by_load(taken, n_taken, top_k, left[c], s->sums)
                                   : insert(taken, n_taken, top_k, left[c], by);
  } else {
    /* Too few: the next best that are not overloaded, then the least loaded of the rest. */
    unsigned char is_taken[CLB_MAX_EXPERTS] = {0};
    int missing = top_k - n_left, n_more = 0;
    int32_t more[CLB_MAX_EXPERTS];
    for (int c = 0; c < n_left; c++) taken[n_taken++] = left[c], is_taken[left[c]] = 1;
    for (int e = 0; e < n_experts; e++)
      if (by[e] > -INFINITY && !is_taken[e] && !overloaded(s, e, total))
        n_more = insert_next(more, n_more, missing, e, by);
    for (int c = 0; c < n_more; c++) taken[n_taken++] = more[c], is_taken[more[c]] = 1;
    missing -= n_more, n_more = 0;
    for (int e = 0; missing > 0 && e < n_experts; e++)
      if (by[e] > -INFINITY && !is_taken[e]) n_more = insert_by_load(more, n_more, missing, e, s->sums);
    for (int c = 0; c < n_more; c++) taken[n_taken++] = more[c];
  }
  int n_chosen = 0;
  for (int c = 0; c < top_k; c++) n_chosen = insert(chosen, n_chosen, top_k, taken[c], by);
}

static void push(clb_balancer *s, const int32_t *chosen, const float *shares, int top_k) {
  int32_t *entry = s->ring + (ptrdiff_t)s->position * s->n_experts;
  for (int e = 0; e < s->n_experts; e++) s->sums[e] -= entry[e], entry[e] = 0;
  for (int j = 0; j < top_k; j++) {
    entry[chosen[j]] = (int32_t)lrintf(shares[j] * 16777216.0f); /* exact product; to nearest, ties to even */
    s->sums[chosen[j]] += entry[chosen[j]];
  }
  s->position = (s->position + 1) % s->window;
}

static void weigh(const clb_gate_rule *rule, const float *logits, const float *scores, const int32_t *ids,
                  float *weights) {
  if (rule->by_score) clb_score_weights(rule, scores, ids, weights);
  else clb_gate_weights(rule, logits, ids, weights);
}

void clb_balance(const clb_kernels *k, clb_balancer *state, const clb_gate_rule *rule, const float *logits,
                 ptrdiff_t ldl, ptrdiff_t n_tokens, int32_t *ids, float *weights) {
  clb_gate_rule renormalised = *rule;
  renormalised.renormalize = 1, renormalised.scale = 1.0f;
  for (ptrdiff_t t = 0; t < n_tokens; t++, logits += ldl, ids += rule->top_k, weights += rule->top_k) {
    float share[CLB_MAX_EXPERTS], scores[CLB_MAX_EXPERTS], choice[CLB_MAX_EXPERTS];
    if (rule->by_score) {
      clb_scores(k, rule, logits, ldl, 1, scores);
      clb_choices(rule, logits, scores, choice);
    }
    choose(state, rule->by_score ? choice : logits, rule->top_k, ids);
    weigh(rule, logits, scores, ids, weights);
    weigh(&renormalised, logits, scores, ids, share);
    push(state, ids, share, rule->top_k);
  }
}
