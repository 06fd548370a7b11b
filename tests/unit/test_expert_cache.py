"""The cache alone, with loads that the test controls."""

import sys
import threading
from types import SimpleNamespace

import pytest

from colibri_cli import InvalidInput
from colibri_cli.expert_cache import ExpertCache


class Disk:
    """Loads names; keeps a list of them, and can be made to fail or to wait."""

    def __init__(self):
        self.loaded = []
        self.broken = set()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)

    def __call__(self, name):
        self.loaded.append(name)
        self.started.release()
        assert self.gate.wait(30)
        if name in self.broken:
            raise InvalidInput(expected="an expert", got="none", at=name)
        return SimpleNamespace(name=name, n_bytes=10)


@pytest.fixture
def disk():
    return Disk()


@pytest.fixture
def eager_threads():
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def use(cache, *names):
    experts = cache.acquire(names)
    cache.release(names)
    return [expert.name for expert in experts]


def counters(cache):
    return cache.hits, cache.misses, cache.evictions, cache.loads, cache.resident


def test_the_least_recently_used_goes(disk):
    cache = ExpertCache(disk, 3)
    for name in "abc":
        use(cache, name)
    use(cache, "a")  # b is now the oldest
    use(cache, "d")
    use(cache, "a")
    use(cache, "c")
    assert disk.loaded == ["a", "b", "c", "d"]
    use(cache, "b")  # pushes out d, then used before a and c
    use(cache, "d")
    assert disk.loaded == ["a", "b", "c", "d", "b", "d"]
    use(cache, "c")
    assert disk.loaded[-1] == "d"
    use(cache, "a")
    assert disk.loaded[-1] == "a"


def test_counters(disk):
    cache = ExpertCache(disk, 2)
    assert counters(cache) == (0, 0, 0, 0, 0)
    assert use(cache, "a", "b") == ["a", "b"]
    assert counters(cache) == (0, 2, 0, 2, 2)
    use(cache, "b")
    assert counters(cache) == (1, 2, 0, 2, 2)
    use(cache, "c")
    assert counters(cache) == (1, 3, 1, 3, 2)
    assert cache.resident_bytes == 20


def test_an_expert_in_use_is_never_evicted(disk):
    cache = ExpertCache(disk, 2)
    (held,) = cache.acquire(["a"])
    for name in "bcdefgh":
        use(cache, name)
    assert cache.acquire(["a"]) == [held]
    assert disk.loaded.count("a") == 1
    cache.release(["a"])
    for name in "bcdefgh":
        use(cache, name)
    assert cache.acquire(["a"]) == [held]  # one of two holders is still there
    cache.release(["a"])
    cache.release(["a"])
    for name in "bc":
        use(cache, name)
    use(cache, "a")
    assert disk.loaded.count("a") == 2


def test_what_is_over_goes_when_it_is_released(disk):
    cache = ExpertCache(disk, 2)
    cache.acquire("abc")
    assert cache.resident == 3
    cache.acquire("de")
    assert cache.resident == 5
    cache.release("abc")
    assert cache.resident == 2
    cache.release("de")
    assert cache.resident == 2
    use(cache, "d", "e")
    assert disk.loaded == list("abcde")


def together(n, call):
    """Run ``call`` in n threads; return their results or errors."""
    results = []

    def run():
        try:
            results.append(call())
        except Exception as error:  # whatever it is, the test compares it
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(n)]
    for thread in threads:
        thread.start()
    return threads, results


def waiting(cache, n):
    """Wait until n threads have asked for what is being loaded."""
    while cache.hits + cache.misses < n:
        threading.Event().wait(0.001)


def test_one_load_serves_every_thread_that_waits(disk):
    cache = ExpertCache(disk, 2)
    disk.gate.clear()
    threads, results = together(5, lambda: cache.acquire(["a"])[0])
    waiting(cache, 5)
    disk.gate.set()
    for thread in threads:
        thread.join()
    assert disk.loaded == ["a"]
    assert len({id(expert) for expert in results}) == 1
    assert (cache.hits, cache.misses) == (4, 1)
    for _ in range(5):
        cache.release(["a"])
    use(cache, "b", "c")
    assert cache.resident == 2


