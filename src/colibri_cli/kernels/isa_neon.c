#ifdef __aarch64__
#include "simd_neon.h"

#include "ops.h"
#endif
