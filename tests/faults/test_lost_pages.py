"""Mapped files that are cut short while they are in use: the answer is refused, and the process goes on.

Each test runs in a process of its own, which a SIGBUS would end.
"""

import os
import signal
import subprocess
import sys

import pytest

SETTING = """
import os, pathlib, signal, sys, threading
import numpy as np
from reference import Classifier, Ffns, integers, numbers
from colibri_cli import ColibriError, Experts, Model, _core
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.formats.packed import PackedHeader, write_packed

folder = pathlib.Path(sys.argv[1])
E, H, I = 4, 96, 64
ffns = Ffns.make(1, E, H, I)
names, shape = ffns.write(folder), ExpertShape(H, I, "silu", True)
experts = Experts.open(folder, "mmap", threads=2, shape=shape, files=names)
held = Experts.from_arrays(**ffns.arrays())

def batch(n, *ids):
    return numbers(2, n, H), np.tile(np.int32(ids), (n, 1)), numbers(3, n, len(ids))

def packed(dtype):
    shape, names = ExpertShape(H, I, "silu", True, dtype), [f"{e}.{dtype}" for e in range(E)]
    kernel = _core.ExpertKernel(H, I, _core.ACTIVATIONS["silu"], True, dtype=_core.DTYPES[dtype])
    for e, name in enumerate(names):
        expert = kernel.pack(ffns.up[e], ffns.down[e], ffns.up_bias[e], ffns.down_bias[e])
        write_packed(folder / name, PackedHeader(shape, True), memoryview(expert))
    return Experts.open(folder, "mmap", threads=2, shape=shape, files=names), names

def refused(call, name):
    try:
        call()
    except ColibriError as error:
        assert name in str(error), error
    else:
        sys.exit("an answer from pages that are gone")
"""

MODEL = """
bundle = Classifier.make(vocab=200).write(folder / "bundle")
model = Model.open(bundle, loading="mmap")
model.infer(range(200))
os.truncate(bundle / sys.argv[2], 0)
for _ in range(3):
    refused(lambda: model.infer(range(200)), sys.argv[2])
"""

OTHERS = """
expected = held.run(*batch(300, 0, 1, 2))
os.truncate(folder / names[3], 0)
refused(lambda: experts.run(*batch(300, 0, 3)), names[3])
for _ in range(3):
    assert (experts.run(*batch(300, 0, 1, 2)) == expected).all()
(folder / "fresh.bin").write_bytes(ffns.raw(3))
experts.replace(3, folder / "fresh.bin")
assert (experts.run(*batch(300, 0, 3)) == held.run(*batch(300, 0, 3))).all()
"""

OUT = """
out = np.full((300, H), 7, np.float32)
os.truncate(folder / names[3], 0)
refused(lambda: experts.run(*batch(300, 0, 3), out=out), names[3])
assert (out == 7).all(), "out was written by a call that failed"
"""

PACKED = """
for dtype in ("float32", "bfloat16", "int8", "int4"):
    experts, names = packed(dtype)
    expected = experts.run(*batch(300, 0, 1, 2))
    out = np.full((300, H), 7, np.float32)
    os.truncate(folder / names[3], 64)
    refused(lambda: experts.run(*batch(300, 0, 3), out=out), names[3])
    assert (out == 7).all(), "out was written by a call that failed"
    refused(experts.preload, names[3])
    assert (experts.run(*batch(300, 0, 1, 2)) == expected).all()
    experts.replace(3, folder / names[2])
    assert np.isfinite(experts.run(*batch(300, 0, 3))).all()
"""

PRELOAD = """
os.truncate(folder / names[3], 0)
refused(experts.preload, names[3])
refused(lambda: experts.run(*batch(3, 3)), names[3])
"""

# A long call over the lost expert, while short ones over another come and go.
COMPANY = """
over, errors, n_short = threading.Event(), [], 0

def short_calls():
    global n_short
    while not over.is_set():
        try:
            experts.run(*batch(1, 0))
        except ColibriError as error:
            errors.append(str(error))
        n_short += 1

others = [threading.Thread(target=short_calls) for _ in range(2)]
for other in others:
    other.start()
try:
    for e in (1, 2, 3):
        os.truncate(folder / names[e], 0)
        before = n_short
        refused(lambda: experts.run(*batch(20_000, e)), names[e])
        assert n_short > before, "the calls did not overlap"
finally:
    over.set()
    for other in others:
        other.join()
assert not errors, errors[:3]
"""

ELSEWHERE = """
import mmap
experts.run(*batch(3, 3))
with open(folder / "mine", "w+b") as file:
    file.write(bytes(8192))
    file.flush()
    mine = np.frombuffer(mmap.mmap(file.fileno(), 8192, access=mmap.ACCESS_READ), np.uint8)
    file.truncate(0)
mine.max()
sys.exit("somebody else's lost pages were read")
"""


def python(code, *arguments, options=()):
    return subprocess.run(
        [sys.executable, *options, "-c", SETTING + code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("file", ["experts/expert_3.bin", "embedding.bin"])
def test_a_model_refuses_the_answer(file, tmp_path):
    done = python(MODEL, tmp_path, file)
    assert done.returncode == 0, done.stderr


CASES = {"others": OTHERS, "out": OUT, "packed": PACKED, "preload": PRELOAD, "company": COMPANY}


@pytest.mark.parametrize("case", CASES)
def test_experts(case, tmp_path):
    done = python(CASES[case], tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler")])
def test_another_programs_bus_error_stays_its_own(options, tmp_path):
    done = python(ELSEWHERE, tmp_path, options=options)
    assert done.returncode == -signal.SIGBUS, done.stderr
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(options)
