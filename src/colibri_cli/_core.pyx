# cython: language_level=3, auto_pickle=False, autotestdict=False
# cython: binding=False, embedsignature=True, embedsignature.format=clinic
"""The compiled core: declare, check, call without the GIL, return.

Everything here takes buffers and gives NumPy arrays. Checks come first, so that a refused call has written nothing;
after them, a kernel works on pointers alone. Whatever memory a call needs is held in a workspace that grows to the
largest call seen and is then reused.
"""

import os

import numpy as np

from colibri_cli.errors import InvalidInput, UsageError

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.math cimport INFINITY
from libc.string cimport memcpy, memset

# ---------------------------------------------------------------- instruction sets

cdef const clb_kernels *kernels = clb_kernels_best()


def isa_names():
    """Every instruction set in this build that this processor runs, best first."""
    cdef const char *const *name = clb_isa_names()
    names = []
    while name[0] != NULL:
        if clb_kernels_by_name(name[0]) != NULL:
            names.append(name[0].decode())
        name += 1
    return tuple(names)


def isa():
    """Name the instruction set whose kernels run now: ``"avx2"``, ``"scalar"``, ..."""
    return kernels.isa.decode()


def use_isa(name):
    """Choose the instruction set for the whole process; ``COLIBRI_ISA`` does the same at start-up.

    Raises
    ------
    UsageError
        This build does not hold it, or this processor does not run it.
    """
    global kernels
    cdef const clb_kernels *chosen = clb_kernels_by_name(name.encode(errors="replace"))
    if chosen == NULL:
        raise UsageError(
            expected=f"an instruction set that runs here ({', '.join(isa_names())})",
            got=repr(name),
            at="COLIBRI_ISA",
        )
    kernels = chosen
    clb_use_isa(chosen.isa)  # for callers from C


if os.environ.get("COLIBRI_ISA"):
    use_isa(os.environ["COLIBRI_ISA"])


# ---------------------------------------------------------------- memory

@cython.final
cdef class _Memory:
    """Aligned memory that lives as long as somebody refers to it."""

    cdef char *data
    cdef size_t n_bytes
    cdef _Memory next  # in a chain of workspaces

    def __dealloc__(self):
        clb_free(self.data, self.n_bytes)

    cdef int reserve(self, size_t n_bytes) except -1:
        """Hold at least n_bytes; what was there before is lost when that means new memory."""
        if n_bytes <= self.n_bytes:
            return 0
        clb_free(self.data, self.n_bytes)
        self.n_bytes = 0
        self.data = <char *>clb_alloc(n_bytes)
        if self.data == NULL:
            raise MemoryError(f"cannot hold {n_bytes} bytes")
        self.n_bytes = n_bytes
        return 0


@cython.final
cdef class Watch:
    """An array on a file's pages, which the file may lose; until that is noticed they read as zeros."""

    cdef readonly object array, name
    cdef int region

    def __cinit__(self, array not None, name not None):
        cdef size_t n_bytes = array.nbytes
        self.array, self.name = array, name
        self.region = clb_watch(contiguous(array, n_bytes), n_bytes)
        if self.region < 0:
            raise UsageError(expected="at most 16,384 mapped files in a process", got="one more", at=name,
                             hint="load them with loading=\"static\"")

    def __dealloc__(self):
        clb_unwatch(self.region)

    def check(self):
        """Refuse what was read, or will be, if the file has been cut short.

        Raises
        ------
        InvalidInput
            Pages were gone when they were read.
        """
        if clb_lost(self.region):
            raise InvalidInput(
                expected=f"{self.array.nbytes} bytes, as when it was mapped",
                got="a file cut short since",
                at=self.name,
                hint="to change a file that is in use, write a new one and rename it",
            )


cdef _Memory new_floats(size_t n):
    cdef _Memory memory = _Memory()
    memory.reserve(n * sizeof(float))
    memset(memory.data, 0, n * sizeof(float))
    return memory


@cython.final
cdef class _Workspaces:
    """Workspaces that are not in use, as a chain; only touched with the GIL held, which is all the locking it needs."""

    cdef _Memory first

    cdef _Memory take(self):
        cdef _Memory workspace = self.first
        if workspace is None:
            return _Memory()
        self.first = workspace.next
        workspace.next = None
        return workspace

    cdef void give_back(self, _Memory workspace):
        workspace.next = self.first
        self.first = workspace

    cdef list idle(self):
        cdef _Memory workspace = self.first
        found = []
        while workspace is not None:
            found.append(workspace)
            workspace = workspace.next
        return found


# ---------------------------------------------------------------- buffers

cdef struct Matrix:
    Py_buffer view
    bint held
    char *data
    Py_ssize_t rows, columns
    Py_ssize_t row_stride, column_stride  # bytes


cdef object dtype_name(object array):
    try:
        return str(array.dtype)
    except AttributeError:
        return type(array).__name__


cdef char format_of(const Py_buffer *view) noexcept:
    """The type code of a native buffer: f float32, i int32, q int64; 0 for anything else."""
    cdef const char *code = view.format
    if code == NULL:
        return 0
    if code[0] == b"@" or code[0] == b"=" or code[0] == b"<":  # every machine that runs this is little-endian
        code += 1
    if code[0] == 0 or code[1] != 0:
        return 0
    if code[0] == b"f":
        return b"f"
    if code[0] == b"i" or code[0] == b"l" or code[0] == b"q":
        if view.itemsize == 4:
            return b"i"
        if view.itemsize == 8:
            return b"q"
    return 0


cdef int open_matrix(object array, Matrix *m, object name, object contract, bint integers, int flags) except -1:
    """Hold a two-dimensional buffer (one dimension counts as one column)."""
    cdef object exporter = array
    m.held = False
    try:
        PyObject_GetBuffer(exporter, &m.view, flags | PyBUF_STRIDES | PyBUF_FORMAT)
    except (TypeError, BufferError, ValueError) as error:
        if not hasattr(array, "__dlpack__") or isinstance(array, np.ndarray):
            raise InvalidInput(expected=contract, got=f"{type(array).__name__} ({error})", at=name) from None
        try:
            exporter = np.from_dlpack(array)
        except (TypeError, BufferError, RuntimeError, ValueError, AssertionError) as refused:
            raise InvalidInput(expected=contract, got=f"{dtype_name(array)} ({refused})", at=name) from None
        if flags & PyBUF_WRITABLE and not exporter.flags.writeable:
            # NumPy 1 marks every DLPack import read-only; the exporter has said that it may be written.
            raise InvalidInput(expected=contract, got="a read-only array", at=name)
        PyObject_GetBuffer(exporter, &m.view, flags | PyBUF_STRIDES | PyBUF_FORMAT)
    m.held = True
    cdef char code = format_of(&m.view)
    if (code != b"f") if not integers else (code != b"i" and code != b"q"):
        raise InvalidInput(expected=contract, got=dtype_name(exporter), at=f"{name}.dtype")
    if m.view.ndim != 2 and m.view.ndim != 1:
        raise InvalidInput(expected=contract, got=f"{m.view.ndim} dimensions", at=f"{name}.shape")
    m.data = <char *>m.view.buf
    m.rows = m.view.shape[0]
    m.columns = m.view.shape[1] if m.view.ndim == 2 else 1
    if m.view.strides == NULL:  # ctypes leaves them out: C-contiguous
        m.row_stride, m.column_stride = m.columns * m.view.itemsize, m.view.itemsize
    else:
        m.row_stride = m.view.strides[0]
        m.column_stride = m.view.strides[1] if m.view.ndim == 2 else m.view.itemsize
    return 0


