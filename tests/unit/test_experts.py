import itertools
import os
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Classifier, Ffns, integers, numbers

from colibri_cli import Experts, InvalidInput, UsageError
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.topology import default_threads

E, H, I, T, K = 9, 20, 12, 50, 8  # noqa: E741 - the sizes' usual letters
FFNS = Ffns.make(1, E, H, I, activation="silu", gated=True)
OTHER = Ffns.make(50, E, H, I, activation="silu", gated=True)
SHAPE = ExpertShape(H, I, "silu", True)
LOADINGS = ("static", "mmap", "on-demand")
every_loading = pytest.mark.parametrize("loading", LOADINGS)

X, WEIGHTS = numbers(2, T, H), numbers(3, T, K)
IDS = np.argsort(numbers(4, T, E), axis=1, kind="stable")[:, :K].astype(np.int32)


@pytest.fixture
def folder(tmp_path):
    FFNS.write(tmp_path)
    for e in range(E):
        (tmp_path / f"other_{e}.bin").write_bytes(OTHER.raw(e))
    (tmp_path / "short.bin").write_bytes(FFNS.raw(0)[:-1])
    return tmp_path


@pytest.fixture(scope="module")
def held():
    return Experts.from_arrays(**FFNS.arrays())


def opened(folder, loading, **options):
    names = [f"expert_{e}.bin" for e in range(E)]
    return Experts.open(folder, loading, **({"shape": SHAPE, "files": names} | options))


# ---------------------------------------------------------------- loading


@every_loading
@pytest.mark.parametrize("max_tokens", [1, 7, 512])
@pytest.mark.parametrize("cache_experts", [1, 3, 9])
def test_the_answer_does_not_depend_on_the_loading(loading, cache_experts, max_tokens, folder, held):
    experts = opened(folder, loading, cache_experts=cache_experts, max_tokens=max_tokens)
    for _ in range(2):
        np.testing.assert_array_equal(experts.run(X, IDS, WEIGHTS), held.run(X, IDS, WEIGHTS))


@every_loading
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_ungated_experts_of_a_bundle(activation, loading, tmp_path):
    model = Classifier.make(gated=False, activation=activation)
    bundle = model.write(tmp_path / "bundle")
    x, ids, weights = numbers(1, 9, 24), integers(2, 0, 6, 9, 2), numbers(3, 9, 2)
    for place in (bundle, bundle / "experts"):
        found = Experts.open(place, loading).run(x, ids, weights)
        np.testing.assert_array_equal(found, Experts.from_arrays(**model.experts.arrays()).run(x, ids, weights))


def test_on_demand_counts(folder):
    experts = opened(folder, "on-demand", cache_experts=2)
    size = SHAPE.n_bytes

    def run(*ids):
        experts.run(X[:1], np.int32([ids]), WEIGHTS[:1, : len(ids)])
        stats = experts.stats()
        return stats["hits"], stats["misses"], stats["evictions"], stats["resident"], stats["bytes_read"] // size

    assert experts.stats() == {
        "loading": "on-demand",
        "source": str(folder),
        "n_experts": E,
        "resident": 0,
        "resident_bytes": 0,
        "in_place_bytes": 0,
        "hits": 0,
        "misses": 0,
        "evictions": 0,
        "bytes_read": 0,
    }
    assert run(3, 1) == (0, 2, 0, 2, 2)
    assert run(1) == (1, 2, 0, 2, 2)
    assert run(5) == (1, 3, 1, 2, 3)  # 3 goes
    assert run(1) == (2, 3, 1, 2, 3)
    assert run(3) == (2, 4, 2, 2, 4)  # 5 goes
    assert run(-1) == (2, 4, 2, 2, 4)
    assert run(0, 1, 2, 3, 4) == (2, 9, 7, 2, 9)  # by twos, ascending: 1 and 3 are gone when their turn comes
    assert experts.stats()["resident_bytes"] >= 2 * size


