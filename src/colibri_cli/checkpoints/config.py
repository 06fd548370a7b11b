"""config.json: the family of a model, and its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri_cli import _core
from colibri_cli.checkpoints import gates
from colibri_cli.checkpoints.families import FAMILIES, REFUSED
from colibri_cli.checkpoints.family import ACTIVATIONS
from colibri_cli.checkpoints.plan import ModelPlan
from colibri_cli.checkpoints.settings import Key, Settings
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.formats.checked_file import CheckedFile
from colibri_cli.formats.json_objects import read_object
from colibri_cli.formats.layers import LayerShared
from colibri_cli.formats.tensor import shown

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.checkpoints.family import Family, Only

_MAX_CONFIG_BYTES = 1 << 24
_MAX_SIZE = 1 << 24  # hidden or intermediate


def read_config(path: Path) -> tuple[Settings, Settings | None, tuple[str, Family]]:
    """Return the text model's settings, those of its quantisation, and its family.

    Raises
    ------
    UsageError
        The file is missing or cannot be read, or the family is not supported.
    InvalidInput
        It is no such config.
    """
    with CheckedFile(path) as file:
        if file.size > _MAX_CONFIG_BYTES:
            raise InvalidInput(
                expected=f"at most {_MAX_CONFIG_BYTES:,} bytes", got=f"{file.size:,} bytes", at=file.name
            )
        members = read_object(file.read(0, file.size), file.name)
    text = members.get("text_config")
    candidates = [Settings(members, f"{path}: $")]
    if isinstance(text, dict):
        candidates.insert(0, Settings(text, f"{path}: $.text_config"))
    quantization = next((found for each in candidates if (found := each.get("quantization_config")) is not None), None)
    if quantization is not None and not isinstance(quantization, dict):
        raise InvalidInput(expected="an object", got="something else", at=f"{path}: $.quantization_config")
    by_words = None if quantization is None else Settings(quantization, f"{path}: $.quantization_config")
    for settings in candidates:
        family = _family(settings)
        if family is not None:
            return candidates[0], by_words, family
    name = candidates[-1].word(Key("model_type"))
    reason = REFUSED.get(name.removesuffix("_text"))
    raise UsageError(
        expected="a family of MoE models that is supported",
        got=shown(name) if reason is None else f"{name}: {reason}",
        at=candidates[-1].where("model_type"),
        hint=f"supported: {', '.join(FAMILIES)}",
    )


def _family(settings: Settings) -> tuple[str, Family] | None:
    name = settings.get("model_type")
    if not isinstance(name, str):
        return None
    name = name.removesuffix("_text")  # a model's text part has a type of its own
    return (name, FAMILIES[name]) if name in FAMILIES else None


def plan_of(name: str, family: Family, settings: Settings) -> tuple[ModelPlan, int]:
    """Return the plan of a model, and the number of its layers, MoE and dense.

    Raises
    ------
    UsageError
        A setting stands for a formula that is not supported.
    InvalidInput
        A setting is missing or out of range.
    """
    _check_only(settings, family.only)
    n_experts = settings.integer(gates.N_EXPERTS, 1, _core.MAX_EXPERTS)
    top_k = settings.integer(gates.TOP_K, 1, n_experts)
    gate = family.gate if isinstance(family.gate, gates.Gate) else family.gate.choose(settings)
    n_layers, layers = family.layers(settings)
    if not layers:
        raise InvalidInput(expected="a model with MoE layers", got="none by its settings", at=settings.at)
    word = settings.word(family.activation)
    if word not in ACTIVATIONS:
        where = settings.where(family.activation.all_names[0])
        raise UsageError(expected=f"an activation of {', '.join(ACTIVATIONS)}", got=shown(word), at=where)
    alpha = settings.number(family.alpha) if isinstance(family.alpha, Key) else family.alpha
    plan = ModelPlan(
        family=name,
        hidden_size=settings.integer(Key("hidden_size"), 1, _MAX_SIZE),
        intermediate_size=settings.integer(family.size, 1, _MAX_SIZE),
        n_experts=n_experts,
        top_k=top_k,
        activation=ACTIVATIONS[word],
        gated=family.gated,
        alpha=alpha,
        beta=family.beta,
        limit=None if family.limit is None else settings.number(family.limit),
        biased=family.layouts[0].up_bias is not None,
        router=gate.plan(settings, n_experts, top_k),
        shared=_shared_plan(family, settings),
        layers=tuple(layers),
    )
    return plan, n_layers


def _shared_plan(family: Family, settings: Settings) -> LayerShared | None:
    shared = family.shared
    if shared is None:
        return None
    count = 1 if shared.count is None else settings.integer(shared.count, 0, 1 << 10)
    size = count * settings.integer(shared.size, 0, _MAX_SIZE) if count else 0
    if size == 0:
        return None
    if size > _MAX_SIZE:
        raise InvalidInput(expected=f"a shared expert of at most {_MAX_SIZE}", got=str(size), at=settings.at)
    _check_only(settings, shared.only)
    return LayerShared(size, shared.gate is not None)


def _check_only(settings: Settings, only: Only) -> None:
    for name, values in only:
        if settings.get(name) not in values:
            words = " or ".join("none" if value is None else str(value) for value in values)
            raise UsageError(expected=words, got="another formula", at=settings.where(name))


def fp8_block(quantization: Settings | None) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale of FP8; (0, 0): all; None where weights are not FP8.

    Raises
    ------
    UsageError
        The weights are quantised in another way.
    InvalidInput
        A setting is out of range.
    """
    if quantization is None:
        return None
    method = quantization.word(Key("quant_method"))
    if method not in ("fp8", "mxfp4"):
        raise UsageError(expected="weights of fp8 or mxfp4", got=shown(method), at=quantization.where("quant_method"))
    if method == "mxfp4":
        return None
    if quantization.get("weight_block_size") is None:
        return (0, 0)
    sizes = quantization.members("weight_block_size", int, 2)
    match sizes:
        case [int(rows), int(columns)] if min(rows, columns) >= 1:
            return rows, columns
    raise InvalidInput(expected="two positive sizes", got="others", at=quantization.where("weight_block_size"))
