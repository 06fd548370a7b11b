"""The kernels without Python around them: the same hash from every instruction set, here and (make test-arm) on Arm."""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNELS = TESTS.parent / "src" / "colibri_cli" / "kernels"
NAMES = ("float_mode", "isa", "isa_scalar", "pack", "pairs", "pool", "score")
SOURCES = [TESTS / "c" / "golden.c", *(KERNELS / f"{name}.c" for name in NAMES)]
GOLDEN = (TESTS / "data" / "golden_kernels.txt").read_text().strip()
ARM = os.environ.get("COLIBRI_TEST_ARM")


def hashes(folder, compiler, isa, *flags, run=()):
    program = folder / "golden"
    sources = [*SOURCES, *(KERNELS / f"isa_{name}.c" for name in isa)]
    command = [*compiler, "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-I", KERNELS]
    subprocess.run([*command, *flags, *sources, "-lm", "-lpthread", "-o", program], check=True)
    lines = subprocess.run([*run, program], capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split() for line in lines)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_every_instruction_set_gives_the_golden_hash(tmp_path):
    found = hashes(tmp_path, ["cc"], ["amx", "avx2", "avx512", "neon"])
    assert set(found) >= {"scalar"}
    assert set(found.values()) == {GOLDEN}, platform.processor()


@pytest.mark.skipif(not ARM, reason="make test-arm")
def test_arm_gives_the_golden_hash(tmp_path):
    found = hashes(
        tmp_path, ["aarch64-linux-gnu-gcc"], ["amx", "avx2", "avx512", "neon"], "-static", run=["qemu-aarch64"]
    )
    assert found == {"neon": GOLDEN, "scalar": GOLDEN}