cdef void close_matrix(Matrix *m):
    if m.held:
        PyBuffer_Release(&m.view)
        m.held = False


cdef bint direct(const Matrix *m) noexcept:
    """Whether a kernel can read each row where it is: aligned floats side by side."""
    return (
        (m.column_stride == sizeof(float) or m.columns <= 1)
        and m.row_stride % <Py_ssize_t>sizeof(float) == 0
        and <size_t>m.data % sizeof(float) == 0
    )


cdef void gather(const Matrix *m, Py_ssize_t first, Py_ssize_t n, float *to) noexcept nogil:
    """Copy rows first..first + n - 1, whatever their strides."""
    cdef Py_ssize_t r, c
    for r in range(n):
        for c in range(m.columns):
            memcpy(to + r * m.columns + c, m.data + (first + r) * m.row_stride + c * m.column_stride, sizeof(float))


cdef int64_t integer_at(const Matrix *m, Py_ssize_t row, Py_ssize_t column) noexcept nogil:
    cdef const char *at = m.data + row * m.row_stride + column * m.column_stride
    cdef int32_t narrow
    cdef int64_t wide
    if m.view.itemsize == 4:
        memcpy(&narrow, at, 4)
        return narrow
    memcpy(&wide, at, 8)
    return wide


cdef struct Range:
    char *low
    char *high


cdef Range range_of(const Matrix *m) noexcept:
    """The addresses from a buffer's first byte to behind its last, wherever its strides lead; of an empty one, none."""
    cdef Py_ssize_t rows = m.row_stride * (m.rows - 1), columns = m.column_stride * (m.columns - 1)
    cdef Range found
    found.low = found.high = NULL
    if m.rows > 0 and m.columns > 0:
        found.low = m.data + min(rows, 0) + min(columns, 0)
        found.high = m.data + m.view.itemsize + max(rows, 0) + max(columns, 0)
    return found


cdef bint overlap(const Range *a, const Range *b) noexcept:
    return a.low < b.high and b.low < a.high


cdef object owner_of(object array):
    """Who keeps an array's memory: of a view, the array that it is of, or whose memory that is."""
    base = array.base if type(array) is np.ndarray else None  # another type's base may be anything
    return array if base is None else base


cdef void *data_of(object array) except NULL:
    """The first element of an array that this module has just made; a kernel given no rows reads nothing from it."""
    cdef Py_buffer view
    cdef void *data
    PyObject_GetBuffer(array, &view, PyBUF_STRIDES)
    data = view.buf
    PyBuffer_Release(&view)  # the caller keeps the array
    return data


cdef const void *contiguous(object array, size_t n_bytes) except NULL:
    """The first element of a C-contiguous array of that size, which the caller keeps alive."""
    cdef Py_buffer view
    cdef const void *data
    cdef Py_ssize_t found
    PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS)
    data, found = view.buf, view.len
    PyBuffer_Release(&view)
    if found != <Py_ssize_t>n_bytes:
        raise InvalidInput(expected=f"{n_bytes} bytes", got=str(found), at="array")
    return data


cdef int look_at(object array, Matrix *m) except -1:
    """Where an array is that the caller keeps alive: two dimensions, or one, which counts as one column."""
    PyObject_GetBuffer(array, &m.view, PyBUF_STRIDES)
    m.data, m.rows, m.row_stride = <char *>m.view.buf, m.view.shape[0], m.view.strides[0]
    m.columns, m.column_stride = 1, m.view.itemsize
    if m.view.ndim == 2:
        m.columns, m.column_stride = m.view.shape[1], m.view.strides[1]
    PyBuffer_Release(&m.view)
    return 0


cdef int check_tokens(Py_ssize_t n, object name) except -1:
    if n > 1 << 30:
        raise InvalidInput(expected="at most 2^30 tokens", got=str(n), at=f"{name}.shape")
    return 0


# ---------------------------------------------------------------- gating

GATE_KINDS = {
    "softmax-topk": <int>CLB_SOFTMAX_TOPK,
    "topk-softmax": <int>CLB_TOPK_SOFTMAX,
    "sigmoid-topk": <int>CLB_SIGMOID_TOPK,
    "sqrtsoftplus-topk": <int>CLB_SQRTSOFTPLUS_TOPK,
    "topk-sigmoid": <int>CLB_TOPK_SIGMOID,
}
GATINGS = {"exact": <int>CLB_EXACT, "taylor": <int>CLB_TAYLOR}
MAX_EXPERTS = CLB_MAX_EXPERTS


def builtin_router_table():
    """The built-in bundle's gate as it stands in this module's read-only data, float32 ``[hidden_size, width]``."""
    cdef Py_ssize_t n = <Py_ssize_t>clb_builtin_router.hidden_size * clb_builtin_router.width
    flat = np.frombuffer((<const char *>clb_builtin_router.table)[: n * sizeof(float)], np.float32)
    return flat.reshape(clb_builtin_router.hidden_size, clb_builtin_router.width)


@cython.final
cdef class Balance:
    """The balancer's memory: a ring over the last tokens and its sum, for each expert."""

    cdef clb_balancer state
    cdef _Memory memory

    def __cinit__(self, int n_experts, int window, double threshold, bint prefer_emptiest):
        cdef size_t n_sums = <size_t>n_experts * sizeof(int64_t)
        cdef size_t n_ring = <size_t>n_experts * window * sizeof(int32_t)
        self.memory = _Memory()
        self.memory.reserve(n_sums + n_ring)
        memset(self.memory.data, 0, n_sums + n_ring)
        self.state = clb_balancer(
            n_experts, window, 0, <int32_t *>(self.memory.data + n_sums), <int64_t *>self.memory.data, threshold,
            0, prefer_emptiest,
        )

    @property
    def sums(self):
        """int64 ``(n_experts,)``: each ring's sum, in units of 2^-24."""
        return np.frombuffer(self.memory.data[: self.state.n_experts * sizeof(int64_t)], np.int64).copy()

    def save(self):
        """Return (ring int32 ``(window, n_experts)``, the row that the next token writes)."""
        cdef Py_ssize_t n = <Py_ssize_t>self.state.n_experts * self.state.window * sizeof(int32_t)
        ring = np.frombuffer((<char *>self.state.ring)[:n], np.int32)
        return ring.reshape(self.state.window, self.state.n_experts).copy(), self.state.position

    def load(self, ring, int position):
        """Take over what save returned; shapes and range are the caller's to check."""
        cdef Py_ssize_t row, e, n_experts = self.state.n_experts, window = self.state.window
        cdef const void *entries = contiguous(ring, window * n_experts * sizeof(int32_t))
        memcpy(self.state.ring, entries, window * n_experts * sizeof(int32_t))
        for e in range(n_experts):
            self.state.sums[e] = 0
            for row in range(window):
                self.state.sums[e] += self.state.ring[row * n_experts + e]
        self.state.position = position


