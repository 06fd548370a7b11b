"""A token classifier's config.json as an object."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from colibri_cli import bundle
from colibri_cli.errors import InvalidInput
from colibri_cli.validate import read_config

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"]


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How experts are chosen and weighed.

    Attributes
    ----------
    kind : "topk-softmax" or "softmax-topk"
        Softmax over the chosen experts' logits, or over all logits and renormalised over the chosen.
    gating : "exact" or "taylor"
        How the softmax takes its exponentials.
    """

    kind: Literal["topk-softmax", "softmax-topk"]
    gating: Literal["exact", "taylor"]


@dataclass(frozen=True, slots=True)
class BalanceConfig:
    """How the load is balanced.

    Attributes
    ----------
    enabled : bool
        Whether it is, unless the caller says otherwise.
    window : int
        Tokens that an expert's ring remembers, 1 to 4,096.
    threshold : float
        Times the mean ring sum above which an expert is skipped, 1 to 1,024.
    candidates : int
        Best experts by gate score that a token chooses from, ``top_k`` to ``n_experts``.
    prefer : "score" or "emptiest"
        Which candidates are taken.
    """

    enabled: bool
    window: int
    threshold: float
    candidates: int
    prefer: Literal["score", "emptiest"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A token classifier's sizes and choices; ``schema/config.schema.json`` describes each and its range."""

    schema_version: int
    task: Literal["token-classification"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_experts: int
    top_k: int
    n_classes: int
    classes: tuple[str, ...]
    activation: Activation
    gated: bool
    dtype: Literal["float32"]
    context: int
    tokenizer: str
    router: RouterConfig
    balance: BalanceConfig
    artifact: str

    def expert_file(self, expert: int) -> str:
        """Return the path of an expert's file, relative to the bundle."""
        return bundle.expert_name(self.artifact, expert)

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of each file whose size the config fixes, by its path in the bundle."""
        sizes = {file.name: self._size(file) for file in bundle.TENSORS}
        expert = self._size(bundle.expert(self.artifact))
        sizes |= {self.expert_file(i): expert for i in range(self.n_experts)}
        return {name: size for name, size in sizes.items() if size}

    def _size(self, file: bundle.SizedFile) -> int:
        return file.size(*(getattr(self, key) for key in file.keys))


def load_config(path: str | os.PathLike[str]) -> ModelConfig:
    """Read and check a token classifier's config.json.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        It has a finding, and the message gives the first and the number of the others; or its task is another one.
    """
    value = read_sound(path)
    if value["task"] != "token-classification":
        raise InvalidInput(
            expected='a bundle of task "token-classification"',
            got=f'"{value["task"]}"',
            at=os.fspath(path),
            hint="MoELayer.open(bundle, layer) runs one of its layers",
        )
    return model_config(value)


def read_sound(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the config.json of a bundle of any task; raises as :func:`load_config`."""
    value: Any
    value, findings = read_config(path)
    if findings:
        first, *others = findings
        raise InvalidInput(
            expected=first.expected,
            got=first.found,
            at=f"{first.place} ({first.pointer})",
            hint=f"{len(others)} more: colibri validate-config {first.file}" if others else None,
        )
    return value  # type: ignore[no-any-return] # the schema wants an object


def model_config(value: dict[str, Any]) -> ModelConfig:
    """Make the object of a token classifier's sound config.json."""
    fields = dict(value)
    fields["classes"] = tuple(fields["classes"])
    fields["router"] = RouterConfig(**fields["router"])
    balance = fields["balance"]
    fields["balance"] = BalanceConfig(**balance | {"threshold": float(balance["threshold"])})
    return ModelConfig(**fields)
