/* Colibri: Mixture-of-Experts layers on CPUs, from C.
 *
 *     #include "colibri.h"
 *
 * An expert is one feed-forward network; a router sends each token to top_k of them. Two calls make a layer:
 *
 *     clb_route         hidden states x [n_tokens][hidden_size] -> expert ids and weights [n_tokens][top_k]
 *     clb_experts_run   x, ids, weights -> y [n_tokens][hidden_size], the weighted sum of each token's experts
 *
 * Before them, once: clb_expert_open for each packed expert file, mapped or in any memory, or clb_expert_in_place for
 * arrays of your own, or clb_expert_pack, which makes the bytes of a packed file from such arrays.
 *
 * WHERE THE FUNCTIONS ARE. In a program without Python: libcolibri.a, which the Python package installs beside this
 * header's folder (cc prog.c -I$INC $INC/../lib/libcolibri.a -lpthread -lm, with INC=$(python -c 'import colibri_cli;
 * print(colibri_cli.get_include())')). In a Python process (ctypes, numba, Cython): the extension module
 * colibri_cli._core exports the same functions, and they share its pool of threads. docs/c.md shows both.
 *
 * MEMORY. The library allocates nothing here, but for the threads that the first wide call starts. All memory is yours:
 * weights, inputs, outputs and the workspace. A clb_expert, and a clb_router, hold pointers to your weights and copy
 * none: those must stay where they are, unchanged, while a call that uses them runs. Weights are never written. Nothing
 * here has to be closed or freed.
 *
 * ALIASING. What a call writes (y, ids, weights of clb_route, the workspace, what is packed) overlaps nothing else that
 * it is given. The ranges of x, y, ids, weights and workspace are compared, and a call that breaks this is refused;
 * a range goes from the first row's first element to the last row's last.
 *
 * ALIGNMENT. Pointers to float and int32_t are aligned as such, packed files to 4 bytes, 64 being best. Weights in
 * place and the workspace may lie at any address.
 *
 * ERRORS. A function that returns int gives CLB_OK or one of clb_error. Sizes, pointers, ids and options are checked
 * first; a refused call has written nothing. What C cannot check is that memory is as large as you say.
 *
 * THREADS. All functions may be called from any number of threads at once; one workspace serves one call at a time. A
 * call runs on the calling thread and on up to n_threads - 1 threads of one pool, which a process has once however many
 * callers there are; small calls stay on the calling thread. An idle pool sleeps. Pool threads take no signals. After
 * fork a child's pool starts anew when it is first needed. A calling thread needs 256 KiB of stack. Calls round to
 * nearest and keep denormals whatever the thread's floating-point mode, which they put back.
 *
 * RESULTS. A token's result has the same bits for every instruction set, number of threads, batch, workspace, stride
 * and place of weights, and from Python (docs/numerics.md).
 *
 * STRUCTURES. Each that you fill begins with its size; start from its _INIT value and change what differs. A newer
 * library takes an older, shorter structure and its defaults for the rest. clb_expert is opaque.
 *
 * ABI. CLB_ABI_VERSION changes when code that was compiled against an older header would no longer work. New functions,
 * values and fields at a structure's end do not change it. Who loads the library at run time compares it with
 * clb_abi_version(). */
#ifndef COLIBRI_H
#define COLIBRI_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CLB_ABI_VERSION 1

#if defined(__GNUC__)
#define CLB_API __attribute__((visibility("default")))
#else
#define CLB_API
#endif

enum {
  CLB_MAX_EXPERTS = 1024,    /* experts of a layer */
  CLB_MAX_SIZE = 1 << 24,    /* hidden_size, intermediate_size */
  CLB_MAX_TOP_K = 1 << 16,   /* slots of a token in clb_experts_run */
  CLB_MAX_TABLE = 1 << 28,   /* values in a router's table */
  CLB_MAX_STRIDE = 1 << 29,  /* of rows of x and y, in floats */
  CLB_MAX_THREADS = 256,     /* of one call */
  CLB_ROUTER_WIDTH_STEP = 16 /* a row of a router's table is experts, padded to a multiple of this */
};

/* ---------------------------------------------------------------- errors */

