"""The bench itself: what it checks before it times, what it makes of its samples, what the self-test finds."""

import gc
import json
import subprocess
import sys
from importlib.resources import files
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from reference import Classifier, Ffns, integers, numbers, route

from colibri_cli import Experts, InvalidInput, Model, Router, UsageError, _core
from colibri_cli.bench import case as timing
from colibri_cli.bench import clock, comparison, installation, machine, oracle, report, runner
from colibri_cli.bench import measure as measuring
from colibri_cli.bench.case import Arm, Case
from colibri_cli.bench.measure import Plan, measure
from colibri_cli.bench.suite import CASES, routing_error
from colibri_cli.errors import ColibriError
from colibri_cli.model import builtin_bundle

SCHEMA = json.loads(files("colibri_cli").joinpath("schema/bench.schema.json").read_text())
SHORT = Plan(rounds=3, seconds=1e-4)  # three rounds are always done


def arm(name: str, ns: float, error: float = 0.0, **rest: object) -> Arm:
    return Arm(name, lambda n: np.full(n, ns), lambda: error, 1e-3, **rest)


def case(*arms: Arm, **rest: int) -> Case:
    return Case("case", "about", 1, list(arms), **rest)


# ---------------------------------------------------------------- samples


def test_the_cores_clock_is_taken_off_and_calls_are_counted(monkeypatch):
    monkeypatch.setattr(timing, "core_clock_ns", lambda: 20.0)
    found = timing.in_core(lambda ns: ns.__setitem__(slice(None), [10, 20, 100]), n_calls=4)(3)
    assert found.tolist() == [0, 0, 20]


def test_pythons_clock_is_taken_off(monkeypatch):
    monkeypatch.setattr(clock, "python_clock_ns", lambda: 1e12)
    assert clock.from_python(lambda: None)(5).tolist() == [0] * 5


