"""Colibri itself, as a caller of the library drives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.bench.peers.peer import Batch, Bound, Kind, Peer, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bench.shapes import Shape
    from colibri_cli.experts import Experts

PEER = Peer(
    name="colibri",
    requirements=("colibri-cli",),
    modules=("colibri_cli",),
    kinds=(Kind("", "float32", 32), Kind("", "bfloat16", 16), Kind("", "int8", 8.5), Kind("", "int4", 4.5)),
)
_MOST_TOKENS = 512  # of the workspace; longer batches run in chunks


class ColibriEngine:
    """Packed experts, shared by an engine for each number of threads."""

    def __init__(self, kind: Kind, weights: Weights) -> None:
        from colibri_cli.experts import Experts

        self._dtype = kind.dtype
        self._packed = Experts.from_arrays(*weights, dtype=kind.dtype, threads=1, max_tokens=_MOST_TOKENS)
        self._experts: Experts = self._packed

    def versions(self) -> dict[str, str]:
        """Name the package and the kernels."""
        from colibri_cli import __version__, _core

        return {"colibri": f"{__version__}, {_core.isa()}"}

    def prepare(self, threads: int) -> None:
        """Run the same packed weights with another number of threads."""
        from colibri_cli import _core
        from colibri_cli.experts import ARRAYS, Experts

        shape = self._packed.shape
        kernel = _core.ExpertKernel(
            shape.hidden_size,
            shape.intermediate_size,
            _core.ACTIVATIONS[shape.activation],
            shape.gated,
            threads=threads,
            max_tokens=_MOST_TOKENS,
            dtype=_core.DTYPES[self._dtype],
            narrow_states=self._dtype == "bfloat16",  # as in a model of that type, and as the others have them
        )
        self._experts = Experts(kernel, shape, list(self._packed._set), loading="static", source=ARRAYS)

    def bind(self, batch: Batch) -> Bound:
        """Answer into the same array each time."""
        experts, y = self._experts, np.empty_like(batch.hidden)
        return Bound(lambda: experts.run(batch.hidden, batch.ids, batch.weights, out=y), lambda: y)


def load(kind: Kind, shape: Shape, weights: Weights, folder: Path) -> ColibriEngine:  # noqa: ARG001  # as every peer's
    """Pack the weights."""
    return ColibriEngine(kind, weights)
