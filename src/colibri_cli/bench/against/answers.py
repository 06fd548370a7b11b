"""Right answers in float64, and how far an arm's are from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri_cli.bench import oracle
from colibri_cli.bench.against.work import checked_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibri_cli.bench.peers.peer import Batch, Floats, Weights
    from colibri_cli.bench.shapes import Shape

_F64 = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # weights turned into float64 at a time

# What a right answer of a weight type may be off: root mean square, by that of the right values. Swapped or missing
# experts, rows or scales are off by 0.3 and more; the types' own errors are 1e-6, 5e-3, 1e-2 and 1.3e-1.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 4e-2, "int4": 2.5e-1}
_OUTLIER = 8  # times the tolerance, that the largest error may be, by the largest right value


class Error(NamedTuple):
    """How far an answer is from float64's.

    Attributes
    ----------
    largest : float
        Largest difference, by the largest right value.
    rms : float
        Root mean square of the differences, by that of the right values.
    """

    largest: float
    rms: float

    def excusable(self, dtype: str) -> bool:
        """Whether the weight type explains it."""
        return self.rms <= TOLERANCES[dtype] and self.largest <= _OUTLIER * TOLERANCES[dtype]  # nor NaN


class Answers:
    """Right outputs of the checked tokens of batches that begin alike."""

    def __init__(self, shape: Shape, weights: Weights, batch: Batch, token_counts: Sequence[int]) -> None:
        """Compute them for the first so many tokens of ``batch``, for each of the counts."""
        self._shape = shape
        tokens = np.unique(np.concatenate([checked_tokens(shape, n) for n in token_counts]))
        routed = oracle.Routed(batch.ids[tokens], batch.weights[tokens].astype(np.float64), np.ones(len(tokens), bool))
        right = oracle.experts(
            batch.hidden[tokens], routed, lambda e, x: _swiglu(x, weights.gate_up[e], weights.down[e])
        )
        self._right = dict(zip(tokens.tolist(), right, strict=True))

    def error(self, n_tokens: int, found: Floats) -> Error:
        """Judge the outputs of the `checked_tokens` of so many."""
        right = np.array([self._right[token] for token in checked_tokens(self._shape, n_tokens).tolist()])
        off = found.astype(np.float64) - right
        return Error(float(np.abs(off).max() / np.abs(right).max()), float(np.sqrt((off**2).sum() / (right**2).sum())))


def _swiglu(x: _F64, gate_up: Floats, down: Floats) -> _F64:
    """One expert, some of its intermediate values at a time."""
    hidden, inter = down.shape
    step = max(1, _BLOCK // hidden)
    y = np.zeros_like(x)
    for i in range(0, inter, step):
        rows = slice(i, min(i + step, inter))
        gate_up_block = np.concatenate([gate_up[:inter][rows], gate_up[inter:][rows]])
        y += oracle.swiglu(x, gate_up_block, down[:, rows])
    return y
