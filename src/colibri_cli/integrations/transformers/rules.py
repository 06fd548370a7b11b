"""What an experts module of transformers computes between its two projections, found by trying it.

The built-in implementations call the module's own ``_apply_gate``, which may do anything. Colibri has its formulas
compiled in, so it has to know which one it is: the module's function is run in float64 on a grid of values, and has to
agree with one of Colibri's formulas on all of it. A class of any name is so recognised by what it does, and a class
that does something else is refused, whatever its name.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from colibri_cli.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ALPHAS = ("alpha", "swiglu_alpha")  # what transformers' classes call the numbers of their formulas
LIMITS = ("limit", "swiglu_limit")
NUMBERS = ALPHAS + LIMITS
WAY_BACK = 'model.set_experts_implementation("eager") is the way back'
_WIDE = ("OpenAIPrivacyFilterExperts",)  # whose eager form computes bfloat16 layers in float32 to the end
_SETTINGS = (bool, int, float, str)  # of an activation, such as GELU's approximate
_QUICK_GELU = 1.702
_STEPS = (0.0, 1e-3, 0.1, 0.4, 0.8, 1.3, 2.0, 3.1, 4.7, 6.6, 9.8, 15.0, 90.0, 1e4)
_TOLERANCE = 1e-6  # some gates go through float32; no two formulas are as near to each other


@dataclass(frozen=True, slots=True)
class Rule:
    """A layer's formula and the layout of its weights, in the words of ``Experts.from_arrays``.

    ``wide``: intermediate states are float32 in a bfloat16 model too. ``scales`` is the (rows, columns) of a block of
    weights that share a scale; None where weights have none.
    """

    owner: str
    activation: str
    gated: bool
    interleaved: bool
    transposed: bool
    wide: bool
    alpha: float
    beta: float
    limit: float  # infinity: none
    scales: tuple[int, int] | None

    def __str__(self) -> str:
        """Give all of it in a word, as an operator's argument."""
        rows, columns = self.scales or (0, 0)
        flags = f"{self.gated:d},{self.interleaved:d},{self.transposed:d},{self.wide:d}"
        numbers = f"{self.alpha!r},{self.beta!r},{self.limit!r},{rows},{columns}"
        return f"{self.owner},{self.activation},{flags},{numbers}"

    @classmethod
    def parse(cls, word: str) -> Rule:
        """Take what ``str`` gives."""
        owner, activation, *rest = word.split(",")
        gated, interleaved, transposed, wide = (flag == "1" for flag in rest[:4])
        alpha, beta, limit = map(float, rest[4:7])
        rows, columns = map(int, rest[7:])
        scales = (rows, columns) if rows else None
        return cls(owner, activation, gated, interleaved, transposed, wide, alpha, beta, limit, scales)


_known: WeakKeyDictionary[torch.nn.Module, tuple[tuple[Any, ...], str]] = WeakKeyDictionary()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rule_of(module: torch.nn.Module) -> str:
    """Give the rule of an experts module as a word; found once, and again when what it follows from has changed.

    Raises
    ------
    InvalidInput
        Colibri has no such formula.
    """
    own = vars(module)
    act = own["_modules"].get("act_fn", own.get("act_fn"))
    follows_from = (
        type(module),
        own.get("_apply_gate"),
        act,
        *((name, value) for name, value in getattr(act, "__dict__", {}).items() if isinstance(value, _SETTINGS)),
        *(len(getattr(act, name, ())) for name in ("_forward_hooks", "_forward_pre_hooks")),
        *(own.get(name) for name in NUMBERS),
    )
    known = _known.get(module)
    if known is None or known[0] != follows_from:
        known = _known[module] = (follows_from, str(_find(module)))
    return known[1]


def refused(module: object, expected: str, got: str, at: str = "") -> InvalidInput:
    """Say that a module is not for Colibri, with its class's name and the way back."""
    name = module if isinstance(module, str) else type(module).__name__
    return InvalidInput(expected=expected, got=got, at=f"{name}{at}", hint=WAY_BACK)


