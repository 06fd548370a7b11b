/* A routed layer from C: packed expert files mapped and run where they are, or constant arrays of the program's own.
 *
 * Build, where colibri-cli is installed (pip):
 *
 *     INC=$(python3 -c 'import colibri_cli; print(colibri_cli.get_include())')
 *     cc -std=c11 -O2 moe_layer.c -I"$INC" "$INC"/../lib/libcolibri.a -lpthread -lm -o moe_layer
 *
 * Run:
 *
 *     ./moe_layer                                 the constant arrays below, in place
 *     ./moe_layer --pack 0.bin 1.bin 2.bin 3.bin  writes them as packed expert files, and their gate as router.bin
 *     ./moe_layer router.bin 0.bin 1.bin ...      a layer: raw float32 gate weights [n_experts][hidden_size], and a
 *                                                 packed file for each expert, as a bundle of `colibri pack` has them
 *
 * Files come in the order of the experts' ids, which is not a shell's order of expert_*.bin: there 10 is before 2. The
 * gate is a softmax over the top 2, renormalised. For a layer that chooses otherwise, or has a router bias or a shared
 * expert, fill in the clb_router from the bundle's config.json.
 *
 * Each prints a checksum of the layer's output for 64 tokens of made-up input: the same number whatever the processor,
 * and the same for the constant arrays as for their files. Nothing is copied on the way: the weights are read where
 * they are, and input, output and workspace are this program's. */
#define _POSIX_C_SOURCE 200809L
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "colibri.h"

enum { TOKENS = 64, TOP_K = 2, THREADS = 2 };

/* Four experts of a layer with hidden_size 4 and intermediate_size 3, as PyTorch holds them: gate rows, then up rows.
 */
enum { EXPERTS = 4, HIDDEN = 4, INTER = 3 };
static const float gate_up[EXPERTS][2 * INTER][HIDDEN] = {
    {{.5f, -1, .25f, 2}, {1, 1, 0, -1}, {0, .5f, -.5f, 1}, {1, 0, 0, 1}, {-1, .25f, 1, 0}, {2, -1, 0, .5f}},
    {{-1, 0, 1, .5f}, {.25f, 2, -1, 0}, {1, -.5f, 1, 0}, {0, 1, 1, 0}, {.5f, 0, -1, 1}, {0, -1, 2, .25f}},
    {{0, 1, -1, 1}, {2, 0, .5f, .5f}, {-.5f, 1, 0, 0}, {1, 1, 1, 1}, {0, 0, .25f, -1}, {-1, 2, 0, 1}},
    {{1, .25f, 0, -1}, {0, -1, 1, 1}, {.5f, .5f, 2, -1}, {0, .5f, 0, 1}, {1, -1, 0, 2}, {.25f, 1, -1, 0}},
};
static const float down[EXPERTS][HIDDEN][INTER] = {
    {{1, 0, -.5f}, {.25f, 1, 0}, {-1, .5f, 2}, {0, -1, 1}},
    {{0, 2, 1}, {-1, .5f, .25f}, {1, 1, -1}, {.5f, 0, 0}},
    {{-.5f, 1, 1}, {2, -1, 0}, {0, .25f, 1}, {1, 0, .5f}},
    {{1, -1, .5f}, {0, 1, -2}, {.25f, 0, 1}, {-1, 1, 0}},
};
static const float gate[EXPERTS][HIDDEN] = {{1, 0, 0, .5f}, {0, 1, .25f, 0}, {-1, 0, 1, 0}, {0, -.5f, 0, 1}};
/* The gate as `colibri gen-router --output router.c` writes one: [hidden_size][n_experts padded to 16]. */
static const float router_table[HIDDEN][16] = {{1, 0, -1, 0}, {0, 1, 0, -.5f}, {0, .25f, 1, 0}, {.5f, 0, 0, 1}};

static void fail(const char *what, const char *why) {
  fprintf(stderr, "moe_layer: %s: %s\n", what, why);
  exit(1);
}

static void check(int error, const char *what) {
  if (error) fail(what, clb_error_name(error));
}

static void *memory(size_t n_bytes, const char *what) {
  void *p = n_bytes ? malloc(n_bytes) : NULL; /* 0 is how the library refuses sizes */
  if (!p) fail(what, "no such memory");
  return p;
}

/* A whole file, read-only and shared: its pages are the page cache's own. */
static const void *map(const char *path, size_t *size) {
  struct stat status;
  int file = open(path, O_RDONLY);
  if (file < 0 || fstat(file, &status) != 0 || status.st_size == 0) fail(path, "cannot be opened, or is empty");
  void *bytes = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, file, 0);
  if (bytes == MAP_FAILED) fail(path, "cannot be mapped");
  close(file);
  *size = (size_t)status.st_size;
  return bytes;
}

static void save(const char *path, const void *bytes, size_t size) {
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) fail(path, "cannot be written");
}

static clb_shape constant_shape(void) {
  clb_shape shape = CLB_SHAPE_INIT; /* float32, SwiGLU */
  shape.hidden_size = HIDDEN, shape.intermediate_size = INTER;
  return shape;
}