def test_the_collector_waits_and_comes_back():
    seen = []
    clock.from_python(lambda: seen.append(gc.isenabled()))(3)
    assert seen == [False] * 3
    assert gc.isenabled()
    gc.disable()
    try:
        clock.from_python(lambda: None)(1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_clock_is_read_as_often_as_asked():
    ns = np.full(10_000, -1.0)
    _core.time_clock(ns)
    assert (ns >= 0).all()
    assert 0 < ns.sum() < 1e10
    assert clock.python_clock_ns() > 0


# ---------------------------------------------------------------- measuring


def test_arms_take_turns():
    turns = []

    def sampler(name):
        def sample(n):
            turns.append(name)
            return np.ones(n)

        return sample

    arms = [Arm(name, sampler(name), lambda: 0.0, 0) for name in "abc"]
    measure(case(*arms), SHORT)
    assert "".join(turns).endswith("abcabcabc")


@pytest.mark.parametrize("error", [0.01, float("inf"), float("nan")])
def test_a_wrong_answer_is_not_timed(error):
    def never(n):
        pytest.fail(f"{n} samples were timed")

    wrong = Arm("wrong", never, lambda: error, 1e-3)
    with pytest.raises(ColibriError, match="at case, wrong") as caught:
        measure(case(Arm("right", never, lambda: 0.0, 0), wrong), SHORT)
    assert caught.value.exit_code == 1


def test_percentiles_are_times_that_were_measured():
    times = np.arange(1.0, 1001.0)
    counting = Arm("counting", lambda n: np.resize(times, n), lambda: 0.0, 0)
    (found,) = measure(case(counting), Plan(rounds=1, seconds=1.0))
    assert found.n_samples == 5000
    assert (found.p50_ns, found.p99_ns, found.p999_ns) == (500, 990, 999)


def test_few_samples_have_no_far_percentiles():
    slow = Arm("slow", lambda n: np.full(n, 7.0), lambda: 0.0, 0)
    (found,) = measure(case(slow), Plan(rounds=3, seconds=0))
    assert found.n_samples == 15
    assert (found.p50_ns, found.p99_ns, found.p999_ns) == (7, None, None)


def test_figures_follow_from_the_times():
    probe = iter([100.0, 130.0, 120.0])
    first = arm(
        "first",
        1000.0,
        probe=lambda: {"peak_gflops": next(probe), "matrix_ns": 600.0, "unpacking_ns": 100.0},
        call=lambda: None,
    )
    found, other = measure(case(first, arm("other", 4000.0), flops=50_000, weight_bytes=2_000), SHORT)
    assert (found.gflops, found.peak_gflops, found.weights_gb_s) == (50, 130, 2)
    assert (found.outside_share, found.unpacking_share) == (pytest.approx(0.4), pytest.approx(0.1))
    assert found.ratio is None
    assert other.ratio == 4
    assert other.allocated_bytes is None
    assert found.allocated_bytes >= 0


def test_the_spread_is_the_middle_half_of_the_rounds(monkeypatch):
    monkeypatch.setattr(measuring, "_FEWEST_ROUNDS", 5)
    rounds = iter([1.0] * 4 + [10.0, 20.0, 30.0, 40.0, 50.0])  # a call to warm up and three to size the rounds

    def sample(n):
        return np.full(n, next(rounds))

    (found,) = measure(case(Arm("drifting", sample, lambda: 0.0, 0)), Plan(rounds=5, seconds=0))
    assert (found.low_ns, found.p50_ns, found.high_ns) == (20, 30, 40)


def test_a_slow_machine_gets_fewer_rounds_and_samples(monkeypatch):
    monkeypatch.setattr(measuring, "_SLOW", 0)
    (found,) = measure(case(arm("slow", 7.0)), Plan(rounds=100, seconds=0))
    assert found.n_samples == 3


# ---------------------------------------------------------------- the suite


@pytest.mark.parametrize("name", CASES)
def test_every_case_answers_right_and_can_be_timed(name):
    built = CASES[name](2)
    assert built.name == name
    names = [(arm.name, arm.threads) for arm in built.arms]
    assert len(set(names)) == len(names)
    for arm in built.arms:
        assert arm.error() <= arm.tolerance
        times = arm.sample(3)
        assert times.shape == (3,)
        assert (times >= 0).all()
        if arm.probe is not None:
            assert all(value >= 0 for value in arm.probe().values())


def broken(monkeypatch, name, position, change):
    """Let one of the core's timers alter the answer that it leaves in an argument."""
    timer = getattr(_core, name)

    def altered(*arguments):
        timer(*arguments)
        change(arguments[position])

    monkeypatch.setattr(_core, name, altered)


def swap(a):
    a[0] = a[0][::-1].copy()


def nudge(a):
    a.flat[0] += 0.01


@pytest.mark.parametrize(
    ("name", "timer", "position", "change"),
    [
        ("routing-512", "time_route", 2, swap),
        ("routing-1", "time_route", 3, nudge),
        ("softmax", "time_softmax", 1, nudge),
        ("dispatch", "time_dispatch", 2, lambda offsets: offsets.__setitem__(8, 1)),
        ("dispatch", "time_dispatch", 3, lambda order: order.sort()),
        ("expert-call-1", "time_expert", 4, nudge),
    ],
)
def test_a_broken_kernel_is_not_timed(monkeypatch, name, timer, position, change):
    broken(monkeypatch, timer, position, change)
    with pytest.raises(ColibriError, match=f"at {name}"):
        measure(CASES[name](1), SHORT)


@pytest.mark.parametrize("name", ["layer-16", "model-16"])
def test_broken_experts_are_not_timed(monkeypatch, name):
    run = Experts.run

    def altered(self, *arguments):
        y = run(self, *arguments)
        y[3] *= 1.01
        return y

    monkeypatch.setattr(Experts, "run", altered)
    with pytest.raises(ColibriError, match=f"at {name}"):
        measure(CASES[name](1), SHORT)


def test_near_ties_may_go_either_way():
    hidden = np.eye(20, 4, dtype=np.float32)
    hidden[1:] = [0, 0, 0, 1]
    weight = np.array([[1, 0, 0, 3], [1 + 1e-6, 0, 0, 2], [0, 0, 0, 1]], np.float32)
    right = oracle.route(hidden, weight, 2)
    assert right.clear.tolist() == [False] + [True] * 19
    assert routing_error(right, right.ids, right.weights) == 0
    ids = right.ids.copy()
    ids[0] = ids[0][::-1]
    assert routing_error(right, ids, right.weights) == 0
    ids[1] = ids[1][::-1]
    assert routing_error(right, ids, right.weights) == np.inf


def test_a_check_that_few_tokens_pass_through_is_none():
    right = oracle.route(np.zeros((5, 4)), np.ones((3, 4)), 2)
    assert not right.clear.any()
    assert routing_error(right, right.ids, right.weights) == np.inf


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], list(CASES)),
        (["dispatch"], ["dispatch"]),
        (["model", "layer-1"], ["layer-1", "model-16", "model-512"]),
        (["layer-1", "layer"], ["layer-1", "layer-16", "layer-512"]),
        (["expert-call"], ["expert-call-0", "expert-call-1"]),
    ],
)
def test_cases_by_name_and_beginning(names, expected):
    assert runner.chosen(names) == expected


