#!/usr/bin/env python3
"""Turn trained gate weights into a constant table: ``colibri gen-router`` for build systems.

Needs nothing but numpy, and runs from the source tree before anything is built or installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SOURCE_TREE = Path(__file__).resolve().parents[1] / "src"
if SOURCE_TREE.is_dir():
    sys.path.insert(0, str(SOURCE_TREE))

from colibri_cli.errors import ColibriError  # noqa: E402  # found through the line above
from colibri_cli.gen_router import generate  # noqa: E402  # found through the line above


def main() -> int:
    """Run; return the exit code: 0 done, 1 bad data or a missing or stale file, 2 could not run."""
    parser = argparse.ArgumentParser(description="Turn trained gate weights into a constant table.")
    parser.add_argument("source", metavar="SOURCE", help=".pt, .pth, .safetensors, .npy, .npz, raw float32 .bin")
    parser.add_argument("--output", metavar="FILE", required=True, help="ends in .c or .h (C11, not C++), .bin or .npy")
    parser.add_argument("--key", metavar="NAME", help="which tensor; default: the only one that can be a gate")
    parser.add_argument("--name", metavar="IDENTIFIER", help="the table's name in C; default: colibri_router_table")
    parser.add_argument(
        "--hidden-size", metavar="N", type=int, help="needed for raw values, and for more experts than features"
    )
    parser.add_argument("--transposed", action="store_true", help="the tensor is [hidden_size, n_experts]")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if FILE is missing or stale")
    parser.add_argument("--quiet", "-q", action="store_true", help="no report")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the report")
    flags = vars(parser.parse_args())
    report_format, quiet = flags.pop("format"), flags.pop("quiet")
    try:
        done = generate(**flags)
    except ColibriError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not quiet:
        report = done.to_json() if report_format == "json" else done.to_text()
        sys.stdout.buffer.write(report.encode(sys.stdout.encoding, "backslashreplace"))
    return 1 if done.stale else 0


if __name__ == "__main__":
    sys.exit(main())
