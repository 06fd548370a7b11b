"""What a run against peers found, and what follows from it: rates, shares, ratios, means."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any

from colibri_cli.bench.against.request import case_name
from colibri_cli.bench.comparison import Key, Times

if TYPE_CHECKING:
    from colibri_cli.bench.against.limits import Limit
    from colibri_cli.bench.shapes import Shape


@dataclass(frozen=True, slots=True)
class ArmResult:
    """What became of one arm in a cell; a figure that does not apply is None.

    Attributes
    ----------
    name, peer : str
    ours : bool
        Whether it is Colibri.
    status : {"timed", "wrong", "failed", "not run"}
        "wrong": its answer was, so it was not timed; "failed": its process ended or did not answer; "not run": the
        peer cannot, or had failed before.
    reason : str
        Of any status but "timed".
    error, rms_error : float
        Of its answer against float64, see `answers.Error`.
    n_rounds, n_samples : int
    p50_ns, low_ns, high_ns : float
        Of a call: median of the rounds' medians, and their quartiles.
    p99_ns : float
        Nearest rank of all samples; None with fewer than 100.
    gflops, gb_s : float
        Operations, and bytes of the active experts' weights, each counted once, at P50, 10^9 a second.
    of_peak, of_read : float
        Share of what the machine could do just before or after, the median of the rounds.
    ratio : float
        Its time by Colibri's, the median of the rounds that both took part in.
    """

    name: str
    peer: str
    ours: bool
    status: str
    reason: str | None = None
    error: float | None = None
    rms_error: float | None = None
    n_rounds: int | None = None
    n_samples: int | None = None
    p50_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    p99_ns: float | None = None
    gflops: float | None = None
    gb_s: float | None = None
    of_peak: float | None = None
    of_read: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape, weight type, batch and number of threads."""

    shape: Shape
    dtype: str
    n_tokens: int
    threads: int
    active_experts: int
    limit: Limit
    arms: list[ArmResult]

    @property
    def case(self) -> str:
        """Shape, weight type and tokens, as one name."""
        return case_name(self.shape, self.dtype, self.n_tokens)

    @property
    def colibri(self) -> ArmResult:
        """Colibri's arm."""
        return next(arm for arm in self.arms if arm.ours)

    @property
    def best_rival(self) -> ArmResult | None:
        """The quickest of the others, by its ratio; None: none was timed beside Colibri."""
        rivals = [arm for arm in self.arms if not arm.ours and arm.ratio is not None]
        return min(rivals, key=lambda arm: arm.ratio or 0, default=None)

    @property
    def ahead(self) -> float | None:
        """Time of the best rival by Colibri's: above 1 Colibri is ahead."""
        return None if self.best_rival is None else self.best_rival.ratio


@dataclass(frozen=True, slots=True)
class Contest:
    """A whole run.

    Attributes
    ----------
    cells : list of Cell
    against : tuple of str
    versions : dict of str to str
        Of the packages that ran.
    environment : dict
        See `runner.environment`.
    rounds : int
        Turns of an arm in a cell, at most.
    seconds : float
        That the run took.
    quick : bool
    """

    cells: list[Cell]
    against: tuple[str, ...]
    versions: dict[str, str]
    environment: dict[str, Any]
    rounds: int
    seconds: float
    quick: bool

    @property
    def passed(self) -> bool:
        """Whether Colibri answered right and was timed everywhere."""
        return all(cell.colibri.status == "timed" for cell in self.cells)

    def times(self) -> dict[Key, Times]:
        """Give what `comparison` compares: Colibri's own times."""
        return {
            (cell.case, cell.colibri.name, cell.threads): Times(
                cell.colibri.p50_ns, cell.colibri.low_ns or 0, cell.colibri.high_ns or 0
            )
            for cell in self.cells
            if cell.colibri.p50_ns is not None
        }

    def limits(self) -> dict[int, Limit]:
        """Give the best of the run, by number of threads."""
        best: dict[int, Limit] = {}
        for cell in self.cells:
            best[cell.threads] = best.get(cell.threads, cell.limit).or_better(cell.limit)
        return best

    def means(self) -> dict[str, tuple[float, int]]:
        """Geometric mean of `Cell.ahead` and the number of cells, by weight type."""
        logs: dict[str, list[float]] = defaultdict(list)
        for cell in self.cells:
            if cell.ahead is not None:
                logs[cell.dtype].append(log(cell.ahead))
        return {dtype: (exp(sum(found) / len(found)), len(found)) for dtype, found in logs.items()}

    def behind(self) -> list[Cell]:
        """Cells in which a rival was quicker, the worst first."""
        lost = [cell for cell in self.cells if cell.ahead is not None and cell.ahead < 1]
        return sorted(lost, key=lambda cell: cell.ahead or 0)

    def to_dict(self) -> dict[str, Any]:
        """Give the run as ``schema/bench.schema.json`` has it, but for the key "schema"."""
        return {
            "quick": self.quick,
            "against": list(self.against),
            "environment": self.environment,
            "versions": self.versions,
            "rounds": self.rounds,
            "seconds": round(self.seconds, 1),
            "shapes": [asdict(shape) for shape in dict.fromkeys(cell.shape for cell in self.cells)],
            "limits": [{"threads": threads, **limit._asdict()} for threads, limit in self.limits().items()],
            "means": [{"dtype": dtype, "ahead": mean, "cells": cells} for dtype, (mean, cells) in self.means().items()],
            "behind": [
                {"case": cell.case, "threads": cell.threads, "rival": cell.best_rival.name, "ahead": cell.ahead}
                for cell in self.behind()
                if cell.best_rival is not None
            ],
            "cases": self._cases(),
        }

    def _cases(self) -> list[dict[str, Any]]:
        """Group the cells by all but the number of threads."""
        cases: dict[str, dict[str, Any]] = {}
        for cell in self.cells:
            head = {
                "name": cell.case,
                "shape": cell.shape.name,
                "dtype": cell.dtype,
                "n_tokens": cell.n_tokens,
                "flops": cell.shape.flops(cell.n_tokens),
                "active_experts": cell.active_experts,
                "contests": [],
                "arms": [],
            }
            case = cases.setdefault(cell.case, head)
            contest = {"threads": cell.threads, **cell.limit._asdict()}
            if cell.best_rival is not None:
                contest |= {"best_rival": cell.best_rival.name, "ahead": cell.ahead}
            case["contests"].append(contest)
            for arm in cell.arms:
                figures = {key: value for key, value in asdict(arm).items() if value is not None}
                case["arms"].append({"name": figures.pop("name"), "threads": cell.threads, **figures})
        return list(cases.values())