@pytest.mark.parametrize("name", ["", "lay", "layer-", "Layer", "layer-2"])
def test_an_unknown_case_is_refused(name):
    with pytest.raises(UsageError, match="routing-512"):
        runner.chosen(["layer", name])


# ---------------------------------------------------------------- the oracle


def test_the_oracle_routes_as_the_reference():
    hidden, weight = numbers(1, 60, 12), numbers(2, 7, 12)
    found = oracle.route(hidden, weight, 3)
    ids, weights = route(hidden.astype(np.float64) @ weight.T.astype(np.float64), "topk-softmax", 3)
    assert np.array_equal(found.ids, ids)
    assert np.allclose(found.weights, weights, rtol=1e-14)
    assert found.clear.mean() > 0.9


def test_the_oracle_runs_experts_as_the_reference():
    ffns, hidden = Ffns.make(3, 5, 12, 7, bias=False), numbers(4, 30, 12)
    routed = oracle.route(hidden, numbers(5, 5, 12), 2)
    found = oracle.experts(hidden, routed, lambda e, x: oracle.swiglu(x, ffns.up[e], ffns.down[e]))
    assert np.allclose(found, ffns(hidden, routed.ids, routed.weights), rtol=1e-12, atol=1e-14)


def test_the_oracle_classifies_as_the_reference(tmp_path):
    classifier = Classifier.make(activation="relu", gated=False)
    model = Model.open(classifier.write(tmp_path / "bundle"))
    ids = integers(6, 0, 50, 40)
    probabilities, clear = oracle.classify(model, ids)
    assert np.allclose(probabilities, classifier.infer(ids)[0], rtol=1e-12)
    assert clear.mean() > 0.9


def test_the_oracle_refuses_a_file_of_another_size(tmp_path):
    path = tmp_path / "router_weights.bin"
    path.write_bytes(bytes(12))
    with pytest.raises(InvalidInput, match="Expected 16 bytes"):
        oracle.floats(path, 2, 2)
    with pytest.raises(UsageError, match="no such file"):
        oracle.floats(tmp_path / "none.bin", 2, 2)


# ---------------------------------------------------------------- the core's meters


def test_the_meter_counts_one_call_and_leaves_no_trace():
    model = Model.open(threads=1)
    ids = np.arange(64, dtype=np.int32)
    expected = model.infer(ids)
    found, linear_ns, n_linear, transpose_ns, n_transpose = _core.metered(lambda: model.infer(ids))
    assert np.array_equal(found.probabilities, expected.probabilities)
    load = expected.routing.load
    assert n_linear >= 3 + 2 * np.count_nonzero(load)  # mixer, gate and head, and twice an expert
    assert n_transpose >= 2 * np.count_nonzero(load > 2) > 0  # fewer rows take them as they lie
    assert linear_ns > 0
    assert transpose_ns > 0
    with pytest.raises(ZeroDivisionError):
        _core.metered(lambda: 1 / 0)
    assert _core.metered(lambda: None)[1:] == (0, 0, 0, 0)


def test_the_meter_counts_experts_that_take_weights_as_they_lie():
    model = Model.open(threads=1)
    ids = np.arange(2, dtype=np.int32)  # so that no expert has more than two rows
    found, _, n_linear, _, _ = _core.metered(lambda: model.infer(ids))
    assert n_linear >= 3 + 2 * np.count_nonzero(found.routing.load)


