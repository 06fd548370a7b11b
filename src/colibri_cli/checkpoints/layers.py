"""Which layers of a model are MoE, by config.json, as transformers decides it for each family."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibri_cli.checkpoints.settings import Key, Settings
from colibri_cli.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    LayerRule = Callable[[Settings], tuple[int, Sequence[int]]]
    """Settings -> how many layers there are, and those that are MoE, ascending."""

MOST_LAYERS = 1 << 12


def n_layers(settings: Settings) -> int:
    """Return ``num_hidden_layers``."""
    return settings.integer(Key("num_hidden_layers"), 1, MOST_LAYERS)


def every(settings: Settings) -> tuple[int, Sequence[int]]:
    """All layers are MoE."""
    n = n_layers(settings)
    return n, range(n)


def after(key: Key) -> LayerRule:
    """All but the first, as many as the key says."""

    def rule(settings: Settings) -> tuple[int, Sequence[int]]:
        n = n_layers(settings)
        return n, range(settings.integer(key, 0, MOST_LAYERS), n)

    return rule


def by_type(default: LayerRule) -> LayerRule:
    """Those that ``mlp_layer_types`` calls sparse; where it is not there, another rule's."""

    def rule(settings: Settings) -> tuple[int, Sequence[int]]:
        n = n_layers(settings)
        types = settings.members("mlp_layer_types", str, n)
        if types is None:
            return default(settings)
        return n, _where(settings, "mlp_layer_types", types, "sparse", ("dense",))

    return rule


def by_step(mlp_only: tuple[int, ...] = ()) -> LayerRule:
    """Qwen's: every ``decoder_sparse_step``-th, but none of ``mlp_only_layers``."""

    def rule(settings: Settings) -> tuple[int, Sequence[int]]:
        n = n_layers(settings)
        step = settings.integer(Key("decoder_sparse_step", 1), 1, MOST_LAYERS)
        dense = settings.members("mlp_only_layers", int)
        skipped = set(mlp_only if dense is None else dense)
        return n, [i for i in range(n) if (i + 1) % step == 0 and i not in skipped]

    return rule


def by_period(settings: Settings) -> tuple[int, Sequence[int]]:
    """Jamba's: one in ``expert_layer_period``, from ``expert_layer_offset`` on."""
    n = n_layers(settings)
    period = settings.integer(Key("expert_layer_period", 2), 1, MOST_LAYERS)
    return n, range(settings.integer(Key("expert_layer_offset", 1), 0, period - 1), n, period)


def by_frequency(settings: Settings) -> tuple[int, Sequence[int]]:
    """A.X's: multiples of ``moe_layer_freq`` after ``first_k_dense_replace``."""
    n, layers = after(Key("first_k_dense_replace", 1))(settings)
    frequency = settings.integer(Key("moe_layer_freq", 1), 1, MOST_LAYERS)
    return n, [i for i in layers if i % frequency == 0]


def by_block(settings: Settings) -> tuple[int, Sequence[int]]:
    """Nemotron-H's: blocks are "moe" by ``layers_block_type``, or E in ``hybrid_override_pattern``."""
    types = settings.members("layers_block_type", str)
    name, moe = "layers_block_type", "moe"
    if types is None:
        name, moe = "hybrid_override_pattern", "E"
        types = list(settings.word(Key(name)))
    if not 1 <= len(types) <= MOST_LAYERS:
        raise InvalidInput(expected=f"1 to {MOST_LAYERS} layers", got=str(len(types)), at=settings.where(name))
    others = ("linear_attention", "full_attention", "mamba", "attention", "mlp", "M", "*", "-")
    return len(types), _where(settings, name, types, moe, others)


def _where(settings: Settings, name: str, types: Sequence[object], moe: str, others: tuple[str, ...]) -> Sequence[int]:
    for i, word in enumerate(types):
        if word != moe and word not in others:
            got = "another"
            raise InvalidInput(expected=f"{moe} or {' or '.join(others)}", got=got, at=f"{settings.where(name)}[{i}]")
    return [i for i, word in enumerate(types) if word == moe]
