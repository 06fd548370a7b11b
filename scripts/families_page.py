#!/usr/bin/env python3
"""Write docs/transformers.md: its table by running every MoE family of the installed transformers with Colibri.

usage: families_page.py [--check] [FAMILY ...]      (needs the package with its extra "transformers", installed)

Each family's text model is made small, with random weights, and run once by transformers' own loop over experts and
once by Colibri. With families named, their rows are printed and nothing is written; with --check nothing is written
either, and the exit code is 1 if the page is stale.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from colibri_cli.checkpoints.families import FAMILIES
from colibri_cli.errors import ColibriError
from colibri_cli.formats.files import write_atomically
from colibri_cli.integrations.transformers import register
from colibri_cli.integrations.transformers.rules import Rule, rule_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, TEMPLATE = ROOT / "docs/transformers.md", ROOT / "docs/transformers/page.md"
MODELS = Path(transformers.__file__).parent / "models"
AGREES = 2e-5  # the largest difference from transformers' own loop, relative to the largest output

# What makes a text model small, under whatever names a config has for it.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size",), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers", "moe_layer_start_index"), 0),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "index_n_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "index_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "decoder_sparse_step"), 1),
    **dict.fromkeys(("vocab_size", "index_topk", "sliding_window"), 64),
    **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), None),
    "max_position_embeddings": 128,
}
# What a family's config wants besides, mostly so that a small model has attention and experts.
BESIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "beam": {"mlp_layer_types": ["sparse", "sparse"]},
    "deepseek_ocr2": {"mlp_layer_types": ["sparse", "sparse"]},
    "diffusion_gemma": {"enable_moe_block": True},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 24], "head_dim": 128},
    "flint": {"num_hidden_layers": 4},
    "gemma4": {"enable_moe_block": True},
    "glm4v_moe": {"head_dim": 128},
    "glm5_next": {"qk_rope_head_dim": 0, "mlp_layer_types": ["sparse", "sparse"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "nemotron_h": {"layers_block_type": ["attention", "moe"]},
    "qwen3_5_moe": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp": {
        "num_hidden_layers": 4,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# MoE families whose classes transformers does not send through its experts interface.
APART = {
    "dbrx": "DbrxExperts",
    "doge": "DogeCDMoE",
    "jetmoe": "JetMoeMoE",
    "llama4": "Llama4TextExperts",
    "longcat_flash": "LongcatFlashExperts",
    "nllb_moe": "NllbMoeExperts",
    "step3p7": "Step3p7Experts",
    "switch_transformers": "SwitchTransformersExperts",
    "vitpose_backbone": "VitPoseBackboneMoeMLP",
}
_PARTS = (
    "Vision",
    "Audio",
    "SamEncoder",
    "VisionEncoder",
    "Classification",
    "Code2Wav",
    "QuestionAnswering",
    "PreTrained",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A family in the table."""

    family: str
    experts: str
    formula: str
    verdict: str


COLUMNS = {
    "family": lambda row: row.family,
    "experts": lambda row: f"`{row.experts}`",
    "formula": lambda row: row.formula,
    "with Colibri": lambda row: row.verdict,
    "`colibri pack`": lambda row: "yes" if {row.family, f"{row.family}_text"} & FAMILIES.keys() else "",
}


class NoModelError(Exception):
    """A family of which no small text model could be made."""


def families() -> list[str]:
    """Name the families whose experts go through transformers' experts interface."""
    sources = sorted(MODELS.glob("*/modeling_*.py"))
    return [path.parent.name for path in sources if "@use_experts_implementation" in path.read_text("utf-8")]