def test_transposing_is_what_static_loading_saves():
    model = Model.open(threads=1, loading="static")
    assert _core.metered(lambda: model.infer(np.arange(16, dtype=np.int32)))[3:] == (0, 0)


@pytest.mark.parametrize("isa", _core.isa_names())
@pytest.mark.parametrize("threads", [1, 2])
def test_the_machines_limits_can_be_measured(isa, threads):
    before = _core.isa()
    _core.use_isa(isa)
    try:
        assert _core.peak_gflops(threads) > 0
    finally:
        _core.use_isa(before)
    assert _core.read_bandwidth(1 << 20, threads, 1) > 0


def test_a_timer_refuses_arrays_of_another_size():
    ns, x, y = np.empty(3), np.zeros((4, 8), np.float32), np.zeros((3, 8), np.float32)
    with pytest.raises(InvalidInput):
        _core.time_softmax(x, y, 0, ns)
    gate = Router.from_array(numbers(1, 4, 8), threads=1)._core
    with pytest.raises(InvalidInput):
        _core.time_route(gate, x, np.zeros((4, 1), np.int32), np.zeros((4, 2), np.float32), 1, ns)
    with pytest.raises(InvalidInput):
        _core.time_dispatch(np.array([1, 9], np.int32), 2, np.zeros(9, np.int32), np.zeros(2, np.int32), ns)


# ---------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("cache", "available", "limit", "expected"),
    [
        (32 << 20, 8 << 30, None, 128 << 20),
        (None, 8 << 30, None, 256 << 20),
        (32 << 20, 8 << 30, 256 << 20, 64 << 20),
        (32 << 20, 100 << 20, None, 25 << 20),
        (512 << 20, 64 << 30, None, 1 << 30),
        (32 << 20, 0, None, 1 << 20),
        (32 << 20, None, None, 128 << 20),
    ],
)
def test_reading_takes_more_than_the_caches_and_no_more_than_there_is(cache, available, limit, expected):
    found = {"last_level_cache": cache, "memory_available": available, "memory_limit": limit}
    assert machine.bytes_beyond_caches(found) == expected


def test_allocations_are_those_of_one_call_with_its_result():
    assert 1_000_000 <= machine.allocated_bytes(lambda: np.zeros(1_000_000, np.uint8)) < 1_010_000
    assert machine.allocated_bytes(lambda: None) < 1_000


def test_heap_growth_is_what_calls_keep():
    if machine.heap_growth(lambda: None) is None:
        pytest.skip("this C library does not tell")
    kept = []
    assert machine.heap_growth(lambda: kept.append(np.empty(5_000, np.uint8))) > 20 * 5_000
    assert machine.heap_growth(lambda: np.empty(5_000, np.uint8)) < 5_000


def test_the_peak_is_the_best_of_several_loops_and_the_kernels_own(monkeypatch):
    loops = iter([3.0, 9.0, 5.0, 1.0, 1.0] * 2)
    monkeypatch.setattr(_core, "peak_gflops", lambda threads: next(loops) * threads)
    monkeypatch.setattr(machine, "_tile_gflops", lambda: 10.0)
    assert machine.peak_gflops(2) == 18
    assert machine.peak_gflops(1) == 10


def test_the_kernels_own_rate_is_a_rate():
    assert 0 < machine._tile_gflops() < 1e4


def test_more_threads_have_no_lower_peak_and_all_cases_the_same():
    def result(name, *peaks):
        arms = [Arm("colibri", lambda n: np.ones(n), lambda: 0.0, 0, n, probe=lambda p=p: p) for n, p in peaks]
        return runner.Result(name, "about", 1, 9, 9, measure(case(*arms, flops=9, weight_bytes=9), SHORT))

    found = runner._with_common_peaks(
        [
            result("a", (1, {"peak_gflops": 50.0}), (2, {"peak_gflops": 40.0})),
            result("b", (1, {"peak_gflops": 30.0}), (2, {"peak_gflops": 45.0})),
            result("c", (1, {})),
        ]
    )
    assert [[arm.peak_gflops for arm in case.arms] for case in found] == [[50, 50], [50, 50], [None]]


