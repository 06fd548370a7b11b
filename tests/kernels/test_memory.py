"""Memory: no allocation in a warmed call, and nothing read beyond the last element of an input."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_cli import _core

CC = shutil.which("cc")
COUNTER = Path(__file__).with_name("count_allocations.c")

# The counter must see an allocation (or the test could not fail), and none during warmed calls.
WARMED_CALLS = """
import ctypes, gc, sys
import numpy as np
from reference import Ffns, integers, numbers
from colibri_cli import Balancer, Experts

case, threads = sys.argv[1], int(sys.argv[2])
counter = ctypes.CDLL(None)
counter.count_stop.restype = ctypes.c_long

T, H, I, E, K = 48, 160, 96, 6, 3
ffns = Ffns.make(1, E, H, I)
x, ids, weights = numbers(2, T, H), integers(3, -1, E, T, K), numbers(4, T, K)
out = np.empty((T, H), np.float32)
if case == "mmap":
    import pathlib, tempfile
    from colibri_cli.formats.experts import ExpertShape
    folder = tempfile.TemporaryDirectory()
    files = ffns.write(pathlib.Path(folder.name))
    experts = Experts.open(folder.name, "mmap", threads=threads, shape=ExpertShape(H, I, "silu", True), files=files)
else:
    tokens = 24 if case == "chunks" else 512
    experts = Experts.from_arrays(**ffns.arrays(), threads=threads, max_tokens=tokens, copy=case != "in place")
if case == "strided":
    x, ids, weights = (np.repeat(a, 2, axis=1)[:, ::2] for a in (x, ids.astype(np.int64), weights))

def run(n):
    for _ in range(n):
        experts.run(x, ids, weights, out=out)

run(50)
expected = out.copy()
gc.collect()
gc.disable()
run(5)

counter.count_start()
seen = np.empty(1 << 20, np.uint8)
assert counter.count_stop() > 0, "the counter does not count"

blocks = sys.getallocatedblocks()
run(50)
assert sys.getallocatedblocks() < blocks + 10, "calls leave Python objects behind"  # the count itself is one
counter.count_start()
run(50)
n = counter.count_stop()
assert n == 0, f"{n} allocations in 50 calls"
assert (out == expected).all()
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    if CC is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("counter") / "count.so"
    subprocess.run([CC, "-shared", "-fPIC", "-O1", "-o", library, COUNTER, "-ldl"], check=True)
    return library


def python(code, *arguments, **environment):
    """Run code in a process of its own, which may crash without ending the suite."""
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stderr}"


@pytest.mark.skipif(_core.sanitized(), reason="the sanitizer brings an allocator of its own")
@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("case", ["static", "mmap", "in place", "chunks", "strided"])
def test_a_warmed_call_allocates_nothing(case, threads, counter):
    python(WARMED_CALLS, case, threads, LD_PRELOAD=str(counter))


# Every input ends where a page that must not be touched begins.
AT_THE_END_OF_A_PAGE = """
import ctypes, faulthandler, mmap, sys
import numpy as np
from reference import BFloat16, Ffns, high_halves, integers, numbers
from colibri_cli import Experts, Router, _core
from colibri_cli.formats.experts import ExpertShape

faulthandler.enable()
_core.use_isa(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def at_the_end(a):
    size = -(-a.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0, ctypes.get_errno()
    view = np.frombuffer(memory, a.dtype, a.size, size - a.nbytes).reshape(a.shape)
    view[...] = a
    kept.append(memory)
    return view

for hidden, inter in ((1, 1), (7, 9), (16, 8), (17, 15), (33, 31), (64, 48), (65, 16)):
    for gated in (False, True):
        for n_tokens in (1, 3, 9):
            ffns = Ffns.make(1, 2, hidden, inter, gated=gated, activation="relu")
            x, ids, weights = numbers(2, n_tokens, hidden), integers(3, 0, 2, n_tokens, 2), numbers(4, n_tokens, 2)
            expected = ffns.bits(x, ids, weights)
            guarded = [at_the_end(a) for a in (x, ids, weights)]
            out = at_the_end(np.zeros_like(x))
            arrays = {k: at_the_end(a) if isinstance(a, np.ndarray) else a for k, a in ffns.arrays().items()}
            Experts.from_arrays(**arrays).run(*guarded, out=out)
            assert (out == expected).all()

            kernel = _core.ExpertKernel(hidden, inter, _core.ACTIVATIONS["relu"], gated)
            shape = ExpertShape(hidden, inter, "relu", gated)
            files = [shape.split(at_the_end(np.frombuffer(ffns.raw(e), np.float32))) for e in range(2)]
            raw = [kernel.in_place(w1, w2, b1, b2) for w1, b1, w2, b2 in files]
            out[...] = 0
            kernel.run(_core.ExpertSet(raw), *guarded, out=out)
            assert (out == expected).all()

            in_turn = np.arange(2 * inter).reshape(2, inter).T.ravel() if gated else np.arange(inter)
            for layout, order in (("concatenated", slice(None)), ("interleaved", in_turn)):
                for axes in ((0, 1, 2), (0, 2, 1)):
                    up, down = (np.ascontiguousarray(a.transpose(axes)) for a in (ffns.up[:, order], ffns.down))
                    arrays = {"gate_up": up, "down": down, "gate_up_bias": ffns.up_bias[:, order]}
                    arrays["down_bias"] = ffns.down_bias
                    options = {"activation": "relu", "gated": gated, "layout": layout, "transposed": axes[1] == 2}
                    own = Experts.from_arrays(**{k: at_the_end(a) for k, a in arrays.items()}, **options, copy=False)
                    assert (own.run(*guarded) == expected).all()
                    arrays = {k: BFloat16(at_the_end(high_halves(a))) for k, a in arrays.items()}
                    narrow = Experts.from_arrays(**arrays, **options, dtype="bfloat16", copy=False)
                    packed = Experts.from_arrays(**arrays, **options, dtype="bfloat16")
                    assert (narrow.run(*guarded) == packed.run(*guarded)).all()

            router = Router.from_array(at_the_end(numbers(5, inter, hidden)), at_the_end(numbers(6, inter)), top_k=1)
            router.route(guarded[0])
            mixer = at_the_end(numbers(8, 3, hidden, hidden))
            _core.Mixer(at_the_end(numbers(7, 4, hidden)), mixer, 1).run(at_the_end(integers(9, 0, 4, n_tokens)))
            head = _core.Head(at_the_end(numbers(10, inter, hidden)), at_the_end(numbers(11, inter)), 1)
            head.run(guarded[0])
        logits = at_the_end(numbers(12, 5, 8))
        _core.softmax(logits)
        _core.softmax(at_the_end(numbers(12, 11, 24)), "taylor")
"""


def test_nothing_is_read_beyond_an_inputs_end(isa):
    python(AT_THE_END_OF_A_PAGE, isa)