typedef enum {
  CLB_OK = 0,
  CLB_ERROR_NULL = 1,        /* a pointer is NULL that must not be */
  CLB_ERROR_STRUCT = 2,      /* a struct_size that this library does not know: not from _INIT, or a newer header */
  CLB_ERROR_SIZE = 3,        /* a size, count, stride or number of threads is out of range */
  CLB_ERROR_OPTION = 4,      /* another field is out of range, or two do not go together */
  CLB_ERROR_ID = 5,          /* an id is neither -1 nor in 0..n_experts - 1 */
  CLB_ERROR_EXPERT = 6,      /* an id names an expert that was not made, or was made with another shape */
  CLB_ERROR_ROOM = 7,        /* the memory to write to, or the workspace, is too small */
  CLB_ERROR_ALIGNMENT = 8,   /* a float, an int32_t or a packed file is not aligned to 4 bytes */
  CLB_ERROR_OVERLAP = 9,     /* what the call writes overlaps something else that it was given */
  CLB_ERROR_NOT_FINITE = 10, /* a router's logit, or a weight to be held as int8 or int4, is NaN or infinite */
  CLB_ERROR_FORMAT = 11,     /* not a packed expert file of version 1, or its fields and its size disagree */
  CLB_ERROR_CHECKSUM = 12,   /* the file is damaged */
  CLB_ERROR_ISA = 13         /* this build, or this processor, does not have the instruction set */
} clb_error;

/* "CLB_ERROR_SIZE"; "CLB_ERROR" for a number that is none of them. Never NULL, never to be freed. */
CLB_API const char *clb_error_name(int error);

/* ---------------------------------------------------------------- the library */

/* The CLB_ABI_VERSION that the library was built with. */
CLB_API int clb_abi_version(void);

/* The instruction set whose kernels run: "avx512_amx", "avx512_bf16", "avx512", "avx2", "neon" or "scalar". At first
 * the best that the processor has. Changes speed, never a result. */
CLB_API const char *clb_isa(void);

/* Choose it for the whole process; NULL or "": the best. clb_use_isa(getenv("COLIBRI_ISA")) is what Python does.
 * CLB_ERROR_ISA: not here; nothing has changed. */
CLB_API int clb_use_isa(const char *name);

/* ---------------------------------------------------------------- experts */

/* How weights are held: 32, 16, 8.5, 4.5 and 16 bits each. CLB_F16: in place only. */
typedef enum { CLB_F32, CLB_BF16, CLB_I8, CLB_I4, CLB_F16 } clb_dtype;

/* gelu through erf; relu2 = relu squared; silu(g) = g * sigmoid(alpha * g). */
typedef enum { CLB_RELU, CLB_RELU2, CLB_SILU, CLB_GELU, CLB_GELU_TANH } clb_activation;

/* What a layer's experts have in common. An expert computes
 *
 *     not gated:  down @ act(up @ x + up_bias) + down_bias
 *     gated:      down @ (act(g) * (u + beta)) + down_bias,  g and u the gate's and the up projection's outputs
 *
 * with g at most limit and u within -limit..limit first. */
typedef struct {
  size_t struct_size;
  int hidden_size;       /* 1..CLB_MAX_SIZE: inputs and outputs */
  int intermediate_size; /* 1..CLB_MAX_SIZE: inputs of down */
  int dtype;             /* clb_dtype */
  int activation;        /* clb_activation */
  int gated;             /* 0 or 1 */
  float alpha, beta;     /* finite; gpt-oss: 1.702 and 1 */
  float limit;           /* greater than 0; INFINITY: none; gpt-oss: 7 */
} clb_shape;
#define CLB_SHAPE_INIT {sizeof(clb_shape), 0, 0, CLB_F32, CLB_SILU, 1, 1.0f, 0.0f, INFINITY}

/* One expert's weights as they lie in a program or in another library's memory. With I = intermediate_size,
 * H = hidden_size, U = 2 I where gated and else I:
 *
 *     up         [U][H]   gated: gate rows and then up rows; interleaved: gate and up rows in turn
 *     down       [H][I]
 *     up_bias    [U]      contiguous, or NULL for zeros
 *     down_bias  [H]      likewise
 *
 * Output j's input i is at j * stride[0] + i * stride[1] bytes. Strides of {0, 0} mean the arrays above, contiguous, as
 * PyTorch's nn.Linear stores them. */
typedef struct {
  size_t struct_size;
  int dtype;       /* of up and down, clb_dtype: CLB_F32, or (in place) CLB_BF16, CLB_F16 */
  int bias_dtype;  /* of the biases, likewise */
  int interleaved; /* 0 or 1; 1 only where gated */
  const void *up, *down, *up_bias, *down_bias;
  ptrdiff_t up_stride[2], down_stride[2];
} clb_arrays;
#define CLB_ARRAYS_INIT {sizeof(clb_arrays), CLB_F32, CLB_F32, 0, NULL, NULL, NULL, NULL, {0, 0}, {0, 0}}

