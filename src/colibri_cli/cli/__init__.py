"""The command line. A command parses, calls one library function and reports; `main` is the only catch."""

import os
import sys
from typing import Annotated

import typer

from colibri_cli import __version__
from colibri_cli.cli.bench import bench
from colibri_cli.cli.gen_router import gen_router
from colibri_cli.cli.infer import infer
from colibri_cli.cli.options import Quiet, Verbose, set_verbosity, with_verbosity
from colibri_cli.cli.pack import pack
from colibri_cli.cli.tokenize import tokenize
from colibri_cli.cli.validate_config import validate_config
from colibri_cli.errors import ColibriError

_INTERRUPTED = 130  # 128 + SIGINT, as shells say it
_CLOSED_PIPE = 141  # 128 + SIGPIPE

app = typer.Typer(
    help="Run Mixture-of-Experts models on CPUs: routing, load balancing and expert FFNs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich, which is most of Typer's start-up time
)
for _command in (tokenize, infer, gen_router, validate_config, pack, bench):
    # Arguments that infer does not take are left to it, for a hint.
    app.command(context_settings={"allow_extra_args": _command is infer})(with_verbosity(_command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"colibri {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001  # its callback does it all
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit."),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    set_verbosity(quiet=quiet, verbose=verbose)


def main() -> int:
    """Run the command line.

    Returns
    -------
    int
        The exit code: 0 done, 1 bad data or findings, 2 could not run, 130 interrupted, 141 when the reader
        of standard output has gone.
    """
    try:
        app(prog_name="colibri")
    except ColibriError as error:
        _complain(str(error))
        return error.exit_code
    except MemoryError:
        _complain("Expected enough memory, got less than this input takes - at this machine")
        return 2
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return _discard(_CLOSED_PIPE)
    except OSError as error:  # a file's has its name; else standard output cannot take the help text
        from colibri_cli.formats.files import unreadable
        from colibri_cli.report import unwritable

        _complain(str(unreadable(error.filename, error) if error.filename else unwritable(error)))
        return _discard(2)
    except SystemExit as leaving:
        # Typer turns a closed pipe into exit 1, which here would say that the data is bad.
        if isinstance(leaving.__context__, BrokenPipeError):
            return _discard(_CLOSED_PIPE)
        return leaving.code if isinstance(leaving.code, int) else 0
    return 0


def _discard(code: int) -> int:
    from colibri_cli.report import discard_stdout

    discard_stdout()
    return code


def _complain(message: str) -> None:
    from colibri_cli.report import printable

    terminal = sys.stderr is not None and sys.stderr.isatty()
    colour = "red" if terminal and not os.environ.get("NO_COLOR") else None
    first, *others = message.splitlines()
    typer.secho(printable(first), err=True, fg=colour, bold=colour is not None)
    for line in others:
        typer.echo(printable(line), err=True)
