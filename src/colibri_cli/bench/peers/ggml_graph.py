"""ggml, through ggml-python: the graph that llama.cpp builds for an MoE layer, in ggml's own weight types."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_cli.bench.peers.peer import Batch, Bound, Floats, Kind, Peer, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bench.shapes import Shape

PEER = Peer(
    name="ggml",
    requirements=("ggml-python>=0.0.45",),
    modules=("ggml",),
    kinds=(
        Kind("", "float32", 32),
        Kind("", "bfloat16", 16),
        Kind("q8_0", "int8", 34 * 8 / 32, 32),
        Kind("q4_0", "int4", 18 * 8 / 32, 32),
        Kind("q4_K", "int4", 144 * 8 / 256, 256),
    ),
)
_TYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_K": "Q4_K"}
_ROOM = 1 << 20  # bytes for the tensors' own records


class GgmlEngine:
    """Weights in one context; each batch and its graph in another.

    Gate and up projection are one tensor, hence one product, which never was slower than two.
    """

    def __init__(self, kind: Kind, shape: Shape, weights: Weights) -> None:
        import ggml

        self._ggml: Any = ggml
        self._shape = shape
        self._type = int(getattr(ggml, f"GGML_TYPE_{_TYPES[kind.name or kind.dtype]}"))
        self._context = self._new_context(kind.n_bytes(shape.n_weights))
        self._gate_up = self._quantised(weights.gate_up)
        self._down = self._quantised(weights.down)
        self._backend = ggml.ggml_backend_cpu_init()
        self._batch_context: Any = None

    def _new_context(self, n_bytes: int) -> Any:
        g = self._ggml
        return g.ggml_init(g.ggml_init_params(mem_size=n_bytes + _ROOM, mem_buffer=None, no_alloc=False))

    def _quantised(self, experts: Floats) -> Any:
        g = self._ggml
        n_experts, n_rows, n_columns = experts.shape
        tensor = g.ggml_new_tensor_3d(self._context, self._type, n_columns, n_rows, n_experts)
        start, n_bytes = g.ggml_get_data(tensor), g.ggml_nbytes(tensor) // n_experts
        for e, expert in enumerate(experts):
            floats = np.ascontiguousarray(expert).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            g.ggml_quantize_chunk(self._type, floats, start + e * n_bytes, 0, n_rows, n_columns, None)
        return tensor

    def versions(self) -> dict[str, str]:
        """Name the package and what the library was built for."""
        from importlib.metadata import version

        widest = ("avx512", "avx512_vnni", "avx2", "fma", "neon", "dotprod")
        found = [name for name in widest if getattr(self._ggml, f"ggml_cpu_has_{name}")()]
        return {"ggml-python": ", ".join([version("ggml-python"), *found])}

    def prepare(self, threads: int) -> None:
        """Tell the backend, which has OpenMP's pool."""
        self._ggml.ggml_backend_cpu_set_n_threads(self._backend, threads)

    def bind(self, batch: Batch) -> Bound:
        """Build the graph."""
        g, shape, (n_tokens, top_k) = self._ggml, self._shape, batch.ids.shape
        if self._batch_context is not None:
            g.ggml_free(self._batch_context)
        a_slot = 3 * shape.intermediate_size + (3 + top_k) * shape.hidden_size  # floats, all the graph's tensors
        self._batch_context = context = self._new_context(n_tokens * top_k * a_slot * 4 + 16 * _ROOM)
        hidden = self._input(batch.hidden, g.GGML_TYPE_F32, shape.hidden_size, 1, n_tokens)
        ids = self._input(batch.ids, g.GGML_TYPE_I32, top_k, n_tokens)
        weights = self._input(batch.weights, g.GGML_TYPE_F32, 1, top_k, n_tokens)
        inner = g.ggml_swiglu(context, g.ggml_mul_mat_id(context, self._gate_up, hidden, ids))
        outer = g.ggml_mul(context, g.ggml_mul_mat_id(context, self._down, inner, ids), weights)
        row = 4 * shape.hidden_size
        slots = [
            g.ggml_view_2d(context, outer, shape.hidden_size, n_tokens, row * top_k, row * k) for k in range(top_k)
        ]
        summed = slots[0] if top_k > 1 else g.ggml_cont(context, slots[0])
        for slot in slots[1:]:
            summed = g.ggml_add(context, summed, slot)
        graph = g.ggml_new_graph(context)
        g.ggml_build_forward_expand(graph, summed)

        def answer() -> Floats:
            y = np.empty_like(batch.hidden)
            ctypes.memmove(y.ctypes.data, g.ggml_get_data(summed), y.nbytes)
            return y

        return Bound(lambda: g.ggml_backend_graph_compute(self._backend, graph), answer)

    def _input(self, array: np.ndarray[Any, Any], ggml_type: int, *sizes: int) -> Any:
        new = getattr(self._ggml, f"ggml_new_tensor_{len(sizes)}d")
        tensor = new(self._batch_context, ggml_type, *sizes)
        ctypes.memmove(self._ggml.ggml_get_data(tensor), array.ctypes.data, array.nbytes)
        return tensor


def load(kind: Kind, shape: Shape, weights: Weights, folder: Path) -> GgmlEngine:  # noqa: ARG001  # as every peer's
    """Quantise the weights, an expert at a time."""
    return GgmlEngine(kind, shape, weights)
