"""What several commands share: choices, their defaults from a file's ending, CPU lists, the log."""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from colibri_cli.errors import UsageError
from colibri_cli.formats.files import is_folder

_LAST_CPU = 8191  # Linux's own limit; keeps "0-999999999999" from being spelled out
_Format = TypeVar("_Format", bound=StrEnum)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors on standard error.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="More about what happens on standard error.")]


def set_verbosity(*, quiet: bool, verbose: bool) -> None:
    """Send the package's log lines to standard error: from INFO on, WARNING if quiet, DEBUG if verbose.

    Raises
    ------
    UsageError
        It is to be both.
    """
    if quiet and verbose:
        raise UsageError(expected="--quiet or --verbose", got="both", at="the command line")
    logging.raiseExceptions = False  # standard error may be a pipe that was closed
    log = logging.getLogger("colibri_cli")
    log.handlers = [logging.StreamHandler(sys.stderr)]
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``-q`` and ``-v`` of its own, so that they work before its name and after it."""

    @functools.wraps(command)
    def run(*args: Any, quiet: bool, verbose: bool, **kwargs: Any) -> None:
        if quiet or verbose:
            set_verbosity(quiet=quiet, verbose=verbose)
        command(*args, **kwargs)

    signature = inspect.signature(command, eval_str=True)
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in (("quiet", Quiet), ("verbose", Verbose))
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *extra])  # type: ignore[attr-defined]  # read by inspect
    run.__annotations__ = {**command.__annotations__, "quiet": Quiet, "verbose": Verbose}
    return run


def format_for(
    output: Path | None, endings: Mapping[str, _Format], otherwise: _Format, *, strict: bool = False
) -> _Format:
    """Choose the format that the output file's ending names.

    Raises
    ------
    UsageError
        ``strict``, and the file has an ending that names none.
    """
    ending = "" if output is None else output.suffix.lower()
    if strict and ending and ending not in endings:
        *others, last = endings
        raise UsageError(
            expected=f"a file ending in {', '.join(others)} or {last}",
            got=ending,
            at=f"--output {output}",
            hint="--format says what to write, whatever the ending",
        )
    return endings.get(ending, otherwise)


def check_output(output: Path | None) -> None:
    """Refuse a file that plainly cannot be written, before the work is done.

    Raises
    ------
    UsageError
        It is a directory, or would lie where there is none.
    """
    if output is None:
        return
    got = "a directory" if is_folder(output) else None if is_folder(output.parent) else "no such folder"
    if got is not None:
        raise UsageError(expected="a writable file", got=got, at=str(output))


def refuse_terminal(name: str) -> None:
    """Keep binary data off a person's screen.

    Raises
    ------
    UsageError
        Standard output is a terminal.
    """
    if sys.stdout is not None and sys.stdout.isatty():
        raise UsageError(
            expected=f"a file or a pipe for the format {name}",
            got="a terminal",
            at="standard output",
            hint="--output FILE, or > FILE",
        )


def pin(cpus: str) -> None:
    """Run only on the listed CPUs, e.g. ``0,2-3``, from now on.

    Raises
    ------
    UsageError
        The list does not parse, or names a CPU that this process may not use.
    """
    wanted = _cpu_list(cpus)
    allowed = os.sched_getaffinity(0)
    if not wanted <= allowed:
        raise UsageError(
            expected=f"CPUs out of {','.join(map(str, sorted(allowed)))}",
            got=str(min(wanted - allowed)),
            at="--pin",
        )
    os.sched_setaffinity(0, wanted)


def _cpu_list(cpus: str) -> set[int]:
    wanted: set[int] = set()
    for part in cpus.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(n.isascii() and n.isdigit() and len(n) <= len(str(_LAST_CPU)) for n in numbers):
            raise _not_cpus(part)
        low, high = map(int, numbers)
        if not low <= high <= _LAST_CPU:
            raise _not_cpus(part)
        wanted.update(range(low, high + 1))
    return wanted


def _not_cpus(part: str) -> UsageError:
    return UsageError(expected="CPU numbers and ranges such as 0,2-3", got=repr(part), at="--pin")
