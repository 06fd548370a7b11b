"""MXFP4: blocks of 32 four-bit floats with a power of two each, as gpt-oss is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.errors import InvalidInput

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK = 32
BLOCK_BYTES = BLOCK // 2
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_E2M1, *(-value for value in _E2M1)], "<f4")
# A byte is two values, the low half first; a pair of float32 is copied as one 64-bit number.
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=1).view("<u8").ravel()
_NAN = 255  # of an E8M0 scale


def decode(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], out: npt.NDArray[np.float32], at: str) -> None:
    """Decode rows of MXFP4.

    The float32 product of a four-bit value (E2M1) and ``2 ** (scale - 127)`` (E8M0): exact unless it overflows, as in
    OCP's "Microscaling Formats (MX) Specification" 1.0 and in transformers' ``convert_moe_packed_tensors``.

    Parameters
    ----------
    blocks : array of uint8, (rows, G, 16)
    scales : array of uint8, (rows, G)
    out : array of float32, (rows, 32 * G), C-contiguous
        Written.
    at : str
        Where the scales are, for the message.

    Raises
    ------
    InvalidInput
        A scale is 255, which is no number.
    """
    if (scales == _NAN).any():
        row, block = np.argwhere(scales == _NAN)[0].tolist()
        raise InvalidInput(expected="scales of 0 to 254", got="255 (not a number)", at=f"{at}[{row}, {block}]")
    out.view("<u8")[...] = _PAIRS[blocks.reshape(len(blocks), -1)]
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    grid = out.reshape(*scales.shape, BLOCK)
    with np.errstate(over="ignore"):
        grid *= powers[:, :, np.newaxis]