def _find(module: torch.nn.Module) -> Rule:
    if getattr(module, "has_post_expert_norm", False):
        raise refused(module, "experts whose output is their last projection", "a norm after it (has_post_expert_norm)")
    gated = bool(getattr(module, "has_gate", True))
    scaled = isinstance(getattr(module, "down_proj_scale_inv", None), torch.Tensor)
    found = _formula(module, gated)
    return Rule(
        owner=type(module).__name__.replace(",", ""),
        activation=found.activation,
        gated=gated,
        interleaved=found.interleaved,
        transposed=bool(getattr(module, "is_transposed", False)),
        wide=type(module).__name__ in _WIDE,
        alpha=found.alpha,
        beta=found.beta,
        limit=found.limit,
        scales=_block(module) if scaled else None,
    )


def _block(module: torch.nn.Module) -> tuple[int, int]:
    """Rows and columns of a block; one that is larger than any matrix where a whole matrix has one scale."""
    weight, size = module.down_proj, getattr(module, "block_size", None)
    if weight.dtype == torch.int8:  # two FP4 numbers a byte: 32 of a row share a scale
        return 1, 32
    rows, columns = (1 << 30, 1 << 30) if size is None else size
    return int(rows), int(columns)


@dataclass(frozen=True, slots=True)
class _Formula:
    activation: str
    interleaved: bool
    alpha: float
    beta: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        value = _ACTIVATIONS[self.activation](gate, self.alpha)
        return value * (up.clamp(-self.limit, self.limit) + self.beta)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "silu": lambda x, alpha: x * torch.sigmoid(alpha * x),
    "gelu_tanh": lambda x, _: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": lambda x, _: torch.nn.functional.gelu(x),
    "relu": lambda x, _: torch.relu(x),
    "relu2": lambda x, _: torch.relu(x).square(),
}


def _formula(module: torch.nn.Module, gated: bool) -> _Formula:
    """Find the formula that a module's gate, or its activation where it has no gate, agrees with."""
    own = vars(module)
    alphas = [float(own[name]) for name in ALPHAS if isinstance(own.get(name), int | float)]
    limits = [float(own[name]) for name in LIMITS if isinstance(own.get(name), int | float)]
    limits = [limit for limit in limits if 0 < limit < math.inf]
    steps = sorted({*_STEPS, *(limit * factor for limit in limits for factor in (0.99, 1.01, 3))})
    values = torch.tensor([*(-step for step in reversed(steps)), *steps], dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad():
            if not gated:
                return _first(module, module.act_fn(values), values, None, _formulas(alphas, [], gated))
            gate, up = (side.flatten() for side in torch.meshgrid(values, values, indexing="ij"))
            together = (torch.cat([gate, up]), torch.stack([gate, up], 1).flatten())
            found = [module._apply_gate(row[None])[0] for row in together]
            return _first(module, found, gate, up, _formulas(alphas, limits, gated))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise refused(module, "a gate that can be tried", f"{type(error).__name__}: {error}") from error


def _formulas(alphas: list[float], limits: list[float], gated: bool) -> Iterator[_Formula]:
    """Every formula that the module's numbers allow, the commonest first."""
    for limit, beta, interleaved, activation in itertools.product(
        (math.inf, *limits), (0.0, 1.0) if gated else (0.0,), (False, True) if gated else (False,), _ACTIVATIONS
    ):
        for alpha in (1.0, *alphas, _QUICK_GELU) if activation == "silu" else (1.0,):
            yield _Formula(activation, interleaved, alpha, beta, limit)


def _first(
    module: torch.nn.Module,
    found: Any,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    formulas: Iterator[_Formula],
) -> _Formula:
    """Give the first formula that agrees with what was found (a pair, for the two layouts, where there is an up)."""
    scale = (1 + gate.abs()) if up is None else (1 + gate.abs()) * (1 + up.abs())
    for formula in formulas:
        expected = formula(gate, torch.ones_like(gate) if up is None else up)
        actual = found if up is None else found[formula.interleaved]
        if actual.shape == expected.shape:
            bound = _TOLERANCE * (scale + 10 * expected.abs())
            if bool(((actual.double() - expected).abs() <= bound).all()):
                return formula
    act = getattr(module, "act_fn", None)
    expected = "SiLU, GELU, ReLU or squared ReLU" + ("" if up is None else " of the gate, times the up projection")
    got = "an activation" if up is None else "an _apply_gate"
    raise refused(module, expected, f"{got} that is none of them" + (f": {type(act).__name__}" if act else ""))
