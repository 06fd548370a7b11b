"""``colibri validate-config``: every finding in a bundle's config, with its place."""

import logging
from enum import StrEnum
from typing import Annotated

import typer

_log = logging.getLogger(__name__)


class FindingsFormat(StrEnum):
    """How findings are written."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


def validate_config(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="A bundle, or its config.json; - is standard input.")
    ],
    check_files: Annotated[
        bool, typer.Option("--files", help="Also check the bundle's files beside it: presence and size.")
    ] = False,
    output_format: Annotated[
        FindingsFormat, typer.Option("--format", help="github: workflow commands; sarif: SARIF 2.1.0.")
    ] = FindingsFormat.TEXT,
) -> None:
    """Check a bundle's config: schema, and rules between keys.

    Exit code 0: no findings; 1: findings; 2: a file could not be read.
    """
    from colibri_cli import report
    from colibri_cli.validate import validate_files
    from colibri_cli.validate.report import render

    validation = validate_files(files, check_files=check_files)
    report.emit(render(validation, output_format.value))
    if validation.files:
        _log.info("%s", validation.summary())
    validation.raise_unreadable()
    if validation.findings:
        raise typer.Exit(1)
