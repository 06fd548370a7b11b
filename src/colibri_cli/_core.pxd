"""The C kernels as Cython sees them; kernels/kernels.h is the contract."""

from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "kernels.h" nogil:
    enum:
        CLB_PANEL
        CLB_MAX_EXPERTS
        CLB_MAX_SEGMENTS

    ctypedef enum clb_activation:
        CLB_RELU, CLB_RELU2, CLB_SILU, CLB_GELU, CLB_GELU_TANH
    ctypedef enum clb_gate_kind:
        CLB_SOFTMAX_TOPK, CLB_TOPK_SOFTMAX, CLB_SIGMOID_TOPK, CLB_SQRTSOFTPLUS_TOPK, CLB_TOPK_SIGMOID
    ctypedef enum clb_exp_kind:
        CLB_EXACT, CLB_TAYLOR
    ctypedef enum clb_dtype:
        CLB_F32, CLB_BF16, CLB_I8, CLB_I4, CLB_F16

    ctypedef struct clb_activation_rule:
        clb_activation kind
        int gated
        float alpha, beta, limit

    ctypedef struct clb_gate_rule:
        int n_experts, top_k
        clb_gate_kind kind
        clb_exp_kind gating
        int renormalize
        float scale
        int by_score
        float epsilon
        const float *correction
        int n_groups, top_groups, group_sums
        float masked

    ctypedef struct clb_kernels:
        const char *isa
        void (*softmax_f32)(clb_exp_kind gating, const float *logits, Py_ssize_t ldl, int n_columns, int n_tokens,
                            float *out, Py_ssize_t ldo) noexcept nogil
        void (*accumulate_f32)(float w, const float *t, int n, float *y) noexcept nogil

    const clb_kernels *clb_kernels_by_name(const char *isa) noexcept
    const clb_kernels *clb_kernels_best() noexcept
    const char *const *clb_isa_names() noexcept
    int clb_use_isa(const char *name) noexcept

    void *clb_alloc(size_t n_bytes) noexcept
    void clb_free(void *memory, size_t bytes) noexcept
    int clb_watch(const void *start, size_t n_bytes) noexcept
    void clb_unwatch(int region) noexcept
    int clb_lost(int region) noexcept
    int clb_float_mode() noexcept
    void clb_restore_float_mode(int before) noexcept
    void clb_pool_reserve(int n_threads) noexcept
    ctypedef void (*clb_team)(void (*member)(void *), void *arg, unsigned n_threads, unsigned flags) noexcept
    void clb_pool_borrow(clb_team team) noexcept

    ctypedef struct clb_route_job:
        const float *x
        Py_ssize_t x_stride
        int n_tokens, hidden_size
        const float *table
        const float *bias
        int width
        clb_gate_rule rule
        float *logits
        int32_t *ids
        float *weights
    Py_ssize_t clb_route_batch(const clb_kernels *k, const clb_route_job *job, int n_threads) noexcept
    Py_ssize_t clb_choose(const clb_kernels *k, const clb_route_job *job) noexcept

    ctypedef struct clb_router_table:
        const float *table
        int hidden_size, width
    const clb_router_table clb_builtin_router

    ctypedef struct clb_balancer:
        int n_experts, window, position
        int32_t *ring
        int64_t *sums
        double threshold
        int candidates
        int prefer_emptiest
    void clb_balance(const clb_kernels *k, clb_balancer *state, const clb_gate_rule *rule, const float *logits,
                     Py_ssize_t ldl, Py_ssize_t n_tokens, int32_t *ids, float *weights) noexcept

    void clb_seed(uint64_t seed, uint64_t *state) noexcept
    void clb_gumbel(uint64_t *state, float temperature, float *logits, Py_ssize_t ldl, int n_experts,
                    Py_ssize_t n_tokens) noexcept

    void clb_dispatch(const int32_t *ids, int n_slots, int n_experts, int32_t *offsets, int32_t *order) noexcept

    ctypedef struct clb_place:
        int in_place
        clb_dtype biases
        Py_ssize_t output, input, up, bias, up_bias
    ctypedef struct clb_expert "clb_expert_pointers":  # in C, clb_expert is the public, opaque one
        const void *up
        const void *up_bias
        const void *down
        const void *down_bias
        const float *up_bases
        const float *down_bases
        clb_place up_place, down_place
    ctypedef struct clb_experts_shape:
        int hidden_size, intermediate_size
        clb_dtype dtype
        clb_activation_rule rule
        int narrow_states
    ctypedef struct clb_experts_job:
        const clb_experts_shape *shape
        const clb_expert *experts
        int n_tokens, top_k
        const int32_t *offsets
        const int32_t *order
        const float *slot_weights
        const float *x
        Py_ssize_t x_stride
        float *y
        Py_ssize_t y_stride
        void *inputs
        void *activations
        char *lanes
    size_t clb_lay_out(const clb_experts_shape *shape, int biased, const char *payload, clb_expert *e) noexcept
    size_t clb_input_bytes(const clb_experts_shape *shape) noexcept
    size_t clb_lanes_bytes(const clb_experts_shape *shape) noexcept
    int clb_lanes_wanted(const clb_kernels *k, const clb_experts_shape *shape, int in_place, size_t n_slots) noexcept
    size_t clb_states_bytes(const clb_experts_shape *shape, size_t n_slots) noexcept
    void clb_experts_begin(const clb_kernels *k, const clb_experts_job *job, int n_threads) noexcept
    void clb_experts_add(const clb_kernels *k, const clb_experts_job *job, int begin, int end,
                         int n_threads) noexcept
    size_t clb_panel_bytes(clb_dtype dtype, int n_inputs) noexcept
    void clb_pack_panels(const clb_kernels *k, clb_dtype dtype, const float *w, Py_ssize_t output_stride,
                         Py_ssize_t input_stride, int n_outputs, int n_inputs, void *panels,
                         Py_ssize_t panel_stride, float *bases, Py_ssize_t base_stride, int n_threads) noexcept

    ctypedef struct clb_mix_job:
        const int32_t *ids
        int n_tokens
        const float *embedding
        int hidden_size, context
        const float *mixer
        const float *zeros
        float *x
    void clb_mix_context(const clb_kernels *k, const clb_mix_job *job, int n_threads) noexcept

    ctypedef struct clb_head_job:
        const float *h
        int n_tokens, hidden_size, n_classes
        const float *panels
        const float *bias
        float *probabilities
        int32_t *classes
    Py_ssize_t clb_head(const clb_kernels *k, const clb_head_job *job, int n_threads) noexcept

    ctypedef struct clb_samples:
        double *ns
        int n_samples, n_calls
    void clb_time_clock(double *ns, int n_samples) noexcept
    void clb_time_route(const clb_kernels *k, const clb_route_job *batch, int n_tokens,
                        const clb_samples *s) noexcept
    void clb_time_softmax(const clb_kernels *k, clb_exp_kind gating, const float *logits, int n_columns,
                          int n_tokens, float *out, const clb_samples *s) noexcept
    void clb_time_dispatch(const int32_t *ids, int n_tokens, int top_k, int n_experts, int32_t *offsets,
                           int32_t *order, const clb_samples *s) noexcept
    void clb_time_expert(const clb_kernels *k, const clb_experts_job *job, int expert,
                         const clb_samples *s) noexcept

    ctypedef struct clb_meter:
        int64_t linear_ns, linear_calls, fill_ns, fill_calls
    const clb_kernels *clb_meter_start(const clb_kernels *k) noexcept
    clb_meter clb_meter_read() noexcept

    bint clb_sanitized() noexcept
    double clb_peak_gflops(const clb_kernels *k, int n_threads) noexcept
    double clb_read_bandwidth(char *memory, size_t n_bytes, int n_threads, int n_tries) noexcept
