"""Who may import whom, and what a bare `colibri --help` may load."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("colibri_cli").submodule_search_locations[0])

# A module's first name under colibri_cli -> the first names it may import. `errors` is everybody's.
MAY_IMPORT = {
    "__init__": {"_core", "balance", "c_header", "experts", "layer", "model", "router", "shared_expert", "tokenizer"},
    "__main__": {"cli"},
    "cli": {
        *("bench", "cli", "formats", "gen_router", "infer_report", "isa", "model", "report", "tokenize_report"),
        *("pack", "tokenizer", "topology", "validate", "words"),
    },
    "infer_report": {"model", "report", "tokenizer", "words"},
    "tokenize_report": {"report", "tokenizer"},
    "report": {"formats"},
    "bench": {"_core", "balance", "bench", "experts", "formats", "layer", "model", "report", "router", "topology"},
    "integrations": {
        *("_core", "checks", "expert_arrays", "formats", "forks", "integrations", "topology", "weights"),
    },
    "words": {"model", "tokenizer"},
    "model": {"_core", "arrays", "balance", "config", "experts", "formats", "layer", "router", "tokenizer", "topology"},
    "layer": {"_core", "arrays", "balance", "checks", "experts", "open_layer", "router", "shared_expert"},
    "open_layer": {"bundle", "checks", "config", "experts", "formats", "layer_bundle", "router", "shared_expert"},
    "layer_bundle": {"bundle", "config", "formats"},
    "shared_expert": {"arrays", "checks", "experts", "router"},
    "router": {"_core", "arrays", "balance", "checks", "gate_rule", "topology"},
    "gate_rule": {"_core", "checks"},
    "balance": {"_core", "checks", "forks"},
    "experts": {
        *("_core", "checks", "config", "expert_arrays", "expert_cache", "expert_files", "formats", "forks"),
        "topology",
    },
    "expert_files": {"_core", "expert_arrays", "formats", "forks"},
    "expert_arrays": {"_core", "checks", "weights"},
    "weights": {"arrays", "dlpack"},
    "dlpack": set(),
    "expert_cache": {"_core", "formats", "forks"},
    "gen_router": {"formats"},
    "checkpoints": {"_core", "checkpoints", "formats", "gate_rule"},
    "pack": {
        *("_core", "bundle", "checkpoints", "checks", "expert_arrays", "formats", "layer_bundle", "pack", "topology"),
    },
    "config": {"bundle", "validate"},
    "validate": {"bundle", "formats", "validate"},
    "bundle": {"formats"},
    "c_header": set(),
    "tokenizer": {"formats"},
    "formats": {"formats"},
    "topology": {"checks"},
    "arrays": set(),
    "forks": set(),
    "checks": set(),
    "errors": set(),
}


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("colibri_cli"):
            below = node.module.split(".")[1:]
            names |= {below[0]} if below else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("colibri_cli.")}
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_what_the_rule_allows(path):
    allowed = MAY_IMPORT.get(_name(path))
    if allowed is None:
        pytest.fail(f"{_name(path)} has no line in MAY_IMPORT")
    assert _imports(path) - {"errors", "__version__"} <= allowed


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("typer", {"cli"}),
        ("rich", {"report.py"}),
        ("sentencepiece", {"tokenizer.py"}),
        *((name, {"bench", "integrations"}) for name in ("torch", "transformers")),
        *((name, {"bench"}) for name in ("onnx", "onnxruntime", "ggml", "matplotlib")),
    ],
)
def test_a_library_has_its_homes(library, home):
    users = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = [node.module]
            if any(module.split(".")[0] == library for module in modules):
                users.add(path.relative_to(PACKAGE).parts[0])
    assert users == home


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from colibri_cli.cli import main; sys.argv = ['colibri', '--help']; main(); "
        "heavy = {'numpy', 'sentencepiece', 'jsonschema', 'torch', 'colibri_cli._core'}; "
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == ""
    assert "infer" in run.stdout
