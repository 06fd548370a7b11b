"""``colibri bench``: what Colibri costs on this machine, and whether it does right there."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from colibri_cli.cli.options import format_for
from colibri_cli.errors import UsageError


class BenchFormat(StrEnum):
    """How the figures are written."""

    TEXT = "text"
    JSON = "json"


def bench(
    case: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this case, or those that begin so; repeatable.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=256, metavar="N", help="For the threaded arms.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, with a wider spread.")] = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier run's JSON; exit 1 if an arm got slower.")
    ] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Check this installation; exit 1: failed.")] = False,
    judge: Annotated[bool, typer.Option("--judge", help="Let --self-test judge dispatch latency too.")] = False,
    output_format: Annotated[
        BenchFormat | None, typer.Option("--format", help="Default: json if FILE ends in .json, else text.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of standard output.")] = None,
) -> None:
    """Measure this machine, or check an installation."""
    if judge and not self_test:
        raise UsageError(expected="--self-test", got="--judge without it", at="the command line")
    if self_test and (case or compare or quick):
        raise UsageError(expected="--self-test alone", got="an option of measuring", at="the command line")

    from colibri_cli import bench, report
    from colibri_cli.bench.report import run_json, run_text, self_test_json, self_test_text

    as_json = (output_format or format_for(output, {".json": BenchFormat.JSON}, BenchFormat.TEXT)) is BenchFormat.JSON
    terminal = report.on_terminal(output)
    if self_test:
        phases = bench.self_test(judge=judge)
        text = self_test_json(phases, bench.environment()) if as_json else self_test_text(phases, terminal=terminal)
        failed = any(phase.status == "failed" for phase in phases)
    else:
        before = None if compare is None else bench.Baseline.read(compare)
        run = bench.run(case or (), threads=threads, quick=quick, steps=report.steps)
        changes = [] if before is None else bench.compare(before, run)
        text = run_json(run, before, changes) if as_json else run_text(run, before, changes, terminal=terminal)
        failed = any(change.verdict == "slower" for change in changes)
    report.emit(text, output)
    if failed:
        raise typer.Exit(1)
