#include "simd_scalar.h"

#include "ops.h"

void clb_gate_weights(const clb_gate_rule *rule, const float *logits, const int32_t *ids, float *weights) {
  float best[CLB_MAX_EXPERTS];
  for (int j = 0; j < rule->top_k; j++) best[j] = logits[ids[j]];
  weights_of(rule, logits, best, weights);
}
