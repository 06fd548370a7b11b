"""A config as an object."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_cli.config import BalanceConfig, RouterConfig, load_config
from colibri_cli.errors import InvalidInput, UsageError

CASES = Path(__file__).parents[1] / "cli" / "validate_config"


def test_every_value_is_read():
    config = load_config(CASES / "good" / "gated.json")
    assert config.schema_version == 1
    assert config.task == "token-classification"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (12000, 128, 64)
    assert (config.n_experts, config.top_k, config.n_classes, config.context) == (8, 2, 5, 3)
    assert config.classes == ("noun", "verb", "modifier", "function", "other")
    assert (config.activation, config.gated, config.dtype) == ("silu", True, "float32")
    assert config.router == RouterConfig(kind="softmax-topk", gating="taylor")
    assert config.balance == BalanceConfig(enabled=True, window=4096, threshold=1.8, candidates=4, prefer="emptiest")
    assert (config.tokenizer, config.artifact) == ("tokenizer.model", "experts/expert_{i}.bin")


def test_numbers_have_the_types_of_their_fields_however_they_are_written():
    config = load_config(CASES / "good" / "integers_with_points_and_exponents.json")
    assert [repr(n) for n in (config.top_k, config.vocab_size, config.hidden_size)] == ["2", "12000", "128"]
    assert repr(config.balance.threshold) == "2.0"


def test_configs_compare_by_value_and_are_hashable():
    one, other = (load_config(CASES / "good" / f"{name}.json") for name in ("as_shipped", "keys_in_any_order"))
    assert one == other
    assert hash(one) == hash(other)
    assert one != load_config(CASES / "good" / "gated.json")


def test_expert_file():
    assert load_config(CASES / "good" / "as_shipped.json").expert_file(7) == "experts/expert_7.bin"
    assert load_config(CASES / "good" / "one_expert.json").expert_file(0) == "experts/0/weights.v1.bin"


def test_file_sizes():
    expert = 4 * (64 * 128 + 64 + 128 * 64 + 128)
    tensors = {
        "embedding.bin": 4 * 12000 * 128,
        "context.bin": 4 * 7 * 128 * 128,
        "router_weights.bin": 4 * 8 * 128,
        "head.bin": 4 * (5 * 128 + 5),
    }
    sizes = load_config(CASES / "good" / "as_shipped.json").file_sizes()
    assert sizes == tensors | {f"experts/expert_{i}.bin": expert for i in range(8)}


def test_file_sizes_of_gated_experts_and_without_a_context():
    gated = load_config(CASES / "good" / "gated.json").file_sizes()
    assert gated["experts/expert_0.bin"] == 4 * (128 * 128 + 128 + 128 * 64 + 128)
    single = load_config(CASES / "good" / "one_expert.json").file_sizes()
    assert list(single) == ["embedding.bin", "router_weights.bin", "head.bin", "experts/0/weights.v1.bin"]


def test_error_is_the_first_finding():
    path = CASES / "bad" / "artifact_array.json"
    with pytest.raises(InvalidInput) as raised:
        load_config(path)
    assert str(raised.value) == f"Expected string, got array - at {path}:27:15 ($.artifact)"


def test_error_counts_the_other_findings():
    path = CASES / "bad" / "everything_at_once.json"
    with pytest.raises(InvalidInput) as raised:
        load_config(path)
    assert raised.value.at == f"{path}:4:17 ($.vocab_size)"
    assert raised.value.hint == f"9 more: colibri validate-config {path}"


def test_missing_config_cannot_be_run(tmp_path):
    with pytest.raises(UsageError, match=r"no such file.*none\.json"):
        load_config(tmp_path / "none.json")


def test_loading_imports_only_what_the_check_needs():
    code = (
        "import json, sys; from colibri_cli.config import load_config; load_config(sys.argv[1]);"
        "print(json.dumps(sorted(sys.modules)))"
    )
    case = CASES / "good" / "as_shipped.json"
    done = subprocess.run([sys.executable, "-c", code, case], check=True, capture_output=True)
    loaded = set(json.loads(done.stdout))
    assert "colibri_cli.config" in loaded
    assert loaded.isdisjoint({"numpy", "sentencepiece", "typer", "rich", "difflib"})
