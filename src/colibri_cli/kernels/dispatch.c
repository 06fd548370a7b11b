/* Level 3 of the routing: slots grouped by expert, so that each expert's weights are read once a batch. */
#include "kernels.h"

void clb_dispatch(const int32_t *ids, int n_slots, int n_experts, int32_t *offsets, int32_t *order) {
  int32_t placed = 0;
  for (int e = 0; e < n_experts; e++) offsets[e] = 0;
  for (int s = 0; s < n_slots; s++)
    if (ids[s] >= 0) offsets[ids[s]]++;
  for (int e = 0; e < n_experts; e++) offsets[e] = placed += offsets[e]; /* where each expert ends */
  offsets[n_experts] = placed;
  /* From the back, so that an expert's slots stay in order; each end moves down to its start. */
  for (int s = n_slots - 1; s >= 0; s--)
    if (ids[s] >= 0) order[--offsets[ids[s]]] = s;
}
