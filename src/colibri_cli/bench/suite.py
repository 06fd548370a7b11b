"""The cases, by name. Each is built when its turn comes: data, arms and how an arm is checked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from colibri_cli import _core
from colibri_cli.bench import machine, oracle
from colibri_cli.bench.case import Arm, Case, core_clock_ns, in_core
from colibri_cli.bench.clock import from_python
from colibri_cli.experts import Experts
from colibri_cli.layer import MoELayer
from colibri_cli.model import Model
from colibri_cli.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from colibri_cli.bench.clock import Sampler, Times

_Floats: TypeAlias = npt.NDArray[np.float32]
_Build: TypeAlias = "Callable[[int], Case]"

HIDDEN, INTERMEDIATE, N_EXPERTS, TOP_K = 128, 512, 8, 2
_SEED = 20_26
_EXACT = 1e-5  # relative to the largest output: float32's error over the chains of these sizes, with room


def _numbers(*shape: int) -> _Floats:
    return np.random.default_rng(_SEED).standard_normal(shape, np.float32)


def _states(n_tokens: int) -> _Floats:
    return np.random.default_rng(_SEED + 1).standard_normal((n_tokens, HIDDEN), np.float32)


def _thread_counts(threads: int) -> list[int]:
    return [1] if threads == 1 else [1, threads]


def _routing(n_tokens: int, _: int) -> Case:
    """Route a batch, or one token after the other of a batch, in the core."""
    batch = max(n_tokens, 64)
    weight, hidden = _numbers(N_EXPERTS, HIDDEN), _states(batch)
    ids, weights = np.empty((batch, TOP_K), np.int32), np.empty((batch, TOP_K), np.float32)

    def arm(gating: str, tolerance: float) -> Arm:
        core = Router.from_array(weight, top_k=TOP_K, gating=gating, threads=1)._core

        def fill(ns: Times) -> None:
            _core.time_route(core, hidden, ids, weights, n_tokens, ns)

        def error() -> float:
            ids.fill(-1)
            fill(np.empty(batch // n_tokens))
            return routing_error(oracle.route(hidden, weight, TOP_K), ids, weights)

        return Arm(gating, in_core(fill), error, tolerance)

    each = f"{n_tokens} tokens a call" if n_tokens > 1 else "one token a call, the next of 64 each time"
    return Case(
        f"routing-{n_tokens}",
        f"logits and top {TOP_K} of {N_EXPERTS} experts, hidden size {HIDDEN}, {each}; in the core",
        n_tokens,
        [arm("exact", _EXACT), arm("taylor", 0.003)],
    )


def routing_error(right: oracle.Routed, ids: npt.NDArray[np.int32], weights: _Floats) -> float:
    """Largest error of a weight; infinite where an id is wrong that float32 can tell, or most ids it cannot."""
    if right.clear.mean() < 0.9 or not np.array_equal(ids[right.clear], right.ids[right.clear]):
        return float("inf")
    return float(np.abs(weights - right.weights)[right.clear].max())


def _softmax(_: int) -> Case:
    """Softmax of the gate's logits, against NumPy's and PyTorch's."""
    logits = 4 * _numbers(1024, N_EXPERTS)
    right = oracle.softmax(logits)
    out = np.empty_like(logits)

    def called(name: str, softmax: Callable[[], _Floats], tolerance: float = 1e-6) -> Arm:
        return Arm(name, from_python(softmax), lambda: float(np.abs(softmax() - right).max()), tolerance)

    def in_kernel(gating: str, tolerance: float) -> Arm:
        def fill(ns: Times) -> None:
            _core.time_softmax(logits, out, _core.GATINGS[gating], ns)

        def error() -> float:
            out.fill(np.nan)
            fill(np.empty(1))
            return float(np.abs(out - right).max())

        return Arm(f"{gating}, in the core", in_core(fill), error, tolerance)

    def by_numpy() -> _Floats:
        np.subtract(logits, logits.max(axis=1, keepdims=True), out=out)
        np.exp(out, out=out)
        np.divide(out, out.sum(axis=1, keepdims=True), out=out)
        return out

    arms = [
        called("taylor", partial(_core.softmax, logits, "taylor", out), 0.003),
        called("exact", partial(_core.softmax, logits, "exact", out)),
        in_kernel("taylor", 0.003),
        in_kernel("exact", 1e-6),
        called("numpy", by_numpy),
    ]
    about = f"softmax over 1,024 x {N_EXPERTS} float32, one thread, called from Python unless in the core"
    if find_spec("torch") is not None:
        import torch

        tensor = torch.from_numpy(logits)
        arm = called("torch", lambda: torch.softmax(tensor, dim=1).numpy())
        arms.append(replace(arm, sample=_with_one_thread(torch, from_python(lambda: torch.softmax(tensor, dim=1)))))
        about += f"; torch {torch.__version__} with {torch.backends.cpu.get_cpu_capability()}"
    return Case("softmax", about, 1024, arms)


