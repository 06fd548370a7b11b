"""What Colibri costs on this machine: measured, never asserted.

A *case* is one piece of work; its *arms* are the ways of doing it. `suite` builds them, `measure` times them: an arm's
answer is checked against `oracle` before it is timed, and the arms of a case take turns, round after round, so that a
drifting clock or a busy neighbour meets all of them alike. Times hold no clock: what reading it costs is measured
beside every burst of samples and taken off. `comparison` holds a run against an earlier one. `installation` checks
instead of measuring, in four phases. `report` renders all three.
"""

from __future__ import annotations

from colibri_cli.bench.comparison import Baseline, Change, compare
from colibri_cli.bench.installation import Phase, self_test
from colibri_cli.bench.runner import Run, environment, run
from colibri_cli.bench.suite import CASES

__all__ = ["CASES", "Baseline", "Change", "Phase", "Run", "compare", "environment", "run", "self_test"]