def test_peak_memory_is_in_bytes():
    assert 10 << 20 < machine.peak_memory() < 1 << 40


# ---------------------------------------------------------------- a run and its report


@pytest.fixture(scope="module")
def measured():
    return runner.run(["expert-call-1", "layer-1", "model-16"], threads=2, quick=True)


def document(data: bytes) -> dict:
    parsed = json.loads(data)
    jsonschema.validate(parsed, SCHEMA)
    return parsed


def test_a_run_obeys_the_schema(measured):
    found = document(report.run_json(measured, None, []))
    assert [entry["name"] for entry in found["cases"]] == ["expert-call-1", "layer-1", "model-16"]
    assert set(found["read_gb_s"]) == {"1", "2"}
    arms = {(entry["name"], a["name"], a["threads"]): a for entry in found["cases"] for a in entry["arms"]}
    assert set(arms) == {
        ("expert-call-1", "colibri", 1),
        ("layer-1", "colibri", 1),
        ("layer-1", "colibri", 2),
        ("model-16", "mmap", 1),
        ("model-16", "static", 1),
        ("model-16", "mmap", 2),
    }
    assert {"gflops", "peak_gflops", "weights_gb_s", "allocated_bytes"} <= set(arms["layer-1", "colibri", 2])
    assert "outside_share" in arms["model-16", "mmap", 1]
    assert "outside_share" not in arms["model-16", "mmap", 2]
    assert found["environment"]["isa"] == _core.isa()


def test_the_text_shows_what_the_json_holds(measured):
    text = report.run_text(measured, None, [], terminal=False)
    times, rates, calls, about, where = text.split("\n\n")
    assert [row.split()[0] for row in times.splitlines()] == [
        *("case", "expert-call-1", "layer-1", "colibri", "model-16", "static", "mmap", "Threads:", "x"),
    ]
    assert [line.split(",")[1].split(":")[0] for line in where.splitlines() if line.startswith("memory read")] == [
        " 1 thread",
        " 2 threads",
    ]
    assert "of peak" in rates.splitlines()[0]
    assert "outside matrices" in calls.splitlines()[0]
    assert [line.split(":")[0] for line in about.splitlines()] == ["expert-call-1", "layer-1", "model-16"]
    assert f"isa: {_core.isa()}" in where.splitlines()


@pytest.mark.parametrize(
    ("ns", "expected"),
    [
        (None, "-"),
        (0.0, "0.00 ns"),
        (2.968, "2.97 ns"),
        (9.996, "10.0 ns"),
        (99.96, "100 ns"),
        (999.4, "999 ns"),
        (1000.0, "1.00 µs"),
        (152_345.0, "152 µs"),
        (4.73e6, "4.73 ms"),
        (2e9, "2.00 s"),
    ],
)
def test_times_have_three_digits(ns, expected):
    assert report.duration(ns) == expected


# ---------------------------------------------------------------- comparing


def baseline(measured, factor: float) -> comparison.Baseline:
    times = {
        (result.name, a.name, a.threads): comparison.Times(a.p50_ns * factor, a.low_ns * factor, a.high_ns * factor)
        for result in measured.results
        for a in result.arms
    }
    return comparison.Baseline(times, measured.environment)


@pytest.mark.parametrize(("factor", "verdict"), [(0.01, "slower"), (1, "same"), (100, "faster")])
def test_a_change_beyond_the_spread_is_told(measured, factor, verdict):
    changes = comparison.compare(baseline(measured, factor), measured)
    assert len(changes) == 6
    assert {change.verdict for change in changes} == {verdict}


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ((100, 90, 110), (116, 115, 130), "same"),  # within the drift of clocks
        ((100, 90, 110), (120, 116, 130), "slower"),
        ((100, 90, 150), (140, 130, 160), "same"),  # within the earlier spread
        ((100, 90, 110), (85, 80, 86), "same"),
        ((100, 90, 110), (80, 78, 84), "faster"),
        ((0, 0, 0), (0, 0, 0), "same"),
    ],
)
def test_verdicts(before, now, verdict):
    assert comparison._verdict(comparison.Times(*before), comparison.Times(*now)) == verdict


