"""Colibri against peers: what is asked for, what fits, who is right, who is lost, and what it all amounts to."""

import json
import os
from collections import namedtuple
from dataclasses import replace
from importlib.resources import files
from itertools import count, cycle
from pathlib import Path

import fake_peer
import jsonschema
import numpy as np
import pytest
from reference import Ffns

from colibri_cli import InvalidInput, UsageError
from colibri_cli.bench import comparison, machine, report
from colibri_cli.bench.against import limits, measure, plot, room, run, work
from colibri_cli.bench.against.answers import TOLERANCES, Answers, Error
from colibri_cli.bench.against.limits import Limit, Limits
from colibri_cli.bench.against.measure import Plan, Racer, Turns, Work
from colibri_cli.bench.against.report import contest_text
from colibri_cli.bench.against.request import Entrant, Request, parse_one, parse_threads
from colibri_cli.bench.against.results import ArmResult, Cell, Contest
from colibri_cli.bench.against.workers import Worker, WorkerLost
from colibri_cli.bench.peers import MODULES, find
from colibri_cli.bench.peers.peer import Kind
from colibri_cli.bench.runner import environment
from colibri_cli.bench.shapes import SHAPES, WEIGHT_TYPES, Shape

SCHEMA = json.loads(files("colibri_cli").joinpath("schema/bench.schema.json").read_text())
TINY = Shape("tiny", 64, 32, 5, 2)
LIMIT = Limit(100.0, 20.0)


def document(data: bytes) -> dict:
    parsed = json.loads(data)
    jsonschema.validate(parsed, SCHEMA)
    return parsed


# ---------------------------------------------------------------- the request


def test_every_combination_is_asked_for_by_default():
    request = Request.parse()
    assert request.shapes == (SHAPES["token-classifier"],)
    assert request.dtypes == WEIGHT_TYPES
    assert request.tokens == (1, 4, 16, 64, 512)
    assert request.threads[0] == 1
    assert request.against == ()
    assert [arm.name for arm in request.entrants("int4")] == ["colibri"]


def test_lists_are_read_once_each():
    request = Request.parse(None, ["olmoe", "mixtral-8x7b", "olmoe"], None, "16, 1,16", "int8", "2,1")
    assert [shape.name for shape in request.shapes] == ["olmoe", "mixtral-8x7b"]
    assert (request.tokens, request.dtypes, request.threads) == ((16, 1), ("int8",), (2, 1))
    assert request.keys() == {
        (f"{shape}-int8-{tokens}", "colibri", threads)
        for shape in ("olmoe", "mixtral-8x7b")
        for tokens in (1, 16)
        for threads in (1, 2)
    }


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({"shapes": ["olmo"]}, "--shape"),
        ({"shapes": [""]}, "--shape"),
        ({"tokens": "0"}, "--tokens"),
        ({"tokens": "1,"}, "--tokens"),
        ({"tokens": "65537"}, "--tokens"),
        ({"dtypes": "float16"}, "--dtype"),
        ({"threads": "257"}, "--threads"),
        ({"threads": "two"}, "--threads"),
        ({"against": "colibri"}, "--against"),
        ({"against": ""}, "--against"),
        ({"experts": 1}, "--experts"),
        ({"experts": 9}, "--experts"),
    ],
)
def test_what_there_is_not_is_refused(options, at):
    with pytest.raises(UsageError) as caught:
        Request.parse(**options)
    assert caught.value.at == at


def test_fewer_experts_are_another_case():
    request = Request.parse(shapes=["olmoe"], experts=16)
    assert request.shapes[0] == Shape("olmoe-of-16", 2048, 1024, 16, 8)
    assert ("olmoe-of-16-int8-1", "colibri", 1) in request.keys()  # noqa: SIM118  # a method, not a mapping's keys
    assert Request.parse(shapes=["olmoe"], experts=64).shapes == (SHAPES["olmoe"],)


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("3", 3)])
def test_one_number_of_threads(text, expected):
    assert parse_one(text) == expected


def test_several_are_too_many_for_plain_cases():
    with pytest.raises(UsageError, match="got 1,2 - at --threads"):
        parse_one("1,2")
    assert parse_threads("1,2") == (1, 2)


