"""Whether this installation does right where it is: four phases."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from colibri_cli import _core
from colibri_cli.bench import oracle
from colibri_cli.bench.case import core_clock_ns
from colibri_cli.bench.clock import percentile
from colibri_cli.bench.suite import HIDDEN, N_EXPERTS, TOP_K, routing_error
from colibri_cli.model import Model, builtin_bundle
from colibri_cli.router import Router

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_DISPATCH_LIMIT_NS = 500
_TOLERANCE = {"exact": 1e-5, "taylor": 0.003}  # of a routing weight
_SANITIZERS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the self-test.

    Attributes
    ----------
    name : str
    status : {"passed", "failed", "reported", "not checked"}
        "reported": measured and not judged; "not checked": this build cannot.
    detail : str
    """

    name: str
    status: str
    detail: str


def self_test(*, judge: bool = False, bundle: Path | None = None) -> list[Phase]:
    """Check this installation.

    Parameters
    ----------
    judge : bool
        Also judge the dispatch latency, which a busy machine may fail.
    bundle : path, optional
        What the compiled gate must agree with. Default: the built-in bundle.
    """
    return [
        _buffers(),
        _routing(builtin_bundle() if bundle is None else bundle),
        _dispatch_latency(judge=judge),
        _memory_safety(),
    ]


def _phase(name: str, faults: list[str], fine: str) -> Phase:
    return Phase(name, "failed", "; ".join(faults)) if faults else Phase(name, "passed", fine)


def _buffers() -> Phase:
    """Look where the core's memory begins: weights, tables and the buffers of calls that have been made."""
    model = Model.open(threads=1, loading="static")
    model.infer(np.arange(40, dtype=np.int32))
    router, experts = model.layer.router, model.layer.experts
    routing = router.route(np.ones((3, 2 * HIDDEN), np.float32)[:, ::2])  # strided, so that a buffer is needed
    experts.run(np.ones((3, HIDDEN), np.float32), routing.expert_ids, routing.expert_weights)
    holders: dict[str, list[Any]] = {
        "router table": [None],
        "router": [router._core],
        "experts": [experts._set[i] for i in range(len(experts))],
        "expert buffers": [experts._kernel],
        "mixer": [model._mixer],
        "head": [model._head],
    }
    addresses = {name: [at for holder in held for at in _core.addresses(holder)] for name, held in holders.items()}
    faults = [
        f"{name} at {at:#x}, not a multiple of {_ALIGNMENT}"
        for name, found in addresses.items()
        for at in found
        if at % _ALIGNMENT
    ]
    faults += [f"{name}: none found" for name, found in addresses.items() if not found]
    n_found = sum(map(len, addresses.values()))
    return _phase("buffers", faults, f"{n_found} buffers, each on a multiple of {_ALIGNMENT} bytes")


def _routing(bundle: Path) -> Phase:
    """Hold ids and weights against NumPy's, by every instruction set: of the compiled gate, and of one made here."""
    rng = np.random.default_rng(7)
    hidden = rng.standard_normal((509, HIDDEN), np.float32)
    made = rng.standard_normal((13, HIDDEN), np.float32)
    builtin = oracle.floats(bundle / "router_weights.bin", N_EXPERTS, HIDDEN)
    before, faults, n_checked = _core.isa(), [], 0
    try:
        for isa in _core.isa_names():
            _core.use_isa(isa)
            for gating, tolerance in _TOLERANCE.items():
                routers = {
                    "built-in gate": (
                        Router.builtin(N_EXPERTS, kind="topk-softmax", top_k=TOP_K, gating=gating, threads=1),
                        oracle.route(hidden, builtin, TOP_K),
                    ),
                    "gate of 13 experts": (
                        Router.from_array(made, top_k=3, gating=gating, threads=1),
                        oracle.route(hidden, made, 3),
                    ),
                }
                for name, (router, right) in routers.items():
                    found = router.route(hidden)
                    error = routing_error(right, found.expert_ids, found.expert_weights)
                    n_checked += len(hidden)
                    if not error <= tolerance:
                        faults.append(f"{isa}, {gating}, {name}: {_wrong(right, found.expert_ids, error)}")
    finally:
        _core.use_isa(before)
    names = ", ".join(_core.isa_names())
    return _phase("routing", faults, f"{n_checked:,} tokens as NumPy routes them in float64 ({names}; exact, taylor)")


def _wrong(right: oracle.Routed, ids: npt.NDArray[np.int32], error: float) -> str:
    wrong = np.flatnonzero((ids != right.ids).any(axis=1) & right.clear)
    if not len(wrong):
        return f"a weight is off by {error:.2g}"
    token = wrong[0]
    return f"token {token} goes to {ids[token].tolist()} instead of {right.ids[token].tolist()}"


def _dispatch_latency(*, judge: bool) -> Phase:
    """Time the counting sort of one token's slots in the core, the clock's cost taken off."""
    slots = np.random.default_rng(7).integers(0, N_EXPERTS, 64 * TOP_K, np.int32)
    offsets, order, ns = np.empty(N_EXPERTS + 1, np.int32), np.empty(TOP_K, np.int32), np.empty(20_000)
    clock = core_clock_ns()
    _core.time_dispatch(slots, TOP_K, offsets, order, ns)
    p50, p99 = (percentile(np.maximum(ns - clock, 0), per_mille) for per_mille in (500, 990))
    detail = f"P50 {p50:.0f} ns, P99 {p99:.0f} ns for one token's {TOP_K} slots"
    if not judge:
        return Phase("dispatch latency", "reported", detail)
    status = "passed" if p99 <= _DISPATCH_LIMIT_NS else "failed"
    return Phase("dispatch latency", status, f"{detail}; the limit is P99 {_DISPATCH_LIMIT_NS} ns")


def _memory_safety() -> Phase:
    """Let a sanitizer watch the kernels at awkward sizes, in a process of its own, which a finding ends."""
    name = "memory safety"
    if not _core.sanitized():
        return Phase(name, "not checked", "this is not the sanitizer build (make debug)")
    options = {key: ":".join(filter(None, [os.environ.get(key), value])) for key, value in _SANITIZERS.items()}
    command = [sys.executable, "-m", "colibri_cli.bench.memory_safety"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **options})  # noqa: S603  # our own module
    lines = [line for line in _telling(done.stderr) if line]
    if done.returncode != 0 or lines:
        return Phase(name, "failed", lines[0] if lines else f"exit code {done.returncode}")
    return Phase(name, "passed", done.stdout.strip())


def _telling(errors: str) -> Iterator[str]:
    """Give the lines of a sanitizer's report that say what was found; without any, the last line."""
    lines = errors.strip().splitlines()
    found = [line for line in lines if "ERROR:" in line or "runtime error:" in line]
    yield from found or lines[-1:]
