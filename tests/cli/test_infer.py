import io
import json
import os
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from command import colibri

MODELS = Path(__file__).parents[2] / "models"
SCHEMA = json.loads(files("colibri_cli").joinpath("schema/infer.schema.json").read_text())
GOLDEN = json.loads((MODELS / "golden.json").read_text())
SENTENCE = GOLDEN[1]["text"]


def valid(data: bytes) -> dict:
    parsed = json.loads(data)
    jsonschema.validate(parsed, SCHEMA)
    return parsed


def answer(found: dict) -> dict:
    """A document without what differs from run to run."""
    return {key: value for key, value in found.items() if key != "run"}


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    path = tmp_path / "input.bin"
    path.write_bytes(np.array(GOLDEN[1]["ids"], "<i4").tobytes())
    return path


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["text"][:20])
def test_the_answers_are_the_golden_ones(case: dict):
    found = valid(colibri("infer", "--text", case["text"], "--format", "json").stdout)
    pieces = found["pieces"]
    assert [piece["id"] for piece in pieces] == case["ids"]
    assert [[expert["id"] for expert in piece["experts"]] for piece in pieces] == case["expert_ids"]
    weights = [[expert["weight"] for expert in piece["experts"]] for piece in pieces]
    assert np.allclose(weights, case["expert_weights"], atol=1e-5)
    probabilities = [piece["probabilities"] for piece in pieces]
    assert np.allclose(probabilities, case["probabilities"], atol=1e-5)
    load = np.bincount(np.ravel(case["expert_ids"]), minlength=8)
    assert found["load"] == load.tolist()


def test_two_flags_are_enough(input_file: Path):
    done = colibri("infer", "--input", input_file, "--experts-dir", MODELS / "experts")
    assert done.returncode == 0
    blocks = done.stdout.decode().split("\n\n")
    words, load, classes = ([line.split() for line in block.splitlines()] for block in blocks)
    assert words.pop()[:5] == ["(a", "word", "of", "several", "pieces:"]
    assert words[0] == ["word", "experts", "class", "probability"]
    assert [row[0] for row in words[1:]] == re.findall(r"\w+|[^\w\s]", SENTENCE)
    assert load[0] == ["expert", "tokens", "share", "of", "the", "busiest"]
    assert sum(int(row[1]) for row in load[1:]) == 2 * len(GOLDEN[1]["ids"])
    assert all(set(row[3]) <= set("█▏▎▍▌▋▊▉") for row in load[1:] if row[1] != "0")
    assert classes[0] == ["whole", "input", "probability", "of", "1"]
    assert [row[0] for row in classes[1:]] == ["noun", "verb", "modifier", "function", "other"]
    assert sum(float(row[1]) for row in classes[1:]) == pytest.approx(1, abs=0.003)
    assert "\x1b" not in done.stdout.decode()
    log = done.stderr.decode()
    assert re.search(r"^experts: 8 of 8 loaded \(mmap, [\d.]+ KiB\) from .*experts$", log, re.MULTILINE)
    parts = "I/O .* ms, open .* ms, tokenize .* ms, mix .* ms, route .* ms, experts .* ms, head .* ms"
    assert re.search(f"^time: {parts}$", log, re.MULTILINE)


def test_text_and_ids_give_one_answer(input_file: Path):
    by_text = valid(colibri("infer", "--text", SENTENCE, "--format", "json").stdout)
    by_file = valid(colibri("infer", "--input", input_file, "--format", "json").stdout)
    by_pipe = valid(colibri("infer", "--input", "-", "--format", "json", input=input_file.read_bytes()).stdout)
    assert answer(by_text) == answer(by_file) == answer(by_pipe)


@pytest.mark.parametrize("loading", ["static", "on-demand"])
def test_the_answer_does_not_depend_on_how_it_is_computed(loading: str):
    plain = valid(colibri("infer", "--text", SENTENCE, "--format", "json").stdout)
    flags = ["--loading", loading, "--cache-experts", "2", "--preload", "--threads", "1", "--pin", "0", "--repeat", "3"]
    other = valid(colibri("infer", "--text", SENTENCE, "--format", "json", *flags).stdout)
    assert answer(plain) == answer(other)
    assert other["run"]["experts"]["loading"] == loading
    assert other["run"]["latency"]["runs"] == 3


def test_words_are_made_of_their_pieces():
    found = valid(colibri("infer", "--text", "Hummingbirds hover", "--format", "json").stdout)
    (start, stop) = (found["words"][0]["start"], found["words"][0]["stop"])
    assert stop - start > 1, "the word should take several pieces for this test to say something"
    pieces = found["pieces"][start:stop]
    logs = np.log([piece["probabilities"] for piece in pieces]).sum(axis=0)
    shares = np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
    word = found["words"][0]
    assert word["word"] == "Hummingbirds"
    assert word["class"] == found["classes"][int(logs.argmax())]
    assert np.allclose(word["probabilities"], shares, atol=1e-6)
    assert sum(expert["weight"] for expert in word["experts"]) == pytest.approx(1, abs=1e-5)
    assert [word["start"] for word in found["words"][1:]] == [word["stop"] for word in found["words"][:-1]]


