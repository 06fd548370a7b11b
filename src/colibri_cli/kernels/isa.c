/* Which instruction sets this build holds and this processor runs. */
#include <string.h>

#include "kernels.h"

extern const clb_kernels clb_kernels_scalar;
#ifdef __x86_64__
extern const clb_kernels clb_kernels_avx2;
extern const clb_kernels clb_kernels_avx512;
extern const clb_kernels clb_kernels_avx512_bf16;
#endif
#ifdef __aarch64__
extern const clb_kernels clb_kernels_neon; /* part of armv8-a: no question to ask */
#endif

static int runs_always(void) { return 1; }
#ifdef __x86_64__
/* The compiler's runtime also asks whether the operating system saves the wide registers. */
static int runs_avx2(void) {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static int runs_avx512(void) {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
/* Intel's manual has vdpbf16ps as two fused multiply-adds, the upper half's first. Each processor is asked, once. */
static int runs_avx512_bf16(void) {
  static int answer = -1;
  int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
  if (known >= 0) return known;
  known = runs_avx512() && __builtin_cpu_supports("avx512bf16") && clb_pairs_are_chains(&clb_kernels_avx512_bf16);
  __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
  return known;
}
#endif

/* Best first. */
static const struct {
  const clb_kernels *kernels;
  int (*runs)(void);
} built[] = {
#ifdef __x86_64__
    {&clb_kernels_avx512_bf16, runs_avx512_bf16},
    {&clb_kernels_avx512, runs_avx512},
    {&clb_kernels_avx2, runs_avx2},
#endif
#ifdef __aarch64__
    {&clb_kernels_neon, runs_always},
#endif
    {&clb_kernels_scalar, runs_always},
};
static const char *const names[] = {
#ifdef __x86_64__
    "avx512_bf16", "avx512", "avx2",
#endif
#ifdef __aarch64__
    "neon",
#endif
    "scalar",      NULL,
};

const char *const *clb_isa_names(void) { return names; }

const clb_kernels *clb_kernels_by_name(const char *isa) {
  for (size_t i = 0; i < sizeof built / sizeof *built; i++)
    if (strcmp(built[i].kernels->isa, isa) == 0) return built[i].runs() ? built[i].kernels : NULL;
  return NULL;
}

const clb_kernels *clb_kernels_best(void) {
  size_t i = 0;
  while (!built[i].runs()) i++; /* scalar always runs */
  return built[i].kernels;
}
