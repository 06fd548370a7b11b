"""Which instruction sets run here: what Linux says of the processor, and the best at first."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_cli import _core
from colibri_cli.errors import UsageError

NEEDED = {
    "avx2": {"fma", "f16c", "avx2"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
    "avx512_amx": {"amx_tile", "amx_bf16"},
}


def said_by_linux() -> list[str]:
    """Name those whose flags, and the flags of all before them, the first processor has; scalar code always runs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    found = ["scalar"]
    for name, needed in NEEDED.items():
        if not needed <= flags:
            break
        found.append(name)
    return found


def runs(name: str) -> bool:
    try:
        _core.use_isa(name)
    except UsageError:
        return False
    return True


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="x86 flags, from Linux")
def test_what_runs_is_what_linux_says_and_the_best_of_it_comes_first():
    before = _core.isa()
    try:
        assert {name for name in ("scalar", *NEEDED) if runs(name)} == set(said_by_linux())
    finally:
        _core.use_isa(before)
    assert set(_core.isa_names()) == set(said_by_linux())
    environment = {k: v for k, v in os.environ.items() if k != "COLIBRI_ISA"}
    command = [sys.executable, "-c", "from colibri_cli import _core; print(_core.isa())"]
    fresh = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert fresh.stdout.strip() == said_by_linux()[-1]
