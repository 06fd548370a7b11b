import hashlib
import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats import router_table
from colibri_cli.gen_router import generate, read_gate

ROOT = Path(__file__).parents[2]
GATES = ROOT / "tests" / "data" / "gates"
SCRIPT = ROOT / "scripts" / "gen_router.py"
FULL = np.load(GATES / "full.npy")
COARSE = np.load(GATES / "coarse.npy")
BLOB_SHA256 = "cd17ed11962e8e6f4baf66dff603d175315c645cd4db4a97978c991b36e33e82"
ENDINGS = (".c", ".h", ".bin", ".npy")

SOURCES_OF_FULL = {
    "tensor.pt": {},
    "tensor_legacy.pth": {},
    "parameter.pt": {},
    "float64.pt": {},
    "state_dict.pt": {},
    "state_dict_legacy.pt": {"key": "gate.weight"},
    "nested.pt": {},
    "transposed_view.pt": {},
    "slice_of_stack.pt": {},
    "every_other_column.pt": {},
    "pickle_protocol_4.pt": {},
    "new_dtypes.pt": {},
    "no_checksums.pt": {},
    "two_gates.pt": {"key": "layers.0.gate.weight"},
    "transposed.pt": {"transposed": True},
    "float32.safetensors": {},
    "float64.safetensors": {},
    "full.npy": {},
    "float64.npy": {},
    "fortran_order.npy": {},
    "big_endian.npy": {},
    "stored.npz": {},
    "compressed.npz": {"key": "gate"},
    "raw.bin": {"hidden_size": 32},
    "raw_transposed.bin": {"hidden_size": 32, "transposed": True},
}
SOURCES_OF_COARSE = {
    "float16.pt": {},
    "bfloat16.pt": {},
    "bfloat16_legacy.pt": {},
    "float16.npy": {},
    "float16.safetensors": {},
    "bfloat16.safetensors": {},
    "two_gates.pt": {"key": "layers.1.gate.weight"},
}


def rendered(source, ending, tmp_path, **options):
    output = tmp_path / f"out{ending}"
    generate(source, output, **options)
    return output.read_bytes()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ending", ENDINGS)
def test_same_weights_same_bytes_whatever_the_source(tmp_path, ending):
    for sources, expected in ((SOURCES_OF_FULL, "full.npy"), (SOURCES_OF_COARSE, "coarse.npy")):
        wanted = rendered(GATES / expected, ending, tmp_path)
        for name, options in sources.items():
            assert rendered(GATES / name, ending, tmp_path, **options) == wanted, name


@pytest.mark.parametrize("ending", [".bin", ".npy"])
def test_an_output_is_a_source_of_the_same_bytes(tmp_path, ending):
    first = rendered(GATES / "full.npy", ending, tmp_path)
    copy = tmp_path / f"elsewhere{ending}"
    copy.write_bytes(first)
    assert rendered(copy, ending, tmp_path) == first


def test_the_bytes_are_these_for_good():
    # A build elsewhere, later, with another numpy or Python, must write them again.
    gate = np.array([[0.5, -0.1], [1e-45, 3.0]], np.float32)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }".ljust(117) + b"\n"
    assert router_table.to_npy(gate) == b"\x93NUMPY\x01\x00\x76\x00" + header + gate.tobytes()
    assert hashlib.sha256(router_table.to_blob(gate)).hexdigest() == BLOB_SHA256
    zeros = ", ".join(["0x0p+0f"] * 6)
    eight = ", ".join(["0x0p+0f"] * 8)
    assert router_table.to_c(gate, "gate").decode() == (
        "/* Router table: 2 experts, padded with zeros to 16; hidden size 2.\n"
        "   Written by colibri gen-router: change the weights, not this file. */\n"
        "extern const float gate[2][16];\n"
        "extern const int gate_shape[3]; /* n_experts, hidden_size, width */\n\n"
        "const int gate_shape[3] = {2, 2, 16};\n\n"
        "_Alignas(64) const float gate[2][16] = {\n"
        f"    {{0x1p-1f, 0x1p-149f, {zeros},\n     {eight}}},\n"
        f"    {{-0x1.99999ap-4f, 0x1.8p+1f, {zeros},\n     {eight}}}\n"
        "};\n"
    )


def test_the_report_says_what_was_done(tmp_path):
    output = tmp_path / "table.c"
    done = generate(GATES / "state_dict.pt", output)
    data = output.read_bytes()
    assert json.loads(done.to_json()) == {
        "schema": "colibri.gen-router/1",
        "source": str(GATES / "state_dict.pt"),
        "key": "gate.weight",
        "n_experts": 8,
        "hidden_size": 32,
        "width": 16,
        "output": str(output),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "before": "missing",
        "written": True,
    }
    assert done.to_text() == (
        f"{output}: written, 8 experts, hidden size 32, width 16, {len(data)} bytes, "
        f"sha256 {hashlib.sha256(data).hexdigest()}\n"
    )


