"""The arrays that a caller gives for a layer's experts, and what the kernels make of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli import _core
from colibri_cli.checks import check_choice
from colibri_cli.errors import InvalidInput
from colibri_cli.weights import Weights, as_weights

if TYPE_CHECKING:
    import numpy.typing as npt

IN_PLACE = ("float32", "bfloat16", "float16")  # what the kernels read from arrays as they are
_COPY = "copy=True takes any strides and types, for the price of a copy"


@dataclass(frozen=True, slots=True)
class ExpertArrays:
    """Every expert's weights, up (E, 2I or I, H) and down (E, H, I), and biases, up (E, 2I or I) and down (E, H)."""

    up: Weights
    down: Weights
    up_bias: Weights | None
    down_bias: Weights | None

    @classmethod
    def take(
        cls,
        gate_up: npt.ArrayLike,
        down: npt.ArrayLike,
        gate_up_bias: npt.ArrayLike | None,
        down_bias: npt.ArrayLike | None,
        *,
        gated: bool,
        transposed: bool,
    ) -> ExpertArrays:
        """View the arguments of ``Experts.from_arrays``.

        Raises
        ------
        InvalidInput
            A dtype or shape is not as it says.
        """
        up, low = as_weights("gate_up", gate_up), as_weights("down", down)
        if transposed:
            up, low = (replace(weights, array=weights.array.transpose(0, 2, 1)) for weights in (up, low))
        n_experts, hidden, inter = low.array.shape
        n_up = inter * (2 if gated else 1)
        if up.array.shape != (n_experts, n_up, hidden) or 0 in low.array.shape or n_experts > _core.MAX_EXPERTS:
            raise InvalidInput(
                expected="gate_up (E, 2I, H)" if gated else "gate_up (E, I, H)",
                got=f"{up.array.shape} for down {low.array.shape}" + (" after transposing" if transposed else ""),
                at="gate_up.shape",
                hint=f"down is (E, H, I): 1 to {_core.MAX_EXPERTS} experts, sizes of at least 1",
            )
        return cls(
            up,
            low,
            None if gate_up_bias is None else as_weights("gate_up_bias", gate_up_bias, (n_experts, n_up)),
            None if down_bias is None else as_weights("down_bias", down_bias, (n_experts, hidden)),
        )

    def packed(self, kernel: _core.ExpertKernel, dtype: str, interleaved: bool) -> list[_core.Expert]:
        """Copy every expert; see :func:`hold`."""
        biases = (self.up_bias, self.down_bias)
        experts = []
        for e in range(len(self.up.array)):
            up_bias, down_bias = (None if bias is None else np.ascontiguousarray(bias.float32(e)) for bias in biases)
            names = f"gate_up[{e}]", f"down[{e}]"
            weights = self.up.float32(e), self.down.float32(e)
            experts.append(hold(kernel, dtype, names, weights, (up_bias, down_bias), interleaved=interleaved))
        return experts

    def in_place(self, kernel: _core.ExpertKernel, dtype: str, interleaved: bool) -> list[_core.Expert]:
        """Let every expert run where it lies.

        Raises
        ------
        InvalidInput
            An array is not the caller's memory, of ``dtype`` (a bias: of one that runs in place), or side by side.
        """
        check_choice("dtype with copy=False", dtype, IN_PLACE)
        for weights in (self.up, self.down):
            _check_in_place(weights, (dtype,))
            array = weights.array
            if array.itemsize not in array.strides[1:] and 1 not in array.shape[1:]:
                raise InvalidInput(
                    expected="each output's inputs, or each input's outputs, side by side, to run in place",
                    got=f"strides {array.strides[1:]}",
                    at=f"{weights.name}.strides",
                    hint=_COPY,
                )
        biases = [bias for bias in (self.up_bias, self.down_bias) if bias is not None]
        for bias in biases:
            _check_in_place(bias, IN_PLACE)
        return [
            kernel.in_place(
                self.up.array[e],
                self.down.array[e],
                None if self.up_bias is None else self.up_bias.array[e],
                None if self.down_bias is None else self.down_bias.array[e],
                interleaved,
            )
            for e in range(len(self.up.array))
        ]


def hold(
    kernel: _core.ExpertKernel,
    dtype: str,
    names: tuple[str, str],
    weights: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]],
    biases: tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.float32] | None],
    *,
    interleaved: bool = False,
) -> _core.Expert:
    """Copy one expert's weights, up and down: into panels, or as float16 to where the kernels widen them from.

    Raises
    ------
    InvalidInput
        A weight to be quantised is not finite, or one to be held as float16 is beyond its range.
    """
    if dtype == "float16":
        up, down = (_float16(name, array) for name, array in zip(names, weights, strict=True))
        return kernel.in_place(up, down, *biases, interleaved, own=True)
    if dtype in ("int8", "int4"):
        for name, array in zip(names, weights, strict=True):
            if not np.isfinite(array).all():
                raise InvalidInput(expected=f"finite weights, to hold as {dtype}", got="NaN or infinity", at=name)
    return kernel.pack(*weights, *biases, interleaved)


def _float16(name: str, weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):  # refused below
        halves = np.ascontiguousarray(weights, np.float16)
    if not np.array_equal(np.isinf(halves), np.isinf(weights)):
        raise InvalidInput(
            expected="weights of at most 65,504, to hold as float16", got=f"{np.abs(weights).max():g}", at=name
        )
    return halves


def _check_in_place(weights: Weights, dtypes: tuple[str, ...]) -> None:
    if not weights.shared:
        raise InvalidInput(
            expected="a buffer or a DLPack tensor, to run in place", got="neither", at=weights.name, hint=_COPY
        )
    if weights.dtype not in dtypes:
        raise InvalidInput(
            expected=f"{' or '.join(dtypes)}, to run in place",
            got=weights.dtype,
            at=f"{weights.name}.dtype",
            hint=f"dtype={weights.dtype!r} runs it as it is; {_COPY}" if weights.dtype in IN_PLACE else _COPY,
        )