def test_a_words_row_is_explained_where_it_is_more_than_a_pieces():
    assert "+n: further experts" in colibri("infer", "--text", "Hummingbirds hover").stdout.decode()
    assert "+n" not in colibri("infer", "--text", "Hummingbirds hover", "--by", "piece").stdout.decode()
    assert "+n" not in colibri("infer", "--text", "hello").stdout.decode()
    assert "+n counts further experts" in colibri("infer", "--help").stdout.decode()


def test_what_the_vocabulary_lacks_is_spelled_by_the_text():
    text = "hello 日本 ok"
    shown = colibri("infer", "--text", text).stdout.decode().splitlines()
    assert [line.split("  ")[0] for line in shown[1:4]] == ["hello", "日本 (unknown)", "ok"]
    by_text = valid(colibri("infer", "--text", text, "--format", "json").stdout)["words"]
    ids = colibri("tokenize", input=text.encode()).stdout
    by_ids = valid(colibri("infer", "--input", "-", "--format", "json", input=ids).stdout)["words"]
    assert [(word["word"], word.get("unknown")) for word in by_text] == [("hello", None), ("日本", True), ("ok", None)]
    assert by_ids[1]["word"] == "⁇"
    assert [word | {"word": ""} for word in by_ids] == [word | {"word": ""} for word in by_text]


def test_rows_by_piece():
    text = colibri("infer", "--text", SENTENCE, "--by", "piece").stdout.decode()
    rows = text.split("\n\n")[0].splitlines()
    assert rows[0].split()[0] == "piece"
    assert len(rows) - 1 == len(GOLDEN[1]["ids"])
    assert rows[1].startswith("▁The ")


@pytest.mark.parametrize(("by", "key", "rows"), [("word", "word", "words"), ("piece", "piece", "pieces")])
def test_jsonl_is_the_documents_rows(by: str, key: str, rows: str):
    lines = colibri("infer", "--text", SENTENCE, "--format", "jsonl", "--by", by).stdout.splitlines()
    document = valid(colibri("infer", "--text", SENTENCE, "--format", "json").stdout)
    objects = [valid(line) for line in lines]
    assert list(objects[0])[:2] == ["schema", key]
    assert [{name: value for name, value in entry.items() if name != "schema"} for entry in objects] == document[rows]


def test_npy_is_the_pieces_probabilities_to_the_last_bit(tmp_path: Path):
    piped = np.load(io.BytesIO(colibri("infer", "--text", SENTENCE, "--format", "npy").stdout))
    path = tmp_path / "out.npy"
    colibri("infer", "--text", SENTENCE, "--output", path)
    assert piped.dtype == np.float32
    assert np.array_equal(piped, np.load(path))
    document = valid(colibri("infer", "--text", SENTENCE, "--format", "json").stdout)
    written = np.array([piece["probabilities"] for piece in document["pieces"]], np.float32)
    assert np.array_equal(piped, written)


@pytest.mark.parametrize("source", [["--text", ""], ["--text", " \n"], ["--input", "-"]])
def test_empty_input_is_valid(source: list[str]):
    found = valid(colibri("infer", *source, "--format", "json").stdout)
    assert (found["words"], found["pieces"], found["load"]) == ([], [], [0] * 8)
    assert found["prediction"] is None
    done = colibri("infer", *source)
    assert (done.returncode, done.stdout) == (0, b"no tokens\n")
    assert b"\nno tokens: nothing to classify\n" in done.stderr
    assert colibri("infer", *source, "--format", "jsonl").stdout == b""
    assert np.load(io.BytesIO(colibri("infer", *source, "--format", "npy").stdout)).shape == (0, 5)


def test_balance_is_never_silent():
    text = "The red bird, the blue bird and the green bird fly. " * 40
    off = colibri("infer", "--text", text, "--format", "json")
    on = colibri("infer", "--text", text, "--format", "json", "--balance", "--repeat", "2")
    assert b"balance" not in off.stderr
    assert b"balance: on" in on.stderr
    assert valid(off.stdout)["run"]["balance"] is False
    assert valid(on.stdout)["run"]["balance"] is True
    again = colibri("infer", "--text", text, "--format", "json", "--balance")
    assert answer(valid(on.stdout)) == answer(valid(again.stdout))
    assert answer(valid(on.stdout)) != answer(valid(off.stdout))


def test_no_balance_overrules_the_bundle(tmp_path: Path):
    for path in MODELS.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((MODELS / "config.json").read_text())
    config["balance"]["enabled"] = True
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = "The red bird, the blue bird and the green bird fly. " * 40
    flags = ["--text", text, "--format", "json"]
    plain = answer(valid(colibri("infer", *flags).stdout))
    assert answer(valid(colibri("infer", *flags, "--model", tmp_path).stdout)) != plain
    assert answer(valid(colibri("infer", *flags, "--model", tmp_path, "--no-balance").stdout)) == plain


