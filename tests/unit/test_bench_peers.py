"""Every peer that is installed, driven as the bench drives it: right answers from a process of its own."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from colibri_cli.bench.against import work
from colibri_cli.bench.against.answers import Answers
from colibri_cli.bench.against.plot import _REQUIREMENT
from colibri_cli.bench.against.workers import Worker
from colibri_cli.bench.peers import MODULES, OURS, find
from colibri_cli.bench.peers.onnx_runtime import quantised
from colibri_cli.bench.shapes import Shape

SMALL = Shape("small", 512, 256, 6, 2)
KINDS = [(name, kind) for name in MODULES for kind in find(name).kinds]


@pytest.fixture(scope="module")
def weights_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    work.write_weights(folder, SMALL)
    return folder


@pytest.mark.parametrize(("name", "kind"), KINDS, ids=[f"{name}-{kind.dtype}-{kind.name}" for name, kind in KINDS])
def test_a_peer_answers_right(name, kind, weights_folder, tmp_path):
    missing = find(name).missing()
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    answers = Answers(SMALL, work.map_weights(weights_folder, SMALL), work.tokens(SMALL, 33), (1, 7, 33))
    worker = Worker(tmp_path)
    try:
        versions = worker.ask(120, "load", MODULES[name], kind, SMALL, weights_folder, 33, tmp_path)
        assert all(versions.values())
        for threads in (1, 2):
            worker.ask(60, "prepare", threads)
            for n_tokens in (7, 1, 33):
                found, seconds = worker.ask(60, "answer", n_tokens)
                error = answers.error(n_tokens, found)
                assert error.excusable(kind.dtype)
                assert error.rms > 0 if kind.dtype != "float32" else error.rms < 2e-6
                assert seconds > 0
                assert (worker.ask(60, "sample", 2) > 0).all()
    finally:
        worker.close()


def test_the_extras_are_what_the_peers_require():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = [requirement for name in MODULES if name != OURS for requirement in find(name).requirements]
    assert sorted(project["optional-dependencies"]["peers"]) == sorted(wanted)
    assert project["optional-dependencies"]["plot"] == [_REQUIREMENT]


@pytest.mark.parametrize("bits", [4, 8])
def test_onnx_codes_are_the_nearest(bits):
    rows = np.random.default_rng(1).standard_normal((5, 96), np.float32)
    rows[0, :32] = 0
    codes, scales = quantised(rows, bits)
    assert (codes.dtype, codes.shape, scales.shape) == (np.uint8, (5, 96 * bits // 8), (5, 3))
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(5, 96)
    half = 1 << (bits - 1)
    steps = np.repeat(scales, 32, axis=1)
    back = (codes.astype(np.float32) - half) * steps
    assert (np.abs(back - rows) <= steps / 2 * 1.0001).all()
    assert (back[0, :32] == 0).all()
    assert codes.min() == 1  # the largest of a block is a whole code on one side
