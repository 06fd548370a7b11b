"""Findings as text, JSON, GitHub workflow commands and SARIF: computed once, rendered as a string."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from colibri_cli import __version__
from colibri_cli.validate import RULES

if TYPE_CHECKING:
    from colibri_cli.validate import Finding, Validation


def render(validation: Validation, output_format: str) -> str:
    """Return the findings in one of `FORMATS`; every line ends with LF."""
    return FORMATS[output_format](validation)


def as_text(validation: Validation) -> str:
    """Return one line a finding, ``config.json:12:15: expected string, got array - at $.artifact``."""
    return "".join(f"{finding}\n" for finding in validation.findings)


def as_json(validation: Validation) -> str:
    """Return a document that obeys ``schema/validate-config.schema.json``."""
    document = {
        "schema": "colibri.validate-config/1",
        "files": validation.files,
        "findings": [asdict(finding) for finding in validation.findings],
    }
    return json.dumps(document, indent=2) + "\n"


def as_github(validation: Validation) -> str:
    """Return workflow commands, which GitHub Actions shows as annotations of the lines."""
    return "".join(map(_annotation, validation.findings))


def as_sarif(validation: Validation) -> str:
    """Return a SARIF 2.1.0 log of one run."""
    ids = list(RULES)
    driver = {
        "name": "colibri validate-config",
        "version": __version__,
        "rules": [{"id": rule, "shortDescription": {"text": text}} for rule, text in RULES.items()],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, ids.index(finding.rule)) for finding in validation.findings],
    }
    log = {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2) + "\n"


FORMATS = {"text": as_text, "json": as_json, "github": as_github, "sarif": as_sarif}


def _annotation(finding: Finding) -> str:
    properties = {"file": finding.file, "line": finding.line, "col": finding.column, "title": finding.rule}
    listed = ",".join(f"{key}={str(value).translate(_IN_PROPERTIES)}" for key, value in properties.items())
    return f"::error {listed}::{finding.message.translate(_IN_MESSAGES)}\n"


_IN_MESSAGES = str.maketrans({"%": "%25", "\r": "%0D", "\n": "%0A"})
_IN_PROPERTIES = _IN_MESSAGES | str.maketrans({":": "%3A", ",": "%2C"})


def _result(finding: Finding, rule_index: int) -> dict[str, Any]:
    path = Path(finding.file)
    location = {
        "physicalLocation": {
            "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else quote(finding.file)},
            "region": {"startLine": finding.line, "startColumn": finding.column},
        },
        "logicalLocations": [{"fullyQualifiedName": finding.pointer}],
    }
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule_index,
        "level": "error",
        "message": {"text": finding.message},
        "locations": [location],
    }
