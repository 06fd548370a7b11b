"""A bundle's config.json, checked: all findings in one run, each with its place in the text.

bytes -> tokens (json_tokens) -> values with positions and syntax errors (json_parser) -> what breaks the schema
(schema_check) -> what breaks the rules between keys, and the bundle's files (rules) -> `Finding`, which report renders.
`colibri_cli.config.load_config` makes the same check at run time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.files import is_folder
from colibri_cli.formats.inputs import STDIN, read_input
from colibri_cli.validate import rules
from colibri_cli.validate.json_parser import parse
from colibri_cli.validate.json_tokens import printable
from colibri_cli.validate.schema_check import check, schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable

LARGEST_CONFIG = 1 << 18  # bytes
RULES = {
    "syntax": "The file is JSON in UTF-8.",
    "duplicate-key": "An object has each key once.",
    "schema": "Every value obeys the JSON Schema of config.json.",
    "consistency": "The values fit one another.",
    "files": "The bundle's files are there and have the sizes that the config fixes.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong in a config.

    Attributes
    ----------
    file : str
        The path as it was given, bytes that are not UTF-8 replaced; ``<stdin>`` for standard input.
    line, column : int
        From 1; the column in code points. The first character of the offending value; of the key for an
        unknown or a duplicate key; of the opening brace for a missing key.
    pointer : str
        The value it concerns, as in ``$.classes[0]`` or ``$["odd key"]``; for a missing key the object.
    expected, found : str
        The contract and the fact.
    rule : str
        One of `RULES`.
    """

    file: str
    line: int
    column: int
    pointer: str
    expected: str
    found: str
    rule: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"

    @property
    def place(self) -> str:
        """``file:line:column``."""
        return f"{printable(self.file)}:{self.line}:{self.column}"

    @property
    def message(self) -> str:
        """The finding without its place in the file."""
        return f"expected {self.expected}, got {self.found} - at {self.pointer}"


@dataclass(frozen=True, slots=True)
class Validation:
    """What came out of several files.

    Attributes
    ----------
    files : list of str
        The files that could be read.
    findings : list of Finding
        By file, in the order they were given, and by position.
    unreadable : list of UsageError
        One for each file that could not be read.
    """

    files: list[str]
    findings: list[Finding]
    unreadable: list[UsageError]

    def summary(self) -> str:
        """Return the counts, as a sentence for people."""
        n_files, n_findings = len(self.files), len(self.findings)
        findings = "no findings" if n_findings == 0 else f"{n_findings} finding{'s' * (n_findings > 1)}"
        return f"{findings} in {n_files} file{'s' * (n_files != 1)}"

    def raise_unreadable(self) -> None:
        """Raise for the files that could not be read.

        Raises
        ------
        UsageError
            There are any; it names all of them.
        """
        if len(self.unreadable) > 1:
            places = ", ".join(f"{error.at} ({error.got})" for error in self.unreadable)
            raise UsageError(expected="readable files", got="some that are not", at=places)
        for error in self.unreadable:
            raise error


def validate_files(paths: Iterable[str | os.PathLike[str]], *, check_files: bool = False) -> Validation:
    """Check several configs; those that cannot be read do not keep the others from being checked."""
    result = Validation([], [], [])
    for path in map(_config_of, paths):
        try:
            result.findings.extend(validate_file(path, check_files=check_files))
        except UsageError as error:
            result.unreadable.append(error)
        else:
            result.files.append(_name(path))
    return result


def validate_file(path: str | os.PathLike[str], *, check_files: bool = False) -> list[Finding]:
    """Check one config.

    Parameters
    ----------
    path : path-like
        The config.json, or the bundle's directory; ``-`` for standard input.
    check_files : bool
        Also check that the bundle's files are in the config's directory and have the sizes that it fixes.

    Returns
    -------
    list of Finding
        By position; empty for a sound config.

    Raises
    ------
    UsageError
        The file is missing or cannot be read; ``check_files`` with standard input.
    """
    if check_files and os.fspath(path) == STDIN:
        raise UsageError(expected="a file, which tells the bundle's directory", got="-", at="--files")
    path = _config_of(path)
    _, findings = read_config(path, Path(path).parent if check_files else None)
    return findings


def validate_text(text: str | bytes, *, file: str = "config.json") -> list[Finding]:
    """Check a config given as text; ``file`` is its name in the findings."""
    return _findings(text, file, None)[1]


def read_config(path: str | os.PathLike[str], bundle: Path | None = None) -> tuple[object, list[Finding]]:
    """Read a config.

    Parameters
    ----------
    path : path-like
        The config.json; ``-`` for standard input.
    bundle : Path, optional
        Also check the files in this directory.

    Returns
    -------
    value : object
        As `json.loads` returns it; it obeys the schema if there are no findings.
    findings : list of Finding
        By position.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    """
    name = _name(path)
    try:
        data = read_input(path, limit=LARGEST_CONFIG)
    except InvalidInput as error:
        return None, [Finding(name, 1, 1, "$", error.expected, error.got, "syntax")]
    return _findings(data, name, bundle)


def _config_of(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    return Path(path) / "config.json" if is_folder(path) else path


def _name(path: str | os.PathLike[str]) -> str:
    return "<stdin>" if os.fspath(path) == STDIN else os.fsencode(path).decode(errors="replace")


def _findings(text: str | bytes, file: str, bundle: Path | None) -> tuple[object, list[Finding]]:
    document = parse(text)
    foreign = rules.checkpoint_config(document.root)
    broken_schema, sound = ([foreign], {}) if foreign else check(document, schema_of(document))
    broken_rules = list(rules.consistency(sound))
    faults = document.faults + broken_schema + broken_rules
    if bundle is not None:
        # A path that leaves the bundle is not looked at.
        unsound = {fault.pointer for fault in broken_rules}
        sound = {pointer: node for pointer, node in sound.items() if pointer not in unsound}
        faults += rules.bundle_files(sound, bundle)
    findings = [
        Finding(
            file,
            *document.lines.position(fault.start),
            fault.pointer,
            fault.expected,
            fault.found,
            fault.rule,
        )
        for fault in faults
    ]
    return document.root.plain(), sorted(findings, key=lambda finding: (finding.line, finding.column))