@pytest.mark.parametrize("loading", ["static", "mmap"])
def test_the_other_loadings_count(loading, folder):
    experts = opened(folder, loading)
    experts.run(X, IDS, WEIGHTS)
    stats = experts.stats()
    assert (stats["loading"], stats["n_experts"], stats["resident"], stats["hits"]) == (loading, E, E, 0)
    assert stats["bytes_read"] == (0 if loading == "mmap" else E * SHAPE.n_bytes)
    assert stats["resident_bytes"] >= E * SHAPE.n_bytes
    assert stats["in_place_bytes"] == (stats["resident_bytes"] if loading == "mmap" else 0)


def test_mapped_experts_are_the_files_pages(folder):
    experts = opened(folder, "mmap")
    before = experts.run(X, IDS, WEIGHTS)
    with (folder / "expert_4.bin").open("r+b") as file:
        file.write(OTHER.raw(4))
    assert (experts.run(X, IDS, WEIGHTS) != before).any()


@every_loading
def test_preload_changes_no_answer(loading, folder, held):
    experts = opened(folder, loading)
    experts.preload()
    np.testing.assert_array_equal(experts.run(X, IDS, WEIGHTS), held.run(X, IDS, WEIGHTS))


def test_arrays_are_copied():
    arrays = {name: np.copy(a) if isinstance(a, np.ndarray) else a for name, a in FFNS.arrays().items()}
    experts = Experts.from_arrays(**arrays)
    before = experts.run(X, IDS, WEIGHTS)
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        arrays[name][:] = 0
    np.testing.assert_array_equal(experts.run(X, IDS, WEIGHTS), before)


def test_what_is_told_of_experts(held):
    assert len(held) == E
    assert held.shape == SHAPE
    assert held.threads == default_threads()
    assert held.stats()["loading"] == "static"
    assert held.stats()["source"] == "arrays"


# ---------------------------------------------------------------- a call


def test_a_skipped_slot_counts_for_nothing(held):
    ids, weights = IDS[:, :3].copy(), WEIGHTS[:, :3].copy()
    ids[::2, 1] = -1
    weights[::2, 1] = np.nan  # never looked at
    kept = weights.copy()
    kept[::2, 1] = 0
    without = np.where(ids < 0, (ids[:, :1] + 1) % E, ids)
    found = held.run(X, ids, weights)
    np.testing.assert_array_equal(found[1::2], held.run(X, without, kept)[1::2])
    pairs = held.run(X, np.ascontiguousarray(ids[:, [0, 2]]), np.ascontiguousarray(weights[:, [0, 2]]))
    np.testing.assert_array_equal(found[::2], pairs[::2])


def test_skipping_every_slot_gives_zeros(held):
    out = np.full((T, H), 7, np.float32)
    held.run(X, np.full((T, K), -1, np.int64), WEIGHTS, out=out)
    assert not out.any()
    assert held.run(X, np.empty((T, 0), np.int32), np.empty((T, 0), np.float32)).tolist() == np.zeros((T, H)).tolist()


@pytest.mark.parametrize("loading", ["static", "on-demand"])
def test_an_expert_given_twice_counts_twice_in_slot_order(loading, folder):
    relu = Ffns.make(1, E, H, I, activation="relu")
    relu.write(folder)
    experts = opened(folder, loading, shape=ExpertShape(H, I, "relu", True))
    ids = np.tile(np.int32([4, 2, 4, 4]), (T, 1))
    np.testing.assert_array_equal(experts.run(X, ids, WEIGHTS[:, :4]), relu.bits(X, ids, WEIGHTS[:, :4]))


def test_slots_are_added_by_ascending_expert():
    relu = Ffns.make(1, 3, H, I, activation="relu")
    experts = Experts.from_arrays(**relu.arrays())
    weights = numbers(5, T, 3)
    results = []
    for order in itertools.permutations(range(3)):
        ids = np.tile(np.int32(order), (T, 1))
        results.append(experts.run(X, ids, np.ascontiguousarray(weights[:, order])))
        np.testing.assert_array_equal(results[-1], relu.bits(X, ids, weights[:, order]))
        np.testing.assert_array_equal(results[-1], results[0])


