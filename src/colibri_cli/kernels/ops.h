/* Every kernel, written once over the lanes of one instruction set. The including file has defined, through its
 * simd_<isa>.h: CLB_ISA, LANES, ROW_TILE, the types vf (floats), vi (integers), vm (truth values) and the operations
 * on them. Each operation is exact or rounds once, so equal operands give equal bits under every instruction set. */
#include <math.h>
#include <string.h>

#include "kernels.h"

#include "transcendental.h"

#include "activation.h"
#include "gate.h"
#include "linear.h"

#include "fill.h"

#include "quant.h"
#include "peak.h"

#define CLB_STRING_(x) #x
#define CLB_STRING(x) CLB_STRING_(x)
#define CLB_JOIN_(a, b) a##b
#define CLB_JOIN(a, b) CLB_JOIN_(a, b)

const clb_kernels CLB_JOIN(clb_kernels_, CLB_ISA) = {
    CLB_STRING(CLB_ISA), linear_f32,   linear_bf16,    linear_i8,   linear_i4, quantize, transpose_f32,
    fill_panels,         activate_f32, accumulate_f32, softmax_f32, gate_f32,  peak_f32,
};
