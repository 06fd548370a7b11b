"""Every kernel at sizes around its lanes, on buffers with nothing to spare: a program for a sanitizer to watch."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli import _core
from colibri_cli.balance import Balancer
from colibri_cli.experts import Experts
from colibri_cli.router import GumbelNoise, Router

if TYPE_CHECKING:
    import numpy.typing as npt

_SIZES = (1, 7, 9, 16, 33)
_TOKENS = (0, 1, 2, 7, 23, 97)
_EXPERTS = (1, 2, 8, 17)
_GATES = [(kind, "exact") for kind in _core.GATE_KINDS] + [("softmax-topk", "taylor"), ("topk-softmax", "taylor")]


def _numbers(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(1).standard_normal(shape, np.float32)


def _high_halves(a: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (a.view(np.uint32) >> 16).astype(np.uint16)


def exercise() -> int:
    """Call the kernels; give the number of calls."""
    n_calls = 0
    for isa in _core.isa_names():
        _core.use_isa(isa)
        for n_tokens, hidden, n_experts in itertools.product(_TOKENS, _SIZES, _EXPERTS):
            n_calls += _layer(n_tokens, hidden, n_experts, threads=1 + n_tokens % 2)
        for n_tokens, hidden, n_classes in itertools.product(_TOKENS, _SIZES, _SIZES):
            n_calls += _ends(n_tokens, hidden, n_classes)
    return n_calls


def _layer(n_tokens: int, hidden: int, n_experts: int, threads: int) -> int:
    x, top_k, inter = _numbers(n_tokens, hidden), min(2, n_experts), hidden + 3
    bias = _numbers(n_experts)
    for kind, gating in _GATES:
        grouped = n_experts == 8 and kind.endswith("-topk")
        router = Router.from_array(
            _numbers(n_experts, hidden),
            bias,
            kind=kind,
            top_k=top_k,
            correction_bias=None if kind == "topk-softmax" else bias,
            n_groups=4 if grouped else 1,
            topk_groups=2 if grouped else 1,
            gating=gating,
            threads=threads,
        )
        router.route(x)
        router.route(x[::-1], Balancer(n_experts), noise=GumbelNoise(1.0, 1))
    routing = router.route(x)
    up, down = _numbers(n_experts, 2 * inter, hidden), _numbers(n_experts, hidden, inter)
    for activation in _core.ACTIVATIONS:
        experts = Experts.from_arrays(up, down, activation=activation, threads=threads)
        experts.run(x, routing.expert_ids, routing.expert_weights)
    for dtype, arrays in (("float32", (up, down)), ("bfloat16", (_high_halves(up), _high_halves(down)))):
        in_place = _core.ExpertKernel(
            hidden, inter, _core.ACTIVATIONS["silu"], True, threads=threads, dtype=_core.DTYPES[dtype]
        )
        for w1, w2 in (arrays, tuple(map(np.asfortranarray, arrays))):
            rows = _core.ExpertSet([in_place.in_place(w1[e], w2[e]) for e in range(n_experts)])
            in_place.run(rows, x, routing.expert_ids, routing.expert_weights)
    return 2 * len(_GATES) + 2 + len(_core.ACTIVATIONS) + 4


def _ends(n_tokens: int, hidden: int, n_classes: int) -> int:
    ids = np.arange(n_tokens, dtype=np.int32) % 5
    mixer = _core.Mixer(_numbers(5, hidden), _numbers(3, hidden, hidden), 1 + n_tokens % 2)
    _core.Head(_numbers(n_classes, hidden), _numbers(n_classes), 1).run(mixer.run(ids))
    return 2


if __name__ == "__main__":
    sys.stdout.write(f"{exercise():,} calls under the sanitizers, nothing found\n")
