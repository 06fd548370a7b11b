"""A run against peers as text: a table for each shape and weight type, then what all of them amount to."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from colibri_cli.bench.report import changes_text, duration, facts_text
from colibri_cli.report import Column, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibri_cli.bench.against.results import ArmResult, Cell, Contest
    from colibri_cli.bench.comparison import Baseline, Change

_NONE = "-"
_NOTES = """\
Times: of a call, the median of the rounds' medians; spread: the middle half of those medians, and P99: of all calls.
Ahead: the best rival's time by Colibri's in the same rounds; below 1 the rival is quicker.
Of peak, of read: share of the multiply-adds, and of the bytes from memory, that so many threads managed in the same
rounds by the best of several loops; each active expert's weights count once, and may come from a cache, hence faster.
Every layer is plain SwiGLU without bias, whatever its model adds. Calls repeat the same tokens. PyTorch's inputs are in
the type of its weights; ONNX Runtime does its own top-k and softmax, a small part of the work.
"""


def contest_text(run: Contest, before: Baseline | None, changes: Sequence[Change], *, terminal: bool) -> str:
    """Show the times, then means and losses, then what was measured where."""
    blocks: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in run.cells:
        blocks[cell.shape.name, cell.dtype].append(cell)
    parts = [_block(cells, terminal=terminal) for cells in blocks.values()]
    if run.means():
        parts.append(_summary(run, terminal=terminal))
    if before is not None:
        parts.append(changes_text(before, run, changes, terminal=terminal))
    parts += [_NOTES, _where(run)]
    return "\n".join(parts)


def _block(cells: Sequence[Cell], *, terminal: bool) -> str:
    shape, dtype = cells[0].shape, cells[0].dtype
    names = [arm.name for arm in cells[0].arms if any(_arm(cell, arm.name).status != "not run" for cell in cells)]
    ours = cells[0].colibri.name
    rivals = [name for name in names if name != ours]
    numbers = ("tokens", "threads", ours, "spread", "P99", *rivals, "ahead", "of peak", "of read")
    columns = [Column(header, number=True) for header in numbers]
    if rivals:
        columns.insert(-3, Column("best rival"))
    rows = []
    for cell in cells:
        arm = cell.colibri
        row = [str(cell.n_tokens), str(cell.threads), _time(arm), _spread(arm), duration(arm.p99_ns)]
        row += [_time(_arm(cell, name)) for name in rivals]
        row += [_NONE if cell.best_rival is None else cell.best_rival.name] if rivals else []
        row += [_NONE if cell.ahead is None else f"{cell.ahead:.2f}", _share(arm.of_peak), _share(arm.of_read)]
        rows.append(row)
    head = (
        f"{shape.name}, {dtype}: hidden {shape.hidden_size}, intermediate {shape.intermediate_size}, "
        f"top {shape.top_k} of {shape.n_experts}\n"
    )
    return head + table(columns, rows, terminal=terminal) + _errors(cells[-1]) + _absences(cells)


def _arm(cell: Cell, name: str) -> ArmResult:
    return next(arm for arm in cell.arms if arm.name == name)


def _time(arm: ArmResult) -> str:
    return duration(arm.p50_ns) if arm.status == "timed" else arm.status


def _spread(arm: ArmResult) -> str:
    if arm.p50_ns is None or arm.low_ns is None or arm.high_ns is None:
        return _NONE
    return f"{(arm.high_ns - arm.low_ns) / arm.p50_ns:.0%}"


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _errors(cell: Cell) -> str:
    """Say how far the arms' answers of a cell are from float64's."""
    found = [f"{arm.name} {arm.rms_error:.1e}" for arm in cell.arms if arm.rms_error is not None]
    return f"root-mean-square error, {cell.n_tokens} tokens: {', '.join(found)}\n" if found else ""


def _absences(cells: Sequence[Cell]) -> str:
    """Say why arms have no time, once where it is the same in all cells."""
    lines = []
    for name in (arm.name for arm in cells[0].arms):
        missing = [(cell, arm) for cell in cells if (arm := _arm(cell, name)).status != "timed"]
        if len(missing) == len(cells) and len({arm.reason for _, arm in missing}) == 1:
            lines.append(f"{name}, {missing[0][1].status}: {missing[0][1].reason}\n")
        else:
            lines += [
                f"{name}, {cell.n_tokens} tokens, {cell.threads} threads, {arm.status}: {arm.reason}\n"
                for cell, arm in missing
            ]
    return "".join(lines)


def _summary(run: Contest, *, terminal: bool) -> str:
    columns = [Column("weights", style="bold"), Column("ahead", number=True), Column("cells", number=True)]
    rows = [[dtype, f"{mean:.2f}", str(cells)] for dtype, (mean, cells) in run.means().items()]
    text = table(columns, rows, terminal=terminal) + "Ahead: geometric mean over the cells.\n"
    behind = run.behind()
    if not behind:
        return text + "Behind in no cell.\n"
    lines = [
        f"  {cell.case}, {cell.threads} thread{'s' * (cell.threads != 1)}: {cell.ahead:.2f} of {cell.best_rival.name}\n"
        for cell in behind
        if cell.best_rival is not None
    ]
    return f"{text}Behind in {len(behind)} cell{'s' * (len(behind) != 1)}:\n{''.join(lines)}"


def _where(run: Contest) -> str:
    limits = {
        f"best of the run, {threads} thread{'s' * (threads != 1)}": f"{limit.peak_gflops:.1f} GFLOP/s, "
        f"{limit.read_gb_s:.1f} GB/s read"
        for threads, limit in run.limits().items()
    }
    took = {"seconds": round(run.seconds), "rounds, at most": run.rounds}
    return facts_text({"packages": run.versions, **limits, **took, **run.environment})
