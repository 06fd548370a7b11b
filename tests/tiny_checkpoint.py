"""A small checkpoint of the OLMoE family, as its publisher would save it."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file


def config(hidden: int, inter: int, n_experts: int, n_layers: int, top_k: int) -> dict[str, object]:
    """The config.json."""
    return {
        "model_type": "olmoe",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_experts": n_experts,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": n_layers,
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }


def weights(hidden: int, inter: int, n_experts: int, n_layers: int) -> dict[str, NDArray[np.float32]]:
    """The tensors by name, and one that is no MoE layer's."""
    rng = np.random.default_rng(5)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((7, hidden), np.float32)}
    for layer in range(n_layers):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate.weight"] = rng.standard_normal((n_experts, hidden), np.float32)
        for e in range(n_experts):
            for name, shape in (("gate", (inter, hidden)), ("up", (inter, hidden)), ("down", (hidden, inter))):
                tensors[f"{mlp}.experts.{e}.{name}_proj.weight"] = rng.standard_normal(shape, np.float32)
    return tensors


def write(folder: Path, settings: dict[str, object], tensors: dict[str, NDArray[np.float32]]) -> None:
    """Save both in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
