/* Which instruction sets this build holds and this processor runs. */
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "kernels.h"

extern const clb_kernels clb_kernels_scalar;
#ifdef __x86_64__
extern const clb_kernels clb_kernels_avx2;
extern const clb_kernels clb_kernels_avx512;
extern const clb_kernels clb_kernels_avx512_bf16;
extern const clb_kernels clb_kernels_avx512_amx;
#endif
#ifdef __aarch64__
extern const clb_kernels clb_kernels_neon; /* part of armv8-a: no question to ask */
#endif

static int runs_always(void) { return 1; }
#ifdef __x86_64__
enum { UNKNOWN, SCALAR, AVX2, AVX512, AVX512_BF16, AVX512_AMX };

/* Which wide registers the operating system saves: the XCR0 register, Intel's manual, volume 1, 13.3. */
static uint32_t saved_registers(void) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

/* Tiles are a thread's own and large, so Linux wants to be asked for them, once a process; its manual, x86/xstate. */
static int has_tiles(uint32_t saved) {
  enum { TILES = 3 << 17, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
  uint32_t a, b, c, d;
  if (~saved & TILES || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~d & (AMX_BF16 | AMX_TILE)) return 0;
#ifdef __linux__
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return 0;
#endif
}

static int ask(void) {
  enum { YMM = 0x6, ZMM = 0xe6 };
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || ~c & (bit_FMA | bit_F16C | bit_OSXSAVE)) return SCALAR;
  uint32_t saved = saved_registers();
  if (~saved & YMM || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || ~b & bit_AVX2) return SCALAR;
  if (~saved & ZMM || ~b & (bit_AVX512F | bit_AVX512BW | bit_AVX512VL) || ~c & bit_AVX512VNNI) return AVX2;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || ~a & bit_AVX512BF16) return AVX512;
  /* The manual has vdpbf16ps as two fused multiply-adds, the upper half's first, and tdpbf16ps as a block. Each
   * processor is held to it. */
  if (!clb_pairs_are_blocks(&clb_kernels_avx512_bf16)) return AVX512;
  return has_tiles(saved) && clb_pairs_are_blocks(&clb_kernels_avx512_amx) ? AVX512_AMX : AVX512_BF16;
}

/* Asked once: in a virtual machine each question leaves it. */
static int processor(void) {
  static int answer = UNKNOWN;
  int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
  if (known == UNKNOWN) __atomic_store_n(&answer, known = ask(), __ATOMIC_RELAXED);
  return known;
}

static int runs_avx2(void) { return processor() >= AVX2; }
static int runs_avx512(void) { return processor() >= AVX512; }
static int runs_avx512_bf16(void) { return processor() >= AVX512_BF16; }
static int runs_avx512_amx(void) { return processor() >= AVX512_AMX; }
#endif

/* Best first. */
static const struct {
  const clb_kernels *kernels;
  int (*runs)(void);
} built[] = {
#ifdef __x86_64__
    {&clb_kernels_avx512_amx, runs_avx512_amx}, {&clb_kernels_avx512_bf16, runs_avx512_bf16},
    {&clb_kernels_avx512, runs_avx512},         {&clb_kernels_avx2, runs_avx2},
#endif
#ifdef __aarch64__
    {&clb_kernels_neon, runs_always},
#endif
    {&clb_kernels_scalar, runs_always},
};
static const char *const names[] = {
#ifdef __x86_64__
    "avx512_amx", "avx512_bf16", "avx512", "avx2",
#endif
#ifdef __aarch64__
    "neon",
#endif
    "scalar",     NULL,
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