@pytest.mark.parametrize("bad", [E, E + 1, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("max_tokens", [4, 512])
def test_an_id_out_of_range_leaves_out_untouched(max_tokens, dtype, bad):
    experts = Experts.from_arrays(**FFNS.arrays(), max_tokens=max_tokens)
    ids, out = IDS.astype(dtype), np.full((T, H), 7, np.float32)
    ids[T - 1, 3] = bad
    with pytest.raises(InvalidInput, match=rf"0\.\.8, got {bad} - at expert_ids\[49, 3\]"):
        experts.run(X, ids, WEIGHTS, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("bad", [2**32, 2**32 + 1, 2**63 - 1, -(2**63), -(2**32) - 1])
def test_an_id_is_not_cut_to_32_bits(bad, held):
    ids = IDS.astype(np.int64)
    ids[0, 0] = bad
    with pytest.raises(InvalidInput, match=f"got {bad} - at"):
        held.run(X, ids, WEIGHTS)


def test_no_tokens(held):
    for k in (0, 1, 8):
        found = held.run(np.empty((0, H), np.float32), np.empty((0, k), np.int32), np.empty((0, k), np.float32))
        assert found.shape == (0, H)
        assert found.dtype == np.float32
    out = np.empty((0, H), np.float32)
    assert held.run(np.empty((0, H), np.float32), np.empty((0, 1), np.int32), np.empty((0, 1), np.float32), out) is out


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 5, 1), (1, 1, 5), (5, 1, 1), (1, 5, 5), (5, 1, 5), (5, 5, 1)])
def test_sizes_of_one(sizes, gated):
    n_experts, hidden, inter = sizes
    ffns = Ffns.make(1, n_experts, hidden, inter, gated=gated, activation="relu")
    x, ids, weights = numbers(2, 3, hidden), integers(3, 0, n_experts, 3, 1), numbers(4, 3, 1)
    np.testing.assert_array_equal(Experts.from_arrays(**ffns.arrays()).run(x, ids, weights), ffns.bits(x, ids, weights))


@every_loading
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(bad, loading, folder):
    experts = opened(folder, loading)
    expected = experts.run(X, IDS, WEIGHTS)
    for row in (0, 7, 8, 23, T - 1):
        x = X.copy()
        x[row, 5] = bad
        found = experts.run(x, IDS, WEIGHTS)
        assert not np.isfinite(found[row]).all()
        np.testing.assert_array_equal(np.delete(found, row, 0), np.delete(expected, row, 0))
    weights = WEIGHTS.copy()
    weights[11, 2] = bad
    found = experts.run(X, IDS, weights)
    assert not np.isfinite(found[11]).all()
    np.testing.assert_array_equal(np.delete(found, 11, 0), np.delete(expected, 11, 0))


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 49, 50, 51])
def test_chunks_keep_the_bits(max_tokens, held):
    experts = Experts.from_arrays(**FFNS.arrays(), max_tokens=max_tokens)
    np.testing.assert_array_equal(experts.run(X, IDS, WEIGHTS), held.run(X, IDS, WEIGHTS))
    np.testing.assert_array_equal(experts.run(X[::-1, :], IDS[::-1], WEIGHTS[::-1]), held.run(X, IDS, WEIGHTS)[::-1])