def test_a_file_that_is_up_to_date_is_not_touched(tmp_path):
    output = tmp_path / "table.c"
    generate(GATES / "full.npy", output)
    os.utime(output, (1, 1))
    inode = output.stat().st_ino
    done = generate(GATES / "tensor.pt", output)
    assert (done.before, done.written) == ("up to date", False)
    assert (output.stat().st_mtime, output.stat().st_ino) == (1, inode)
    assert "up to date" in done.to_text()


def test_a_stale_file_is_replaced(tmp_path):
    output = tmp_path / "table.c"
    generate(GATES / "coarse.npy", output)
    before = output.read_bytes()
    done = generate(GATES / "full.npy", output)
    assert (done.before, done.written, done.stale) == ("stale", True, False)
    assert output.read_bytes() != before
    assert names_in(tmp_path) == ["table.c"]


@pytest.mark.parametrize("content", [None, b"", b"stale"])
def test_check_writes_nothing(tmp_path, content):
    output = tmp_path / "table.c"
    if content is not None:
        output.write_bytes(content)
    done = generate(GATES / "full.npy", output, check=True)
    before = "missing" if content is None else "stale"
    assert (done.before, done.written, done.stale) == (before, False, True)
    assert f": {before}, " in done.to_text()
    assert (output.read_bytes() if output.exists() else None) == content
    generate(GATES / "full.npy", output)
    assert not generate(GATES / "full.npy", output, check=True).stale


def test_name_renames_the_table_and_nothing_else(tmp_path):
    default = rendered(GATES / "full.npy", ".c", tmp_path)
    renamed = rendered(GATES / "full.npy", ".c", tmp_path, name="gate_of_layer_0")
    assert renamed == default.replace(b"colibri_router_table", b"gate_of_layer_0")


def test_a_gate_is_read_c_contiguous():
    for name, options in (("full.npy", {}), ("fortran_order.npy", {}), ("transposed.pt", {"transposed": True})):
        key, gate = read_gate(GATES / name, **options)
        assert key == ""
        assert gate.dtype == np.float32
        assert gate.flags.c_contiguous
        np.testing.assert_array_equal(gate.view(np.uint32), FULL.view(np.uint32))


@pytest.mark.parametrize(
    ("arrays", "options", "key"),
    [
        ({"gate": (4, 8), "embedding": (100, 8), "bias": (4,), "ids": (3, 3)}, {}, "gate"),
        ({"gate": (8, 4), "embedding": (8, 100)}, {"transposed": True}, "gate"),
        ({"small": (4, 8), "wide": (4, 16)}, {"hidden_size": 16}, "wide"),
        ({"shared": (1, 8), "gate": (2, 8)}, {}, "gate"),
        ({"square": (8, 8), "gate": (2, 8)}, {}, "gate"),
        ({"only": (8, 8)}, {}, "only"),
        ({"only": (9, 3)}, {"hidden_size": 3}, "only"),
        ({"small": (4, 8), "wide": (4, 16)}, {"key": "small"}, "small"),
    ],
)
def test_the_gate_is_found(tmp_path, arrays, options, key):
    source = tmp_path / "model.npz"
    np.savez(source, **{name: np.zeros(shape, np.float32) for name, shape in arrays.items()})
    assert read_gate(source, **options)[0] == key


def test_an_ambiguous_file_lists_what_can_be_a_gate_smallest_first(tmp_path):
    source = tmp_path / "model.npz"
    arrays = {f"layer{i}": np.zeros((4, 8 + i), np.float32) for i in reversed(range(30))}
    np.savez(source, embedding=np.zeros((100, 8)), **arrays)
    with pytest.raises(InvalidInput) as caught:
        read_gate(source)
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "Expected one tensor that can be a gate (2-D, floating, more features than experts), "
        f"got 30 of 31 - at {source}"
    )
    assert lines[1:4] == ["hint: pick one with --key", "  layer0  [4, 8]  float32", "  layer1  [4, 9]  float32"]
    assert lines[-1] == "  and 10 more"
    assert len(lines) == 2 + 20 + 1


