/* Softmax and top-k, one token a lane: every step is vertical, so a token's sum over experts is one ascending chain
 * whatever the number of lanes, and no horizontal latency remains. Included by ops.h. */

/* column[e] lane t = logits[t][e], for LANES tokens of which n_tokens exist (zeros beyond). */
static inline __attribute__((always_inline)) void load_columns(const float *logits, ptrdiff_t ldl, int n_columns,
                                                               int n_tokens, vf *column) {
  for (int e = 0; e < n_columns; e += LANES) {
    for (int t = 0; t < LANES; t++) column[e + t] = t < n_tokens ? vf_load(logits + t * ldl + e) : vf_set1(0.0f);
    vf_transpose(column + e);
  }
}

static inline vf exp_of(clb_exp_kind gating, vf x) { return gating == CLB_TAYLOR ? exp_taylor(x) : exp_exact(x); }

/* In two chains: a maximum does not depend on the order, and the exponentials wait for it. */
static inline vf max_of(const vf *column, int n_columns) {
  vf even = column[0], odd = column[n_columns > 1];
  for (int e = 2; e + 1 < n_columns; e += 2) even = vf_max(column[e], even), odd = vf_max(column[e + 1], odd);
  return vf_max(vf_max(even, odd), column[n_columns - 1]);
}

/* e^(x - top) of each lane's columns, scaled to sum to 1. */
static inline __attribute__((always_inline)) void normalise(clb_exp_kind gating, vf *column, int n_columns, vf top) {
  vf sum = vf_set1(0.0f);
  for (int e = 0; e < n_columns; e++) {
    column[e] = exp_of(gating, vf_sub(column[e], top));
    sum = vf_add(sum, column[e]);
  }
  vf scale = vf_div(vf_set1(1.0f), sum);
  for (int e = 0; e < n_columns; e++) column[e] = vf_mul(column[e], scale);
}

static inline __attribute__((always_inline)) void store_columns(vf *column, int n_columns, int n_tokens, float *out,
                                                                ptrdiff_t ldo) {
  for (int e = 0; e < n_columns; e += LANES) {
    vf_transpose(column + e);
    for (int t = 0; t < n_tokens; t++) {
      if (e + LANES <= n_columns) {
        vf_store(out + t * ldo + e, column[e + t]);
      } else {
        float row[LANES];
        vf_store(row, column[e + t]);
        memcpy(out + t * ldo + e, row, (size_t)(n_columns - e) * sizeof(float));
      }
    }
  }
}

/* Rows of 8, a step of several blocks at a time: a block alone is one long chain of latencies, and longer than what the
 * processor looks ahead. */
static inline __attribute__((always_inline)) int softmax_8(clb_exp_kind gating, const float *logits, ptrdiff_t ldl,
                                                           int n_tokens, float *out, ptrdiff_t ldo) {
  enum { BLOCKS = 8 };
  vf column[BLOCKS][CLB_PANEL], top[BLOCKS];
  int t = 0;
  for (; t + BLOCKS * LANES <= n_tokens; t += BLOCKS * LANES) {
    for (int b = 0; b < BLOCKS; b++) {
      load_columns(logits + (t + b * LANES) * ldl, ldl, 8, LANES, column[b]);
      top[b] = max_of(column[b], 8);
    }
    for (int b = 0; b < BLOCKS; b++) normalise(gating, column[b], 8, top[b]);
    for (int b = 0; b < BLOCKS; b++) store_columns(column[b], 8, LANES, out + (t + b * LANES) * ldo, ldo);
  }
  return t;
}

void KERNEL(softmax_f32)(clb_exp_kind gating, const float *logits, ptrdiff_t ldl, int n_columns, int n_tokens,
                         float *out, ptrdiff_t ldo) {
  vf column[CLB_MAX_EXPERTS + LANES];
  int t = n_columns == 8 ? softmax_8(gating, logits, ldl, n_tokens, out, ldo) : 0;
  for (; t < n_tokens; t += LANES) {
    int n = n_tokens - t < LANES ? n_tokens - t : LANES;
    load_columns(logits + t * ldl, ldl, n_columns, n, column);
    normalise(gating, column, n_columns, max_of(column, n_columns));
    store_columns(column, n_columns, n, out + t * ldo, ldo);
  }
}