@cython.final
cdef class Noise:
    """The state of xorshift128+ behind Gumbel noise."""

    cdef uint64_t state[2]
    cdef readonly float temperature

    def __cinit__(self, float temperature, uint64_t seed):
        self.temperature = temperature
        clb_seed(seed, self.state)


@cython.final
cdef class Gate:
    """A router's weights as a table ``[hidden_size, width]``, and its rule."""

    cdef const float *table
    cdef const float *bias
    cdef _Memory memory
    cdef clb_gate_rule rule
    cdef readonly int hidden_size, width, threads
    cdef _Workspaces workspaces

    def __cinit__(self, weight, bias, correction, int n_experts, int hidden_size, int threads, int top_k, int kind,
                  int gating, bint renormalize, float scale, bint by_score, float epsilon, int n_groups,
                  int top_groups, bint group_sums, float masked):
        """Take a C-contiguous float32 weight ``[n_experts, hidden_size]``, or None for the built-in table.

        The biases are such too, or None. What follows top_k is clb_gate_rule's.
        """
        cdef Py_ssize_t e, i
        cdef const float *w
        self.hidden_size, self.threads = hidden_size, threads
        self.width = (n_experts + CLB_PANEL - 1) // CLB_PANEL * CLB_PANEL
        self.workspaces = _Workspaces()
        cdef size_t n_table = 0 if weight is None else <size_t>hidden_size * self.width
        self.memory = new_floats(n_table + 2 * self.width)
        cdef float *table = <float *>self.memory.data
        cdef float *padded_bias = table + n_table
        cdef float *padded_correction = padded_bias + self.width
        self.table, self.bias = table, padded_bias
        self.rule = clb_gate_rule(
            n_experts, top_k, <clb_gate_kind>kind, <clb_exp_kind>gating, renormalize, scale, by_score, epsilon,
            padded_correction, n_groups, top_groups, group_sums, masked,
        )
        if weight is None:
            self.table = clb_builtin_router.table
        else:
            w = <const float *>contiguous(weight, <size_t>n_experts * hidden_size * sizeof(float))
            for e in range(n_experts):
                for i in range(hidden_size):
                    table[i * self.width + e] = w[e * hidden_size + i]
        if bias is not None:
            memcpy(padded_bias, contiguous(bias, n_experts * sizeof(float)), n_experts * sizeof(float))
        if correction is not None:
            memcpy(padded_correction, contiguous(correction, n_experts * sizeof(float)), n_experts * sizeof(float))
        clb_pool_reserve(threads)

    def route(self, hidden, Balance balance, int candidates, Noise noise):
        """Return (ids int32 ``(T, K)``, weights float32 ``(T, K)``, load int64 ``(E,)``)."""
        cdef Matrix x
        cdef Py_ssize_t bad, s, n_slots
        cdef int top_k = self.rule.top_k, csr
        cdef clb_route_job job
        cdef _Memory workspace
        cdef int64_t *load
        cdef size_t n_gathered = 0, n_logits = 0
        cdef uint64_t[2] before
        x.held = False
        contract = f"float32 (tokens, {self.hidden_size})"
        try:
            open_matrix(hidden, &x, "hidden", contract, False, 0)
            if x.columns != self.hidden_size or x.view.ndim != 2:
                raise InvalidInput(expected=contract, got=f"shape {shape_of(&x)}", at="hidden.shape")
            check_tokens(x.rows, "hidden")
            ids = np.empty((x.rows, top_k), np.int32)
            weights = np.empty((x.rows, top_k), np.float32)
            counts = np.zeros(self.rule.n_experts, np.int64)
            if x.rows == 0:
                return ids, weights, counts
            job.n_tokens, job.hidden_size = <int>x.rows, self.hidden_size
            job.table, job.bias, job.width, job.rule = self.table, self.bias, self.width, self.rule
            job.ids, job.weights = <int32_t *>data_of(ids), <float *>data_of(weights)
            job.x, job.x_stride, job.logits = <const float *>x.data, x.row_stride // <Py_ssize_t>sizeof(float), NULL
            load = <int64_t *>data_of(counts)
            workspace = self.workspaces.take()
            try:
                if not direct(&x):
                    n_gathered = <size_t>x.rows * self.hidden_size
                if balance is not None or noise is not None:
                    n_logits = <size_t>x.rows * self.width
                workspace.reserve((n_gathered + n_logits) * sizeof(float))
                if n_gathered:
                    gather(&x, 0, x.rows, <float *>workspace.data)
                    job.x, job.x_stride = <const float *>workspace.data, self.hidden_size
                if n_logits:
                    job.logits = <float *>workspace.data + n_gathered
                n_slots = x.rows * top_k
                if balance is not None:
                    balance.state.candidates = candidates
                with nogil:
                    csr = clb_float_mode()
                    bad = clb_route_batch(kernels, &job, self.threads)
                    if bad < 0 and noise is not None:
                        before = noise.state
                        clb_gumbel(noise.state, noise.temperature, job.logits, self.width, self.rule.n_experts,
                                   job.n_tokens)
                        bad = clb_choose(kernels, &job)
                        if bad >= 0:
                            noise.state = before
                    if bad < 0 and balance is not None:
                        clb_balance(kernels, &balance.state, &self.rule, job.logits, self.width, job.n_tokens,
                                    job.ids, job.weights)
                    if bad < 0:
                        for s in range(n_slots):
                            load[job.ids[s]] += 1
                    clb_restore_float_mode(csr)
            finally:
                self.workspaces.give_back(workspace)
            if bad >= 0:
                raise InvalidInput(
                    expected="finite router logits",
                    got="NaN or infinity",
                    at=f"token {bad}",
                    hint="its hidden state is not finite, or too large for float32",
                )
            return ids, weights, counts
        finally:
            close_matrix(&x)


cdef object shape_of(const Matrix *m):
    cdef int d
    return tuple([m.view.shape[d] for d in range(m.view.ndim)])