def _with_one_thread(torch: ModuleType, timed: Sampler) -> Sampler:
    def sample(n: int) -> Times:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                return timed(n)
        finally:
            torch.set_num_threads(threads)

    return sample


def _dispatch(_: int) -> Case:
    """Sort one token's slots by expert."""
    ids = np.random.default_rng(_SEED).permuted(np.tile(np.arange(N_EXPERTS, dtype=np.int32), (64, 1)), axis=1)
    slots = np.ascontiguousarray(ids[:, :TOP_K]).reshape(-1)
    offsets, order = np.empty(N_EXPERTS + 1, np.int32), np.empty(TOP_K, np.int32)

    def fill(ns: Times) -> None:
        _core.time_dispatch(slots, TOP_K, offsets, order, ns)

    def error() -> float:
        wrong = 0
        for n in range(1, 65):
            fill(np.empty(n))  # leaves the answer for token n - 1
            token = slots.reshape(-1, TOP_K)[n - 1]
            counts = np.bincount(token, minlength=N_EXPERTS)
            right = np.concatenate([[0], np.cumsum(counts)]), np.argsort(token, kind="stable")
            wrong += not (np.array_equal(offsets, right[0]) and np.array_equal(order, right[1]))
        return float(wrong)

    about = f"counting sort of one token's {TOP_K} slots over {N_EXPERTS} experts, the next of 64 tokens each call"
    return Case("dispatch", f"{about}; in the core", 1, [Arm("colibri", in_core(fill), error, 0)])


def _expert_call(n_rows: int, _: int) -> Case:
    """Enter one expert's kernel, with a row or without."""
    n_calls = 1 if n_rows else 64
    gate_up, down = _layer_weights()
    layer = Experts.from_arrays(gate_up, down, threads=1)
    hidden = _states(n_rows)
    slots = np.full(n_rows, 3, np.int32)
    y = np.zeros((n_rows, HIDDEN), np.float32)

    def fill(ns: Times) -> None:
        _core.time_expert(layer._kernel, layer._set, slots, hidden, y, n_calls, ns)

    def error() -> float:
        if not n_rows:
            return 0.0
        y.fill(0)
        fill(np.empty(1))
        return relative_error(y, oracle.swiglu(hidden.astype(np.float64), gate_up[3], down[3]))

    row = "one row" if n_rows else "no row"
    about = f"one expert, hidden size {HIDDEN}, intermediate size {INTERMEDIATE}, entered with {row}; in the core"
    if n_calls > 1:
        about += f"; {n_calls} calls between two clock reads, so percentiles are of such blocks"
    arms = [Arm("colibri", in_core(fill, n_calls), error, _EXACT)]
    return Case(f"expert-call-{n_rows}", about, n_rows, arms)


def _python_call(_: int) -> Case:
    """Call ``Experts.run`` where there is next to nothing to compute: what is left is the call."""
    size, n_tokens = 8, 1
    gate_up, down = _numbers(2, 2 * size, size), _numbers(2, size, size)
    layer = Experts.from_arrays(gate_up, down, threads=1)
    hidden = _numbers(n_tokens, size)
    ids, weights = np.ones((n_tokens, 1), np.int32), np.ones((n_tokens, 1), np.float32)
    out = np.empty_like(hidden)
    call = partial(layer.run, hidden, ids, weights, out)
    right = oracle.swiglu(hidden.astype(np.float64), gate_up[1], down[1])
    arm = Arm("colibri", from_python(call), lambda: relative_error(call(), right), _EXACT)
    about = f"Experts.run into a given array, one token, one expert, hidden and intermediate size {size}; from Python"
    return Case(f"python-call-{n_tokens}", about, n_tokens, [arm])


def _layer_weights() -> tuple[_Floats, _Floats]:
    gate_up = _numbers(N_EXPERTS, 2 * INTERMEDIATE, HIDDEN) * np.float32(HIDDEN**-0.5)
    down = _numbers(N_EXPERTS, HIDDEN, INTERMEDIATE) * np.float32(INTERMEDIATE**-0.5)
    return gate_up, down


