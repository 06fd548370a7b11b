"""Weights in 8 or 4 bits with a scale a block, as transformers' ``FP8Experts`` holds them, decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from colibri_cli.integrations.transformers.rules import refused

if TYPE_CHECKING:
    from colibri_cli.integrations.transformers.rules import Rule

# e2m1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0).
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode(name: str, weight: torch.Tensor, scale: torch.Tensor, rule: Rule, halves: int) -> torch.Tensor:
    """Give one expert's weights in float32: each number times its block's scale, one rounding.

    Parameters
    ----------
    name : str
        For messages.
    weight : tensor of float8_e4m3fn (N, K), or of int8 (N, K / 2) with two FP4 numbers a byte, the low bits first
    scale : tensor of float32, float8_e8m0fnu or uint8 (an exponent), (blocks of rows, blocks of columns)
    rule : Rule
        Has the size of a block.
    halves : int
        2 where ``weight`` is a gate and an up projection, scaled apart.

    Raises
    ------
    InvalidInput
        The scales are not one a block, or a block is across both halves.
    """
    values = _numbers(weight)
    rows, columns = values.shape
    high, wide = rule.scales or (rows, columns)
    half = rows // halves
    blocks = -(-half // high)
    of_row = torch.cat([torch.arange(half) // high + i * blocks for i in range(halves)])
    if high >= rows and scale.shape[0] == 1:  # the halves share the only one
        of_row.zero_()
    of_column = torch.arange(columns) // wide
    expected = (int(of_row[-1]) + 1, int(of_column[-1]) + 1)
    if tuple(scale.shape) != expected:
        raise refused(rule.owner, f"a scale for each block, {expected}", str(tuple(scale.shape)), f".{name}_scale_inv")
    exponent = scale.dtype == torch.uint8
    scales = (scale.to(torch.float32) - 127).exp2() if exponent else scale.to(torch.float32)
    return values * scales[of_row][:, of_column]


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    if weight.dtype != torch.int8:
        return weight.to(torch.float32)
    bits = weight.contiguous().view(torch.uint8)
    pair = torch.stack([bits & 15, bits >> 4], dim=-1).long()
    return torch.tensor(_FP4)[pair].reshape(weight.shape[0], -1)
