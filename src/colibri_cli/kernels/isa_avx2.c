#if defined(__x86_64__) && defined(__GNUC__)
/* The headers first: what they define must not be compiled for AVX2. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "simd_avx2.h"

#include "ops.h"

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