def softmax(logits, gating="exact", out=None):
    """Row-wise softmax of float32 ``(T, n)``, ``n`` a multiple of 8, by the gate's own exponential."""
    cdef Matrix x
    cdef int n
    cdef float *to
    cdef clb_exp_kind kind = <clb_exp_kind><int>GATINGS[gating]
    x.held = False
    try:
        open_matrix(logits, &x, "logits", "float32 (tokens, columns)", False, 0)
        if x.columns % 8 or not 0 < x.columns <= CLB_MAX_EXPERTS or not direct(&x):
            raise InvalidInput(expected="aligned rows of a multiple of 8 columns", got=f"shape {shape_of(&x)}",
                               at="logits")
        result = np.empty((x.rows, x.columns), np.float32) if out is None else out
        to = <float *>data_of(result)
        n = <int>x.columns
        with nogil:
            kernels.softmax_f32(kind, <const float *>x.data, x.row_stride // <Py_ssize_t>sizeof(float), n,
                                <int>x.rows, to, n)
        return result
    finally:
        close_matrix(&x)


def add(y, x):
    """y += x, contiguous float32 ``(tokens, n)`` both, rounded to nearest whatever the caller's mode."""
    cdef Py_ssize_t t, n_tokens = y.shape[0], n = y.shape[1]
    cdef const float *terms = <const float *>contiguous(x, n_tokens * n * sizeof(float))
    cdef float *to = <float *>data_of(y)
    cdef int csr
    with nogil:
        csr = clb_float_mode()
        for t in range(n_tokens):
            kernels.accumulate_f32(1, terms + t * n, <int>n, to + t * n)
        clb_restore_float_mode(csr)


def dispatch(ids, int n_experts):
    """Counting sort of int32 slots by expert: (offsets int32 ``(E + 1,)``, order int32 ``(slots in use,)``)."""
    cdef Py_ssize_t s, n_slots = len(ids)
    cdef const int32_t *slots = <const int32_t *>contiguous(ids, n_slots * sizeof(int32_t))
    for s in range(n_slots):
        if not -1 <= slots[s] < n_experts:
            raise InvalidInput(expected=f"-1 or an id in 0..{n_experts - 1}", got=str(slots[s]), at=f"ids[{s}]")
    offsets = np.empty(n_experts + 1, np.int32)
    order = np.empty(n_slots, np.int32)
    cdef int32_t *to_offsets = <int32_t *>data_of(offsets)
    cdef int32_t *to_order = <int32_t *>data_of(order)
    with nogil:
        clb_dispatch(slots, <int>n_slots, n_experts, to_offsets, to_order)
    return offsets, order[: offsets[n_experts]]


# ---------------------------------------------------------------- experts

ACTIVATIONS = {
    "relu": <int>CLB_RELU,
    "relu2": <int>CLB_RELU2,
    "silu": <int>CLB_SILU,
    "gelu": <int>CLB_GELU,
    "gelu_tanh": <int>CLB_GELU_TANH,
}


DTYPES = {
    "float32": <int>CLB_F32,
    "bfloat16": <int>CLB_BF16,
    "float16": <int>CLB_F16,  # in place only
    "int8": <int>CLB_I8,
    "int4": <int>CLB_I4,
}


cdef clb_dtype biases_of(object array):
    """The type of biases in place: float32, float16, or bfloat16 as uint16."""
    return {"f": CLB_F32, "e": CLB_F16}.get(array.dtype.char, CLB_BF16)


@cython.final
cdef class Expert:
    """One expert's weights where the kernels read them, and what keeps them there.

    A buffer of its payload, read-only, where it has one: where it was packed.
    """

    cdef clb_expert pointers
    cdef _Memory memory  # where the payload is, or
    cdef object owners  # of somebody else's arrays: views of one expert would be hundreds of small things on the heap
    cdef Range[4] ranges  # of addresses: up, down and their biases, or a payload
    cdef readonly Watch watch  # over the pages that those are on
    cdef readonly size_t n_bytes
    cdef readonly bint in_place

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.pointers.up_place.in_place:
            raise BufferError("weights in place are no payload")
        PyBuffer_FillInfo(view, self, <void *>self.pointers.up, self.n_bytes, True, flags)


@cython.final
cdef class ExpertSet:
    """Experts by id, never changed: a call that holds one is not touched by a swap.

    An entry is an Expert, or what a loader makes one of, or None where an id is not in use.
    """

    cdef tuple experts
    cdef _Memory pointers
    cdef _Memory present  # a byte an id: whether it is in use
    cdef bint watched, in_place  # whether an expert is on pages that may be lost, or in somebody else's arrays

    def __cinit__(self, experts):
        cdef Py_ssize_t i, n
        cdef Expert expert
        cdef clb_expert *to
        self.experts = tuple(experts)
        n = len(self.experts)
        if n > CLB_MAX_EXPERTS:
            raise InvalidInput(expected=f"at most {CLB_MAX_EXPERTS} experts", got=str(n), at="experts")
        self.pointers, self.present = _Memory(), _Memory()
        self.pointers.reserve((n + 1) * sizeof(clb_expert))
        self.present.reserve(n + 1)
        to = <clb_expert *>self.pointers.data
        for i in range(n):
            self.present.data[i] = self.experts[i] is not None
            memset(&to[i], 0, sizeof(clb_expert))
            if isinstance(self.experts[i], Expert):
                expert = self.experts[i]
                to[i] = expert.pointers
                self.watched |= expert.watch is not None
                self.in_place |= expert.in_place

    def __len__(self):
        return len(self.experts)

    def __getitem__(self, i):
        return self.experts[i]

    def __iter__(self):
        return iter(self.experts)