def test_a_shorter_call_after_a_longer_one_sees_nothing_of_it(held):
    experts = Experts.from_arrays(**FFNS.arrays(), max_tokens=64)
    for n in (50, 3, 1, 0, 17, 50):
        np.testing.assert_array_equal(
            experts.run(X[:n], IDS[:n, :2], WEIGHTS[:n, :2]), held.run(X, IDS[:, :2], WEIGHTS[:, :2])[:n]
        )


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(T)), cut=st.integers(0, T), k=st.integers(1, K))
def test_a_token_keeps_its_bits_in_any_company(held, order, cut, k):
    ids, weights = IDS[:, :k], WEIGHTS[:, :k]
    whole = held.run(X, ids, weights)
    np.testing.assert_array_equal(held.run(X[order], ids[order], weights[order]), whole[order])
    parts = [held.run(X[part], ids[part], weights[part]) for part in (slice(cut), slice(cut, T))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"hidden": X[:, :-1]}, "hidden.shape"),
        ({"hidden": X[0]}, "hidden.shape"),
        ({"hidden": X[np.newaxis]}, "hidden.shape"),
        ({"hidden": X[:-1]}, "expert_ids.shape"),
        ({"expert_ids": IDS[:-1]}, "expert_ids.shape"),
        ({"expert_ids": IDS[:, 0]}, "expert_ids.shape"),
        ({"expert_ids": IDS[:, :2]}, "expert_weights.shape"),
        ({"expert_weights": WEIGHTS[:, :2]}, "expert_weights.shape"),
        ({"expert_weights": WEIGHTS[:, 0]}, "expert_weights.shape"),
        ({"expert_weights": WEIGHTS[np.newaxis]}, "expert_weights.shape"),
        ({"out": np.empty((T, H + 1), np.float32)}, "out"),
        ({"out": np.empty((T + 1, H), np.float32)}, "out"),
        ({"out": np.empty(T * H, np.float32)}, "out"),
        ({"out": np.empty((H, T), np.float32).T}, "out"),
        ({"out": np.empty((T, 2 * H), np.float32)[:, :H]}, "out"),
        ({"out": np.empty((T, 2 * H), np.float32)[:, ::2]}, "out"),
        ({"out": np.empty((T, H), np.float32)[::-1]}, "out"),
        ({"out": np.empty((T, H))}, "out.dtype"),
        ({"out": np.empty(T * H * 4 + 1, np.uint8)[1:].view(np.float32).reshape(T, H)}, "out"),
        ({"out": np.broadcast_to(np.float32(0), (T, H))}, "out"),
        ({"out": b"bytes"}, "out"),
        ({"out": [[0.0] * H] * T}, "out"),
    ],
)
def test_arrays_that_do_not_fit(change, place, held):
    call = {"hidden": X, "expert_ids": IDS, "expert_weights": WEIGHTS} | change
    with pytest.raises(InvalidInput, match=f" - at {place}$"):
        held.run(**call)


def test_a_read_only_out(held):
    out = np.full((T, H), 7, np.float32)
    out.flags.writeable = False
    with pytest.raises(InvalidInput, match=r" - at out$"):
        held.run(X, IDS, WEIGHTS, out=out)
    assert (out == 7).all()


def test_an_out_that_overlaps_an_input(held):
    memory = np.zeros(4 * T * H, np.float32)
    x, out = memory[: T * H].reshape(T, H), memory[T * H : 2 * T * H].reshape(T, H)
    held.run(x, IDS, WEIGHTS, out=out)  # neighbours do not overlap
    held.run(memory[2 * T * H :].reshape(T, 2 * H)[:, :H], IDS, WEIGHTS, out=out)
    for wrong in (
        x,
        memory[T * H - 1 : 2 * T * H - 1].reshape(T, H),
        memory[1 : 1 + T * H].reshape(T, H),
    ):
        with pytest.raises(InvalidInput, match="Expected memory of its own, got an overlap with an input - at out"):
            held.run(x, IDS, WEIGHTS, out=wrong)
        with pytest.raises(InvalidInput, match="overlap"):
            held.run(x[::-1, ::-1], IDS, WEIGHTS, out=wrong)
    square = np.zeros((H, H), np.float32)
    one = np.zeros((H, 1), np.int32)
    for call in (
        (square.copy(), one, square[:, :1]),
        (square.copy(), square.view(np.int32)[:, 3:4], np.zeros((H, 1), np.float32)),
        (np.broadcast_to(square[5], (H, H)), one, np.zeros((H, 1), np.float32)),
    ):
        with pytest.raises(InvalidInput, match="overlap"):
            held.run(*call, out=square)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"gate_up": FFNS.up[:, :-1]}, "gate_up"),
        ({"gate_up": FFNS.up[:, :, :-1]}, "gate_up"),
        ({"gate_up": FFNS.up[:-1]}, "gate_up"),
        ({"gate_up": FFNS.up[0]}, "gate_up"),
        ({"down": FFNS.down[0]}, "down"),
        ({"gated": False}, "gate_up"),
        ({"transposed": True}, "gate_up"),
        ({"gate_up": np.zeros((0, 2 * I, H), np.float32), "down": np.zeros((0, H, I), np.float32)}, "gate_up"),
        ({"gate_up": np.zeros((1025, 2, 1), np.float32), "down": np.zeros((1025, 1, 1), np.float32)}, "gate_up"),
        ({"gate_up_bias": FFNS.up_bias[:, :-1]}, "gate_up_bias"),
        ({"gate_up_bias": FFNS.up_bias.astype(float)}, "gate_up_bias"),
        ({"down_bias": FFNS.down_bias[0]}, "down_bias"),
        ({"activation": "swish"}, "activation"),
        ({"dtype": "float8"}, "dtype"),
        ({"layout": "blocked"}, "layout"),
        ({"limit": 0.0}, "limit"),
        ({"limit": -1.0}, "limit"),
        ({"limit": np.nan}, "limit"),
        ({"alpha": np.nan}, "alpha"),
        ({"alpha": 1e39}, "alpha"),
        ({"beta": np.inf}, "beta"),
        ({"threads": 0}, "threads"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 65_537}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
    ],
)
def test_experts_that_are_none(change, place):
    with pytest.raises(InvalidInput, match=f" - at {place}"):
        Experts.from_arrays(**FFNS.arrays() | change)