def test_a_missing_peer_is_one_error_with_pips_command(monkeypatch):
    monkeypatch.setattr("colibri_cli.bench.peers.peer.find_spec", lambda module: module == "torch" or None)
    with pytest.raises(UsageError) as caught:
        Request.parse("torch,onnxruntime,ggml")
    assert caught.value.expected == "torch, onnxruntime, ggml, installed"
    assert caught.value.got == "no transformers, onnxruntime, onnx, ggml"
    assert caught.value.hint.startswith("python -m pip install 'torch>=")
    assert all(f"'{requirement}'" in caught.value.hint for requirement in find("ggml").requirements)


def test_shapes_count_weights_and_operations():
    shape = SHAPES["mixtral-8x7b"]
    assert shape.n_weights == 8 * 3 * 4096 * 14336
    assert shape.flops(3) == 2 * 3 * 2 * 3 * 4096 * 14336


# ---------------------------------------------------------------- the peers, installed or not


@pytest.mark.parametrize("name", MODULES)
def test_a_peer_has_or_lacks_each_weight_type(name):
    peer = find(name)
    assert peer.name == name
    assert {kind.dtype for kind in peer.kinds} | peer.lacks.keys() == set(WEIGHT_TYPES)
    assert not {kind.dtype for kind in peer.kinds} & peer.lacks.keys()
    names = [(kind.dtype, kind.name) for kind in peer.kinds]
    assert len(set(names)) == len(names)


def test_a_kind_refuses_rows_that_its_blocks_do_not_divide():
    q4_k = next(kind for kind in find("ggml").kinds if kind.name == "q4_K")
    assert q4_k.refusal(SHAPES["olmoe"]) is None
    assert q4_k.refusal(SHAPES["gpt-oss-20b"]) == "q4_K needs rows of a multiple of 256 weights, not of 2880"
    assert q4_k.refusal(replace(TINY, hidden_size=256)) == "q4_K needs rows of a multiple of 256 weights, not of 32"


# ---------------------------------------------------------------- room


def memory(n_bytes: int, limit: int | None = None) -> dict:
    return {"memory_available": n_bytes, "memory_limit": limit, "last_level_cache": 32 << 20}


def test_what_fits_is_let_through(tmp_path):
    room.check_room(Request.parse(shapes=["olmoe"], dtypes="int4"), tmp_path, memory(8 << 30))


@pytest.mark.parametrize(("available", "limit"), [(8 << 30, None), (64 << 30, 8 << 30)])
def test_too_little_memory_is_told_with_what_would_fit(tmp_path, available, limit):
    request = Request.parse(shapes=["deepseek-v3"])
    with pytest.raises(UsageError, match=r"got 8\.6 GB available - at --shape") as caught:
        room.check_room(request, tmp_path, memory(available, limit))
    fits = int(caught.value.hint.split()[1])
    room.check_room(Request.parse(shapes=["deepseek-v3"], experts=fits), tmp_path, memory(available, limit))
    with pytest.raises(UsageError):
        room.check_room(Request.parse(shapes=["deepseek-v3"], experts=fits + 1), tmp_path, memory(available, limit))


def test_nothing_may_fit(tmp_path):
    with pytest.raises(UsageError, match="hint: fewer of --against, --dtype or --tokens"):
        room.check_room(Request.parse(shapes=["mixtral-8x7b"]), tmp_path, memory(1 << 30))


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")  # noqa: PYI024  # as shutil's own
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(UsageError, match=r"Expected 1\.6 GB for the weights of olmoe, got 0\.0 GB free"):
        room.check_room(Request.parse(shapes=["olmoe"]), tmp_path, memory(1 << 40))