def test_what_only_one_run_has_is_not_compared(measured):
    before = baseline(measured, 1)
    del before.times["layer-1", "colibri", 2]
    before.times["softmax", "torch", 1] = comparison.Times(1, 1, 1)
    changes = comparison.compare(before, measured)
    assert len(changes) == 5
    lines = [
        "only in the earlier run: softmax torch with 1 thread",
        "only in this run: layer-1 colibri with 2 threads",
    ]
    assert document(report.run_json(measured, before, changes))["comparison"]["unmatched"] == lines
    text = report.run_text(measured, before, changes, terminal=False)
    assert all(f"Not compared, {line}." in text.splitlines() for line in lines)


def test_runs_without_an_arm_in_common_are_not_compared(measured):
    before = comparison.Baseline({("softmax", "torch", 1): comparison.Times(1, 1, 1)}, measured.environment)
    with pytest.raises(InvalidInput, match="only in the earlier run: softmax torch with 1 thread; only in this run"):
        comparison.compare(before, measured)


def test_another_machine_is_told(measured):
    before = comparison.Baseline(baseline(measured, 1).times, {**measured.environment, "isa": "other", "cpu": None})
    found = comparison.differences(before, measured)
    assert len(found) == 2
    assert any("isa was 'other'" in line for line in found)
    changes = comparison.compare(before, measured)
    text = report.run_text(measured, before, changes, terminal=False)
    assert "Not a fair comparison: isa was 'other'" in text
    assert document(report.run_json(measured, before, changes))["comparison"]["differences"] == found


def test_a_baseline_comes_back_from_its_file(measured, tmp_path):
    path = tmp_path / "before.json"
    path.write_bytes(report.run_json(measured, None, []))
    before = comparison.Baseline.read(path)
    assert before == baseline(measured, 1)
    changes = comparison.compare(before, measured)
    assert document(report.run_json(measured, before, changes))["comparison"]["changes"][0]["verdict"] == "same"
    assert "same" in report.run_text(measured, before, changes, terminal=False)


ONE = {"schema": "colibri.bench/1", "environment": {}}
ARM = {"name": "x", "threads": 1, "p50_ns": 1, "low_ns": 1, "high_ns": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '"colibri.bench/1"',
        "[" * 100_000,
        "\ud800",
        json.dumps({"schema": "colibri.infer/1"}),
        json.dumps(ONE),
        json.dumps({**ONE, "cases": 3}),
        json.dumps({**ONE, "cases": {"name": "x"}}),
        json.dumps({**ONE, "cases": [{"name": "x"}]}),
        json.dumps({**ONE, "cases": [{"name": "x", "arms": [{}]}]}),
        json.dumps({**ONE, "environment": 3, "cases": []}),
        *(
            json.dumps({**ONE, "cases": [{"name": "x", "arms": [{**ARM, key: value}]}]})
            for key, value in [
                ("p50_ns", None),
                ("p50_ns", "fast"),
                ("p50_ns", float("nan")),
                ("p50_ns", 10**400),
                ("low_ns", -1),
                ("low_ns", 2),
                ("high_ns", float("inf")),
                ("threads", "many"),
                ("threads", []),
            ]
        ),
    ],
)
def test_something_else_is_no_baseline(tmp_path, text):
    path = tmp_path / "before.json"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(InvalidInput, match=r"Expected JSON of colibri\.bench/1"):
        comparison.Baseline.read(path)


def test_a_missing_baseline_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        comparison.Baseline.read(tmp_path / "none.json")


# ---------------------------------------------------------------- the self-test


def statuses(phases: list[installation.Phase]) -> dict[str, str]:
    return {phase.name: phase.status for phase in phases}


def test_this_installation_passes():
    before = _core.isa()
    found = installation.self_test()
    assert statuses(found) == {
        "buffers": "passed",
        "routing": "passed",
        "dispatch latency": "reported",
        "memory safety": "passed" if _core.sanitized() else "not checked",
    }
    assert _core.isa() == before
    assert document(report.self_test_json(found, runner.environment()))["passed"]
    assert report.self_test_text(found, terminal=False).splitlines()[2].split()[:2] == ["routing", "passed"]


