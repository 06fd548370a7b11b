"""``colibri bench``: what Colibri costs on this machine, and whether it does right there."""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from colibri_cli.cli.options import check_output, format_for
from colibri_cli.errors import UsageError

_GROUPS = "routing, softmax, dispatch, expert-call, python-call, layer, model"
_SHAPES = "token-classifier, olmoe, qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b, deepseek-v3"
_PEERS = "torch, onnxruntime, ggml"


def _complete_case(incomplete: str) -> list[str]:
    from colibri_cli.bench import CASES

    return [name for name in [*_GROUPS.split(", "), *CASES] if name.startswith(incomplete)]


def _complete_shape(incomplete: str) -> list[str]:
    return [name for name in _SHAPES.split(", ") if name.startswith(incomplete)]


class BenchFormat(StrEnum):
    """How the figures are written."""

    TEXT = "text"
    JSON = "json"


def bench(
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Only this case, such as layer-16, or this group: {_GROUPS}; repeatable.",
            autocompletion=_complete_case,
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="PEERS", help=f"Time these on the same layer: any of {_PEERS}, by commas.")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"Which layer, instead of token-classifier: {_SHAPES}; repeatable.",
            autocompletion=_complete_shape,
        ),
    ] = None,
    experts: Annotated[int | None, typer.Option(metavar="N", help="Take only so many of the shape's experts.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="N,N", help="Of a call. Default: 1,4,16,64,512.")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPES", help="Of weights. Default: float32,bfloat16,int8,int4.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(metavar="N", help="For the threaded arms; with --shape or --against also a list.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the time, with a wider spread.")] = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An earlier run's JSON; exit 1 if Colibri got slower.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw --shape or --against: roofline and bars, .png or .svg.")
    ] = None,
    self_test: Annotated[bool, typer.Option("--self-test", help="Check this installation; exit 1: failed.")] = False,
    judge: Annotated[bool, typer.Option("--judge", help="Let --self-test judge dispatch latency too.")] = False,
    output_format: Annotated[
        BenchFormat | None, typer.Option("--format", help="Default: json if FILE ends in .json, else text.")
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of standard output.")] = None,
) -> None:
    """Measure this machine, beside its rivals, or check it."""
    contested = bool(shape) or against is not None
    of_contests = {"--experts": experts, "--tokens": tokens, "--dtype": dtype, "--plot": plot}
    alone = "" if contested else next((name for name, value in of_contests.items() if value is not None), "")
    if judge and not self_test:
        raise UsageError(expected="--self-test", got="--judge without it", at="the command line")
    if self_test and (case or compare or quick or contested):
        raise UsageError(expected="--self-test alone", got="an option of measuring", at="the command line")
    if case and contested:
        raise UsageError(expected="--case, or --shape and --against", got="both", at="the command line")
    if alone:
        raise UsageError(expected="--shape or --against", got=f"{alone} without them", at="the command line")
    check_output(output)

    from colibri_cli import bench, report
    from colibri_cli.bench.report import run_json, run_text, self_test_json, self_test_text

    as_json = (output_format or format_for(output, {".json": BenchFormat.JSON}, BenchFormat.TEXT)) is BenchFormat.JSON
    terminal = report.on_terminal(output)
    if self_test:
        phases = bench.self_test(judge=judge)
        text = self_test_json(phases, bench.environment()) if as_json else self_test_text(phases, terminal=terminal)
        report.emit(text, output)
        failed = any(phase.status == "failed" for phase in phases)
    elif contested:
        from colibri_cli.bench.against.plot import check_plot, write_plot
        from colibri_cli.bench.against.report import contest_text

        request = bench.Request.parse(against, shape or (), experts, tokens, dtype, threads)
        before = None if compare is None else bench.Baseline.read(compare, request.keys())
        check_plot(plot)
        check_output(plot)
        contest = bench.contest(request, quick=quick, steps=report.steps)
        changes = [] if before is None else bench.compare(before, contest)
        as_text = partial(contest_text, terminal=terminal)
        report.emit((run_json if as_json else as_text)(contest, before, changes), output)
        if plot is not None:
            write_plot(contest, plot)
        failed = not contest.passed or any(change.verdict == "slower" for change in changes)
    else:
        before = None if compare is None else bench.Baseline.read(compare)
        run = bench.run(case or (), threads=bench.parse_one(threads), quick=quick, steps=report.steps)
        changes = [] if before is None else bench.compare(before, run)
        text = run_json(run, before, changes) if as_json else run_text(run, before, changes, terminal=terminal)
        report.emit(text, output)
        failed = any(change.verdict == "slower" for change in changes)
    if failed:
        raise typer.Exit(1)