@pytest.mark.parametrize("options", [{"loading": "lazy"}, {"cache_experts": 0}, {"threads": 0}, {"max_tokens": 0}])
def test_options_of_open(options, folder):
    with pytest.raises(InvalidInput, match=f" - at {next(iter(options))}"):
        opened(folder, **{"loading": "static"} | options)


def test_files_that_do_not_tell_their_shape(folder):
    with pytest.raises(UsageError, match=r"config\.json"):
        Experts.open(folder)


# ---------------------------------------------------------------- hot plug


@pytest.fixture
def eager_threads():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@every_loading
def test_add_replace_and_remove(loading, folder):
    experts = opened(folder, loading, files=["expert_0.bin", "expert_1.bin"])
    mixed = Experts.from_arrays(
        **FFNS.arrays()
        | {
            name: np.concatenate([getattr(FFNS, part)[:2], getattr(OTHER, part)[7:9]])
            for name, part in zip(
                ("gate_up", "down", "gate_up_bias", "down_bias"), ("up", "down", "up_bias", "down_bias"), strict=True
            )
        }
    )

    def agree(ids, as_ids):
        found = experts.run(X, np.tile(np.int32(ids), (T, 1)), WEIGHTS[:, : len(ids)])
        expected = mixed.run(X, np.tile(np.int32(as_ids), (T, 1)), WEIGHTS[:, : len(as_ids)])
        np.testing.assert_array_equal(found, expected)

    agree([1, 0], [1, 0])
    assert experts.add(folder / "other_7.bin") == 2
    assert len(experts) == 3
    agree([0, 1, 2], [0, 1, 2])
    experts.replace(2, folder / "other_8.bin")
    agree([0, 1, 2], [0, 1, 3])
    experts.remove(1)
    assert experts.stats()["n_experts"] == 2
    agree([0, 2], [0, 3])
    out = np.full((T, H), 7, np.float32)
    with pytest.raises(InvalidInput, match=r"got 1, which was removed - at expert_ids\[0, 1\]"):
        experts.run(X, np.tile(np.int32([0, 1]), (T, 1)), WEIGHTS[:, :2], out=out)
    assert (out == 7).all()
    assert experts.add(folder / "expert_1.bin") == 1  # the lowest id that is free
    agree([0, 1, 2], [0, 1, 3])
    assert experts.add(folder / "other_7.bin") == 3
    agree([3], [2])
    agree([0, 1, 2], [0, 1, 3])


@every_loading
def test_every_expert_may_go(loading, folder):
    experts = opened(folder, loading)
    for e in range(E):
        experts.remove(e)
    assert experts.stats()["n_experts"] == 0
    assert not experts.run(X, np.full((T, 1), -1, np.int32), WEIGHTS[:, :1]).any()
    assert experts.add(folder / "expert_0.bin") == 0