def _layer(n_tokens: int, threads: int) -> Case:
    """Route a batch and run its experts, as a caller of the library does."""
    weight, hidden = _numbers(N_EXPERTS, HIDDEN), _states(n_tokens)
    gate_up, down = _layer_weights()
    routed = oracle.route(hidden, weight, TOP_K)
    right = oracle.experts(hidden, routed, lambda e, rows: oracle.swiglu(rows, gate_up[e], down[e]))

    def arm(n_threads: int) -> Arm:
        router = Router.from_array(weight, top_k=TOP_K, threads=n_threads)
        call = partial(MoELayer(router, Experts.from_arrays(gate_up, down, threads=n_threads)), hidden)
        return Arm(
            "colibri",
            from_python(call),
            lambda: relative_error(call()[routed.clear], right[routed.clear]),
            _EXACT,
            n_threads,
            call,
            lambda: {"peak_gflops": machine.peak_gflops(n_threads)},
        )

    n_floats = len(np.unique(routed.ids)) * 3 * INTERMEDIATE * HIDDEN + N_EXPERTS * HIDDEN
    return Case(
        f"layer-{n_tokens}",
        f"router and SwiGLU experts, hidden size {HIDDEN}, intermediate size {INTERMEDIATE}, top {TOP_K} of "
        f"{N_EXPERTS}, {n_tokens} token{'s' * (n_tokens > 1)}; called from Python",
        n_tokens,
        [arm(n) for n in _thread_counts(threads)],
        2 * n_tokens * (N_EXPERTS * HIDDEN + TOP_K * 3 * INTERMEDIATE * HIDDEN),
        4 * n_floats,
    )


def relative_error(found: npt.ArrayLike, right: npt.ArrayLike) -> float:
    """Largest difference, relative to the largest right value."""
    return float(np.abs(np.subtract(found, right)).max() / np.abs(right).max())


def _model(n_tokens: int, threads: int) -> Case:
    """Classify tokens with the built-in model, ids to probabilities."""
    models = [Model.open(loading=loading, threads=1) for loading in ("mmap", "static")]
    models += [Model.open(threads=n) for n in _thread_counts(threads)[1:]]
    ids = np.random.default_rng(_SEED).integers(0, models[0].config.vocab_size, n_tokens, np.int32)
    right, clear = oracle.classify(models[0], ids)

    def arm(model: Model) -> Arm:
        call = partial(model.infer, ids)
        stats, n_threads = model.layer.experts.stats(), model.layer.experts.threads
        return Arm(
            stats["loading"],
            from_python(call),
            lambda: float(np.abs(call().probabilities - right)[clear].max()),
            _EXACT,
            n_threads,
            call,
            partial(_matrix_time, call, 1 + 320 // n_tokens) if n_threads == 1 else None,
        )

    return Case(
        f"model-{n_tokens}",
        f"Model.infer of the built-in bundle, {n_tokens} tokens from ids to probabilities; called from Python. "
        "Outside matrices: what is left of a call without the time inside the linear layers' kernel (mixer, gate, "
        "experts, head), which other calls of the same round meter",
        n_tokens,
        [arm(model) for model in models],
    )


def _matrix_time(call: Callable[[], object], n_calls: int) -> dict[str, float]:
    """Median nanoseconds in linear kernels of float32 and in fill_panels in one call, clock reads taken off."""
    clock = core_clock_ns()
    found = np.array([_core.metered(call)[1:] for _ in range(n_calls)], np.float64)
    linear, n_linear, transpose, n_transpose = found.T
    return {
        "matrix_ns": float(np.median(linear - n_linear * clock)),
        "unpacking_ns": float(np.median(transpose - n_transpose * clock)),
    }


CASES: dict[str, _Build] = {
    "routing-512": partial(_routing, 512),
    "routing-1": partial(_routing, 1),
    "softmax": _softmax,
    "dispatch": _dispatch,
    "expert-call-0": partial(_expert_call, 0),
    "expert-call-1": partial(_expert_call, 1),
    "python-call-1": _python_call,
    "layer-1": partial(_layer, 1),
    "layer-16": partial(_layer, 16),
    "layer-512": partial(_layer, 512),
    "model-16": partial(_model, 16),
    "model-512": partial(_model, 512),
}
