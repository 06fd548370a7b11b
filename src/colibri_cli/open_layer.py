"""One layer of a bundle, from its files: the parts of an MoELayer."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from colibri_cli.bundle import JOURNAL, layer_folder
from colibri_cli.checks import check_integer
from colibri_cli.config import model_config, read_sound
from colibri_cli.errors import UsageError
from colibri_cli.experts import Experts
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.files import is_folder
from colibri_cli.formats.mapped_file import read_floats
from colibri_cli.layer_bundle import TASK, layer_bundle
from colibri_cli.router import Router
from colibri_cli.shared_expert import SharedExpert

if TYPE_CHECKING:
    import os

    import numpy as np
    import numpy.typing as npt

    from colibri_cli.config import ModelConfig
    from colibri_cli.layer_bundle import LayerBundle


class LayerParts(NamedTuple):
    """What an MoELayer is made of."""

    router: Router
    experts: Experts
    shared: SharedExpert | None


def open_layer(
    bundle: str | os.PathLike[str],
    layer: int,
    loading: str,
    cache_experts: int,
    threads: int | None,
    max_tokens: int,
    intermediate_dtype: str,
) -> LayerParts:
    """Open what ``MoELayer.open`` describes, and raise as it does."""
    folder = Path(bundle)
    if not is_folder(folder):
        raise UsageError(expected="a bundle's folder", got="no such folder", at=str(folder))
    if (folder / JOURNAL).exists() and not (folder / "config.json").exists():
        hint = "run the same colibri pack again: it goes on where it was"
        raise UsageError(expected="a finished bundle", got="an unfinished pack", at=str(folder), hint=hint)
    value = read_sound(folder / "config.json")
    open_experts = partial(
        Experts.open, loading=loading, threads=threads, max_tokens=max_tokens, intermediate_dtype=intermediate_dtype
    )
    if value["task"] != TASK:
        check_integer("layer", layer, 0, 0)
        config = model_config(value)
        router = _classifiers_router(config, folder, threads)
        return LayerParts(router, open_experts(folder, cache_experts=cache_experts), None)
    layers = layer_bundle(value)
    layer = check_integer("layer", layer, 0, max(layers.layers))
    for name, size in layers.file_sizes(layer).items():
        with CheckedFile(folder / name) as file:
            file.check_size(size, "as config.json says")
    folder /= layer_folder(layer)
    experts = open_experts(folder, cache_experts=cache_experts, shape=layers.shape, files=layers.expert_names)
    shared, shape = None, layers.shared_shape
    if layers.shared is not None:
        expert = open_experts(folder, cache_experts=1, shape=shape, files=["shared.bin"])
        gate = _read(folder / "shared_gate.bin", layers.hidden_size) if layers.shared.gated else None
        shared = SharedExpert(expert, gate)
    return LayerParts(_router(layers, folder, threads), experts, shared)


def _router(layers: LayerBundle, folder: Path, threads: int | None) -> Router:
    rule, n_experts = asdict(layers.router), layers.n_experts
    biased, corrected = rule.pop("bias"), rule.pop("correction_bias")
    return Router.from_array(
        _read(folder / "router_weights.bin", n_experts, layers.hidden_size),
        _read(folder / "router_bias.bin", n_experts) if biased else None,
        correction_bias=_read(folder / "correction_bias.bin", n_experts) if corrected else None,
        top_k=layers.top_k,
        threads=threads,
        **rule,
    )


def _classifiers_router(config: ModelConfig, folder: Path, threads: int | None) -> Router:
    weight = _read(folder / "router_weights.bin", config.n_experts, config.hidden_size)
    rule = config.router
    return Router.from_array(weight, kind=rule.kind, top_k=config.top_k, gating=rule.gating, threads=threads)


def _read(path: Path, *shape: int) -> npt.NDArray[np.float32]:
    return read_floats(path, 4 * math.prod(shape), f"float32 {shape}").reshape(shape)
