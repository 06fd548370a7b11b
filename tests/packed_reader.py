"""Packed expert files read from docs/formats.md alone; it shares no code with the package."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER = struct.Struct("<8s4I4B3fQI12s")
DTYPES = ("float32", "bfloat16", "int8", "int4")
ACTIVATIONS = ("relu", "relu2", "silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Packed:
    """What a file holds: weights as they are held, widened exactly to float64."""

    dtype: str
    activation: str
    gated: bool
    numbers: tuple[float, float, float]  # alpha, beta, limit
    up: NDArray[np.float64]  # (U, H), gate rows first
    down: NDArray[np.float64]  # (H, I)
    up_bias: NDArray[np.float64] | None
    down_bias: NDArray[np.float64] | None


def read(data: bytes) -> Packed:
    magic, version, start, hidden, inter, dtype, activation, gated, biased, *rest = HEADER.unpack_from(data)
    alpha, beta, limit, size, _checksum, _reserved = rest
    assert (magic, version, start, len(data)) == (b"CLBEXPRT", 1, 64, 64 + size)
    halves, name = 1 + gated, DTYPES[dtype]
    n_up, n_down = halves * -(-inter // 16), -(-hidden // 16)
    payload = np.frombuffer(data, np.uint8, offset=start)
    up_bytes, down_bytes = n_up * panel_bytes(name, hidden), n_down * panel_bytes(name, inter)
    up, down, rest = np.split(payload, [up_bytes, up_bytes + down_bytes])
    floats = rest.view("<f4").astype(np.float64)
    bases, biases = np.split(floats, [n_up + n_down if name == "int4" else 0])
    bases = bases if name == "int4" else np.ones(n_up + n_down)
    halves_of_up = [
        columns(name, up.reshape(n_up, -1)[half::halves], bases[:n_up][half::halves], hidden)[:inter]
        for half in range(halves)
    ]
    up_bias = down_bias = None
    if biased:
        up_bias, down_bias = np.split(biases, [halves * inter])
        assert len(down_bias) == hidden
    else:
        assert not len(biases)
    return Packed(
        name,
        ACTIVATIONS[activation],
        bool(gated),
        (alpha, beta, limit),
        np.concatenate(halves_of_up),
        columns(name, down.reshape(n_down, -1), bases[n_up:], inter)[:hidden],
        up_bias,
        down_bias,
    )


def panel_bytes(dtype: str, n: int) -> int:
    groups = -(-n // 32)
    return {"float32": 64 * n, "bfloat16": 32 * n, "int8": 544 * groups, "int4": 288 * groups}[dtype]


def columns(dtype: str, panels: NDArray[np.uint8], bases: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """The weights of panels as (16 x panels, n) rows of outputs."""
    values = np.stack([panel(dtype, p.tobytes(), base, n) for p, base in zip(panels, bases, strict=True)])
    return values.transpose(0, 2, 1).reshape(-1, n)


EVEN_ODD = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]


def panel(dtype: str, data: bytes, base: float, n: int) -> NDArray[np.float64]:
    """One panel as (n inputs, 16 outputs)."""
    if dtype == "float32":
        return np.frombuffer(data, "<f4").reshape(n, 16).astype(np.float64)
    if dtype == "bfloat16":
        found = np.empty((n, 16))
        found[:, EVEN_ODD] = bfloat16(np.frombuffer(data, "<u2")).reshape(n, 16)
        return found
    groups = []
    size = panel_bytes(dtype, 1)
    for at in range(0, len(data), size):
        group = data[at : at + size]
        w = np.empty((32, 16))
        if dtype == "int8":
            scales = np.empty(16)
            scales[EVEN_ODD] = bfloat16(np.frombuffer(group, "<u2", offset=512))
            for i in range(32):
                for j in range(16):
                    w[i, j] = int.from_bytes(group[(i // 2 * 16 + j) * 2 + i % 2 :][:1], "little", signed=True)
            groups.append(w * scales)
        else:
            code, zero = np.frombuffer(group, np.uint8, 16, 256), np.frombuffer(group, np.uint8, 16, 272)
            scale = 2.0 ** (code // 16 - 15.0) * (1 + code % 16 / 16)
            for i in range(32):
                for j in range(16):
                    byte = group[i // 4 * 32 + j % 8 * 4 + i % 4]
                    w[i, j] = byte >> 4 if j >= 8 else byte & 15
            groups.append(base * scale * (w - zero / 16))
    return np.concatenate(groups)[:n]


def bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