/* One expert, ready to run: its shape and where its weights are. Copy it as you like; all zeros is no expert. */
typedef struct {
  uint64_t opaque[32];
} clb_expert;

/* View a packed expert file (docs/formats.md): size bytes at file, a mapping or any other memory. Header and sizes are
 * checked, the weights are not read (clb_expert_verify does that), and nothing is copied: file must stay. A mapped file
 * that another process cuts short raises SIGBUS when it is run, as any mapping does.
 * Writes *expert, and *shape, whose struct_size you have set, unless it is NULL.
 * CLB_ERROR_NULL, STRUCT, ALIGNMENT, FORMAT. */
CLB_API int clb_expert_open(const void *file, size_t size, clb_shape *shape, clb_expert *expert);

/* Compare a packed file with its checksum, which reads all of it. CLB_ERROR_NULL, ALIGNMENT, FORMAT, CHECKSUM. */
CLB_API int clb_expert_verify(const void *file, size_t size);

/* Run arrays where they lie, with the bits of the same weights packed. Slower where few tokens share an expert (1.1 to
 * 2.8 times, docs/library.md): panels are put together anew in each call. dtype is the shape's, CLB_F32, CLB_BF16 or
 * CLB_F16, and each output's inputs, or each input's outputs, lie side by side. CLB_ERROR_NULL, STRUCT, SIZE, OPTION
 * (dtype), SIZE (strides). */
CLB_API int clb_expert_in_place(const clb_shape *shape, const clb_arrays *arrays, clb_expert *expert);

/* Bytes of a packed file of this shape, with or without biases; 0: the shape is refused. */
CLB_API size_t clb_expert_size(const clb_shape *shape, int biased);

/* Make a packed file in memory of at least clb_expert_size(shape, a bias is given) bytes, aligned to 4: then
 * clb_expert_open it with that very size, or clb_expert_seal it and write it to disk. arrays are CLB_F32, with strides
 * that are multiples of 4. An absent bias beside a given one is zeros. CLB_BF16 rounds to nearest; CLB_I8 and CLB_I4
 * choose scales for a small squared error, and weights for them must be finite.
 * CLB_ERROR_NULL, STRUCT, SIZE, OPTION, ROOM, ALIGNMENT, OVERLAP, NOT_FINITE. */
CLB_API int clb_expert_pack(const clb_shape *shape, const clb_arrays *arrays, void *file, size_t size, int n_threads);

/* Set a packed file's checksum, which clb_expert_pack leaves 0 since it reads all of it. For files that go to disk.
 * CLB_ERROR_NULL, ALIGNMENT, FORMAT. */
CLB_API int clb_expert_seal(void *file, size_t size);

/* Bytes of workspace for clb_experts_run on n_tokens; 0: an argument is out of range. A call with less does as many
 * tokens at a time as fit, with the same bits; 512 at a time lose no speed. */
CLB_API size_t clb_workspace_size(const clb_shape *shape, int n_experts, int n_tokens, int top_k);

/* y[t] = sum over k of weights[t][k] * expert ids[t][k] (x[t]), added by ascending id.
 *
 *     shape      what every expert that an id names was made with
 *     experts    [n_experts], by id, at most CLB_MAX_EXPERTS; those that no id names may be zeros
 *     x          [n_tokens] rows of hidden_size floats, x_stride floats from row to row: any, 0 and negative too
 *     ids        [n_tokens][top_k], contiguous; -1 skips a slot; an id given twice counts twice
 *     weights    [n_tokens][top_k], contiguous
 *     y          [n_tokens] rows of hidden_size floats, y_stride >= hidden_size floats from row to row; written whole
 *     workspace  workspace_size bytes, with anything in them; at least clb_workspace_size for one token
 *     n_threads  1..CLB_MAX_THREADS: the most threads that the call uses, the calling one included
 *
 * A NaN or infinity in x stays in its row.
 *
 * With n_tokens = 0 nothing is done and x to workspace may be NULL.
 * CLB_ERROR_NULL, STRUCT, SIZE, OPTION, ID, EXPERT, ROOM, ALIGNMENT, OVERLAP. */
