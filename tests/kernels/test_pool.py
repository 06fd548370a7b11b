"""The thread pool: any number of callers, forks, no GIL, and no work while idle."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from reference import Ffns, integers, numbers

from colibri_cli import Experts, InvalidInput, Router, _core
from colibri_cli.formats.experts import ExpertShape

T, H, I, E, K = 120, 160, 96, 6, 2  # noqa: E741 - the sizes' usual letters
FFNS = Ffns.make(1, E, H, I)
BATCH = numbers(2, T, H), integers(3, 0, E, T, K), numbers(4, T, K)


@pytest.fixture(scope="module")
def expected():
    return Experts.from_arrays(**FFNS.arrays(), threads=1).run(*BATCH)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_any_width(threads, expected):
    experts = Experts.from_arrays(**FFNS.arrays(), threads=threads)
    for _ in range(20):
        np.testing.assert_array_equal(experts.run(*BATCH), expected)


@pytest.mark.parametrize("given", [1, 2, 3, 7])
def test_a_hosts_team_instead_of_the_pool(given, expected):
    """Of whatever size the host makes it; only calls of that kernel, and only while they last."""
    member_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    asked = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def team(member, argument, n_threads, flags):
        asked.append((n_threads, flags))
        others = [threading.Thread(target=member_type(member), args=(argument,)) for _ in range(given - 1)]
        for other in others:
            other.start()
        member_type(member)(argument)
        for other in others:
            other.join()

    pool = Experts.from_arrays(**FFNS.arrays(), threads=2)
    address = ctypes.cast(team, ctypes.c_void_p).value
    kernel = _core.ExpertKernel(H, I, _core.ACTIVATIONS["silu"], True, threads=3, team=address)
    hosted = Experts(kernel, pool.shape, list(pool._set), loading="static", source="arrays")
    for _ in range(5):
        np.testing.assert_array_equal(hosted.run(*BATCH), expected)
    assert set(asked) == {(3, 0)}
    asked.clear()
    np.testing.assert_array_equal(pool.run(*BATCH), expected)
    with pytest.raises(InvalidInput):
        hosted.run(BATCH[0], np.full((T, K), E), BATCH[2])
    np.testing.assert_array_equal(pool.run(*BATCH), expected)
    assert asked == []


def test_many_threads_call_one_engine(expected):
    experts = Experts.from_arrays(**FFNS.arrays(), threads=2)
    router = Router.from_array(numbers(5, E, H), threads=2)
    chosen = router.route(BATCH[0]).expert_ids
    good = []

    def call():
        for _ in range(30):
            same = (experts.run(*BATCH) == expected).all() and (router.route(BATCH[0]).expert_ids == chosen).all()
            good.append(bool(same))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * (8 * 30)


def test_engines_of_different_width_share_the_pool(expected):
    engines = [Experts.from_arrays(**FFNS.arrays(), threads=n) for n in (1, 2, 5)]
    good = []

    def call(experts):
        good.extend(bool((experts.run(*BATCH) == expected).all()) for _ in range(30))

    threads = [threading.Thread(target=call, args=(experts,)) for experts in engines * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * (6 * 30)


def helpers_seconds():
    """CPU time of every thread but this one."""
    return time.process_time() - time.thread_time()


def test_helpers_do_their_share():
    # As long as it takes: on a busy machine a helper may have to wait for its turn.
    experts = Experts.from_arrays(**FFNS.arrays(), threads=2)
    before, deadline = helpers_seconds(), time.monotonic() + 30
    while helpers_seconds() < before + 0.05 and time.monotonic() < deadline:
        experts.run(*BATCH)
    assert helpers_seconds() >= before + 0.05


def test_a_width_of_one_uses_no_helper():
    experts = Experts.from_arrays(**FFNS.arrays(), threads=1)
    time.sleep(0.01)  # helpers of earlier tests fall asleep
    before = helpers_seconds()
    for _ in range(100):
        experts.run(*BATCH)
    assert helpers_seconds() < before + 0.02


FORK = """
import os, sys, threading, warnings
import numpy as np
from reference import Ffns, integers, numbers
from colibri_cli import Experts, Model

warnings.simplefilter("ignore")  # newer Pythons warn of forks with threads, which is the point here
ffns = Ffns.make(1, 6, 160, 96)
batch = numbers(2, 120, 160), integers(3, 0, 6, 120, 2), numbers(4, 120, 2)
experts = Experts.from_arrays(**ffns.arrays(), threads=2)
model = Model.open(threads=2)
expected, answer = experts.run(*batch), model.infer(range(300)).probabilities