def small_model(family: str, seed: int = 0) -> Any:
    """Make a family's text model, small, with random weights, its experts run by transformers' own loop.

    Raises
    ------
    NoModelError
        None of its classes could be made.
    """
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module.__name__
        and not any(part in name for part in _PARTS)
    ]
    why = []
    for made in sorted(classes, key=lambda c: (not c.__name__.endswith("ForCausalLM"), "Text" not in c.__name__)):
        config = made.config_class
        fields = {*inspect.signature(config.__init__).parameters, *getattr(config, "__dataclass_fields__", ())}
        options = {name: value for name, value in SMALL.items() if name in fields} | BESIDES.get(family, {})
        if "qk_rope_head_dim" in fields:  # multi-head latent attention has its head's size from its parts
            options = {k: v for k, v in options.items() if k != "head_dim"} | {"num_key_value_heads": 4}
        if "hidden_size" not in fields:  # text and more
            continue
        try:
            torch.manual_seed(seed)
            model = made._from_config(config(**options), experts_implementation="eager").eval().float()
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            StrictDataclassError,
        ) as error:
            why.append(f"{made.__name__}: {error}")
            continue
        if experts_of(model):
            with torch.no_grad():
                for layer in experts_of(model):  # so that they are a large part of the answer
                    for parameter in layer.parameters():
                        parameter.normal_(std=0.3)
            return model
        why.append(f"{made.__name__} has no experts")
    raise NoModelError(f"{family}: {'; '.join(why)}")


def experts_of(model: Any) -> list[torch.nn.Module]:
    """List a model's experts modules."""
    return [module for module in model.modules() if hasattr(module, "is_concatenated")]


def answer(model: Any, implementation: str, ids: torch.Tensor) -> torch.Tensor:
    """Run a model: logits, or hidden states where it has no head."""
    model.set_experts_implementation(implementation)
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False)[0]
    return found


def formula_of(module: torch.nn.Module) -> str:
    """Say what an experts module computes."""
    rule = Rule.parse(rule_of(module))
    names = {"silu": "SiLU", "gelu_tanh": "GELU (tanh)", "gelu": "GELU", "relu": "ReLU", "relu2": "squared ReLU"}
    words = [names[rule.activation], "gated" if rule.gated else "not gated"]
    words += [f"alpha {rule.alpha:g}"] if rule.alpha != 1 else []
    words += [f"up + {rule.beta:g}"] if rule.beta != 0 else []
    words += ["clamped"] if rule.limit != float("inf") else []
    words += ["transposed"] if rule.transposed else []
    words += ["interleaved"] if rule.interleaved else []
    words += ["biases"] if getattr(module, "has_bias", False) else []
    return ", ".join(words)


def row_of(family: str) -> Row:
    """Run a family both ways."""
    try:
        model = small_model(family)
    except NoModelError as error:
        return Row(family, "?", "", f"not tried: {error}")
    layer = experts_of(model)[0]
    name = type(layer).__name__
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    eager = answer(model, "eager", ids)
    try:
        found = answer(model, "colibri", ids)
    except ColibriError as error:
        return Row(family, name, "its own", f"refused: {error.got}")
    off = float((found - eager).abs().max() / eager.abs().max())
    if not off <= AGREES:
        return Row(family, name, formula_of(layer), f"**differs** by {off:.1e}")
    with torch.no_grad():
        for each in experts_of(model):
            each.down_proj.zero_()
    if float((answer(model, "eager", ids) - eager).abs().max()) < 0.01 * float(eager.abs().max()):
        return Row(family, name, formula_of(layer), "not tried: its experts hardly change its answer")
    return Row(family, name, formula_of(layer), "runs")


def table(rows: list[Row]) -> str:
    """Write rows as a table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(column(row) for column in COLUMNS.values())} |" for row in rows]
    return "\n".join(lines)


def page() -> str:
    """Write the page."""
    rows = [row_of(family) for family in families()]
    rows += [
        Row(f, name, "its own", "no experts interface: transformers run their own code") for f, name in APART.items()
    ]
    text = TEMPLATE.read_text("utf-8")
    runs = sum(row.verdict == "runs" for row in rows)
    words = {"{version}": transformers.__version__, "{runs}": str(runs), "{families}": str(len(rows))}
    words["{table}"] = table(sorted(rows, key=lambda row: row.family))
    for name, value in words.items():
        text = text.replace(name, value)
    return text


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="print the rows of these families only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # transformers' own, about configs as small as these
    logging.disable(logging.WARNING)
    register()
    if arguments.families:
        print(table([row_of(family) for family in arguments.families]))
        return 0
    text = page()
    if arguments.check:
        return int(PAGE.read_text("utf-8") != text)
    write_atomically(PAGE, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
