"""A bundle of MoE layers: its config.json as an object, and the files of its layers."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from colibri_cli import bundle
from colibri_cli.config import read_sound
from colibri_cli.errors import InvalidInput
from colibri_cli.formats.experts import ExpertShape
from colibri_cli.formats.layers import LayerRouter, LayerShared

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

TASK = "moe-layers"
ARTIFACT = "experts/expert_{i}.bin"


@dataclass(frozen=True, slots=True)
class LayerBundle:
    """What the layers of a bundle have in common; ``schema/layers.schema.json`` describes each key and its range."""

    schema_version: int
    task: str
    family: str
    hidden_size: int
    intermediate_size: int
    n_experts: int
    top_k: int
    activation: str
    gated: bool
    alpha: float
    beta: float
    limit: float | None
    biased: bool
    dtype: str
    router: LayerRouter
    shared: LayerShared | None
    layers: tuple[int, ...]
    artifact: str

    @property
    def shape(self) -> ExpertShape:
        """Of the experts."""
        return self._shape(self.intermediate_size)

    @property
    def shared_shape(self) -> ExpertShape | None:
        """Of the shared expert."""
        return None if self.shared is None else self._shape(self.shared.intermediate_size)

    @property
    def expert_names(self) -> list[str]:
        """Paths of the experts' files relative to their layer's folder, by id."""
        return [bundle.expert_name(self.artifact, i) for i in range(self.n_experts)]

    def file_sizes(self, layer: int) -> dict[str, int]:
        """Return the bytes of each file of a layer, by its path in the bundle.

        Raises
        ------
        InvalidInput
            The bundle does not have that layer.
        """
        if layer not in self.layers:
            raise InvalidInput(expected=f"one of the layers {_listed(self.layers)}", got=str(layer), at="layer")
        sizes = {file.name: self._size(file) for file in bundle.LAYER_FILES}
        sizes |= dict.fromkeys(self.expert_names, self._size(bundle.packed_expert(self.artifact)))
        folder = bundle.layer_folder(layer)
        return {f"{folder}/{name}": size for name, size in sizes.items() if size}

    def _size(self, file: bundle.SizedFile) -> int:
        if self.shared is None and any(key.startswith("shared.") for key in file.keys):
            return 0
        return file.size(*(attrgetter(key)(self) for key in file.keys))

    def _shape(self, intermediate_size: int) -> ExpertShape:
        return ExpertShape(
            self.hidden_size,
            intermediate_size,
            self.activation,
            self.gated,
            self.dtype,
            self.alpha,
            self.beta,
            self.limit,
        )


def load_layer_bundle(path: str | os.PathLike[str]) -> LayerBundle:
    """Read and check the config.json of a bundle of layers.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        It has a finding, and the message gives the first and the number of the others; or its task is another one.
    """
    value = read_sound(path)
    if value["task"] != TASK:
        raise InvalidInput(expected=f'a bundle of task "{TASK}"', got=f'"{value["task"]}"', at=os.fspath(path))
    return layer_bundle(value)


def layer_bundle(config: dict[str, Any]) -> LayerBundle:
    """Make the object of a sound config.json's value."""
    router, shared = dict(config["router"]), config["shared"]
    router["masked_score"] = -math.inf if router["masked_score"] is None else 0.0
    return LayerBundle(
        **config
        | {
            "router": LayerRouter(**router),
            "shared": None if shared is None else LayerShared(**shared),
            "layers": tuple(config["layers"]),
        }
    )


def bundle_config(plan: DataclassInstance, dtype: str) -> dict[str, Any]:
    """Return the value of a bundle's config.json.

    Parameters
    ----------
    plan : dataclass
        With the fields of :class:`LayerBundle` but ``schema_version``, ``task``, ``dtype`` and ``artifact``.
    dtype : {"float32", "bfloat16", "int8", "int4"}
    """
    config = {"schema_version": 1, "task": TASK, **asdict(plan), "dtype": dtype, "artifact": ARTIFACT}
    masked = config["router"]["masked_score"]
    config["router"] |= {"masked_score": None if masked == -math.inf else 0}
    config["layers"] = list(config["layers"])
    return config


def _listed(layers: tuple[int, ...]) -> str:
    words = [str(layer) for layer in layers]
    return ", ".join(words if len(words) <= 8 else [*words[:4], "...", *words[-3:]])