@every_loading
def test_a_bad_file_leaves_the_old_set(loading, folder, held):
    experts = opened(folder, loading)
    (folder / "folder.bin").mkdir()
    expected = held.run(X, IDS, WEIGHTS)
    for path, error in [
        ("short.bin", InvalidInput),
        ("missing.bin", UsageError),
        ("folder.bin", (UsageError, InvalidInput)),
    ]:
        with pytest.raises(error, match=path):
            experts.replace(3, folder / path)
        with pytest.raises(error, match=path):
            experts.add(folder / path)
    assert len(experts) == experts.stats()["n_experts"] == E
    np.testing.assert_array_equal(experts.run(X, IDS, WEIGHTS), expected)


@every_loading
@pytest.mark.parametrize("bad", [-1, E, 1 << 40])
def test_an_expert_that_is_not_there(bad, loading, folder):
    experts = opened(folder, loading)
    with pytest.raises(InvalidInput, match=f"got {bad} - at expert id"):
        experts.replace(bad, folder / "other_0.bin")
    with pytest.raises(InvalidInput, match=f"got {bad} - at expert id"):
        experts.remove(bad)
    experts.remove(2)
    with pytest.raises(InvalidInput, match="got 2, which was removed - at expert id"):
        experts.remove(2)
    with pytest.raises(InvalidInput, match="got 2, which was removed - at expert id"):
        experts.replace(2, folder / "other_0.bin")


@every_loading
def test_the_most_experts(loading, folder):
    experts = opened(folder, loading, files=["expert_0.bin"] * 1024)
    with pytest.raises(InvalidInput, match="at most 1024 experts"):
        experts.add(folder / "expert_1.bin")
    experts.remove(1000)
    assert experts.add(folder / "expert_1.bin") == 1000


def test_what_was_replaced_or_removed_leaves_the_cache(folder):
    experts = opened(folder, "on-demand", cache_experts=E)
    experts.run(X, IDS, WEIGHTS)
    assert experts.stats()["resident"] == E
    experts.replace(4, folder / "other_4.bin")
    experts.remove(5)
    assert experts.stats()["resident"] == E - 2


def test_a_path_replaced_by_itself_is_read_again(folder):
    experts = opened(folder, "on-demand")
    experts.run(X, IDS, WEIGHTS)
    path = folder / "expert_4.bin"
    fresh = folder / "fresh"
    fresh.write_bytes(OTHER.raw(4))
    os.replace(fresh, path)  # noqa: PTH105 - as a deployment does it
    experts.replace(4, path)
    ids = np.full((T, 1), 4, np.int32)
    expected = Experts.from_arrays(**OTHER.arrays()).run(X, ids, WEIGHTS[:, :1])
    np.testing.assert_array_equal(experts.run(X, ids, WEIGHTS[:, :1]), expected)


@every_loading
@pytest.mark.usefixtures("eager_threads")
def test_1000_replacements_under_four_threads(loading, folder):
    experts = opened(folder, loading, cache_experts=2, max_tokens=8, threads=2)
    ids = np.tile(np.int32([1, 4, 6]), (T, 1))
    answers = []
    for path in ("expert_4.bin", "other_4.bin"):
        experts.replace(4, folder / path)
        answers.append(experts.run(X, ids, WEIGHTS[:, :3]).tobytes())
    assert answers[0] != answers[1]
    over = threading.Event()
    seen = [[] for _ in range(4)]

    def infer(mine):
        while not over.is_set():
            mine.append(experts.run(X, ids, WEIGHTS[:, :3]).tobytes())

    threads = [threading.Thread(target=infer, args=(mine,), daemon=True) for mine in seen]
    for thread in threads:
        thread.start()
    n_replaced = 0
    try:
        while n_replaced < 1000 or (min(map(len, seen)) < 30 and all(thread.is_alive() for thread in threads)):
            experts.replace(4, folder / "expert_4.bin")
            experts.replace(4, folder / "other_4.bin")
            n_replaced += 2
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert min(map(len, seen)) >= 30  # no thread met an error
    assert set(itertools.chain(*seen)) == set(answers)
    assert experts.run(X, ids, WEIGHTS[:, :3]).tobytes() == answers[1]
    if loading == "on-demand":
        assert experts.stats()["resident"] <= 2
