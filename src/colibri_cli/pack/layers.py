"""One layer of a checkpoint into the kernels' layout, an expert a thread at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli import _core
from colibri_cli.errors import InvalidInput
from colibri_cli.expert_arrays import hold
from colibri_cli.formats.packed import PackedHeader, packed_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibri_cli.checkpoints.checkpoint import CheckpointLayer
    from colibri_cli.checkpoints.ffn import ExpertWeights
    from colibri_cli.layer_bundle import LayerBundle
    from colibri_cli.pack.sinks import Sink


class LayerPacker:
    """Packs one layer after the other.

    Parameters
    ----------
    bundle : LayerBundle
    threads : int
        Experts that are packed at once.
    """

    def __init__(self, bundle: LayerBundle, threads: int) -> None:
        self._names = bundle.expert_names
        self._experts = _ExpertPacker(PackedHeader(bundle.shape, bundle.biased))
        self._shared: _ExpertPacker | None = None
        if bundle.shared_shape is not None:
            self._shared = _ExpertPacker(PackedHeader(bundle.shared_shape, biased=False))
        self._threads = threads

    @property
    def n_steps(self) -> int:
        """Experts of a layer, a shared one included."""
        return len(self._names) + (self._shared is not None)

    def run(self, number: int, layer: CheckpointLayer, sink: Sink, count: Iterator[int]) -> None:
        """Pack the layer of that number; ``count`` moves on by ``n_steps``.

        Raises
        ------
        InvalidInput
            A router's weight is not finite, or an expert's that is to be held as int8 or int4.
        UsageError
            The sink refuses.
        """
        for name, array in (
            ("router_weights.bin", layer.router_weight()),
            ("router_bias.bin", layer.router_bias()),
            ("correction_bias.bin", layer.correction_bias()),
            ("shared_gate.bin", layer.shared_gate()),
        ):
            if array is not None:
                if not np.isfinite(array).all():
                    at = f"layer {number}, {name}"
                    raise InvalidInput(expected="finite weights", got="NaN or infinity", at=at)
                sink.put(name, (np.ascontiguousarray(array, "<f4").data,))
        with ThreadPoolExecutor(self._threads) as pool:
            tasks = [pool.submit(self._expert, number, layer, e, sink) for e in range(len(self._names))]
            if self._shared is not None:
                tasks.append(pool.submit(self._shared_expert, self._shared, number, layer, sink))
            try:
                for task in as_completed(tasks):
                    task.result()
                    next(count)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        layer.forget()

    def _expert(self, number: int, layer: CheckpointLayer, e: int, sink: Sink) -> None:
        sink.put(self._names[e], self._experts.pack(layer.expert(e), f"layer {number}, expert {e}"))
        layer.forget(e)

    def _shared_expert(self, packer: _ExpertPacker, number: int, layer: CheckpointLayer, sink: Sink) -> None:
        weights = layer.shared()
        if weights is not None:
            sink.put("shared.bin", packer.pack(weights, f"layer {number}, shared expert"))


class _ExpertPacker:
    """Packs experts of one shape, each on the thread that asks."""

    def __init__(self, header: PackedHeader) -> None:
        shape = header.shape
        self._header = header
        self._kernel = _core.ExpertKernel(
            shape.hidden_size,
            shape.intermediate_size,
            _core.ACTIVATIONS[shape.activation],
            shape.gated,
            dtype=_core.DTYPES[shape.dtype],
        )

    def pack(self, weights: ExpertWeights, name: str) -> tuple[bytes, memoryview]:
        names = f"{name}: gate_up", f"{name}: down"
        biases = weights.up_bias, weights.down_bias
        expert = hold(self._kernel, self._header.shape.dtype, names, (weights.up, weights.down), biases)
        return packed_parts(self._header, memoryview(expert))