def test_a_file_without_a_gate_lists_what_there_is(tmp_path):
    source = tmp_path / "model.npz"
    np.savez(source, bias=np.zeros(4), ids=np.zeros((2, 4), np.int64))
    with pytest.raises(InvalidInput, match="got 0 of 2") as caught:
        read_gate(source)
    assert caught.value.hint == "pick one with --key\n  ids  [2, 4]  int64\n  bias  [4]  float64"


@pytest.mark.parametrize(
    ("shape", "options"), [((128, 8), {}), ((8, 128), {"transposed": True}), ((128, 8), {"key": ""})]
)
def test_more_experts_than_features_are_refused_unless_stated(tmp_path, shape, options):
    source = tmp_path / "gate.npy"
    np.save(source, np.zeros(shape, np.float32))
    with pytest.raises(
        InvalidInput, match="at least as many features as experts, got 128 experts of hidden size 8"
    ) as caught:
        read_gate(source, **options)
    assert "--transposed" in caught.value.hint
    assert "--hidden-size 8" in caught.value.hint
    assert read_gate(source, hidden_size=8, **options)[1].shape == (128, 8)


@pytest.mark.parametrize(
    ("config", "hint"),
    [
        (None, "--hidden-size N"),
        ('{"hidden_size": 32}', "--hidden-size 32, as config.json beside it states"),
        ('{"hidden_size": true}', "--hidden-size N"),
        ('{"hidden_size": -1}', "--hidden-size N"),
        ("[32]", "--hidden-size N"),
        ("[" * 100_000, "--hidden-size N"),
        ("{", "--hidden-size N"),
    ],
)
def test_raw_values_hint_at_their_hidden_size(tmp_path, config, hint):
    source = tmp_path / "gate.bin"
    source.write_bytes(bytes(1024))
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match="Expected --hidden-size for raw float32 values, got none") as caught:
        read_gate(source)
    assert caught.value.hint.startswith(hint)


def with_value(value, dtype=np.float32):
    gate = FULL.astype(dtype)
    gate[3, 5] = value
    return gate


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (with_value(np.nan), {}, "Expected finite weights in float32, got nan - at {path}, expert 3, feature 5"),
        (with_value(-np.inf), {}, "got -inf - at {path}, expert 3, feature 5"),
        (with_value(1e39, np.float64), {}, "got inf - at {path}, expert 3, feature 5"),
        (with_value(np.nan).T, {"transposed": True}, "got nan - at {path}, expert 3, feature 5"),
        (FULL[0], {}, r"Expected a gate \[n_experts, hidden_size\], got \[32\] - at {path}"),
        (FULL[None], {"transposed": True}, r"Expected a gate \[hidden_size, n_experts\], got \[1, 8, 32\]"),
        (COARSE.astype(np.int32), {}, "Expected float32, float64, float16 or bfloat16, got int32 - at {path}"),
        (np.ones((1025, 1100), np.float32), {}, "Expected 1 to 1024 experts .*, got 1025 experts, hidden size 1100"),
        (FULL[:0], {}, "Expected 1 to 1024 experts and at least one feature, .*, got 0 experts, hidden size 32"),
        (FULL[:, :0], {}, "got 8 experts, hidden size 0"),
        (FULL, {"hidden_size": 64}, "Expected hidden size 64, got 32 - at {path}$"),
        (FULL, {"hidden_size": 8}, "Expected hidden size 8, got 32 - at {path}\nhint: is it --transposed?"),
        (FULL, {"key": "gate"}, "Expected a tensor named 'gate', got none - at {path}\nhint: pick one with --key"),
    ],
)
def test_what_is_no_gate_is_refused(tmp_path, values, options, message):
    source = tmp_path / "gate.npy"
    np.save(source, values)
    with pytest.raises(InvalidInput, match=message.format(path=source)):
        generate(source, tmp_path / "table.c", **options)
    assert names_in(tmp_path) == ["gate.npy"]


