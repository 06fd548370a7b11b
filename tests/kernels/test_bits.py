"""The same bits everywhere: every way of computing an answer, against hashes that are kept with the tests.

Inputs come from PCG64's raw stream through integer arithmetic, so no library has a say in them. To accept new bits on
purpose: ``PYTHONPATH=tests python tests/kernels/test_bits.py``.
"""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from reference import ACTIVATIONS, Classifier, Ffns, integers, numbers

from colibri_cli import Balancer, Experts, GumbelNoise, Model, Router, _core
from colibri_cli.formats.experts import ExpertShape

pytestmark = pytest.mark.usefixtures("isa")

GOLDEN = Path(__file__).parent.parent / "data" / "golden_bits.json"


def digest(*arrays):
    """sha256 over the arrays' bytes, little-endian."""
    sha = hashlib.sha256()
    for a in arrays:
        sha.update(np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def golden(name):
    return json.loads(GOLDEN.read_text())[name]


# ---------------------------------------------------------------- the matrix

# Many small experts, and few wide ones whose projections several threads share.
LAYERS = {
    "small": (Ffns.make(1, 9, 81, 49, activation="silu"), 133, 3),
    "wide": (Ffns.make(2, 2, 273, 150, activation="gelu", gated=False), 29, 2),
}


def batch(name):
    ffns, n_tokens, top_k = LAYERS[name]
    n_experts, hidden = ffns.down.shape[:2]
    ids = np.argsort(numbers(3, n_tokens, n_experts), axis=1, kind="stable")[:, :top_k].astype(np.int32)
    ids[::7, -1] = -1
    return numbers(4, n_tokens, hidden), ids, numbers(5, n_tokens, top_k)


def layer(name, folder, loading, threads, max_tokens):
    ffns = LAYERS[name][0]
    if loading == "arrays":
        return Experts.from_arrays(**ffns.arrays(), threads=threads, max_tokens=max_tokens)
    shape = ExpertShape(*ffns.down.shape[1:], ffns.activation, ffns.gated)
    files = [f"expert_{e}.bin" for e in range(len(ffns.down))]
    return Experts.open(folder / name, loading, 1, threads, max_tokens, shape=shape, files=files)


def offset(a, n_bytes):
    """The same values, starting n_bytes after a 64-byte boundary."""
    memory = np.empty(a.nbytes + 128, np.uint8)
    first = -memory.ctypes.data % 64 + n_bytes
    view = memory[first : first + a.nbytes].view(a.dtype).reshape(a.shape)
    view[...] = a
    return view


ARRANGEMENTS = {
    "4 bytes off": lambda a: offset(a, 4),
    "1 byte off": lambda a: offset(a, 1),
    "60 bytes off": lambda a: offset(a, 60),
    "rows apart": lambda a: np.repeat(a, 2, axis=0)[::2],
    "columns apart": lambda a: np.repeat(a, 3, axis=1)[:, ::3],
    "backwards": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
    "fortran": np.asfortranarray,
}


def splits(n):
    """Ways to cut a batch: whole, one by one, and two uneven ones."""
    return {
        "whole": [n],
        "one by one": [1] * n,
        "around the lanes": [1, 7, 8, 9, n - 25],
        "halves": [n // 2, 0, n - n // 2],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("layers")
    for name, (ffns, _, _) in LAYERS.items():
        (path / name).mkdir()
        ffns.write(path / name)
    return path


@pytest.mark.parametrize("max_tokens", [10, 512])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("loading", ["arrays", "static", "mmap", "on-demand"])
@pytest.mark.parametrize("name", LAYERS)
def test_experts(name, loading, threads, max_tokens, folder):
    experts, (x, ids, weights) = layer(name, folder, loading, threads, max_tokens), batch(name)
    found = {}
    for way, arrange in ARRANGEMENTS.items():
        found[way] = digest(experts.run(arrange(x), arrange(ids.astype(np.int64)), arrange(weights)))
    for way, lengths in splits(len(x)).items():
        ends = np.cumsum(lengths)
        parts = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        found[way] = digest(np.concatenate([experts.run(x[part], ids[part], weights[part]) for part in parts]))
    out = offset(np.empty_like(x), 4)
    experts.run(x, ids, weights, out=out)
    found["given out"] = digest(out)
    assert found == dict.fromkeys(found, golden(f"experts, {name}"))


# ---------------------------------------------------------------- every kernel

RULES = {
    "gated": {},
    "ungated": {"gated": False},
    "gpt-oss": {"limit": 1.5, "alpha": 1.702, "beta": 1.0},
}


def activations():
    for rule, options in RULES.items():
        for activation in ACTIVATIONS:
            ffns = Ffns.make(7, 3, 21, 35, activation=activation, **options)
            x, ids, weights = numbers(8, 40, 21) * np.float32(4), integers(9, 0, 3, 40, 2), numbers(10, 40, 2)
            yield f"{activation}, {rule}", digest(Experts.from_arrays(**ffns.arrays()).run(x, ids, weights))


EXTREMES = np.float32([3e38, -3e38, 1e-45, -1e-40, 0.0, 1.0, -86.6, 88.1])


def softmaxes():
    for gating in ("exact", "taylor"):
        rows = [numbers(1, 67, 24) * np.float32(scale) for scale in (0.5, 8, 128, 2.0**100)]
        tops = np.float32([0, 3e38, -3e38, 1])[:, np.newaxis]
        found = [_core.softmax(r, gating) for r in (*rows, np.concatenate([tops, np.tile(EXTREMES[:7], (4, 1))], 1))]
        yield f"softmax, {gating}", digest(*found)


def routings():
    for kind in ("softmax-topk", "topk-softmax"):
        for gating in ("exact", "taylor"):
            for renormalize in (True, False):
                found = []
                for n_experts, top_k in ((8, 2), (17, 5), (3, 3), (40, 8)):
                    weight, bias = numbers(1, n_experts, 37), numbers(2, n_experts)
                    router = Router.from_array(
                        weight, bias, kind=kind, top_k=top_k, gating=gating, renormalize=renormalize, threads=2
                    )
                    routing = router.route(numbers(3, 301, 37) * np.float32(2))
                    found += [routing.expert_ids, routing.expert_weights, routing.load]
                yield f"route, {kind}, {gating}, {'' if renormalize else 'not '}renormalised", digest(*found)


SCORED = {
    "softmax-topk": {},
    "sigmoid-topk": {},
    "sigmoid-topk, by the best of a group": {"group_score": "max", "masked_score": 0.0, "renormalize": False},
    "sqrtsoftplus-topk": {},
    "topk-sigmoid": {},
}


def routings_by_score():
    for name, options in SCORED.items():
        found, kind = [], name.split(",")[0]
        for n_experts, top_k, n_groups, topk_groups in ((8, 2, 2, 1), (17, 5, 1, 1), (3, 3, 1, 1), (40, 8, 8, 4)):
            groups = {} if kind == "topk-sigmoid" else {"n_groups": n_groups, "topk_groups": topk_groups}
            weight, bias, correction = numbers(1, n_experts, 37), numbers(2, n_experts), numbers(4, n_experts)
            gate = {"kind": kind, "top_k": top_k, "scale": 2.5, "correction_bias": correction, "threads": 2}
            router = Router.from_array(weight, bias, **gate, **groups, **options)
            hidden, balancer = numbers(3, 301, 37) * np.float32(2), Balancer(n_experts, threshold=1.2)
            plain, balanced = router.route(hidden), router.route(hidden, balancer)
            found += [plain.expert_ids, plain.expert_weights, balanced.expert_ids, balanced.expert_weights]
            found += [balancer.state()["ring"]]
        yield f"route by score, {name}", digest(*found)


def level_two():
    hidden, router = numbers(4, 2000, 12), Router.from_array(numbers(5, 12, 12), top_k=3)
    for prefer in ("score", "emptiest"):
        balancer = Balancer(12, threshold=1.2, prefer=prefer)
        routing = router.route(hidden, balancer)
        yield f"balanced, {prefer}", digest(routing.expert_ids, routing.expert_weights, balancer.state()["ring"])
    noisy = router.route(hidden, noise=GumbelNoise(0.75, 2024))
    yield "noisy", digest(noisy.expert_ids, noisy.expert_weights)
    both = router.route(hidden, Balancer(12), noise=GumbelNoise(0.75, 2024))
    yield "noisy and balanced", digest(both.expert_ids, both.expert_weights)


def small_model(folder):
    model = Classifier.make(3, hidden=45, inter=19, context=3, n_classes=21, vocab=300)
    return Model.open(model.write(Path(folder) / "bundle")), integers(6, 0, 300, 500)


def built_in_model(_folder):
    return Model.open(), integers(7, 0, 12_000, 500)


MODELS = {"model, small": small_model, "model, built-in": built_in_model}


def inferred(name, folder):
    model, ids = MODELS[name](folder)
    result = model.infer(ids)
    return digest(result.probabilities, result.classes, result.routing.expert_ids, result.routing.expert_weights)


def test_activations():
    for name, found in activations():
        assert found == golden(name), name


def test_gating():
    for name, found in (*softmaxes(), *routings(), *routings_by_score()):
        assert found == golden(name), name


def test_balancing_and_noise():
    for name, found in level_two():
        assert found == golden(name), name


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path):
    assert inferred(name, tmp_path) == golden(name)


def test_no_two_hashes_are_the_same():
    hashes = json.loads(GOLDEN.read_text())
    # Softmax over the chosen, and softmax over all renormalised over the chosen, are one computation.
    same = [name for name in hashes if name.startswith("route, topk-softmax") or name.endswith(", renormalised")]
    for gating in ("exact", "taylor"):
        assert len({hashes[name] for name in same if gating in name}) == 1
    others = [value for name, value in hashes.items() if name not in same]
    assert len(set(others)) == len(others)


def main():
    """Write the hashes that this build gives."""
    with tempfile.TemporaryDirectory() as folder:
        found = {f"experts, {name}": digest(layer(name, None, "arrays", 1, 512).run(*batch(name))) for name in LAYERS}
        found |= dict([*activations(), *softmaxes(), *routings(), *routings_by_score(), *level_two()])
        found |= {name: inferred(name, folder) for name in MODELS}
    GOLDEN.write_text(json.dumps(found, indent=1) + os.linesep)
    sys.stdout.write(f"{len(found)} hashes of {_core.isa()} in {GOLDEN}\n")


if __name__ == "__main__":
    main()
