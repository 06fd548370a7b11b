"""``colibri gen-router``: trained gate weights to a constant table."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ReportFormat(StrEnum):
    """How the report is written."""

    TEXT = "text"
    JSON = "json"


def gen_router(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="Trained weights: .pt, .pth, .safetensors, .npy, .npz, raw float32 .bin."
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="Becomes what its ending says: .c or .h (C11, not C++), .bin, .npy.")
    ],
    key: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which tensor; default: the only one that can be a gate."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="IDENTIFIER", help="The table's name in C; default: colibri_router_table."),
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Needed for raw values, and for more experts than features.")
    ] = None,
    transposed: Annotated[bool, typer.Option("--transposed", help="The tensor is [hidden_size, n_experts].")] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if FILE is missing or stale.")] = False,
    report_format: Annotated[ReportFormat, typer.Option("--format", help="The report's.")] = ReportFormat.TEXT,
) -> None:
    """Turn trained gate weights into a constant table.

    The same weights give the same bytes, whatever the format of SOURCE; a FILE that holds them already
    is left alone.
    """
    from colibri_cli.gen_router import generate
    from colibri_cli.report import emit

    done = generate(source, output, key=key, name=name, hidden_size=hidden_size, transposed=transposed, check=check)
    emit(done.to_json() if report_format is ReportFormat.JSON else done.to_text())
    if done.stale:
        raise typer.Exit(1)
