"""What Colibri costs on this machine: measured, never asserted.

A *case* is one piece of work; its *arms* are the ways of doing it. `suite` builds them, `measure` times them: an arm's
answer is checked against `oracle` before it is timed, and the arms of a case take turns, round after round, so that a
drifting clock or a busy neighbour meets all of them alike. Times hold no clock: what reading it costs is measured
beside every burst of samples and taken off. `comparison` holds a run against an earlier one. `installation` checks
instead of measuring, in four phases. `report` renders all three.

`against` does the same with other libraries' MoE layers as arms, each in a process of its own; `peers` drives them.

The names load on first use: a worker that runs a peer loads nothing of Colibri's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_cli.bench.against.request import Request, parse_one
    from colibri_cli.bench.against.run import contest
    from colibri_cli.bench.comparison import Baseline, Change, compare
    from colibri_cli.bench.installation import Phase, self_test
    from colibri_cli.bench.runner import Run, environment, run
    from colibri_cli.bench.suite import CASES

__all__ = [
    "CASES",
    "Baseline",
    "Change",
    "Phase",
    "Request",
    "Run",
    "compare",
    "contest",
    "environment",
    "parse_one",
    "run",
    "self_test",
]

_HOME = {
    "CASES": "suite",
    "Baseline": "comparison",
    "Change": "comparison",
    "Phase": "installation",
    "Request": "against.request",
    "Run": "runner",
    "compare": "comparison",
    "contest": "against.run",
    "environment": "runner",
    "parse_one": "against.request",
    "run": "runner",
    "self_test": "installation",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
