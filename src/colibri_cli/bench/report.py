"""Runs, comparisons and self-tests as text and JSON: computed once, rendered twice."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from colibri_cli.bench.comparison import SCHEMA, differences, unmatched
from colibri_cli.report import Column, json_document, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from colibri_cli.bench.against.results import Contest
    from colibri_cli.bench.comparison import Baseline, Change
    from colibri_cli.bench.installation import Phase
    from colibri_cli.bench.measure import Measured
    from colibri_cli.bench.runner import Result, Run

_NONE = "-"
_UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
_STATUS = {"passed": "green", "failed": "bold red", "reported": "", "not checked": "dim"}
_VERDICT = {"slower": "bold red", "faster": "green", "same": "dim"}


def run_json(run: Run | Contest, before: Baseline | None, changes: Sequence[Change]) -> bytes:
    """Render a run, with its comparison if there is one."""
    document = {"schema": SCHEMA, **run.to_dict()}
    document["cases"] = iter(document["cases"])
    if before is not None:
        document["comparison"] = {
            "differences": differences(before, run),
            "unmatched": unmatched(before, run),
            "changes": [asdict(change) for change in changes],
        }
    return json_document(document)


def run_text(run: Run, before: Baseline | None, changes: Sequence[Change], *, terminal: bool) -> str:
    """Show times, then rates and shares, then what was measured how and where."""
    parts = [_times(run, terminal=terminal)]
    if any(result.weight_bytes for result in run.results):
        parts.append(_rates(run, terminal=terminal))
    if any(arm.allocated_bytes is not None for result in run.results for arm in result.arms):
        parts.append(_calls(run, terminal=terminal))
    if before is not None:
        parts.append(changes_text(before, run, changes, terminal=terminal))
    parts += [_cases(run.results), _environment(run)]
    return "\n".join(parts)


def self_test_json(phases: Sequence[Phase], environment: dict[str, Any]) -> bytes:
    """Render a self-test."""
    passed = all(phase.status != "failed" for phase in phases)
    members = {"schema": SCHEMA, "environment": environment, "passed": passed}
    return json_document({**members, "self_test": (asdict(phase) for phase in phases)})


def self_test_text(phases: Sequence[Phase], *, terminal: bool) -> str:
    """Show a phase a row."""
    columns = [Column("phase", style="bold"), Column("status", style=_STATUS), Column("detail")]
    return table(columns, [[phase.name, phase.status, phase.detail] for phase in phases], terminal=terminal)


def _numbers(*headers: str) -> list[Column]:
    return [Column(header, number=True) for header in headers]


def _arms(results: Sequence[Result]) -> list[tuple[Result, Measured]]:
    return [(result, arm) for result in results for arm in result.arms]


def _names(result: Result, arm: Measured) -> list[str]:
    return [result.name if arm is result.arms[0] else "", arm.name, str(arm.threads)]


_NAME_COLUMNS = [Column("case", style="bold"), Column("arm"), Column("threads", number=True)]


def _times(run: Run, *, terminal: bool) -> str:
    columns = [*_NAME_COLUMNS, *_numbers("P50", "P99", "P99.9", "spread", "a token", "x first", "error", "samples")]
    rows = [
        [
            *_names(result, arm),
            duration(arm.p50_ns),
            duration(arm.p99_ns),
            duration(arm.p999_ns),
            f"{(arm.high_ns - arm.low_ns) / arm.p50_ns:.0%}" if arm.p50_ns else _NONE,
            duration(arm.p50_ns / result.n_tokens) if result.n_tokens > 1 else _NONE,
            _NONE if arm.ratio is None else f"{arm.ratio:.2f}",
            f"{arm.error:.1e}",
            f"{arm.n_samples:,}",
        ]
        for result, arm in _arms(run.results)
    ]
    note = (
        "Threads: at most; work too small to be worth sharing stays on one. Spread: the middle half of the rounds' "
        "medians, by P50.\n"
        "x first: time by that of the case's first arm, below 1 is faster. Error: of the answer, against float64.\n"
    )
    return table(columns, rows, terminal=terminal) + note


def _rates(run: Run, *, terminal: bool) -> str:
    columns = [*_NAME_COLUMNS, *_numbers("GFLOP/s", "peak", "of peak", "weights GB/s", "memory", "of memory")]
    rows = []
    for result, arm in _arms(run.results):
        if arm.gflops is None or arm.peak_gflops is None or arm.weights_gb_s is None:
            continue
        memory = run.read_gb_s[arm.threads]
        rates = [f"{arm.gflops:.1f}", f"{arm.peak_gflops:.1f}", f"{arm.gflops / arm.peak_gflops:.0%}"]
        reads = [f"{arm.weights_gb_s:.1f}", f"{memory:.1f}", f"{arm.weights_gb_s / memory:.0%}"]
        rows.append([*_names(result, arm), *rates, *reads])
    note = (
        "Peak: the best that so many threads reached during the run in multiply-adds that need no memory.\n"
        "Weights that fit the caches come faster than memory's rate, so their share may pass 100 %.\n"
    )
    return table(columns, rows, terminal=terminal) + note


def _calls(run: Run, *, terminal: bool) -> str:
    columns = [*_NAME_COLUMNS, *_numbers("outside matrices", "of it unpacking", "allocated", "C heap grew")]
    rows = [
        [
            *_names(result, arm),
            _share(arm.outside_share),
            _share(arm.unpacking_share),
            f"{arm.allocated_bytes:,} B",
            _NONE if arm.heap_growth_bytes is None else f"{arm.heap_growth_bytes:,} B",
        ]
        for result, arm in _arms(run.results)
        if arm.allocated_bytes is not None
    ]
    note = (
        "Outside matrices: share of a call that multiplies by no weights of mixer, gate, experts or head. Of it "
        "unpacking: turning mapped rows into panels, also as a share of the call.\n"
        "Allocated: by Python and NumPy at most during one warmed call, its result included. "
        "C heap: in use after more calls, as a rule 20.\n"
    )
    return table(columns, rows, terminal=terminal) + note


def changes_text(before: Baseline, run: Run | Contest, changes: Sequence[Change], *, terminal: bool) -> str:
    """Show what a comparison found, and what makes it no fair one."""
    columns = [*_NAME_COLUMNS, *_numbers("P50 before", "now", "change"), Column("verdict", style=_VERDICT)]
    rows = [
        [
            change.case,
            change.arm,
            str(change.threads),
            duration(change.before_ns),
            duration(change.now_ns),
            f"{change.now_ns / change.before_ns - 1:+.0%}" if change.before_ns else _NONE,
            change.verdict,
        ]
        for change in changes
    ]
    notes = "".join(f"Not a fair comparison: {difference}.\n" for difference in differences(before, run))
    notes += "".join(f"Not compared, {arms}.\n" for arms in unmatched(before, run))
    return table(columns, rows, terminal=terminal) + notes


def _cases(results: Sequence[Result]) -> str:
    return "".join(f"{result.name}: {result.about}.\n" for result in results)


def _environment(run: Run) -> str:
    found = {
        **run.environment,
        "clock, taken off": f"{run.clock_ns['core']:.0f} ns in the core, {run.clock_ns['python']:.0f} ns from Python",
        "peak memory of this process": f"{run.peak_memory_bytes:,} bytes",
    }
    for threads, rate in run.read_gb_s.items():
        found[f"memory read, {threads} thread{'s' * (threads != 1)}"] = f"{rate:.1f} GB/s of {run.read_bytes:,} bytes"
    return facts_text(found)


def facts_text(facts: Mapping[str, object]) -> str:
    """Show a fact a line."""
    return "".join(f"{name.replace('_', ' ')}: {_value(value)}\n" for name, value in facts.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {part}" for key, part in value.items()) or _NONE
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    return _NONE if value is None else str(value)


def duration(ns: float | None) -> str:
    """Three significant digits, in the unit that suits."""
    if ns is None:
        return _NONE
    unit, size = next(((unit, size) for unit, size in _UNITS if ns >= size), _UNITS[-1])
    value = ns / size
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.1%}"