def test_a_gate_too_large_is_refused_unread(tmp_path):
    source = tmp_path / "gate.bin"
    with source.open("wb") as stream:
        stream.truncate(1 << 33)  # a sparse file of 8 GiB
    with pytest.raises(InvalidInput, match="in a table of at most 16777216 values, got 16777216 experts"):
        read_gate(source, hidden_size=128)


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("table.txt", {}, "Expected a file ending in .c, .h, .bin or .npy, got .txt - at --output"),
        ("table", {}, "got no ending - at --output"),
        ("table.C", {}, "got .C - at --output"),
        ("table.bin", {"name": "gate"}, "Expected --name with .c or .h only, got .bin"),
        ("table.c", {"name": "float"}, "Expected a C identifier .* got 'float' - at --name"),
        ("table.c", {"name": ""}, "Expected a C identifier .* got '' - at --name"),
        ("table.c", {"hidden_size": 0}, "Expected a positive size, got 0 - at --hidden-size"),
        ("missing/table.c", {}, "Expected a writable file, got no such file or directory - at .*missing/table.c"),
        ("gate.npy", {}, "Expected another file than the source, got the source - at --output"),
        ("link.npy", {}, "Expected another file than the source, got the source - at --output"),
        ("folder.c", {}, "Expected a writable file, got a directory - at .*folder.c"),
        ("n" * 300 + ".c", {}, "Expected a writable file, got a name that is too long"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, output, options, message):
    source = tmp_path / "gate.npy"
    np.save(source, FULL)
    (tmp_path / "link.npy").symlink_to(source)
    (tmp_path / "folder.c").mkdir()
    before = names_in(tmp_path), source.read_bytes()
    with pytest.raises(UsageError, match=message):
        generate(source, tmp_path / output, **options)
    assert (names_in(tmp_path), source.read_bytes()) == before


def test_a_missing_source_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"Expected a readable file, got no such file or directory - at .*gone\.pt"):
        generate(tmp_path / "gone.pt", tmp_path / "table.c")


# The command, and the script that build systems call: the same flags, the same answers.


@pytest.fixture(params=[("-m", "colibri_cli", "gen-router"), (SCRIPT,)], ids=["command", "script"])
def gen_router(request):
    """Run either and return exit code, standard output and standard error."""

    def run(*arguments):
        command = [sys.executable, *request.param, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    return run


def test_the_whole_way(gen_router, tmp_path):
    output = tmp_path / "table.c"
    arguments = (GATES / "raw.bin", "--hidden-size", "32", "--output", output)
    code, text, _ = gen_router(*arguments, "--check")
    assert code == 1
    assert text.startswith(f"{output}: missing")
    assert not output.exists()
    code, text, errors = gen_router(*arguments)
    assert (code, errors) == (0, "")
    assert text.startswith(f"{output}: written, 8 experts, hidden size 32")
    assert output.read_bytes() == router_table.to_c(FULL)
    code, text, _ = gen_router(*arguments, "--check")
    assert code == 0
    assert text.startswith(f"{output}: up to date")
    output.write_bytes(b"stale")
    code, text, _ = gen_router(*arguments, "--check")
    assert code == 1
    assert text.startswith(f"{output}: stale")
    assert output.read_bytes() == b"stale"


def test_every_flag_arrives(gen_router, tmp_path):
    output = tmp_path / "table.h"
    flags = ("--key", "", "--name", "gate", "--hidden-size", "32", "--transposed", "--output", output)
    assert gen_router(GATES / "transposed.pt", *flags)[::2] == (0, "")
    assert output.read_bytes() == router_table.to_header(FULL, "gate")


def test_the_json_report_keeps_its_schema(gen_router, tmp_path):
    schema = json.loads((files("colibri_cli") / "schema" / "gen-router.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    arguments = (GATES / "state_dict.pt", "--output", tmp_path / "table.bin", "--format", "json")
    for flags, state in (
        (("--check",), ("missing", False)),
        ((), ("missing", True)),
        (("--check",), ("up to date", False)),
    ):
        report = json.loads(gen_router(*arguments, *flags)[1])
        jsonschema.validate(report, schema)
        assert report["key"] == "gate.weight"
        assert (report["before"], report["written"]) == state


def test_exit_codes(gen_router, tmp_path):
    output = tmp_path / "table.c"
    code, text, errors = gen_router(GATES / "whole_module.pt", "--output", output)
    assert (code, text) == (1, "")
    assert "the global torch.nn.modules.linear.Linear, which was not run" in errors
    code, text, errors = gen_router(GATES / "raw.bin", "--output", output)
    assert (code, text) == (2, "")
    assert "Expected --hidden-size for raw float32 values" in errors
    assert gen_router(GATES / "raw.bin")[0] == 2
    assert gen_router(GATES / "raw.bin", "--output", output, "--hidden-size", "x")[0] == 2
    assert not output.exists()


def test_a_build_needs_numpy_alone(tmp_path):
    # The source tree with no package installed, and nothing importable but the standard library and numpy.
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    packages = tmp_path / "packages"
    packages.mkdir()
    for folder in Path(np.__file__).parents[1].glob("numpy*"):
        (packages / folder.name).symlink_to(folder)
    script, output = tmp_path / "scripts" / "gen_router.py", tmp_path / "table.c"
    arguments = (GATES / "raw.bin", "--hidden-size", "32", "--output", output, "--quiet")
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", script, *arguments],
        env={"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert output.read_bytes() == router_table.to_c(FULL)