CLB_API int clb_experts_run(const clb_shape *shape, const clb_expert *experts, int n_experts, const float *x,
                            ptrdiff_t x_stride, const int32_t *ids, const float *weights, int n_tokens, int top_k,
                            float *y, ptrdiff_t y_stride, void *workspace, size_t workspace_size, int n_threads);

/* ---------------------------------------------------------------- router */

/* How experts are chosen from a token's logits, logits = table^T x + bias. A score is the softmax over all experts, the
 * sigmoid or the sqrt(softplus) of a logit; the best top_k by score + correction are chosen, ties to the lower id.
 * CLB_TOPK_...: the best by logit (+ correction), and a score of those alone. */
typedef enum {
  CLB_SOFTMAX_TOPK,
  CLB_TOPK_SOFTMAX,
  CLB_SIGMOID_TOPK,
  CLB_SQRTSOFTPLUS_TOPK,
  CLB_TOPK_SIGMOID
} clb_gate_kind;

/* The exponential of a softmax: full precision, or a second-order polynomial (probabilities within 0.003). */
typedef enum { CLB_EXACT, CLB_TAYLOR } clb_exp_kind;

/* What a group of experts counts for: its best score + correction, or the sum of its best two. */
typedef enum { CLB_GROUP_MAX, CLB_GROUP_TOP2 } clb_group_score;

/* A gate's table and its rule; docs/library.md has the rules of published models, under the same names. The table is
 * [hidden_size][width], width = n_experts padded to a multiple of CLB_ROUTER_WIDTH_STEP, and at most CLB_MAX_TABLE
 * values: what `colibri gen-router --output router.c` writes, or clb_router_pack. */
typedef struct {
  size_t struct_size;
  int n_experts, hidden_size; /* 1..CLB_MAX_EXPERTS, 1.. */
  int top_k;                  /* 1..n_experts, or the number of experts in topk_groups groups */
  int kind;                   /* clb_gate_kind */
  int gating;                 /* clb_exp_kind; CLB_TAYLOR with the two kinds of softmax only */
  int renormalize;            /* 0 or 1: divide the weights by their sum over the chosen, plus epsilon */
  float scale;                /* of the weights, at the end; greater than 0, finite */
  float epsilon;              /* at least 0, finite; at most 1e-11 with CLB_TOPK_SOFTMAX */
  int n_groups, topk_groups;  /* a divisor of n_experts, and 1..n_groups; 1 with kinds that choose by logits */
  int group_score;            /* clb_group_score; CLB_GROUP_TOP2 wants groups of two and more */
  float masked_score;         /* what experts of other groups are chosen by: -INFINITY or 0 */
  const float *table;
  const float *bias;       /* [n_experts], or NULL */
  const float *correction; /* [n_experts], or NULL: only chooses; not with CLB_TOPK_SOFTMAX */
} clb_router;
#define CLB_ROUTER_INIT                                                                                     \
  {sizeof(clb_router), 0,    0,    2,   CLB_SOFTMAX_TOPK, CLB_EXACT, 1, 1.0f, 1e-20f, 1, 1, CLB_GROUP_TOP2, \
   -INFINITY,          NULL, NULL, NULL}

/* Bytes of a table; 0: out of range. */
CLB_API size_t clb_router_table_size(int n_experts, int hidden_size);

/* Make a table of weights [n_experts] rows of hidden_size floats, stride floats from row to row, as PyTorch's nn.Linear
 * stores a gate. size is that of the memory at table.
 * CLB_ERROR_NULL, SIZE, ROOM, ALIGNMENT, OVERLAP. */
CLB_API int clb_router_pack(const float *weights, ptrdiff_t stride, int n_experts, int hidden_size, float *table,
                            size_t size);

/* Choose each token's experts: ids and weights [n_tokens][top_k], contiguous, best first. x, x_stride, n_tokens and
 * n_threads as in clb_experts_run. Needs no workspace.
 * CLB_ERROR_NULL, STRUCT, SIZE, OPTION, ALIGNMENT, OVERLAP; CLB_ERROR_NOT_FINITE: a logit is NaN or infinite, and
 * *bad_token, unless bad_token is NULL, is the first such token's number; ids and weights hold no answer then. */
CLB_API int clb_route(const clb_router *router, const float *x, ptrdiff_t x_stride, int n_tokens, int32_t *ids,
                      float *weights, int *bad_token, int n_threads);

#ifdef __cplusplus
}
#endif

#endif
