"""Expert files that change, shrink or vanish after they were opened."""

import os
from pathlib import Path

import numpy as np
import pytest
from reference import Ffns, integers, numbers

from colibri_cli import Experts, InvalidInput, UsageError
from colibri_cli.expert_files import ExpertReader
from colibri_cli.formats.experts import ExpertShape

E, H, I, T = 5, 12, 7, 30  # noqa: E741 - the sizes' usual letters
FFNS = Ffns.make(1, E, H, I)
SHAPE = ExpertShape(H, I, "silu", True)
BATCH = numbers(2, T, H), integers(3, 0, E, T, 3), numbers(4, T, 3)
NAMES = [f"expert_{e}.bin" for e in range(E)]


@pytest.fixture
def folder(tmp_path):
    FFNS.write(tmp_path)
    return tmp_path


@pytest.fixture
def experts(folder):
    """Experts on demand, of which every call must load all but one."""
    return Experts.open(folder, "on-demand", cache_experts=1, max_tokens=8, shape=SHAPE, files=NAMES)


def cut(path):
    os.truncate(path, path.stat().st_size - 4)


def rewritten(path):
    path.write_bytes(FFNS.raw(0))


def exchanged(path):
    fresh = path.with_name("fresh")
    fresh.write_bytes(FFNS.raw(0))
    fresh.rename(path)


def vanished(path):
    path.unlink()


def a_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (cut, InvalidInput),
        (rewritten, InvalidInput),
        (exchanged, InvalidInput),
        (vanished, UsageError),
        (a_folder, InvalidInput),
    ],
)
def test_a_failing_load_leaves_out_untouched_and_the_rest_usable(change, error, experts, folder):
    expected = experts.run(*BATCH)
    path = folder / "expert_4.bin"  # the last to be loaded: the others have run by then
    os.utime(path, (1, 1))
    experts.replace(4, path)
    change(path)
    out = np.full((T, H), 7, np.float32)
    for _ in range(3):
        with pytest.raises(error, match=r"expert_4\.bin"):
            experts.run(*BATCH, out=out)
        assert (out == 7).all()
    without = BATCH[1].copy()
    without[without == 4] = -1
    assert np.isfinite(experts.run(BATCH[0], without, BATCH[2])).all()
    assert experts.stats()["resident"] <= 1
    if path.is_dir():
        path.rmdir()
    path.write_bytes(FFNS.raw(4))
    experts.replace(4, path)
    np.testing.assert_array_equal(experts.run(*BATCH, out=out), expected)


@pytest.mark.parametrize("change", [cut, rewritten, exchanged])
def test_a_file_that_changes_while_it_is_read(change, folder, monkeypatch):
    read = ExpertReader.read

    def read_slowly(reader, path):
        expert = read(reader, path)
        os.utime(path, (1, 1))
        change(Path(path))
        return expert

    experts = Experts.open(folder, "on-demand", shape=SHAPE, files=NAMES)
    monkeypatch.setattr(ExpertReader, "read", read_slowly)
    out = np.full((T, H), 7, np.float32)
    with pytest.raises(InvalidInput, match="changed since"):
        experts.run(*BATCH, out=out)
    assert (out == 7).all()
    assert experts.stats()["resident"] == 0


@pytest.mark.parametrize("change", [cut, rewritten, exchanged, vanished])
def test_what_was_read_at_once_is_not_touched(change, folder):
    experts = Experts.open(folder, "static", shape=SHAPE, files=NAMES)
    expected = experts.run(*BATCH)
    for name in NAMES:
        change(folder / name)
    np.testing.assert_array_equal(experts.run(*BATCH), expected)


@pytest.mark.parametrize("change", [exchanged, vanished])
def test_mapped_pages_outlive_their_name(change, folder):
    experts = Experts.open(folder, "mmap", shape=SHAPE, files=NAMES)
    expected = experts.run(*BATCH)
    for name in NAMES:
        change(folder / name)
    np.testing.assert_array_equal(experts.run(*BATCH), expected)