@cython.final
cdef class ExpertKernel:
    """The shape that a layer's experts share, and the buffers of its calls."""

    cdef clb_experts_shape shape
    cdef readonly int threads, max_tokens
    cdef clb_team team
    cdef size_t most_kept  # bytes of a workspace that outlives its call
    cdef _Workspaces workspaces

    def __cinit__(self, int hidden_size, int intermediate_size, int activation, bint gated, float alpha=1.0,
                  float beta=0.0, limit=None, int threads=1, int max_tokens=512, int dtype=0,
                  bint narrow_states=False, size_t team=0, size_t most_kept=<size_t>-1):
        self.shape.hidden_size, self.shape.intermediate_size = hidden_size, intermediate_size
        self.shape.dtype, self.shape.narrow_states = <clb_dtype>dtype, narrow_states
        self.shape.rule = clb_activation_rule(
            <clb_activation>activation, gated, alpha, beta, INFINITY if limit is None else limit
        )
        self.threads, self.max_tokens = threads, max_tokens
        self.team, self.most_kept = <clb_team>team, most_kept
        self.workspaces = _Workspaces()
        if not team:
            clb_pool_reserve(threads)

    def pack(self, up, down, up_bias=None, down_bias=None, bint interleaved=False):
        """Copy one expert into panels.

        up is float32 ``[outputs, hidden]`` (gated: gate rows then up rows, or alternating where interleaved), down is
        ``[hidden, intermediate]``, both aligned and with any strides; the biases are contiguous, and zeros if the
        other alone is given. Shapes are the caller's to check.
        """
        cdef int n = self.shape.intermediate_size, hidden = self.shape.hidden_size
        cdef int halves = 2 if self.shape.rule.gated else 1, half
        cdef clb_dtype dtype = self.shape.dtype
        cdef size_t up_panel = clb_panel_bytes(dtype, hidden)
        cdef bint biased = up_bias is not None or down_bias is not None
        cdef Expert expert = Expert()
        cdef clb_expert *e = &expert.pointers
        cdef Matrix u, d
        cdef float *biases
        cdef const float *bias
        cdef Py_ssize_t i, first, step, column, down_step, down_column
        cdef int csr
        expert.memory = _Memory()
        expert.n_bytes = clb_lay_out(&self.shape, biased, NULL, NULL)
        expert.memory.reserve(expert.n_bytes)
        clb_lay_out(&self.shape, biased, expert.memory.data, e)
        biases = <float *>e.up_bias
        u.held = d.held = False
        try:
            open_matrix(up, &u, "up", "float32 (outputs, inputs)", False, 0)
            open_matrix(down, &d, "down", "float32 (outputs, inputs)", False, 0)
            step = u.row_stride // <Py_ssize_t>sizeof(float)
            column = u.column_stride // <Py_ssize_t>sizeof(float)
            down_step = d.row_stride // <Py_ssize_t>sizeof(float)
            down_column = d.column_stride // <Py_ssize_t>sizeof(float)
            first = step if interleaved else step * n  # from the gate's first row to the up projection's
            with nogil:
                csr = clb_float_mode()
                for half in range(halves):
                    clb_pack_panels(kernels, dtype, <const float *>u.data + half * first,
                                    step * halves if interleaved else step, column, n, hidden,
                                    <char *>e.up + half * up_panel, halves * up_panel, <float *>e.up_bases + half,
                                    halves, self.threads)
                clb_pack_panels(kernels, dtype, <const float *>d.data, down_step, down_column, hidden, n,
                                <char *>e.down, clb_panel_bytes(dtype, n), <float *>e.down_bases, 1, self.threads)
                clb_restore_float_mode(csr)
        finally:
            close_matrix(&u)
            close_matrix(&d)
        if biased:
            memset(biases, 0, (halves * n + hidden) * sizeof(float))
        if up_bias is not None:
            bias = <const float *>contiguous(up_bias, halves * n * sizeof(float))
            for i in range(halves * n):  # alternating biases become gate biases, then up biases
                biases[i] = bias[(i % n) * 2 + i // n] if interleaved else bias[i]
        if down_bias is not None:
            memcpy(<float *>e.down_bias, contiguous(down_bias, hidden * sizeof(float)), hidden * sizeof(float))
        return expert

    def adopt(self, payload, bint biased, Watch watch=None, bint own=False):
        """Run one expert where its payload lies, at any address: contiguous uint8, as memoryview(packed) has it.

        watch is over the pages that it is on; own: nobody else has that memory.
        """
        cdef Expert expert = Expert()
        expert.n_bytes = clb_lay_out(&self.shape, biased, NULL, NULL)
        clb_lay_out(&self.shape, biased, <const char *>contiguous(payload, expert.n_bytes), &expert.pointers)
        expert.owners, expert.watch, expert.in_place = owner_of(payload), watch, not own
        cdef Matrix bytes_
        look_at(payload, &bytes_)
        expert.ranges[0] = range_of(&bytes_)
        return expert

    def in_place(self, up, down, up_bias=None, down_bias=None, bint interleaved=False, Watch watch=None,
                 bint own=False):
        """Run one expert where its weights lie, at any address: float32, float16, or bfloat16 as uint16.

        Shapes and interleaved are as for pack; inputs, or outputs, should lie side by side. Biases are of
        any of these. watch is over the pages that all of them are on; own: nobody else has the arrays.
        """
        cdef Expert expert = Expert()
        cdef clb_expert *e = &expert.pointers
        cdef clb_place *place = &e.up_place
        cdef int i, n = self.shape.intermediate_size
        cdef Matrix[4] m
        arrays = up, down, up_bias, down_bias
        expert.owners, expert.watch, expert.n_bytes = [], watch, 0
        for i in range(4):
            if arrays[i] is not None:
                look_at(arrays[i], &m[i])
                expert.ranges[i] = range_of(&m[i])
                expert.n_bytes += arrays[i].nbytes
                expert.owners.append(owner_of(arrays[i]))
        e.up, place.output, place.input = m[0].data, m[0].row_stride, m[0].column_stride
        e.down, e.down_place.output, e.down_place.input = m[1].data, m[1].row_stride, m[1].column_stride
        expert.in_place = not own
        place.in_place = e.down_place.in_place = True
        if up_bias is not None:
            e.up_bias, place.bias, place.biases = m[2].data, m[2].row_stride, biases_of(up_bias)
        if down_bias is not None:
            e.down_bias, e.down_place.bias, e.down_place.biases = m[3].data, m[3].row_stride, biases_of(down_bias)
        place.up, place.up_bias = place.output * n, place.bias * n
        if interleaved:
            place.up, place.up_bias = place.output, place.bias
            place.output *= 2
            place.bias *= 2
        return expert

    def run(self, ExpertSet experts not None, hidden, expert_ids, expert_weights, out=None, loader=None):
        """Weighted sum of each token's experts, float32 ``(T, hidden_size)``.

        loader, for experts that are not resident: ``loader.group`` is how many it holds at once,
        ``loader.acquire(ids)`` gives their Expert objects and ``loader.release(ids)`` lets go.
        """
        cdef Matrix x, ids, weights, y
        cdef Range written
        cdef Range[3] read
        cdef _Memory workspace
        cdef Expert expert
        cdef int i
        x.held = ids.held = weights.held = y.held = False
        contract = f"float32 (tokens, {self.shape.hidden_size})"
        try:
            open_matrix(hidden, &x, "hidden", contract, False, 0)
            open_matrix(expert_ids, &ids, "expert_ids", "int32 or int64 (tokens, top_k)", True, 0)
            open_matrix(expert_weights, &weights, "expert_weights", "float32 (tokens, top_k)", False, 0)
            if x.columns != self.shape.hidden_size or x.view.ndim != 2:
                raise InvalidInput(expected=contract, got=f"shape {shape_of(&x)}", at="hidden.shape")
            if ids.rows != x.rows or ids.view.ndim != 2:
                raise InvalidInput(expected=f"({x.rows}, top_k)", got=f"shape {shape_of(&ids)}",
                                   at="expert_ids.shape")
            if weights.rows != ids.rows or weights.columns != ids.columns or weights.view.ndim != 2:
                raise InvalidInput(expected=f"the shape of expert_ids, {shape_of(&ids)}",
                                   got=f"shape {shape_of(&weights)}", at="expert_weights.shape")
            check_tokens(x.rows, "hidden")
            if ids.columns > 1 << 16:
                raise InvalidInput(expected="at most 65,536 experts a token", got=str(ids.columns),
                                   at="expert_ids.shape")
            if out is None:
                out = np.empty((x.rows, x.columns), np.float32)
            open_matrix(out, &y, "out", contract, False, PyBUF_WRITABLE)
            if (
                y.view.ndim != 2 or y.rows != x.rows or y.columns != x.columns or not direct(&y)
                or (y.rows > 1 and y.row_stride != y.columns * <Py_ssize_t>sizeof(float))
            ):
                raise InvalidInput(expected=f"C-contiguous float32 {(x.rows, x.columns)}",
                                   got=f"shape {shape_of(&y)}, strides {(y.row_stride, y.column_stride)}", at="out")
            written, read[0], read[1], read[2] = range_of(&y), range_of(&x), range_of(&ids), range_of(&weights)
            if overlap(&written, &read[0]) or overlap(&written, &read[1]) or overlap(&written, &read[2]):
                raise InvalidInput(expected="memory of its own", got="an overlap with an input", at="out")
            if experts.in_place:
                for entry in experts.experts:
                    if isinstance(entry, Expert):
                        expert = entry
                        for i in range(4):
                            if expert.in_place and overlap(&written, &expert.ranges[i]):
                                raise InvalidInput(expected="memory of its own", got="an overlap with a weight",
                                                   at="out")
            workspace = self.workspaces.take()
            clb_pool_borrow(self.team)
            try:
                self.run_chunks(experts, &x, &ids, &weights, &y, workspace, loader)
            finally:
                clb_pool_borrow(NULL)
                if workspace.n_bytes <= self.most_kept:
                    self.workspaces.give_back(workspace)
            return out
        finally:
            close_matrix(&x)
            close_matrix(&ids)
            close_matrix(&weights)
            close_matrix(&y)

    cdef int copy_ids(self, ExpertSet experts, const Matrix *ids, int32_t *to) except -1:
        """Copy the ids, refusing those that name no expert; what is checked is what is used, whoever else writes."""
        cdef Py_ssize_t t, k, n = len(experts.experts)
        cdef int64_t e
        for t in range(ids.rows):
            for k in range(ids.columns):
                e = integer_at(ids, t, k)
                if e < -1 or e >= n or (e >= 0 and not experts.present.data[e]):
                    raise InvalidInput(
                        expected=f"-1 or the id of an expert in 0..{n - 1}",
                        got=f"{e}" if e < -1 or e >= n else f"{e}, which was removed",
                        at=f"expert_ids[{t}, {k}]",
                    )
                to[t * ids.columns + k] = <int32_t>e
        return 0

    cdef int check_files(self, ExpertSet experts, const int32_t *ids, Py_ssize_t n) except -1:
        """Refuse an answer from experts whose file has lost its pages."""
        cdef Py_ssize_t i
        cdef Expert expert
        if not experts.watched:
            return 0
        for i in range(n):
            if ids[i] >= 0:
                expert = experts.experts[ids[i]]
                if expert.watch is not None and clb_lost(expert.watch.region):
                    expert.watch.check()
        return 0

    cdef int run_chunks(self, ExpertSet experts, const Matrix *x, const Matrix *ids, const Matrix *weights,
                        const Matrix *y, _Memory workspace, object loader) except -1:
        """Take max_tokens tokens at a time: each token's bits are its own, whatever chunk it is in."""
        cdef int n_experts = <int>len(experts.experts), hidden = self.shape.hidden_size, csr
        cdef Py_ssize_t top_k = ids.columns, chunk, first, n, t, k
        cdef size_t state_bytes, input_bytes = clb_input_bytes(&self.shape)
        cdef clb_experts_job job
        cdef int32_t *all_ids
        cdef int32_t *offsets
        cdef int32_t *order
        cdef float *slot_weights
        cdef float *gathered
        cdef float *summed
        # What may fail half-way (a load, a file that loses its pages) is summed apart: out is written whole or not.
        cdef bint copies = not direct(x), apart = loader is not None or experts.watched
        if x.rows == 0:
            return 0
        chunk = min(<Py_ssize_t>self.max_tokens, x.rows, max(1, (1 << 30) // max(1, top_k)))  # slots are counted in int
        # One allocation: every buffer of the call, largest alignment first.
        cdef size_t n_slots = <size_t>(chunk * top_k), n_ids = <size_t>(x.rows * top_k)
        cdef size_t n_summed = <size_t>(x.rows * hidden) if apart else 0
        cdef size_t n_gathered = <size_t>(chunk * hidden) if copies else 0
        cdef size_t lanes_bytes = 0
        if clb_lanes_wanted(kernels, &self.shape, experts.in_place, n_slots):
            lanes_bytes = clb_lanes_bytes(&self.shape) * self.threads
        state_bytes = clb_states_bytes(&self.shape, n_slots)
        workspace.reserve(
            state_bytes + lanes_bytes + chunk * input_bytes
            + (n_gathered + n_summed + 2 * n_slots + n_ids + n_experts + 1) * sizeof(float)
        )
        job.shape, job.top_k = &self.shape, <int>top_k
        job.experts = <const clb_expert *>experts.pointers.data
        job.activations = workspace.data
        job.lanes = workspace.data + state_bytes if lanes_bytes else NULL
        job.inputs = workspace.data + state_bytes + lanes_bytes
        gathered = <float *>(workspace.data + state_bytes + lanes_bytes + chunk * input_bytes)
        summed = gathered + n_gathered
        slot_weights = summed + n_summed
        order = <int32_t *>(slot_weights + n_slots)
        offsets = order + n_slots
        all_ids = offsets + n_experts + 1
        job.offsets, job.order, job.slot_weights, job.y_stride = offsets, order, slot_weights, hidden
        self.copy_ids(experts, ids, all_ids)
        for first in range(0, x.rows, chunk):
            n = min(chunk, x.rows - first)
            job.n_tokens, job.y = <int>n, (summed if apart else <float *>y.data) + first * hidden
            with nogil:
                csr = clb_float_mode()
                for t in range(n):
                    for k in range(top_k):
                        memcpy(&slot_weights[t * top_k + k],
                               weights.data + (first + t) * weights.row_stride + k * weights.column_stride,
                               sizeof(float))
                if copies:
                    gather(x, first, n, gathered)
                    job.x, job.x_stride = gathered, hidden
                else:
                    job.x = <const float *>(x.data + first * x.row_stride)
                    job.x_stride = x.row_stride // <Py_ssize_t>sizeof(float)
                clb_dispatch(all_ids + first * top_k, <int>(n * top_k), n_experts, offsets, order)
                memset(job.y, 0, n * hidden * sizeof(float))
                clb_experts_begin(kernels, &job, self.threads)
                if loader is None:
                    clb_experts_add(kernels, &job, 0, n_experts, self.threads)
                clb_restore_float_mode(csr)
            if loader is not None:
                self.run_loaded(&job, experts, n_experts, loader)
        self.check_files(experts, all_ids, n_ids)
        if apart:
            memcpy(y.data, summed, n_summed * sizeof(float))
        return 0

    cdef int run_loaded(self, clb_experts_job *job, ExpertSet experts, int n_experts, object loader) except -1:
        """Run the active experts in ascending order, as many at a time as the loader holds."""
        cdef int e, begin, end, csr
        cdef clb_expert *pointers
        cdef _Memory table = _Memory()
        cdef Expert expert
        table.reserve(n_experts * sizeof(clb_expert))
        pointers = <clb_expert *>table.data
        active = [e for e in range(n_experts) if job.offsets[e + 1] > job.offsets[e]]
        job.experts = pointers
        loader.expect([experts.experts[e] for e in active])
        for at in range(0, len(active), loader.group):
            group = active[at : at + loader.group]
            held = loader.acquire([experts.experts[e] for e in group])
            try:
                for e, loaded in zip(group, held):
                    expert = loaded
                    pointers[e] = expert.pointers
                begin, end = group[0], group[len(group) - 1] + 1
                with nogil:
                    csr = clb_float_mode()
                    clb_experts_add(kernels, job, begin, end, self.threads)
                    clb_restore_float_mode(csr)
            finally:
                loader.release([experts.experts[e] for e in group])
        return 0


# ---------------------------------------------------------------- the ends of a model

@cython.final
cdef class Mixer:
    """Token ids to hidden states: each offset's matrix times the neighbour's embedding, one chain an output."""

    cdef object array
    cdef Watch watch
    cdef const float *embedding
    cdef _Memory memory
    cdef const float *zeros
    cdef readonly int vocab_size, hidden_size, context, threads

    def __cinit__(self, embedding, mixer, int threads):
        """Take float32 ``[vocab_size, hidden]``, run in place, and ``[2 context + 1, hidden, hidden]``, contiguous.

        The embedding is an array, or a Watch over one.
        """
        if isinstance(embedding, Watch):
            self.watch, embedding = embedding, embedding.array
        cdef Py_ssize_t vocab_size = embedding.shape[0], hidden = embedding.shape[1], n_offsets = mixer.shape[0], o
        cdef Py_ssize_t n_panels = (hidden + CLB_PANEL - 1) // CLB_PANEL, panel = hidden * CLB_PANEL
        cdef const float *matrices = <const float *>contiguous(mixer, n_offsets * hidden * hidden * sizeof(float))
        cdef float *floats
        self.vocab_size, self.hidden_size = <int>vocab_size, <int>hidden
        self.context, self.threads = <int>(n_offsets // 2), threads
        self.array = embedding
        self.embedding = <const float *>contiguous(embedding, vocab_size * hidden * sizeof(float))
        self.memory = new_floats(n_offsets * n_panels * panel + hidden)
        floats = <float *>self.memory.data
        self.zeros = floats + n_offsets * n_panels * panel
        for o in range(n_offsets):
            clb_pack_panels(kernels, CLB_F32, matrices + o * hidden * hidden, hidden, 1, self.hidden_size,
                            self.hidden_size, floats + o * n_panels * panel, panel * sizeof(float), NULL, 0, 1)
        clb_pool_reserve(threads)

    def run(self, ids):
        """Return float32 ``(T, hidden)`` for contiguous int32 ids."""
        cdef Py_ssize_t n = len(ids), t
        cdef const int32_t *tokens = <const int32_t *>contiguous(ids, n * sizeof(int32_t))
        cdef clb_mix_job job
        cdef int csr
        check_tokens(n, "ids")
        for t in range(n):
            if not 0 <= tokens[t] < self.vocab_size:
                raise InvalidInput(expected=f"a token id in 0..{self.vocab_size - 1}", got=str(tokens[t]),
                                   at=f"ids[{t}]")
        x = np.empty((n, self.hidden_size), np.float32)
        job = clb_mix_job(
            tokens, <int>n, self.embedding, self.hidden_size, self.context, <const float *>self.memory.data,
            self.zeros, <float *>data_of(x),
        )
        with nogil:
            csr = clb_float_mode()
            clb_mix_context(kernels, &job, self.threads)
            clb_restore_float_mode(csr)
        if self.watch is not None:
            self.watch.check()
        return x


@cython.final
cdef class Head:
    """Hidden states to class probabilities."""

    cdef _Memory memory
    cdef const float *bias
    cdef readonly int n_classes, hidden_size, threads

    def __cinit__(self, weight, bias, int threads):
        """Take contiguous float32 weight ``[n_classes, hidden]`` and bias ``[n_classes]``."""
        cdef Py_ssize_t n_classes = weight.shape[0], hidden = weight.shape[1]
        cdef Py_ssize_t n_panels = (n_classes + CLB_PANEL - 1) // CLB_PANEL, panel = hidden * CLB_PANEL
        cdef const float *matrix = <const float *>contiguous(weight, n_classes * hidden * sizeof(float))
        cdef float *floats
        self.n_classes, self.hidden_size, self.threads = <int>n_classes, <int>hidden, threads
        self.memory = new_floats(n_panels * (panel + CLB_PANEL))
        floats = <float *>self.memory.data
        self.bias = floats + n_panels * panel
        clb_pack_panels(kernels, CLB_F32, matrix, hidden, 1, self.n_classes, self.hidden_size, floats,
                        panel * sizeof(float), NULL, 0, 1)
        memcpy(floats + n_panels * panel, contiguous(bias, n_classes * sizeof(float)), n_classes * sizeof(float))
        clb_pool_reserve(threads)

    def run(self, h):
        """Return (probabilities float32 ``(T, C)``, classes int32 ``(T,)``) for contiguous float32 ``(T, hidden)``."""
        cdef Py_ssize_t n = len(h), bad
        cdef clb_head_job job
        cdef int csr
        probabilities = np.empty((n, self.n_classes), np.float32)
        classes = np.empty(n, np.int32)
        job = clb_head_job(
            <const float *>contiguous(h, n * self.hidden_size * sizeof(float)), <int>n, self.hidden_size,
            self.n_classes, <const float *>self.memory.data, self.bias, <float *>data_of(probabilities),
            <int32_t *>data_of(classes),
        )
        with nogil:
            csr = clb_float_mode()
            bad = clb_head(kernels, &job, self.threads)
            clb_restore_float_mode(csr)
        if bad >= 0:
            raise InvalidInput(
                expected="finite class logits",
                got="NaN or infinity",
                at=f"token {bad}",
                hint="a weight of one of its experts, of the head, or of its embedding is not finite",
            )
        return probabilities, classes


# ---------------------------------------------------------------- timing and self-test, for colibri_cli.bench

# Arrays are contiguous; sizes are checked here, values are the caller's. A timer fills ns, float64: the time of each
# sample, one clock read included.

cdef clb_samples samples_into(object ns, int n_calls) except *:
    return clb_samples(<double *>data_of(ns), <int>len(ns), n_calls)


def time_clock(ns, /):
    """Time clock reads."""
    cdef clb_samples samples = samples_into(ns, 0)
    with nogil:
        clb_time_clock(samples.ns, samples.n_samples)


def time_route(Gate gate not None, hidden, ids, weights, int n_tokens, ns, /):
    """Route float32 ``(T, hidden)`` into int32 and float32 ``(T, K)``, the next n_tokens of T a sample."""
    cdef Py_ssize_t n = len(hidden), n_slots = n * gate.rule.top_k
    cdef clb_samples samples = samples_into(ns, 1)
    cdef clb_route_job job
    job.x, job.x_stride = <const float *>contiguous(hidden, n * gate.hidden_size * sizeof(float)), gate.hidden_size
    job.n_tokens, job.hidden_size, job.logits = <int>n, gate.hidden_size, NULL
    job.table, job.bias, job.width, job.rule = gate.table, gate.bias, gate.width, gate.rule
    job.ids = <int32_t *>contiguous(ids, n_slots * sizeof(int32_t))
    job.weights = <float *>contiguous(weights, n_slots * sizeof(float))
    with nogil:
        clb_time_route(kernels, &job, min(n_tokens, <int>n), &samples)


def time_softmax(logits, out, int gating, ns, /):
    """Softmax of float32 ``(T, 8)`` into the same shape."""
    cdef Py_ssize_t n = len(logits)
    cdef const float *x = <const float *>contiguous(logits, n * 8 * sizeof(float))
    cdef float *to = <float *>contiguous(out, n * 8 * sizeof(float))
    cdef clb_samples samples = samples_into(ns, 1)
    with nogil:
        clb_time_softmax(kernels, <clb_exp_kind>gating, x, 8, <int>n, to, &samples)


def time_dispatch(ids, int top_k, offsets, order, ns, /):
    """Sort top_k slots of int32 ids a sample, the next ones each time, into ``(E + 1,)`` and ``(top_k,)``."""
    cdef int n_experts = <int>len(offsets) - 1, n_tokens = <int>len(ids) // top_k
    cdef const int32_t *slots = <const int32_t *>contiguous(ids, n_tokens * top_k * sizeof(int32_t))
    cdef int32_t *to_offsets = <int32_t *>contiguous(offsets, (n_experts + 1) * sizeof(int32_t))
    cdef int32_t *to_order = <int32_t *>contiguous(order, top_k * sizeof(int32_t))
    cdef clb_samples samples = samples_into(ns, 1)
    dispatch(ids, n_experts)  # refuses an id out of range
    with nogil:
        clb_time_dispatch(slots, n_tokens, top_k, n_experts, to_offsets, to_order, &samples)


def time_expert(ExpertKernel kernel not None, ExpertSet experts not None, slots, hidden, y, int n_calls, ns, /):
    """Add the expert that int32 slots ``(T,)``, T from 0, all name to float32 y ``(T, hidden)``, n_calls a sample.

    With no slots it is expert 0, entered and left.
    """
    cdef Py_ssize_t n = len(slots), n_floats = n * kernel.shape.hidden_size
    cdef size_t state_bytes = clb_states_bytes(&kernel.shape, n)
    cdef size_t input_bytes = n * clb_input_bytes(&kernel.shape)
    cdef int expert = slots[0] if n else 0
    cdef clb_samples samples = samples_into(ns, n_calls)
    cdef clb_experts_job job
    cdef _Memory scratch = _Memory()
    scratch.reserve(state_bytes + input_bytes)
    offsets, order = dispatch(slots, <int>len(experts.experts))
    job.shape, job.top_k, job.experts = &kernel.shape, 1, <const clb_expert *>experts.pointers.data
    job.offsets, job.order = <const int32_t *>data_of(offsets), <const int32_t *>data_of(order)
    weights = np.ones(n, np.float32)
    job.slot_weights = <const float *>data_of(weights)
    job.x, job.x_stride = <const float *>contiguous(hidden, n_floats * sizeof(float)), kernel.shape.hidden_size
    job.y, job.y_stride = <float *>contiguous(y, n_floats * sizeof(float)), kernel.shape.hidden_size
    job.n_tokens, job.activations, job.inputs = <int>n, scratch.data, scratch.data + state_bytes
    job.lanes = NULL
    with nogil:
        clb_experts_begin(kernels, &job, 1)
        clb_time_expert(kernels, &job, expert, &samples)


def metered(call, /):
    """Make a call: (its result, ns in linear_f32, calls of it, ns in fill_panels, calls of it).

    The times are the calling thread's and hold a clock read a call. Calls of other threads meanwhile are metered too,
    to no effect but the time that the clock takes.
    """
    global kernels
    cdef const clb_kernels *before = kernels
    cdef clb_meter meter
    kernels = clb_meter_start(kernels)
    try:
        result = call()
    finally:
        kernels = before
    meter = clb_meter_read()
    return result, meter.linear_ns, meter.linear_calls, meter.fill_ns, meter.fill_calls


def peak_gflops(int threads, /):
    """Fused multiply-adds in registers, by the instruction set in use, in 10^9 operations a second."""
    cdef double rate
    clb_pool_reserve(threads)
    with nogil:
        rate = clb_peak_gflops(kernels, threads)
    return rate


def read_bandwidth(size_t n_bytes, int threads, int n_tries, /):
    """Read n_bytes of memory by several loops; the best one's median rate, in 10^9 bytes a second."""
    cdef _Memory memory = _Memory()
    cdef double rate
    memory.reserve(n_bytes)
    clb_pool_reserve(threads)
    with nogil:
        rate = clb_read_bandwidth(memory.data, n_bytes, threads, n_tries)
    return rate


def addresses(holder, /):
    """Where the core's memory for one of its objects begins, and that of its idle workspaces; None: the table."""
    cdef list found = []
    cdef _Memory memory
    if holder is None:
        return [<size_t>clb_builtin_router.table]
    if isinstance(holder, Gate):
        found = [(<Gate>holder).memory] + (<Gate>holder).workspaces.idle()
    elif isinstance(holder, ExpertKernel):
        found = (<ExpertKernel>holder).workspaces.idle()
    elif isinstance(holder, Expert):
        found = [(<Expert>holder).memory]
    elif isinstance(holder, Mixer):
        found = [(<Mixer>holder).memory]
    elif isinstance(holder, Head):
        found = [(<Head>holder).memory]
    result = []
    for memory in found:
        if memory is not None:
            result.append(<size_t>memory.data)
    return result


def sanitized():
    """Whether this build watches its own memory accesses (the address sanitizer)."""
    return clb_sanitized() != 0
