/* Every kernel, written once over the lanes of one instruction set. The including file has defined, through its
 * simd_<isa>.h: CLB_ISA, LANES, UNROLL, the sizes of tiles, the types vf (floats), vi (integers), vm (truth values) and
 * the operations on them. Each operation is exact or rounds once, so equal operands give equal bits under every
 * instruction set. */
#include <math.h>
#include <string.h>

#include "kernels.h"

#include "transcendental.h"

#include "activation.h"
#include "gate.h"
#include "linear.h"
#include "linear_bf16.h"
#include "combine.h"
#include "score.h"

#include "fill.h"
#if LANES == 8 /* with fewer not measured yet */
#include "eight.h"
#include "in_place.h"
#define LINEAR_EIGHT KERNEL(linear_eight)
#define LINEAR_IN_PLACE KERNEL(linear_in_place_f32), KERNEL(linear_in_place_bf16), KERNEL(linear_in_place_blocks)
#else
#define LINEAR_EIGHT NULL
#define LINEAR_IN_PLACE NULL, NULL, NULL
#endif

#include "quant.h"
#include "quantize.h"

#include "pack_quant.h"
#include "narrow.h"
#include "peak.h"

#define CLB_STRING_(x) #x
#define CLB_STRING(x) CLB_STRING_(x)

const clb_kernels CLB_JOIN(clb_kernels_, CLB_ISA) = {
    CLB_STRING(CLB_ISA),
    LANES == 8 ? 256 : 0, /* half an L1 cache; with fewer lanes not measured yet */
    KERNEL(linear_f32),
    KERNEL(linear_bf16),
    KERNEL(linear_i8),
    KERNEL(linear_i4),
    NULL, /* neither pairs nor tiles */
    NULL,
    NULL,
    KERNEL(quantize),
    KERNEL(transpose_f32),
    KERNEL(pack_group),
    KERNEL(fill_panels),
    KERNEL(widen_f16),
    LINEAR_IN_PLACE,
    LINEAR_EIGHT,
    KERNEL(activate_f32),
    KERNEL(narrow_f32),
    KERNEL(accumulate_f32),
    KERNEL(softmax_f32),
    KERNEL(score_f32),
    KERNEL(gate_f32),
    KERNEL(peak_f32),
};
