"""What a process is started with: the instruction set that COLIBRI_ISA names, ``python -O``; and what it may not do."""

import os
import subprocess
import sys

import numpy as np
import pytest
from reference import numbers

from colibri_cli import Experts, InvalidInput, Router, UsageError, _core, isa

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


SHOW_ISA = "import colibri_cli; print(colibri_cli.isa())"


@pytest.mark.parametrize("name", _core.isa_names())
def test_colibri_isa_chooses(name):
    done = python("-c", SHOW_ISA, COLIBRI_ISA=name)
    assert (done.returncode, done.stdout) == (0, f"{name}\n"), done.stderr


def test_an_empty_colibri_isa_is_none():
    assert python("-c", SHOW_ISA, COLIBRI_ISA="").stdout == f"{_core.isa_names()[0]}\n"


@pytest.mark.parametrize("name", ["mmx", "AVX2", " avx2", "scalar,avx2", "é"])
def test_an_unknown_colibri_isa_cannot_run(name):
    done = python("-m", "colibri_cli", "infer", "--text", "hello", COLIBRI_ISA=name)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Expected an instruction set that runs here (")
    assert done.stderr.rstrip().endswith(f"got {name!r} - at COLIBRI_ISA")
    assert "Traceback" not in done.stderr


def test_an_unknown_instruction_set_leaves_the_present_one():
    before = isa()
    with pytest.raises(UsageError, match="COLIBRI_ISA"):
        _core.use_isa("mmx")
    assert isa() == before


def test_scalar_always_runs():
    assert _core.isa_names()[-1] == "scalar"


OPTIMISED = """
import sys
import numpy as np
from colibri_cli import Balancer, Experts, GumbelNoise, InvalidInput, Model, Router, UsageError

assert False, "-O is on"  # a check made with assert would be gone as well
one = np.ones((2, 3, 3), np.float32)
experts = Experts.from_arrays(one, one, gated=False)
x, ids, weights = np.ones((4, 3), np.float32), np.zeros((4, 1), np.int32), np.ones((4, 1), np.float32)
router = Router.from_array(one[0], top_k=2)
attempts = [
    lambda: experts.run(x, ids + 2, weights),
    lambda: experts.run(x, ids - 2, weights),
    lambda: experts.run(x[:, :2], ids, weights),
    lambda: experts.run(x.astype(float), ids, weights),
    lambda: experts.run(x, ids, weights, out=x),
    lambda: experts.replace(2, "nowhere.bin"),
    lambda: experts.remove(2),
    lambda: Experts.from_arrays(one, one),
    lambda: router.route(x * np.nan),
    lambda: router.route(x, Balancer(5)),
    lambda: Router.from_array(one[0], top_k=4),
    lambda: Balancer(0),
    lambda: GumbelNoise(0, 1),
    lambda: Model.open("nowhere"),
    lambda: Model.open().infer([12_000]),
]
for n, attempt in enumerate(attempts):
    try:
        attempt()
    except (InvalidInput, UsageError):
        continue
    sys.exit(f"attempt {n} was not refused")
"""


def test_python_o_keeps_every_check():
    done = python("-O", "-c", OPTIMISED)
    assert done.returncode == 0, done.stderr


def test_more_tokens_than_an_int_counts_are_refused_before_memory_is_asked_for():
    wide = np.broadcast_to(numbers(1, 1, 3), ((1 << 30) + 1, 3))
    with pytest.raises(InvalidInput, match=r"at most 2\^30 tokens"):
        Router.from_array(numbers(2, 4, 3)).route(wide)
    one = np.ones((2, 3, 3), np.float32)
    experts = Experts.from_arrays(one, one, gated=False)
    ids, weights = np.broadcast_to(np.int32(0), (len(wide), 1)), np.broadcast_to(np.float32(0), (len(wide), 1))
    with pytest.raises(InvalidInput, match=r"at most 2\^30 tokens"):
        experts.run(wide, ids, weights)


def test_more_experts_a_token_than_make_sense_are_refused():
    one = np.ones((2, 3, 3), np.float32)
    experts = Experts.from_arrays(one, one, gated=False)
    ids, weights = np.broadcast_to(np.int32(-1), (1, 65_537)), np.broadcast_to(np.float32(0), (1, 65_537))
    with pytest.raises(InvalidInput, match="at most 65,536 experts a token"):
        experts.run(numbers(1, 1, 3), ids, weights)


SHORT_OF_ADDRESSES = """
import resource, sys
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.mapped_file import map_pages

with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 26), resource.RLIM_INFINITY))
with CheckedFile(sys.argv[1]) as file:
    try:
        map_pages(file)
    except MemoryError as error:
        print(error)
"""


def test_a_file_that_no_addresses_are_left_for_is_not_to_blame(tmp_path):
    path = tmp_path / "large.bin"
    path.touch()
    os.truncate(path, 1 << 30)
    done = python("-c", SHORT_OF_ADDRESSES, path)
    assert done.stdout == f"no memory to read or map {path}\n", done.stderr