def good():
    again = Experts.from_arrays(**ffns.arrays(), threads=3)
    return all(
        (e.run(*batch) == expected).all() and (model.infer(range(300)).probabilities == answer).all()
        for e in (experts, again) for _ in range(5)
    )

def fork(depth):
    child = os.fork()
    if child == 0:
        ok = good() and (depth == 0 or fork(depth - 1)) and good()
        helped = len(os.listdir("/proc/self/task")) > 1  # the child has threads of its own
        os._exit(0 if ok and helped else 3)
    return os.waitpid(child, 0)[1] == 0 and good()

if sys.argv[1] == "idle":
    sys.exit(0 if fork(1) else 1)
over = threading.Event()
def busy():
    while not over.is_set():
        experts.run(*batch)
callers = [threading.Thread(target=busy) for _ in range(3)]
for caller in callers:
    caller.start()
done = all([fork(0) for _ in range(8)])
over.set()
for caller in callers:
    caller.join()
sys.exit(0 if done else 1)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_forked_child_may_go_on(state):
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", FORK, state],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def long_call(name, folder):
    """Something that keeps one thread busy for some milliseconds."""
    batch = [np.tile(a, (20, 1)) for a in BATCH]
    if name == "experts":
        experts = Experts.from_arrays(**FFNS.arrays(), threads=1)
        return lambda: experts.run(*batch)
    if name == "on-demand":
        shape, files = ExpertShape(H, I, "silu", True), FFNS.write(folder)
        loaded = Experts.open(folder, "on-demand", cache_experts=E, threads=1, shape=shape, files=files)
        return lambda: loaded.run(*batch)
    if name == "route":
        router = Router.from_array(numbers(5, 1024, H), top_k=64, threads=1)
        return lambda: router.route(batch[0])
    if name == "mix":
        mixer, ids = _core.Mixer(numbers(6, 9, H), numbers(7, 7, H, H), 1), integers(8, 0, 9, 2400)
        return lambda: mixer.run(ids)
    head = _core.Head(numbers(9, 900, H), numbers(10, 900), 1)
    return lambda: head.run(batch[0])


@pytest.mark.parametrize("name", ["experts", "on-demand", "route", "mix", "head"])
def test_the_gil_is_released(name, tmp_path):
    # Nobody is made to give up the GIL while this test runs, so the other thread gets on only if a call lets it go; and
    # far only if it is let go for long, not for the moment in which NumPy clears an array.
    call = long_call(name, tmp_path)
    before, over = sys.getswitchinterval(), False
    ticks = 0

    def tick():
        nonlocal ticks
        while not over:
            ticks += 1
            time.sleep(0)

    other = threading.Thread(target=tick, daemon=True)
    sys.setswitchinterval(1000)
    try:
        other.start()
        for _ in range(300):
            seen = ticks
            call()
            progress = ticks - seen
            if progress > 50:
                break
    finally:
        over = True
        sys.setswitchinterval(before)
    other.join(10)
    assert progress > 50


def test_an_idle_pool_costs_nothing():
    experts = Experts.from_arrays(**FFNS.arrays(), threads=8)
    experts.run(*BATCH)
    before = time.process_time()  # CPU time of all threads, whatever else the machine does
    time.sleep(0.6)
    assert time.process_time() - before < 0.15


WIDTH_AFTER_FORK = """
import os, sys, warnings
import numpy as np
from colibri_cli import Experts
warnings.simplefilter("ignore")
rng = np.random.default_rng(0)
up, down = (rng.standard_normal(shape, np.float32) for shape in [(2, 128, 2048), (2, 2048, 64)])
experts = Experts.from_arrays(up, down, dtype="int8", threads=4)
x = rng.standard_normal((64, 2048), np.float32)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
# Quantising 64 rows makes two tasks, and is the child's first call to the pool.
experts.run(x, np.zeros((64, 1), np.int32), np.ones((64, 1), np.float32))
os._exit(len(os.listdir("/proc/self/task")))
"""


def test_a_forked_childs_pool_is_as_wide_as_its_parents():
    done = subprocess.run([sys.executable, "-c", WIDTH_AFTER_FORK], check=False, timeout=60)
    assert done.returncode == 4
