"""A run against peers as a picture: where each arm stands under the machine's roof, and who is how far ahead."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_cli.errors import UsageError
from colibri_cli.formats.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bench.against.results import ArmResult, Cell, Contest

_ENDINGS = (".png", ".svg")
_REQUIREMENT = "matplotlib>=3.8"
_COLOURS = ("#d1495b", "#00798c", "#edae49", "#30638e", "#6a994e", "#8d6b94", "#7f7f7f", "#003d5b")
_MARKERS = {"float32": "o", "bfloat16": "s", "int8": "^", "int4": "D"}
_SETTINGS = {"svg.hashsalt": "colibri", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def check_plot(path: Path | None) -> None:
    """Refuse, before anything is measured, a picture that could not be drawn.

    Raises
    ------
    UsageError
        The file's ending is another, or matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() not in _ENDINGS:
        raise UsageError(expected="a file ending in .png or .svg", got=path.suffix or "none", at=f"--plot {path}")
    if find_spec("matplotlib") is None:
        raise UsageError(
            expected="matplotlib, installed",
            got="none",
            at="--plot",
            hint=f"python -m pip install '{_REQUIREMENT}'",
        )


def write_plot(run: Contest, path: Path) -> None:
    """Draw a roofline and bars for each number of threads.

    Raises
    ------
    UsageError
        The file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    threads = sorted({cell.threads for cell in run.cells})
    names = list(dict.fromkeys(arm.name for cell in run.cells for arm in cell.arms if arm.status == "timed"))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    n_cases = len({cell.case for cell in run.cells})
    with mpl.rc_context(_SETTINGS):
        figure: Any = Figure(figsize=(max(10, 3 + n_cases * 0.22), 4.5 * len(threads)), layout="constrained")
        grid = figure.subplots(len(threads), 2, squeeze=False, width_ratios=[1, 1.6])
        for (roof, bars), n in zip(grid, threads, strict=True):
            cells = [cell for cell in run.cells if cell.threads == n]
            _draw_roofline(roof, cells, colours, f"{n} thread{'s' * (n != 1)}")
            _draw_bars(bars, cells, colours)
        dtypes = dict.fromkeys(cell.dtype for cell in run.cells)
        keys = [Line2D([], [], marker="o", linestyle="", color=colour, label=name) for name, colour in colours.items()]
        keys += [Line2D([], [], marker=_MARKERS[t], linestyle="", color="white", mec="black", label=t) for t in dtypes]
        figure.legend(handles=keys, loc="outside lower center", ncols=-(-len(keys) // 2), frameon=False)
        figure.suptitle(f"Colibri against {', '.join(run.against) or 'nobody'}: {run.environment['cpu']}")
        data = io.BytesIO()
        ending = path.suffix.lower().removeprefix(".")
        dates = {"Date": None} if ending == "svg" else {}  # the same run, the same bytes
        figure.savefig(data, format=ending, dpi=150, metadata=dates)
    write_atomically(path, data.getvalue())


def _timed(cell: Cell) -> list[ArmResult]:
    return [arm for arm in cell.arms if arm.status == "timed"]


def _draw_roofline(axes: Any, cells: list[Cell], colours: dict[str, str], title: str) -> None:
    """Rate over arithmetic intensity, operations a byte of active weights, with the roof of the whole run."""
    peak = max(cell.limit.peak_gflops for cell in cells)
    read = max(cell.limit.read_gb_s for cell in cells)
    points = [
        (arm.gflops / arm.gb_s, arm.gflops, cell, arm)
        for cell in cells
        for arm in _timed(cell)
        if arm.gb_s and arm.gflops
    ]
    for intensity, gflops, cell, arm in points:
        axes.plot(intensity, gflops, _MARKERS[cell.dtype], color=colours[arm.name], markersize=5, alpha=0.8, mec="none")
    low = min((point[0] for point in points), default=0.1) / 2
    high = max((point[0] for point in points), default=1e3) * 2
    x = np.geomspace(low, high, 200)
    axes.plot(x, np.minimum(peak, read * x), color="black", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte of weights", ylabel="GFLOP/s", title=title)
    axes.text(high, peak, f"{peak:.0f} GFLOP/s", ha="right", va="bottom")
    axes.text(low, read * low, f" {read:.0f} GB/s", ha="left", va="bottom")


def _draw_bars(axes: Any, cells: list[Cell], colours: dict[str, str]) -> None:
    """Draw the best rival's time by Colibri's in the rival's colour: below the line Colibri is behind."""
    contested = [cell for cell in cells if cell.ahead is not None and cell.best_rival is not None]
    for x, cell in enumerate(contested):
        if cell.ahead is not None and cell.best_rival is not None:
            axes.bar(x, cell.ahead - 1, bottom=1, color=colours[cell.best_rival.name], width=0.8)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(contested)), [cell.case for cell in contested], rotation=90, fontsize=6)
    axes.set(yscale="log", ylabel="best rival's time by Colibri's", title="ahead, in the colour of the best rival")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.margins(x=0.01)