/* The top_k largest of each lane in falling order, ties to the lower expert. */
static inline __attribute__((always_inline)) void top_k_of(const vf *column, int n_experts, int top_k, vf *best,
                                                           vi *id) {
  for (int j = 0; j < top_k; j++) best[j] = vf_set1(-INFINITY), id[j] = vi_set1(0);
  for (int e = 0; e < n_experts; e++) {
    vf x = column[e];
    vi x_id = vi_set1(e);
    vm moved = vf_gt(x, best[top_k - 1]);
    if (top_k > 2 && !vm_any(moved)) continue;
    moved = vf_gt(x, best[0]);
    for (int j = 0;; j++) {
      /* Once a lane has inserted, what it pushed out moves down past its equals: those have higher ids. */
      vf best_j = best[j];
      vi id_j = id[j];
      best[j] = vf_select(moved, x, best_j), id[j] = vi_select(moved, x_id, id_j);
      if (j + 1 == top_k) break;
      x = vf_select(moved, best_j, x), x_id = vi_select(moved, id_j, x_id);
      moved = vm_or(moved, vf_gt(x, best[j + 1]));
    }
  }
}

/* weight[j] of the chosen logits, best[0] first. Renormalised softmax over all, and softmax over the chosen, are one
 * formula: e_j / (e_0 + e_1 + ...). */
static inline __attribute__((always_inline)) void weights_of(const clb_gate_rule *rule, const vf *column,
                                                             const vf *best, vf *weight) {
  int whole = rule->kind == CLB_SOFTMAX_TOPK && !rule->renormalize;
  vf top = whole ? max_of(column, rule->n_experts) : best[0];
  vf sum = vf_set1(0.0f);
  for (int j = 0; j < rule->top_k; j++) {
    weight[j] = exp_of(rule->gating, vf_sub(best[j], top));
    if (!whole) sum = vf_add(sum, weight[j]);
  }
  if (whole)
    for (int e = 0; e < rule->n_experts; e++) sum = vf_add(sum, exp_of(rule->gating, vf_sub(column[e], top)));
  vf scale = vf_set1(rule->scale);
  for (int j = 0; j < rule->top_k; j++) weight[j] = vf_mul(vf_div(weight[j], sum), scale);
}

ptrdiff_t KERNEL(gate_f32)(const clb_gate_rule *rule, const float *logits, ptrdiff_t ldl, int n_tokens, int32_t *ids,
                           float *weights) {
  vf column[CLB_MAX_EXPERTS + LANES], best[CLB_MAX_EXPERTS], weight[CLB_MAX_EXPERTS];
  vi id[CLB_MAX_EXPERTS];
  int n_experts = rule->n_experts, top_k = rule->top_k;
  for (int t = 0; t < n_tokens; t += LANES) {
    int n = n_tokens - t < LANES ? n_tokens - t : LANES;
    load_columns(logits + t * ldl, ldl, n_experts, n, column);

    vf finite = vf_set1(0.0f); /* 0 x is NaN for an infinite or NaN x, else 0 */
    for (int e = 0; e < n_experts; e++) finite = vf_fma(column[e], vf_set1(0.0f), finite);
    float zero[LANES];
    vf_store(zero, finite);
    for (int i = 0; i < n; i++)
      if (zero[i] != 0.0f) return t + i;

    if (top_k == 2) top_k_of(column, n_experts, 2, best, id);
    else top_k_of(column, n_experts, top_k, best, id);
    weights_of(rule, column, best, weight);
    for (int j = 0; j < top_k; j++) {
      float w[LANES];
      int32_t e[LANES];
      vf_store(w, weight[j]), vi_store(e, id[j]);
      for (int i = 0; i < n; i++) {
        ids[(ptrdiff_t)(t + i) * top_k + j] = e[i];
        weights[(ptrdiff_t)(t + i) * top_k + j] = w[i];
      }
    }
  }
  return -1;
}
