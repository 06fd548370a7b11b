"""Block-scaled FP8 (e4m3fn), as DeepSeek-V3 is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def _e4m3fn() -> npt.NDArray[np.float32]:
    """Give the value of each byte: sign, 4 bits of exponent (bias 7), 3 of mantissa; S1111111 is NaN, none infinite."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    # Exponent 0 is subnormal: no leading one, and the exponent of 1.
    size: npt.NDArray[np.float32] = np.ldexp(
        (mantissa + 8 * (exponent > 0)).astype(np.float32), np.maximum(exponent, 1) - 10
    )
    size[code & 127 == 127] = np.nan
    size[code >= 128] *= np.float32(-1)
    return size


_VALUES = _e4m3fn()


def decode(
    codes: npt.NDArray[np.uint8],
    scales: npt.NDArray[np.float32],
    block: tuple[int, int],
    out: npt.NDArray[np.float32],
) -> None:
    """Decode a matrix.

    Each weight is the float32 product of its FP8 value and its block's ``weight_scale_inv``, rounded once, as in
    transformers' ``Fp8Dequantize`` and DeepSeek-V3's own ``weight_dequant``.

    Parameters
    ----------
    codes : array of uint8, (rows, columns)
    scales : array of float32, (ceil(rows / block[0]), ceil(columns / block[1]))
    block : (int, int)
        Rows and columns that share a scale.
    out : array of float32, (rows, columns)
        Written.
    """
    rows, columns = block
    out[...] = _VALUES[codes]
    with np.errstate(over="ignore", invalid="ignore"):
        for i, scale in enumerate(scales):
            out[i * rows : (i + 1) * rows] *= np.repeat(scale, columns)[: codes.shape[1]]