def test_a_folder_in_memory_counts_as_memory(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\ntmpfs /memory tmpfs rw 0 0\nnone /with\\040space ramfs rw 0 0\n")
    assert room._is_memory(Path("/memory/x"), mounts)
    assert room._is_memory(Path("/with space"), mounts)
    assert not room._is_memory(Path("/memories"), mounts)
    assert not room._is_memory(tmp_path, tmp_path / "none")
    request = Request.parse(shapes=["olmoe"])
    whole = room._memory(request, request.shapes[0], file_counts=True)
    assert whole - room._memory(request, request.shapes[0], file_counts=False) == 4 * SHAPES["olmoe"].n_weights


# ---------------------------------------------------------------- work and right answers


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    work.write_weights(folder, TINY)
    return folder


def test_everybody_maps_the_same_weights(weights_folder):
    weights = work.map_weights(weights_folder, TINY)
    assert weights.gate_up.shape == (5, 64, 64)
    assert weights.down.shape == (5, 64, 32)
    assert not weights.gate_up.flags.writeable
    assert np.std(weights.gate_up) * 64**0.5 == pytest.approx(1, abs=0.02)
    assert np.std(weights.down) * 32**0.5 == pytest.approx(1, abs=0.02)
    assert len({expert.tobytes() for expert in weights.gate_up}) == 5


def test_tokens_begin_alike_and_follow_their_logits():
    batch = work.tokens(TINY, 40)
    assert all(np.array_equal(a[:7], b) for a, b in zip(batch, batch.first(7), strict=True))
    assert batch.ids.dtype == np.int32
    assert np.allclose(batch.weights.sum(axis=1), 1)
    chosen = np.take_along_axis(batch.logits, batch.ids, axis=1)
    assert (chosen[:, 0] >= chosen[:, 1]).all()
    rest = np.put_along_axis(others := batch.logits.copy(), batch.ids, -np.inf, axis=1)
    assert rest is None
    assert (chosen.min(axis=1) >= others.max(axis=1)).all()


@pytest.mark.parametrize("n_tokens", [1, 2, 9, 512])
def test_first_and_last_tokens_are_checked(n_tokens):
    found = work.checked_tokens(SHAPES["olmoe"], n_tokens)
    assert (found[0], found[-1]) == (0, n_tokens - 1)
    assert len(found) == min(n_tokens, 8)


def test_right_answers_are_the_references(weights_folder, monkeypatch):
    monkeypatch.setattr("colibri_cli.bench.against.answers._BLOCK", 7 * 64)  # several blocks, the last a short one
    weights, batch = work.map_weights(weights_folder, TINY), work.tokens(TINY, 30)
    answers = Answers(TINY, weights, batch, (4, 30))
    ffns = Ffns(weights.gate_up, weights.down)
    right = ffns(batch.hidden, batch.ids, batch.weights)
    for n_tokens in (4, 30):
        checked = right[work.checked_tokens(TINY, n_tokens)]
        error = answers.error(n_tokens, checked.astype(np.float32))
        assert error.largest < 1e-6
        assert error.rms < 1e-6
        off = answers.error(n_tokens, (checked + 0.1 * np.abs(checked).max()).astype(np.float32))
        assert off.largest == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_an_error_is_excused_by_its_type(dtype):
    fine = TOLERANCES[dtype]
    assert Error(fine, fine).excusable(dtype)
    assert not Error(fine, fine * 1.01).excusable(dtype)
    assert not Error(9 * fine, fine / 2).excusable(dtype)
    assert not Error(float("nan"), float("nan")).excusable(dtype)


# ---------------------------------------------------------------- limits


def test_limits_are_rates_and_the_better_ones_stay():
    found = Limits((1, 2), n_bytes=1 << 20).look(2)
    assert found.peak_gflops > 0
    assert found.read_gb_s > 0
    assert Limit(3, 1).or_better(Limit(2, 5)) == Limit(3, 5)
    assert Limits.memory(1 << 20) == 4 << 20


def test_the_kernels_own_stream_is_among_the_loops(monkeypatch):
    monkeypatch.setattr(machine, "read_gb_s", lambda *_, **__: 0.0)
    found = Limits((1,), n_bytes=1 << 20)
    assert len(found._streams[1]) == 3
    for stream, n_bytes in found._streams[1]:
        y = stream()
        assert y.shape == (1, 1024)
        assert np.abs(y).max() > 0
        assert n_bytes >= 1 << 20
    assert found.look(1).read_gb_s > 0
    monkeypatch.setattr(limits, "_nanoseconds", lambda _: 1e6)
    assert found.look(1).read_gb_s == max(n_bytes for _, n_bytes in found._streams[1]) / 1e6
    times = cycle([9e6, 1e6, 3e6])
    monkeypatch.setattr(limits, "_nanoseconds", lambda _: next(times))
    assert found.look(1).read_gb_s == max(n_bytes for _, n_bytes in found._streams[1]) / 3e6


# ---------------------------------------------------------------- turns


class Script:
    """A worker that answers from a list of times, one a sample."""

    def __init__(self, answer, times, log, name="x"):
        self.answer, self.times, self.log, self.name = answer, times, log, name

    def send(self, request, *arguments):
        self.request, self.arguments = request, arguments

    def receive(self, seconds):
        assert seconds > 0
        if self.request == "answer":
            return self.answer
        self.log.append(self.name)
        ns = next(self.times)
        if isinstance(ns, str):
            raise WorkerLost(ns)
        return np.full(self.arguments[0], ns)


class Judge:
    """Right answers that are known beforehand."""

    def error(self, _, found):
        return found


def racer(peer, worker, kind=0):
    return Racer(Entrant(find(peer), find(peer).kinds[kind]), worker)


def cell_of(*racers, plan, looks=None):
    found = iter(looks or [])
    job = Work(TINY, "float32", 4, 1, 5)
    return measure.measure(racers, job, Judge(), lambda _: next(found, LIMIT), plan)


RIGHT = Error(1e-7, 1e-7)


def test_arms_take_turns_and_the_slow_ones_fewer():
    log = []
    ours = racer("colibri", Script((RIGHT, 0.1), count(100.0), log, "c"))
    slow = racer("ggml", Script((RIGHT, 10.0), count(1000.0), log, "g"))
    cell = cell_of(ours, slow, plan=Plan(7, 1.0))
    assert "".join(log) == "cgcccgccgc"
    assert [arm.n_rounds for arm in cell.arms] == [7, 3]
    assert [arm.n_samples for arm in cell.arms] == [7, 3]


def test_figures_follow_from_the_times():
    ours = racer("colibri", Script((RIGHT, 1e-3), iter([100.0, 400.0, 200.0]), []))
    rival = racer("ggml", Script((RIGHT, 1e-3), iter([300.0, 600.0, 300.0]), []))
    cell = cell_of(ours, rival, plan=Plan(3, 0.3), looks=[Limit(10, 1), Limit(1, 4), Limit(2, 1), Limit(4, 8)])
    found, other = cell.arms
    assert cell.limit == Limit(10, 8)
    assert (found.p50_ns, found.low_ns, found.high_ns, found.p99_ns) == (200, 150, 300, 400)
    assert found.gflops == TINY.flops(4) / 200
    assert found.gb_s == 5 * TINY.expert_weights * 4 / 200
    # Each round by the better of the looks beside it: 100 by (10, 4), 400 by (2, 4), 200 by (4, 8).
    assert found.of_peak == pytest.approx(TINY.flops(4) / 800)
    assert found.of_read == pytest.approx(5 * TINY.expert_weights * 4 / 1600)
    assert found.ratio is None
    assert other.ratio == 1.5  # of 3, 1.5 and 1.5, round by round
    assert cell.best_rival is other
    assert cell.ahead == 1.5


def test_few_samples_have_no_p99():
    (arm,) = cell_of(racer("colibri", Script((RIGHT, 1.0), count(1.0), [])), plan=Plan(3, 0.1)).arms
    assert (arm.n_samples, arm.p99_ns) == (3, None)


def test_calls_too_quick_for_the_clock_are_no_error():
    arms = [racer(name, Script((RIGHT, 0.0), count(0.0, 0), [])) for name in ("colibri", "ggml")]
    cell = cell_of(*arms, plan=Plan(3, 0.1))
    assert [arm.p50_ns for arm in cell.arms] == [1, 1]
    assert cell.arms[1].n_samples == 3 * 2_000


def test_a_wrong_answer_is_told_and_not_timed():
    log = []
    wrong = racer("ggml", Script((Error(float("nan"), 0.5), 1e-3), count(1.0), log))
    cell = cell_of(racer("colibri", Script((RIGHT, 1.0), count(1.0), [])), wrong, plan=Plan(3, 0.1))
    arm = cell.arms[1]
    assert (arm.status, arm.error, arm.rms_error, log) == ("wrong", None, 0.5, [])
    assert arm.reason == "its outputs are off by 0.5 (root mean square), nan at most"
    assert cell.ahead is None


def test_a_loss_is_reported_once_and_then_explained():
    lost = racer("ggml", Script((RIGHT, 1e-3), iter([1.0, "ended by SIGSEGV"]), []))
    ours = racer("colibri", Script((RIGHT, 1e-3), count(1.0), []))
    cell = cell_of(ours, lost, plan=Plan(3, 0.1))
    assert (cell.arms[1].status, cell.arms[1].reason) == ("failed", "ended by SIGSEGV")
    assert cell.arms[0].status == "timed"
    cell = cell_of(ours, lost, plan=Plan(3, 0.1))
    assert (cell.arms[1].status, cell.arms[1].reason) == ("not run", "it had failed at 4 tokens and 1 thread")


def test_without_colibri_there_is_no_ratio():
    ours = racer("colibri", Script((Error(1, 1), 1e-3), count(1.0), []))
    cell = cell_of(ours, racer("ggml", Script((RIGHT, 1e-3), count(1.0), [])), plan=Plan(3, 0.1))
    assert [arm.status for arm in cell.arms] == ["wrong", "timed"]
    assert cell.arms[1].ratio is None
    assert cell.best_rival is None


@pytest.mark.parametrize(("mine", "of"), [(3, 7), (7, 7), (1, 5), (3, 3), (4, 9)])
def test_turns_are_spread_evenly(mine, of):
    taken = [i for i in range(of) if Turns(None, RIGHT, mine, 1).takes_part(i, of)]
    assert len(taken) == mine
    assert taken[0] == 0
    assert max(np.diff([*taken, of]), default=of) <= -(-of // mine)


# ---------------------------------------------------------------- workers


@pytest.fixture
def started(tmp_path):
    workers = []

    def start(kind, folder):
        own = tmp_path / f"{len(workers)}"
        own.mkdir()
        workers.append(Worker(own))
        kinds = {found.name: found for found in fake_peer.PEER.kinds}
        workers[-1].send("load", "fake_peer", kinds[kind], TINY, folder, 8, own)
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def test_a_worker_serves_many_requests_and_prints_nowhere(started, weights_folder, capfd):
    worker = started("right", weights_folder)
    versions = worker.receive(60)["fake"].split(", ")
    assert int(versions[1]) != os.getpid()
    assert versions[2] == "False"  # nothing of Colibri's is loaded beside a peer
    worker.ask(60, "prepare", 1)
    answers = Answers(TINY, work.map_weights(weights_folder, TINY), work.tokens(TINY, 8), (2, 8))
    for n_tokens in (2, 8):
        found, seconds = worker.ask(60, "answer", n_tokens)
        assert answers.error(n_tokens, found).excusable("float32")
        assert 0 < seconds < 1
        times = worker.ask(60, "sample", 3)
        assert times.shape == (3,)
        assert (times > 0).all()
    assert capfd.readouterr() == ("", "")


def test_a_worker_that_crashes_is_told_by_its_signal(started, weights_folder):
    worker = started("crashes", weights_folder)
    worker.receive(60)
    with pytest.raises(WorkerLost, match="ended by SIGABRT"):
        worker.ask(60, "answer", 2)
    with pytest.raises(WorkerLost):
        worker.ask(60, "answer", 2)


def test_a_worker_that_raises_is_told_by_its_last_words(started, weights_folder):
    worker = started("raises", weights_folder)
    worker.receive(60)
    with pytest.raises(WorkerLost, match="ended with exit code 1: RuntimeError: no 2 threads here"):
        worker.ask(60, "prepare", 2)


def test_a_worker_that_hangs_is_ended(started, weights_folder):
    worker = started("hangs", weights_folder)
    worker.receive(60)
    with pytest.raises(WorkerLost, match="no answer within 1 second"):
        worker.ask(1, "answer", 2)
    assert worker._process.poll() is not None


# ---------------------------------------------------------------- a whole run


@pytest.fixture
def small(monkeypatch):
    """A tiny shape, little memory to stream, and a fake peer in PyTorch's place."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(machine, "bytes_beyond_caches", lambda _: 1 << 20)
    monkeypatch.setitem(MODULES, "torch", "fake_peer")
    monkeypatch.setattr(run, "_QUICK", Plan(3, 0.01))
    return monkeypatch


def test_a_whole_run_with_every_kind_of_peer(small, tmp_path):
    small.setattr(measure, "_PATIENCE", 3.0)
    small.setattr("tempfile.tempdir", str(tmp_path))
    small.setattr(fake_peer, "PEER", replace(fake_peer.PEER, name="torch"))
    request = Request.parse("torch", ["tiny"], None, "1,3", "float32,int4", "1,2")
    found = run.contest(request, quick=True)
    assert found.passed
    assert [(cell.case, cell.threads) for cell in found.cells] == [
        (f"tiny-{dtype}-{tokens}", threads) for dtype in ("float32", "int4") for threads in (1, 2) for tokens in (1, 3)
    ]
    first, second = ({arm.name: arm for arm in cell.arms} for cell in found.cells[:2])
    assert {name: arm.status for name, arm in first.items()} == {
        "colibri": "timed",
        "torch right": "timed",
        "torch wrong": "timed",  # of one token the last is the first
        "torch nan": "wrong",
        "torch raises": "failed",
        "torch crashes": "failed",
        "torch hangs": "failed",
        "torch breaks": "failed",
        "torch wide": "not run",
    }
    assert second["torch wrong"].status == "wrong"
    assert second["torch breaks"].reason == "it had failed at 1 token and 1 thread"
    assert first["torch breaks"].reason == "ended with exit code 3: it broke"
    assert [arm.status for arm in found.cells[-1].arms] == ["timed", "not run"]
    assert found.cells[-1].arms[1].reason == "it knows nothing of it"
    assert found.versions["fake"].startswith("1.0")
    assert list(tmp_path.iterdir()) == []  # the weights are gone, and every folder
    parsed = document(report.run_json(found, None, []))
    assert [case["name"] for case in parsed["cases"]] == [f"tiny-{d}-{n}" for d in ("float32", "int4") for n in (1, 3)]
    assert {contest["threads"] for contest in parsed["cases"][0]["contests"]} == {1, 2}
    text = contest_text(found, None, [], terminal=False)
    assert "torch wide, not run: wide needs rows of a multiple of 1024 weights, not of 64" in text.splitlines()
    assert "torch breaks, 1 tokens, 1 threads, failed: ended with exit code 3: it broke" in text.splitlines()


def test_a_run_that_is_interrupted_leaves_nothing(small, tmp_path):
    small.setattr("tempfile.tempdir", str(tmp_path))

    def steps(*_):
        yield 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.contest(Request.parse(None, ["tiny"], None, "1", "float32,int8", "1"), quick=True, steps=steps)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- results


def arm(name: str, ns: float | None, ratio: float | None = None, **rest) -> ArmResult:
    peer = name.split()[0]
    if ns is None:
        return ArmResult(name, peer, peer == "colibri", **{"status": "not run", "reason": "none", **rest})
    times = {"p50_ns": ns, "low_ns": ns * 0.99, "high_ns": ns * 1.02, "p99_ns": ns * 2}
    figures = {"error": 1e-7, "rms_error": 1e-8, "n_rounds": 3, "n_samples": 300, "gflops": 10.0, "gb_s": 5.0}
    shares = {"of_peak": 0.5, "of_read": 0.25, "ratio": ratio}
    return ArmResult(name, peer, peer == "colibri", "timed", **times, **figures, **shares)


def contest(*ratios: tuple[str, float | None]) -> Contest:
    cells = [
        Cell(TINY, dtype, i + 1, 1, 5, LIMIT, [arm("colibri", 1000.0), arm("ggml", ratio and 1000 * ratio, ratio)])
        for i, (dtype, ratio) in enumerate(ratios)
    ]
    return Contest(cells, ("ggml",), {"colibri": "1"}, environment(), 3, 1.5, quick=True)


def test_means_are_geometric_and_losses_are_listed():
    found = contest(("float32", 4.0), ("float32", 1.0), ("int8", 0.5), ("int8", 0.25), ("int4", None))
    assert found.means() == {"float32": (pytest.approx(2), 2), "int8": (pytest.approx(8**-0.5), 2)}
    assert [cell.case for cell in found.behind()] == ["tiny-int8-4", "tiny-int8-3"]
    parsed = document(report.run_json(found, None, []))
    assert parsed["behind"][0] == {"case": "tiny-int8-4", "threads": 1, "rival": "ggml", "ahead": 0.25}
    text = contest_text(found, None, [], terminal=False)
    assert "Behind in 2 cells:\n  tiny-int8-4, 1 thread: 0.25 of ggml\n" in text


def test_nothing_lost_is_said():
    assert "Behind in no cell." in contest_text(contest(("int8", 1.1)), None, [], terminal=False)


def test_the_text_shows_times_ratios_and_shares():
    lines = contest_text(contest(("int8", 1.5)), None, [], terminal=False).splitlines()
    assert lines[0] == "tiny, int8: hidden 64, intermediate 32, top 2 of 5"
    assert lines[1].split() == [
        *("tokens", "threads", "colibri", "spread", "P99", "ggml", "best", "rival", "ahead", "of", "peak", "of", "read")
    ]
    assert lines[2].split() == ["1", "1", "1.00", "µs", "3%", "2.00", "µs", "1.50", "µs", "ggml", "1.50", "50%", "25%"]
    assert lines[3] == "root-mean-square error, 1 tokens: colibri 1.0e-08, ggml 1.0e-08"


def test_a_run_passes_where_colibri_was_timed_everywhere():
    found = contest(("int8", 1.5))
    assert found.passed
    found.cells[0].arms[0] = arm("colibri", None, status="wrong")
    assert not found.passed
    assert found.times() == {}


def test_only_colibris_times_are_compared(tmp_path):
    found = contest(("int8", 1.5), ("int4", 2.0))
    path = tmp_path / "before.json"
    path.write_bytes(report.run_json(found, None, []))
    before = comparison.Baseline.read(path, found.times())
    assert before.times == found.times()
    assert {change.verdict for change in comparison.compare(before, found)} == {"same"}
    slower = replace(found, cells=[replace(c, arms=[arm("colibri", 2000.0), c.arms[1]]) for c in found.cells])
    changes = comparison.compare(before, slower)
    assert {(change.arm, change.verdict) for change in changes} == {("colibri", "slower")}
    parsed = document(report.run_json(slower, before, changes))
    assert len(parsed["comparison"]["changes"]) == 2
    assert "slower" in contest_text(slower, before, changes, terminal=False)


def test_an_earlier_run_of_other_cells_is_refused_before_measuring(tmp_path):
    path = tmp_path / "before.json"
    path.write_bytes(report.run_json(contest(("int8", 1.5)), None, []))
    with pytest.raises(InvalidInput, match="only in the earlier run: tiny-int8-1 colibri with 1 thread"):
        comparison.Baseline.read(path, Request.parse().keys())


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", ["x.pdf", "x", "png"])
def test_a_picture_has_an_ending(name):
    with pytest.raises(UsageError, match=r"ending in \.png or \.svg"):
        plot.check_plot(Path(name))


def test_a_picture_needs_matplotlib(monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install 'matplotlib"):
        plot.check_plot(Path("x.png"))
    plot.check_plot(None)


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn_the_same_each_time(tmp_path, ending, magic):
    pytest.importorskip("matplotlib")
    found = contest(("float32", 4.0), ("int8", 0.5), ("int4", None))
    paths = [tmp_path / f"{i}.{ending}" for i in range(2)]
    for path in paths:
        plot.write_plot(found, path)
    assert paths[0].read_bytes().startswith(magic)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_peers_kind_has_bytes():
    assert Kind("q", "int4", 4.5).n_bytes(64) == 36