static clb_arrays constant_arrays(int e) {
  clb_arrays arrays = CLB_ARRAYS_INIT; /* float32, contiguous, no biases */
  arrays.up = gate_up[e], arrays.down = down[e];
  return arrays;
}

static void write_files(char *paths[]) {
  clb_shape shape = constant_shape();
  size_t size = clb_expert_size(&shape, 0);
  void *file = memory(size, "an expert");
  for (int e = 0; e < EXPERTS; e++) {
    clb_arrays arrays = constant_arrays(e);
    check(clb_expert_pack(&shape, &arrays, file, size, THREADS), "packing");
    check(clb_expert_seal(file, size), "the checksum");
    save(paths[e], file, size);
  }
  save("router.bin", gate, sizeof gate);
  free(file);
}

/* x, the same numbers on every machine: multiples of 2^-20 in [-1, 1). */
static void make_up(float *x, size_t n) {
  uint64_t state = UINT64_C(88172645463325252);
  for (size_t i = 0; i < n; i++) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    x[i] = (float)((int64_t)(state >> 43) - (1 << 20)) / (1 << 20);
  }
}

/* The layer: route, then run. */
static void run(const clb_router *router, const clb_shape *shape, const clb_expert *experts) {
  size_t hidden = (size_t)shape->hidden_size, n = TOKENS * hidden;
  size_t workspace_size = clb_workspace_size(shape, router->n_experts, TOKENS, TOP_K);
  float *x = memory(n * sizeof *x, "input"), *y = memory(n * sizeof *y, "output");
  void *workspace = memory(workspace_size, "workspace");
  int32_t ids[TOKENS * TOP_K];
  float weights[TOKENS * TOP_K];
  int bad = -1;
  make_up(x, n);

  check(clb_route(router, x, shape->hidden_size, TOKENS, ids, weights, &bad, THREADS), "routing");
  check(clb_experts_run(shape, experts, router->n_experts, x, shape->hidden_size, ids, weights, TOKENS, TOP_K, y,
                        shape->hidden_size, workspace, workspace_size, THREADS),
        "the experts");

  uint64_t hash = UINT64_C(14695981039346656037); /* FNV-1a */
  for (size_t i = 0; i < n * sizeof *y; i++) hash = (hash ^ ((const unsigned char *)y)[i]) * UINT64_C(1099511628211);
  printf("%d tokens, top %d of %d experts, hidden size %d, %s: %016" PRIx64 "\n", TOKENS, router->top_k,
         router->n_experts, shape->hidden_size, clb_isa(), hash);
  free(x), free(y), free(workspace);
}

static void run_constants(void) {
  clb_shape shape = constant_shape();
  clb_expert experts[EXPERTS];
  for (int e = 0; e < EXPERTS; e++) {
    clb_arrays arrays = constant_arrays(e);
    check(clb_expert_in_place(&shape, &arrays, &experts[e]), "the constant arrays");
  }
  clb_router router = CLB_ROUTER_INIT; /* softmax, top 2, renormalised */
  router.n_experts = EXPERTS, router.hidden_size = HIDDEN, router.table = &router_table[0][0];
  run(&router, &shape, experts);
}

static void run_files(const char *gate_path, int n_experts, char *paths[]) {
  clb_shape shape = CLB_SHAPE_INIT;
  clb_expert *experts = memory((size_t)n_experts * sizeof *experts, "experts");
  size_t size;
  for (int e = 0; e < n_experts; e++) {
    const void *file = map(paths[e], &size); /* and leave it mapped: the expert is there */
    check(clb_expert_open(file, size, &shape, &experts[e]), paths[e]);
  }
  const float *weights = map(gate_path, &size);
  if (size != (size_t)n_experts * (size_t)shape.hidden_size * sizeof(float))
    fail(gate_path, "not float32 [n_experts][hidden_size]");
  size_t table_size = clb_router_table_size(n_experts, shape.hidden_size);
  float *table = memory(table_size, gate_path);
  check(clb_router_pack(weights, shape.hidden_size, n_experts, shape.hidden_size, table, table_size), gate_path);
  clb_router router = CLB_ROUTER_INIT;
  router.n_experts = n_experts, router.hidden_size = shape.hidden_size, router.table = table;
  run(&router, &shape, experts);
  free(table), free(experts);
}

int main(int argc, char *argv[]) {
  check(clb_use_isa(getenv("COLIBRI_ISA")), "COLIBRI_ISA");
  if (argc == 1) run_constants();
  else if (argc == 2 + EXPERTS && strcmp(argv[1], "--pack") == 0) write_files(argv + 2);
  else if (argc > 2 && argv[1][0] != '-') run_files(argv[1], argc - 2, argv + 2);
  else {
    fprintf(stderr, "usage: moe_layer [router.bin expert.bin ...]\n       moe_layer --pack 0.bin 1.bin 2.bin 3.bin\n");
    return 2;
  }
  return 0;
}
