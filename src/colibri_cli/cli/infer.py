"""``colibri infer``: token ids to routing to class probabilities."""

import logging
import time
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri_cli.cli.options import format_for, pin, refuse_terminal
from colibri_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from colibri_cli.model import Inference, Model

_log = logging.getLogger(__name__)


class Task(StrEnum):
    """What a model does."""

    TOKEN_CLASSIFICATION = "token-classification"  # noqa: S105  # a task's name


class Gating(StrEnum):
    """How gate logits become probabilities."""

    EXACT = "exact"
    TAYLOR = "taylor"


class Loading(StrEnum):
    """How experts come into memory."""

    MMAP = "mmap"
    STATIC = "static"
    ON_DEMAND = "on-demand"


class Unit(StrEnum):
    """What one row is about."""

    WORD = "word"
    PIECE = "piece"


class InferFormat(StrEnum):
    """How the result is written."""

    TEXT = "text"
    JSON = "json"
    JSONL = "jsonl"
    NPY = "npy"


_ENDINGS = {".json": InferFormat.JSON, ".jsonl": InferFormat.JSONL, ".npy": InferFormat.NPY}


def infer(
    input_file: Annotated[
        str | None,
        typer.Option("--input", metavar="FILE", help="Token ids, raw int32 (.bin); - is standard input."),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="Text instead of --input.")] = None,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="The bundle; default: the built-in one.")] = None,
    experts_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Expert files, expert_<i>.bin; default: the bundle's.")
    ] = None,
    task: Annotated[Task, typer.Option(help="What the model must be made for.")] = Task.TOKEN_CLASSIFICATION,
    by: Annotated[Unit, typer.Option(help="What a row is, in text and jsonl.")] = Unit.WORD,
    output_format: Annotated[
        InferFormat | None,
        typer.Option("--format", help="Default: what the output file's ending says, else text."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of standard output.")] = None,
    gating: Annotated[Gating | None, typer.Option(help="Default: the bundle's.")] = None,
    balance: Annotated[
        bool | None, typer.Option("--balance/--no-balance", help="Default: the bundle's.", show_default=False)
    ] = None,
    loading: Annotated[Loading, typer.Option(help="How experts come into memory.")] = Loading.MMAP,
    cache_experts: Annotated[int, typer.Option(min=1, metavar="N", help="Experts kept by --loading on-demand.")] = 4,
    preload: Annotated[bool, typer.Option("--preload", help="Touch all expert pages first.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Default: what affinity and cgroup quota allow.")
    ] = None,
    pin_cpus: Annotated[
        str | None, typer.Option("--pin", metavar="CPUS", help="Run on these CPUs only, e.g. 0,2-3.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, metavar="N", help="Infer this often and report P50 and P99.")] = 1,
) -> None:
    """Classify the words of a text or of a token file.

    Text shows each word with its experts and class, the load of each expert and the whole input's classes.
    """
    if (input_file is None) == (text is None):
        got = "neither" if text is None else "both"
        raise UsageError(expected="--input FILE or --text TEXT", got=got, at="the command line")
    chosen = output_format or format_for(output, _ENDINGS, InferFormat.TEXT)
    if chosen is InferFormat.NPY and output is None:
        refuse_terminal("npy")
    if pin_cpus is not None:
        pin(pin_cpus)

    from colibri_cli import infer_report, isa, report
    from colibri_cli.formats.tokens import read_tokens
    from colibri_cli.model import Model

    seconds = {"io": 0.0, "tokenize": 0.0}
    with _timed(seconds, "io"):
        ids = None if input_file is None else read_tokens(input_file)
        opened = Model.open(
            model,
            experts_dir,
            loading=loading.value,
            cache_experts=cache_experts,
            threads=threads,
            gating=None if gating is None else gating.value,
            balance=balance,
        )
        if preload:
            opened.experts.preload()
        if text is not None or chosen is not InferFormat.NPY:
            tokenizer = opened.tokenizer
    if opened.config.task != task:
        raise UsageError(expected=f"a model for {task}", got=opened.config.task, at=str(opened.path))
    if ids is None:
        with _timed(seconds, "tokenize"):
            ids = tokenizer.encode(text or "")
    inference, milliseconds = _run(opened, ids, repeat)
    run = {
        "model": str(opened.path),
        "isa": isa(),
        "gating": gating or opened.config.router.gating,
        "balance": opened.config.balance.enabled,
        "experts": opened.experts.stats(),
        "seconds": {part: round(value, 9) for part, value in (seconds | inference.seconds).items()},
    }
    _log_run(run)

    if chosen is InferFormat.NPY:
        report.emit(infer_report.infer_npy(inference), output)
        return
    latency = infer_report.Latency(milliseconds) if repeat > 1 else None
    answer = infer_report.Answer(task.value, opened.classes, inference, tokenizer.words(ids), tokenizer.pieces(ids))
    if chosen is InferFormat.JSON:
        report.emit(infer_report.infer_json(answer, run, latency), output)
    elif chosen is InferFormat.JSONL:
        report.emit(infer_report.infer_jsonl(answer, by_piece=by is Unit.PIECE), output)
    else:
        terminal = report.on_terminal(output)
        report.emit(infer_report.infer_text(answer, latency, by_piece=by is Unit.PIECE, terminal=terminal), output)


def _run(model: "Model", ids: "NDArray[np.int32]", repeat: int) -> "tuple[Inference, list[float]]":
    """Infer ``repeat`` times, each run starting alike; give the last answer and every run's milliseconds."""
    from colibri_cli import report

    milliseconds = []
    for _ in report.steps(repeat, "infer"):
        started = time.perf_counter()
        inference = model.infer(ids)
        milliseconds.append((time.perf_counter() - started) * 1e3)
    return inference, milliseconds


def _log_run(run: dict[str, Any]) -> None:
    experts = run["experts"]
    _log.debug("model: %s, gating %s, instruction set %s", run["model"], run["gating"], run["isa"])
    loaded = f"{experts['resident']} of {experts['n_experts']} loaded"
    size = f"{experts['resident_bytes'] / 1024:.1f} KiB"
    _log.info("experts: %s (%s, %s) from %s", loaded, experts["loading"], size, experts["source"])
    if experts["loading"] == "on-demand":
        read = experts["bytes_read"] / 1024
        _log.info("expert cache: %d hits, %d misses, %.1f KiB read", experts["hits"], experts["misses"], read)
    if run["balance"]:
        _log.info("balance: on, so experts may differ from the gate's own choice")
    parts = {"I/O" if part == "io" else part: value * 1e3 for part, value in run["seconds"].items()}
    _log.info("time: %s", ", ".join(f"{part} {value:.3f} ms" for part, value in parts.items()))


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> "Iterator[None]":
    started = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - started
