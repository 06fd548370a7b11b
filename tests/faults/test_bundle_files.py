"""Bundles whose files are missing, cut, swollen, or no files at all: a clear error that names the file, and no hang."""

import contextlib
import os
import threading

import numpy as np
import pytest
from reference import Classifier

from colibri_cli import ColibriError, InvalidInput, Model, UsageError

CLASSIFIER = Classifier.make()
FILES = ("embedding.bin", "context.bin", "router_weights.bin", "head.bin", "experts/expert_3.bin")
LOADINGS = ("static", "mmap", "on-demand")
IDS = list(range(40))


@pytest.fixture
def bundle(tmp_path):
    return CLASSIFIER.write(tmp_path / "bundle")


def resize(change):
    return lambda path: os.truncate(path, path.stat().st_size + change)


def swollen(path):
    os.truncate(path, 1 << 40)  # sparse: nothing may try to hold it


def gone(path):
    path.unlink()


def folder(path):
    path.unlink()
    path.mkdir()


def dangling(path):
    path.unlink()
    path.symlink_to("nowhere")


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "empty": (lambda path: os.truncate(path, 0), InvalidInput),
    "a byte short": (resize(-1), InvalidInput),
    "a float short": (resize(-4), InvalidInput),
    "a byte long": (resize(1), InvalidInput),
    "a float long": (resize(4), InvalidInput),
    "swollen": (swollen, InvalidInput),
    "missing": (gone, UsageError),
    "a folder": (folder, ColibriError),
    "a dangling link": (dangling, UsageError),
    "a link to itself": (loop, UsageError),
    "a device": (device, ColibriError),
}
CASES = [(file, "mmap") for file in FILES] + [(FILES[-1], "static"), (FILES[-1], "on-demand")]


@pytest.mark.parametrize(("damage", "error"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize(("file", "loading"), CASES)
def test_a_damaged_file_is_named(file, loading, damage, error, bundle):
    damage(bundle / file)
    with pytest.raises(error, match=rf" - at .*{file.replace('/', '.')}") as caught:
        Model.open(bundle, loading=loading)
    assert caught.value.exit_code == (2 if isinstance(caught.value, UsageError) else 1)


@pytest.mark.parametrize(("file", "loading"), CASES)
def test_a_pipe_does_not_hang(file, loading, bundle):
    pipe(bundle / file)
    errors = []

    def attempt():
        try:
            Model.open(bundle, loading=loading)
        except ColibriError as error:
            errors.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(3)
    hung = thread.is_alive()
    while thread.is_alive():  # let it go, whatever it waits for
        with contextlib.suppress(OSError):  # nobody reads, or nobody has yet
            os.close(os.open(bundle / file, os.O_WRONLY | os.O_NONBLOCK))
        thread.join(0.05)
    assert not hung
    assert len(errors) == 1
    assert os.path.basename(file) in errors[0]  # noqa: PTH119 - a name inside the bundle


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize(("file", "loading"), CASES)
def test_an_unreadable_file(file, loading, bundle):
    (bundle / file).chmod(0)
    with pytest.raises(UsageError, match="permission denied"):
        Model.open(bundle, loading=loading)


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 51},
        {"vocab_size": 1 << 24},
        {"hidden_size": 23},
        {"hidden_size": 65_536},
        {"intermediate_size": 11},
        {"intermediate_size": 262_144},
        {"context": 1},
        {"gated": False},
        {"n_experts": 7},
        {"n_experts": 1024},
        {"n_classes": 6, "classes": list("abcdef")},
    ],
    ids=lambda change: next(iter(change)) + f" {next(iter(change.values()))}",
)
def test_a_config_that_the_files_do_not_fit(change, tmp_path):
    with pytest.raises(ColibriError, match=r" - at .*\.bin"):
        Model.open(CLASSIFIER.write(tmp_path / "bundle", **change))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"top_k": 7}, "top_k"),
        ({"activation": "swish"}, "activation"),
        ({"artifact": "../../etc/passwd"}, "artifact"),
        ({"artifact": "experts/../../{i}.bin"}, "artifact"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "24"}, "hidden_size"),
        ({"hidden_size": 1 << 63}, "hidden_size"),
        ({"context": 32}, "context"),
        ({"n_classes": 1025}, "n_classes"),
        ({"schema_version": 2}, "schema_version"),
    ],
)
def test_a_config_that_is_none(change, place, tmp_path):
    with pytest.raises(InvalidInput, match=rf"config\.json:.*\$\.{place}"):
        Model.open(CLASSIFIER.write(tmp_path / "bundle", **change))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"{}", b"[" * 100_000])