@pytest.mark.parametrize("what", ["ids", "weights"])
def test_broken_routing_fails_the_self_test(monkeypatch, what):
    route = Router.route

    def broken(self, hidden, *arguments, **keywords):
        found = route(self, hidden, *arguments, **keywords)
        if what == "ids":
            found.expert_ids[7] = (found.expert_ids[7] + 1) % self.n_experts
        else:
            found.expert_weights[7] *= np.float32(1.01)
        return found

    monkeypatch.setattr(Router, "route", broken)
    before = _core.isa()
    phase = installation._routing(builtin_bundle())
    assert phase.status == "failed"
    assert ("token 7 goes to" if what == "ids" else "a weight is off by") in phase.detail
    assert _core.isa() == before


def test_a_compiled_gate_that_is_not_the_bundles_fails_the_self_test(tmp_path):
    weights = np.fromfile(builtin_bundle() / "router_weights.bin", "<f4").reshape(8, 128)
    weights[[2, 5]] = weights[[5, 2]]
    weights.tofile(tmp_path / "router_weights.bin")
    found = installation.self_test(bundle=tmp_path)
    assert statuses(found)["routing"] == "failed"
    detail = next(phase.detail for phase in found if phase.name == "routing")
    assert "built-in gate: token" in detail
    assert "gate of 13" not in detail
    assert not document(report.self_test_json(found, runner.environment()))["passed"]


def test_a_bundle_without_its_gate_cannot_be_tested(tmp_path):
    with pytest.raises(UsageError):
        installation.self_test(bundle=tmp_path)


@pytest.mark.parametrize("moved", [4, 32])
def test_a_misaligned_buffer_fails_the_self_test(monkeypatch, moved):
    addresses = _core.addresses

    def shifted(holder):
        return [at + moved * isinstance(holder, _core.Expert) for at in addresses(holder)]

    monkeypatch.setattr(_core, "addresses", shifted)
    phase = installation._buffers()
    assert phase.status == "failed"
    assert phase.detail.count("not a multiple of 64") == 8


def test_buffers_that_are_not_found_fail_the_self_test(monkeypatch):
    monkeypatch.setattr(_core, "addresses", lambda _: [])
    assert installation._buffers().status == "failed"


@pytest.mark.parametrize(("limit", "status"), [(-1, "failed"), (1e12, "passed")])
def test_dispatch_latency_is_judged_on_request(monkeypatch, limit, status):
    monkeypatch.setattr(installation, "_DISPATCH_LIMIT_NS", limit)
    assert installation._dispatch_latency(judge=True).status == status
    assert installation._dispatch_latency(judge=False).status == "reported"


def test_the_memory_safety_program_runs():
    done = subprocess.run(
        [sys.executable, "-m", "colibri_cli.bench.memory_safety"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "calls under the sanitizers" in done.stdout


@pytest.mark.parametrize(
    ("code", "errors", "status", "detail"),
    [
        (0, "", "passed", "calls"),
        (1, "===\n==7==ERROR: AddressSanitizer: heap-buffer-overflow\n#0\n", "failed", "heap-buffer-overflow"),
        (0, "kernels/x.c:3: runtime error: shift\n", "failed", "runtime error: shift"),
        (-11, "", "failed", "exit code -11"),
        (1, "Traceback\nModuleNotFoundError: numpy\n", "failed", "ModuleNotFoundError: numpy"),
    ],
)
def test_what_a_sanitizer_says_decides(monkeypatch, code, errors, status, detail):
    seen = {}

    def run(command, **options):
        seen.update(options["env"], module=command[-1])
        return SimpleNamespace(returncode=code, stderr=errors, stdout="10 calls\n")

    monkeypatch.setenv("ASAN_OPTIONS", "verbosity=0")
    monkeypatch.setattr(_core, "sanitized", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    phase = installation._memory_safety()
    assert phase.status == status
    assert detail in phase.detail
    assert seen["module"] == "colibri_cli.bench.memory_safety"
    assert seen["ASAN_OPTIONS"] == "verbosity=0:detect_leaks=0"
    assert "halt_on_error=1" in seen["UBSAN_OPTIONS"]