def test_a_failed_load_fails_every_thread_that_waits_and_is_tried_again(disk):
    cache = ExpertCache(disk, 1)
    disk.broken, before = {"a"}, disk.gate
    before.clear()
    threads, results = together(5, lambda: cache.acquire(["a"]))
    waiting(cache, 5)
    before.set()
    for thread in threads:
        thread.join()
    assert [str(error) for error in results] == ["Expected an expert, got none - at a"] * 5
    assert disk.loaded == ["a"]
    assert cache.resident == 0
    disk.broken = set()
    assert use(cache, "a") == ["a"]
    assert cache.loads == 1


def test_a_failure_lets_go_of_what_was_held_before_it(disk):
    cache = ExpertCache(disk, 1)
    disk.broken = {"c"}
    with pytest.raises(InvalidInput, match="at c"):
        cache.acquire(["a", "b", "c"])
    assert cache.resident == 1
    use(cache, "d")
    assert cache.resident == 1


def test_an_interrupted_load_does_not_leave_others_waiting():
    started, go_on = threading.Event(), threading.Event()

    def interrupted(name):
        if started.is_set():
            return SimpleNamespace(name=name, n_bytes=10)
        started.set()
        assert go_on.wait(30)
        raise KeyboardInterrupt

    def first():
        with pytest.raises(KeyboardInterrupt):
            cache.acquire(["a"])

    cache = ExpertCache(interrupted, 1)
    loader, _ = together(1, first)
    assert started.wait(30)
    others, results = together(2, lambda: cache.acquire(["a"]))
    waiting(cache, 3)
    go_on.set()
    for thread in loader + others:
        thread.join()
    assert len(results) == 2
    assert [expert.name for (expert,) in results] == ["a", "a"]  # one of them took the loader's place
    assert cache.resident == 1


def test_forget(disk):
    cache = ExpertCache(disk, 4)
    use(cache, "a", "b")
    cache.forget("a")
    cache.forget("never seen")
    assert cache.resident == 1
    use(cache, "a")
    assert disk.loaded == ["a", "b", "a"]
    cache.acquire(["b"])
    cache.forget("b")  # held: stays until it is released
    assert use(cache, "b") == ["b"]
    cache.release(["b"])
    assert disk.loaded == ["a", "b", "a"]


def test_reading_ahead_is_for_what_is_missing_and_fits():
    asked = []

    class File:
        def __init__(self, name):
            self.name = name

        def read_ahead(self):
            asked.append(self.name)

    files = [File(name) for name in "abcd"]
    cache = ExpertCache(lambda _file: SimpleNamespace(n_bytes=1), 2)
    cache.expect(files)
    assert asked == ["a", "b"]
    cache.acquire(files[:1])
    cache.expect(files)
    assert asked == ["a", "b", "b", "c"]


@pytest.mark.usefixtures("eager_threads")
def test_many_threads_over_few_places(disk):
    cache = ExpertCache(disk, 3)
    held = dict.fromkeys("abcdefgh", 0)
    lock = threading.Lock()
    objects = {}

    def work():
        for i in range(300):
            names = [name for j, name in enumerate("abcdefgh") if (i * 7 + j * 3) % 5 == 0][:3]
            experts = cache.acquire(names)
            with lock:
                for name, expert in zip(names, experts, strict=True):
                    assert expert.name == name
                    # While anybody holds an expert, everybody gets that one.
                    assert held[name] == 0 or objects[name] is expert
                    objects[name] = expert
                    held[name] += 1
            with lock:
                for name in names:
                    held[name] -= 1
                cache.release(names)
        return "done"

    threads, results = together(6, work)
    for thread in threads:
        thread.join()
    assert results == ["done"] * 6
    assert cache.resident <= 3
    assert cache.misses == len(disk.loaded) == cache.resident + cache.evictions
