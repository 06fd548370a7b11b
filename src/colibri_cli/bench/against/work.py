"""The work that all arms are given: weights in a file, tokens with their routing, and the right answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from colibri_cli.bench.peers.peer import Batch, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bench.peers.peer import Floats
    from colibri_cli.bench.shapes import Shape

_SEED = 20_26
_FILE = "weights.f32"
_CHECKED_VALUES = 1 << 13  # of an answer, at least 8 tokens: enough for a root mean square


def write_weights(folder: Path, shape: Shape) -> None:
    """Write Gaussian weights, scaled so that states keep their size; an expert at a time, and down to the disk."""
    hidden, inter = shape.hidden_size, shape.intermediate_size
    with (folder / _FILE).open("wb") as stream:
        for part, (n_rows, n_columns) in enumerate(((2 * inter, hidden), (hidden, inter))):
            for e in range(shape.n_experts):
                rows = np.random.default_rng([_SEED, part, e]).standard_normal((n_rows, n_columns), np.float32)
                rows *= np.float32(n_columns**-0.5)
                stream.write(rows.data)
        stream.flush()
        os.fsync(stream.fileno())  # no write-back while something is timed


def map_weights(folder: Path, shape: Shape) -> Weights:
    """Map what `write_weights` wrote."""
    n_experts, hidden, inter = shape.n_experts, shape.hidden_size, shape.intermediate_size
    floats: Floats = np.memmap(folder / _FILE, np.float32, "r")
    gate_up, down = np.split(floats, [n_experts * 2 * inter * hidden])
    return Weights(gate_up.reshape(n_experts, 2 * inter, hidden), down.reshape(n_experts, hidden, inter))


def tokens(shape: Shape, n_tokens: int) -> Batch:
    """Draw hidden states, which bfloat16 holds, and a gate's logits; route by top-k, then softmax."""
    rng = np.random.default_rng(_SEED)
    hidden = rng.standard_normal((n_tokens, shape.hidden_size), np.float32)
    hidden.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
    logits = rng.standard_normal((n_tokens, shape.n_experts), np.float32)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, : shape.top_k].astype(np.int32)
    raised = np.exp(np.take_along_axis(logits, ids, axis=1).astype(np.float64))
    weights = (raised / raised.sum(axis=1, keepdims=True)).astype(np.float32)
    return Batch(hidden, np.ascontiguousarray(ids), weights, logits)


def checked_tokens(shape: Shape, n_tokens: int) -> npt.NDArray[np.int64]:
    """Choose the tokens of a batch whose answers are checked: evenly spread, first and last among them."""
    wanted = min(n_tokens, max(8, _CHECKED_VALUES // shape.hidden_size))
    return np.unique(np.linspace(0, n_tokens - 1, wanted).astype(np.int64))
