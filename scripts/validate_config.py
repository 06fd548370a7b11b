#!/usr/bin/env python3
"""Check a bundle's config.json, as ``colibri validate-config`` does, where only Python is at hand.

    python3 scripts/validate_config.py [--files] [--format text|json|github|sarif] FILE...

Runs from the source tree and needs nothing but Python.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SOURCE_TREE = Path(__file__).resolve().parents[1] / "src"
if SOURCE_TREE.is_dir():
    sys.path.insert(0, str(SOURCE_TREE))

from colibri_cli.errors import ColibriError  # noqa: E402  # found through the line above
from colibri_cli.validate import validate_files  # noqa: E402  # found through the line above
from colibri_cli.validate.report import FORMATS, render  # noqa: E402  # found through the line above


def main() -> int:
    """Run; return the exit code: 0 no findings, 1 findings, 2 could not run."""
    parser = argparse.ArgumentParser(description="Check a bundle's config: JSON syntax, schema, rules between keys.")
    parser.add_argument("file", nargs="+", metavar="FILE", help="a bundle's config.json; - is standard input")
    parser.add_argument("--files", action="store_true", help="also check the bundle's files beside it")
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")
    arguments = parser.parse_args()
    try:
        validation = validate_files(arguments.file, check_files=arguments.files)
        text = render(validation, arguments.format)
        sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "backslashreplace"))
        sys.stdout.flush()
        validation.raise_unreadable()
    except ColibriError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 1 if validation.findings else 0


if __name__ == "__main__":
    sys.exit(main())