def test_a_config_that_is_no_json(text, bundle):
    (bundle / "config.json").write_bytes(text)
    with pytest.raises(InvalidInput, match=r"config\.json"):
        Model.open(bundle)


def test_a_bundle_without_a_config(bundle):
    (bundle / "config.json").unlink()
    with pytest.raises(UsageError, match=r"config\.json"):
        Model.open(bundle)


def test_folders_that_are_none(bundle, tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        Model.open(tmp_path / "none")
    with pytest.raises(UsageError, match="no such folder"):
        Model.open(bundle / "head.bin")
    with pytest.raises(UsageError, match="no such folder"):
        Model.open(bundle, experts_dir=tmp_path / "none")
    with pytest.raises(UsageError, match=r"expert_0\.bin"):
        Model.open(bundle, experts_dir=tmp_path)


# ---------------------------------------------------------------- weights that are not finite


def poison(path, value, at):
    floats = np.fromfile(path, "<f4")
    floats[at] = value
    floats.tofile(path)


@pytest.mark.parametrize("loading", LOADINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_expert_that_is_not_finite_names_the_first_token_it_served(value, loading, bundle):
    chosen = Model.open(bundle).infer(IDS).routing.expert_ids
    tokens = np.flatnonzero((chosen == 3).any(axis=1))
    assert 0 < len(tokens) < len(IDS)
    poison(bundle / "experts/expert_3.bin", value, -1)  # the last bias of the down projection
    model = Model.open(bundle, loading=loading)
    with pytest.raises(InvalidInput, match=rf"Expected finite class logits, .* - at token {tokens[0]}\n"):
        model.infer(IDS)
    others = [i for i in IDS if i not in tokens]
    x = CLASSIFIER.mix(IDS).astype(np.float32)[others]
    routing = model.layer.router.route(x)
    assert np.isfinite(model.experts.run(x, routing.expert_ids, routing.expert_weights)).all()


def test_an_embedding_that_is_not_finite_names_the_first_token_it_reaches(bundle):
    poison(bundle / "embedding.bin", np.nan, 17 * 24 + 5)
    model = Model.open(bundle)
    with pytest.raises(InvalidInput, match=r"Expected finite router logits, .* - at token 15\n"):
        model.infer(IDS)
    assert np.isfinite(model.infer(IDS[:17]).probabilities).all()


def test_a_mixer_that_is_not_finite(bundle):
    poison(bundle / "context.bin", np.nan, 0)  # what stands two tokens before
    model = Model.open(bundle)
    with pytest.raises(InvalidInput, match="at token 0\n"):
        model.infer(IDS)


def test_a_head_that_is_not_finite(bundle):
    poison(bundle / "head.bin", np.inf, -1)
    with pytest.raises(InvalidInput, match=r"Expected finite class logits, .* - at token 0\n"):
        Model.open(bundle).infer(IDS)


def test_a_router_that_is_not_finite(bundle):
    poison(bundle / "router_weights.bin", np.nan, 24 + 7)
    with pytest.raises(InvalidInput, match=r"Expected finite weights, got nan - at .*\[1, 7\]"):
        Model.open(bundle)
