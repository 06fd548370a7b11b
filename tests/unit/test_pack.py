"""`colibri pack`: a bundle equals its checkpoint, whatever interrupts it."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tiny_checkpoint

import colibri_cli
from colibri_cli import Experts, MoELayer, Router
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.pack import DTYPES, pack

HIDDEN, INTER, EXPERTS, LAYERS, TOP_K = 40, 24, 3, 2, 2
CONFIG = tiny_checkpoint.config(HIDDEN, INTER, EXPERTS, LAYERS, TOP_K)


@pytest.fixture
def weights():
    return tiny_checkpoint.weights(HIDDEN, INTER, EXPERTS, LAYERS)


@pytest.fixture
def checkpoint(tmp_path, weights):
    folder = tmp_path / "checkpoint"
    tiny_checkpoint.write(folder, CONFIG, weights)
    return folder


@pytest.fixture
def bundle(tmp_path):
    return tmp_path / "bundle"


def _layer(weights, layer, dtype):
    mlp = f"model.layers.{layer}.mlp"

    def stack(name):
        return np.stack([weights[f"{mlp}.experts.{e}.{name}_proj.weight"] for e in range(EXPERTS)])

    gate_up = np.concatenate([stack("gate"), stack("up")], axis=1)
    return MoELayer(
        Router.from_array(weights[f"{mlp}.gate.weight"], top_k=TOP_K),
        Experts.from_arrays(gate_up, stack("down"), dtype=dtype),
    )


def _files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class _Interrupting:
    """Counts, and is interrupted in place of step ``after``."""

    def __init__(self, after, error=KeyboardInterrupt):
        self.after, self.error = after, error

    def __call__(self, total, _label):
        for i in range(total):
            if i == self.after:
                raise self.error
            yield i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_layers_have_the_bits_of_the_checkpoints_arrays(checkpoint, bundle, weights, dtype, threads):
    done = pack(checkpoint, bundle, dtype=dtype, threads=threads, verify=True)
    assert (done.family, done.layers, done.written, done.resumed) == ("olmoe", (0, 1), LAYERS, 0)
    layer_files = [path for path in (bundle / "layers").rglob("*") if path.is_file()]
    assert done.packed_bytes == sum(path.stat().st_size for path in layer_files)
    x = np.random.default_rng(6).standard_normal((9, HIDDEN), np.float32)
    for layer in range(LAYERS):
        for loading in ("mmap", "static", "on-demand"):
            opened = MoELayer.open(bundle, layer, loading=loading)
            assert np.array_equal(opened(x), _layer(weights, layer, dtype)(x))


@pytest.mark.parametrize("after", range(1, EXPERTS * LAYERS))
def test_an_interrupted_pack_goes_on(checkpoint, bundle, tmp_path, after):
    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, bundle, threads=1, steps=_Interrupting(after))
    assert not (bundle / "config.json").exists()
    with pytest.raises(UsageError, match=r"a finished bundle, got an unfinished pack [^\n]*\n.*the same colibri pack"):
        MoELayer.open(bundle)
    done = pack(checkpoint, bundle, verify=True)
    assert done.resumed == (1 if after >= EXPERTS else 0)
    assert done.written + done.resumed == LAYERS
    pack(checkpoint, tmp_path / "at once")
    assert _files(bundle) == _files(tmp_path / "at once")


def test_a_killed_pack_leaves_nothing_that_the_next_one_trusts(checkpoint, bundle, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, bundle, threads=1, steps=_Interrupting(EXPERTS + 1))
    unfinished = bundle / "layers/1/experts"
    (unfinished / "expert_0.bin").write_bytes(b"torn")
    (unfinished / ".colibri-left").write_bytes(b"behind")
    pack(checkpoint, bundle)
    pack(checkpoint, tmp_path / "at once")
    assert _files(bundle) == _files(tmp_path / "at once")


def test_a_folder_is_finished_as_it_was_begun(checkpoint, bundle):
    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, bundle, steps=_Interrupting(1))
    before = _files(bundle)
    with pytest.raises(UsageError, match="dtype that this folder was begun with"):
        pack(checkpoint, bundle, dtype="int8")
    os.utime(checkpoint / "model.safetensors", (1, 1))
    with pytest.raises(UsageError, match=r"checkpoint .* that this folder was begun with"):
        pack(checkpoint, bundle)
    assert _files(bundle) == before


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": "colibri.pack-journal/1"}', "[" * 100_000])
def test_a_damaged_journal_is_refused(checkpoint, bundle, content):
    bundle.mkdir()
    (bundle / "pack-journal.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"pack-journal\.json"):
        pack(checkpoint, bundle)


def test_other_folders_are_left_alone(checkpoint, bundle):
    bundle.mkdir()
    (bundle / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"an empty folder, got one that holds 'thesis\.txt'"):
        pack(checkpoint, bundle)
    assert _files(bundle) == {Path("thesis.txt"): b"years of work"}
    with pytest.raises(UsageError):
        pack(checkpoint, checkpoint)


def test_a_checkpoint_is_no_bundle(checkpoint):
    before = _files(checkpoint)
    with pytest.raises(UsageError, match=r"an empty folder, got one that holds"):
        pack(checkpoint, checkpoint, verify=True)
    assert _files(checkpoint) == before


def test_what_an_end_before_the_journal_left_is_no_obstacle(checkpoint, bundle):
    bundle.mkdir()
    (bundle / ".colibri-left").write_bytes(b"{")
    (checkpoint / "tokenizer.json").symlink_to("/nowhere/at/all")
    assert pack(checkpoint, bundle, verify=True).written == LAYERS
    (bundle / "pack-journal.json").write_text("{}")  # an end before the journal was dropped
    pack(checkpoint, bundle, verify=True)
    assert not (bundle / "pack-journal.json").exists()


def test_two_packs_do_not_share_a_folder(checkpoint, bundle):
    bundle.mkdir()
    handle = os.open(bundle, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another process packs into"):
        pack(checkpoint, bundle)
    os.close(handle)
    pack(checkpoint, bundle)


def test_a_finished_bundle_is_only_compared(checkpoint, bundle):
    pack(checkpoint, bundle)
    before = _files(bundle)
    with pytest.raises(UsageError, match="a finished bundle"):
        pack(checkpoint, bundle)
    assert pack(checkpoint, bundle, verify=True).written == 0
    assert _files(bundle) == before
    with pytest.raises(InvalidInput, match=r"config\.json"):
        pack(checkpoint, bundle, dtype="int8", verify=True)


@pytest.mark.parametrize("name", ["router_weights.bin", "experts/expert_2.bin"])
@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_verify_finds_a_damaged_file(checkpoint, bundle, name, change):
    pack(checkpoint, bundle)
    path = bundle / "layers/1" / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    if change == "remove":
        path.unlink()
    else:
        path.write_bytes(data if change == "flip" else data[:-1])
    with pytest.raises((InvalidInput, UsageError), match=f"layers/1/{name}"):
        pack(checkpoint, bundle, verify=True)


def test_what_is_not_finite_is_named(tmp_path, weights, bundle):
    weights["model.layers.1.mlp.experts.2.down_proj.weight"][3, 4] = np.nan
    tiny_checkpoint.write(tmp_path, CONFIG, weights)
    with pytest.raises(InvalidInput, match="layer 1, expert 2"):
        pack(tmp_path, bundle, dtype="int8")
    assert not (bundle / "config.json").exists()


def test_a_missing_tensor_is_named_before_anything_is_written(tmp_path, weights, bundle):
    del weights["model.layers.1.mlp.experts.2.down_proj.weight"]
    tiny_checkpoint.write(tmp_path, CONFIG, weights)
    with pytest.raises(InvalidInput, match=r"model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight"):
        pack(tmp_path, bundle)
    assert not bundle.exists()


def test_a_small_disk_is_refused_before_anything_is_written(checkpoint, bundle, monkeypatch):
    usage = shutil.disk_usage(checkpoint)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 10))
    with pytest.raises(UsageError, match="MiB of room"):
        pack(checkpoint, bundle)
    assert _files(bundle) == {}


def test_what_an_interrupted_pack_left_counts_as_room(checkpoint, bundle, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, bundle, threads=1, steps=_Interrupting(EXPERTS - 1))
    (bundle / "layers/0/experts/expert_0.bin").write_bytes(bytes(1 << 20))
    usage = shutil.disk_usage(checkpoint)

    def room(folder):
        return usage._replace(free=(1 << 20) - sum(len(data) for data in _files(folder).values()))

    monkeypatch.setattr(shutil, "disk_usage", room)
    assert pack(checkpoint, bundle).written == LAYERS


@pytest.mark.parametrize("when", [0, EXPERTS + 1, LAYERS * EXPERTS - 1])
def test_a_checkpoint_that_changes_while_it_is_packed_is_no_bundle(checkpoint, bundle, when):
    def changing(total, _label):
        for i in range(total):
            if i == when:
                os.utime(checkpoint / "model.safetensors", (1, 1))
            yield i

    with pytest.raises(UsageError, match="stays as it is while it is packed"):
        pack(checkpoint, bundle, threads=1, steps=changing)
    assert not (bundle / "config.json").exists()
    with pytest.raises(UsageError, match="that this folder was begun with"):
        pack(checkpoint, bundle)


def test_a_read_only_file_system_can_be_verified(checkpoint, bundle, monkeypatch):
    pack(checkpoint, bundle)

    def refuse(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for name in ("unlink", "rename", "replace", "mkdir"):
        monkeypatch.setattr(Path, name, refuse if name != "mkdir" else lambda *_, **__: None)
    assert pack(checkpoint, bundle, verify=True).verified


def test_layers_elsewhere_are_not_removed(checkpoint, bundle, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        pack(checkpoint, bundle, threads=1, steps=_Interrupting(1))
    (bundle / "layers").rename(tmp_path / "elsewhere")
    (bundle / "layers").symlink_to(tmp_path / "elsewhere")
    before = _files(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="bundle's own folder"):
        pack(checkpoint, bundle)
    assert _files(tmp_path / "elsewhere") == before


def test_a_temporary_file_is_not_left_in_a_finished_bundle(checkpoint, bundle):
    pack(checkpoint, bundle)
    (bundle / ".colibri-0123456789abcdef").write_bytes(b"{")
    pack(checkpoint, bundle, verify=True)
    assert not list(bundle.glob(".colibri-*"))


def test_a_file_that_cannot_grow_is_reported_and_the_pack_goes_on_later(checkpoint, bundle, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [sys.executable, "-m", "colibri_cli", "pack", str(checkpoint), str(bundle), "--dtype", "f32"]
    run = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert run.returncode == 2
    assert "Expected a writable file" in run.stderr
    assert not list(bundle.rglob(".colibri-*"))
    pack(checkpoint, bundle, dtype="float32", verify=True)
    pack(checkpoint, tmp_path / "at once", dtype="float32")
    assert _files(bundle) == _files(tmp_path / "at once")


@pytest.mark.parametrize(
    ("flag", "name"),
    [("f32", "float32"), ("bf16", "bfloat16"), ("int8", "int8"), ("int4", "int4"), ("bfloat16", "bfloat16")],
)
def test_the_command_reports_what_it_did(checkpoint, bundle, flag, name):
    command = [sys.executable, "-m", "colibri_cli", "pack", str(checkpoint), str(bundle), "--dtype", flag]
    run = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True)
    report = json.loads(run.stdout)
    schema = Path(colibri_cli.__file__).with_name("schema") / "pack.schema.json"
    jsonschema.validate(report, json.loads(schema.read_text()))
    assert (report["dtype"], report["written"], report["verified"]) == (name, LAYERS, False)
    run = subprocess.run([*command, "--verify"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"{bundle}: olmoe, 0 of 2 layers written, 2 found, 3 experts each")
    assert "verified" in run.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stdout) == (2, "")
    assert "hint: --verify" in again.stderr


@pytest.mark.parametrize("name", ["nosuch", "config.json", "n" * 300])
def test_what_is_no_checkpoint_is_named(checkpoint, bundle, name):
    path = checkpoint / name
    with pytest.raises(UsageError, match=r"a directory with config\.json, got none") as refused:
        pack(path, bundle)
    assert refused.value.at == str(path)
    assert not bundle.exists()


@pytest.mark.parametrize(
    "command", [["validate-config"], ["pack", "checkpoint", "--dtype", "int8"], ["infer", "--text", "a", "--output"]]
)
def test_a_name_that_no_file_can_have_is_named(command, tmp_path):
    name = "n" * 300
    run = subprocess.run(
        [sys.executable, "-m", "colibri_cli", *command, name], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert "standard output" not in run.stderr
    assert name in run.stderr or command[0] == "pack"