def test_gating_can_be_chosen():
    exact = valid(colibri("infer", "--text", SENTENCE, "--format", "json", "--gating", "exact").stdout)
    taylor = valid(colibri("infer", "--text", SENTENCE, "--format", "json", "--gating", "taylor").stdout)
    assert (exact["run"]["gating"], taylor["run"]["gating"]) == ("exact", "taylor")
    for one, two in zip(exact["pieces"], taylor["pieces"], strict=True):
        assert [e["id"] for e in one["experts"]] == [e["id"] for e in two["experts"]]
        assert [e["weight"] for e in one["experts"]] == pytest.approx([e["weight"] for e in two["experts"]], abs=0.003)


def test_repeat_adds_percentiles():
    text = colibri("infer", "--text", "hello", "--repeat", "5").stdout.decode().splitlines()
    assert text[-2].split() == ["runs", "P50", "ms", "P99", "ms"]
    runs, p50, p99 = text[-1].split()
    assert runs == "5"
    assert 0 < float(p50) <= float(p99)
    for name in ("text", "json", "jsonl", "npy"):
        done = colibri("infer", "--text", "hello", "--repeat", "3", "--format", name)
        assert re.search(rb"^latency: 3 runs, P50 [\d.]+ ms, P99 [\d.]+ ms$", done.stderr, re.MULTILINE)
    assert "latency" not in valid(colibri("infer", "--text", "hello", "--format", "json").stdout)["run"]


def test_a_cache_that_is_not_there_is_said():
    assert b"--cache-experts has no effect" in colibri("infer", "--text", "a", "--cache-experts", "4").stderr
    flags = ["--loading", "on-demand", "--cache-experts", "4"]
    assert b"no effect" not in colibri("infer", "--text", "a", *flags).stderr


def test_on_demand_counts_hits_and_misses():
    done = colibri("infer", "--text", SENTENCE, "--loading", "on-demand", "--cache-experts", "1")
    assert re.search(r"expert cache: \d+ hits, [1-9]\d* misses, [\d.]+ KiB read", done.stderr.decode())


def test_pin_narrows_the_cpus_before_anything_starts():
    cpu = min(os.sched_getaffinity(0))
    assert colibri("infer", "--text", "hello", "--pin", str(cpu)).returncode == 0
    assert colibri("infer", "--text", "hello", "--pin", f" {cpu} , {cpu}-{cpu}").returncode == 0


@pytest.mark.parametrize("cpus", ["", "x", "-1", "1-0", "0,", "0-999999999999", "99999", "8191", "0x1", "٣"])
def test_bad_cpu_lists_are_refused(cpus: str):
    done = colibri("infer", "--text", "hello", f"--pin={cpus}")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().rstrip().endswith("- at --pin")


@pytest.mark.parametrize(
    ("flags", "data", "code", "message"),
    [
        ([], b"", 2, "Expected --input FILE or --text TEXT, got neither"),
        (["--text", "a", "--input", "b"], b"", 2, "Expected --input FILE or --text TEXT, got both"),
        (["--input", "none.bin"], b"", 2, "Expected a readable file, got no such file or directory - at none.bin"),
        (["--input", "."], b"", 2, "Expected a readable file, got a directory - at ."),
        (["--input", "-"], b"abcde", 1, "Expected a multiple of 4 bytes, got 5 bytes - at standard input"),
        (["--input", "-"], b"\1\0\0\0\xff\xff\xff\xff", 1, r"got -1 - at ids\[1\]"),
        (["--input", "-"], b"abcd", 1, r"got 1684234849 - at ids\[0\]"),
        (["--input", "-"], b"\0\0\x15\x6b", 1, "got big-endian ones - at standard input"),
        (["--text", "a", "--model", "none"], b"", 2, "none"),
        (["--text", "a", "--experts-dir", "none"], b"", 2, "none"),
        (["--text", "a", "--task", "translation"], b"", 2, "'translation' is not"),
        (["--text", "a", "--cache-experts", "0"], b"", 2, "--cache-experts"),
        (["--text", "a", "--threads", "0"], b"", 2, "--threads"),
        (["--text", "a", "--threads", "257"], b"", 2, "--threads"),
        (["--text", "a", "--output", "none/out"], b"", 2, "Expected a writable file, got no such folder - at none/out"),
        (["--text", "a", "--output", ".", "--format", "json"], b"", 2, "Expected a writable file, got a directory"),
        (["--text", "a", "--output", "out.xyz"], b"", 2, r"\.jsonl or \.npy, got \.xyz - at --output out\.xyz\nhint"),
        (["hello"], b"", 2, "Expected options only, got 'hello' - at the command line\nhint: --text"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, flags: list[str], data: bytes, code: int, message: str):
    done = colibri("infer", *flags, input=data, cwd=tmp_path)
    assert done.returncode == code
    assert done.stdout == b""
    assert re.search(message, done.stderr.decode())
    assert "Traceback" not in done.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_not_utf8_is_refused():
    done = colibri("infer", "--text", b"caf\xe9")
    assert done.returncode == 1
    assert b"Expected Unicode text, got the lone surrogate U+DCE9 - at text, character 3" in done.stderr


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path):
    name = tmp_path / "\x1b[31mred.bin"
    done = colibri("infer", "--input", name)
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr
    assert b"\\x1b[31mred.bin" in done.stderr
