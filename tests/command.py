"""The command as a user runs it."""

import os
import subprocess
import sys
from typing import Any

PROGRAM = (sys.executable, "-m", "colibri_cli")


def colibri(*arguments: str | bytes | os.PathLike[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run ``colibri`` with the arguments given; keywords go to `subprocess.run`."""
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, "check": False, **options}
    return subprocess.run([*PROGRAM, *arguments], **options)
