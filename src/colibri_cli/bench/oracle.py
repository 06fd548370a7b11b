"""The right answers, in float64 and as plainly as NumPy says them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from colibri_cli.model import Model

_F64 = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int32]

_NEAR_TIE = 1e-5  # of what the terms of a logit add up to: twenty times float32's error over a chain of 128


class Routed(NamedTuple):
    """Where tokens belong.

    Attributes
    ----------
    ids : ndarray of int32, (T, K)
    weights : ndarray of float64, (T, K)
    clear : ndarray of bool, (T,)
        No logit is so near another that float32 may rank them otherwise.
    """

    ids: _Ints
    weights: _F64
    clear: npt.NDArray[np.bool_]


def softmax(logits: npt.ArrayLike) -> _F64:
    """Softmax of each row."""
    x = np.asarray(logits, np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def route(hidden: npt.ArrayLike, weight: npt.ArrayLike, top_k: int) -> Routed:
    """Choose and weigh experts: the best ``top_k`` logits, softmax over the chosen, ties to the lower id.

    Softmax over all experts, renormalised over the chosen, is the same.
    """
    x, w = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    logits = x @ w.T
    ids = np.argsort(-logits, axis=1, kind="stable")
    ranked = np.take_along_axis(logits, ids[:, : top_k + 1], axis=1)
    gaps = -np.diff(ranked, axis=1).max(axis=1, initial=-np.inf)
    clear = gaps > _NEAR_TIE * (np.abs(x) @ np.abs(w).T).max(axis=1)
    return Routed(ids[:, :top_k].astype(np.int32), softmax(ranked[:, :top_k]), clear)


def experts(
    hidden: npt.ArrayLike,
    routed: Routed,
    expert: Callable[[int, _F64], _F64],
) -> _F64:
    """Sum each token's experts, weighted; ``expert`` gives one expert's outputs for its tokens' states."""
    x = np.asarray(hidden, np.float64)
    y = np.zeros_like(x)
    for e in np.unique(routed.ids):
        tokens, ranks = np.nonzero(routed.ids == e)
        np.add.at(y, tokens, routed.weights[tokens, ranks, np.newaxis] * expert(int(e), x[tokens]))
    return y


def swiglu(x: _F64, gate_up: npt.ArrayLike, down: npt.ArrayLike) -> _F64:
    """One gated expert: gate rows, then up rows."""
    gate, up = np.split(x @ np.asarray(gate_up, np.float64).T, 2, axis=1)
    return np.asarray((gate / (1 + np.exp(-gate)) * up) @ np.asarray(down, np.float64).T)


def classify(model: Model, ids: _Ints) -> tuple[_F64, npt.NDArray[np.bool_]]:
    """Class probabilities by the bundle's files, ``(T, C)``, and which tokens' routing is clear.

    For a bundle like the built-in one: ungated ReLU experts.
    """
    config, bundle = model.config, model.path
    hidden, context, inter = config.hidden_size, config.context, config.intermediate_size
    embedded = floats(bundle / "embedding.bin", config.vocab_size, hidden)[ids]
    mixer = floats(bundle / "context.bin", 2 * context + 1, hidden, hidden)
    padded = np.pad(embedded, ((context, context), (0, 0)))
    x = sum(padded[o : o + len(ids)] @ mixer[o].T for o in range(2 * context + 1))
    routed = route(x, floats(bundle / "router_weights.bin", config.n_experts, hidden), config.top_k)

    def expert(e: int, rows: _F64) -> _F64:
        raw = floats(bundle / config.expert_file(e), 2 * inter * hidden + inter + hidden)
        w1, b1, w2, b2 = np.split(raw, np.cumsum([inter * hidden, inter, hidden * inter]))
        up = np.maximum(rows @ w1.reshape(inter, hidden).T + b1, 0)
        return np.asarray(up @ w2.reshape(hidden, inter).T + b2)

    head = floats(bundle / "head.bin", config.n_classes * (hidden + 1))
    weight, bias = head[: -config.n_classes].reshape(config.n_classes, hidden), head[-config.n_classes :]
    return softmax(experts(x, routed, expert) @ weight.T + bias), routed.clear


def floats(path: Path, *shape: int) -> _F64:
    """Read a raw float32 file as float64.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        Its size is not that of the shape.
    """
    data = read_bytes(path)
    n_bytes = 4 * int(np.prod(shape))
    if len(data) != n_bytes:
        raise InvalidInput(expected=f"{n_bytes} bytes (float32 {shape})", got=f"{len(data)} bytes", at=str(path))
    return np.frombuffer(data, "<f4").reshape(shape).astype(np.float64)
