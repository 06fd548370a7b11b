"""The operator that runs a layer's experts, as PyTorch and its compiler see it, and the way to it from a module."""

from __future__ import annotations

from functools import cache

import torch
from torch.autograd.forward_ad import unpack_dual

from colibri_cli.errors import InvalidInput
from colibri_cli.integrations.transformers.rules import NUMBERS, refused, rule_of
from colibri_cli.integrations.transformers.store import Store, Tensors
from colibri_cli.topology import check_threads

STORE = Store()
_HIDDEN = (torch.float32, torch.bfloat16, torch.float16)

# Tensors alone say which experts to run, and words how: a graph that is kept, or run for another layer, stays right.
_LIBRARY = torch.library.Library("colibri", "DEF")
_LIBRARY.define(
    "experts(Tensor hidden, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor? up_bias, Tensor? down_bias,"
    " Tensor? up_scale, Tensor? down_scale, str rule, str pack, bool narrow,"
    " int threads) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def forward(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    pack: str,
    narrow: bool,
    threads: int,
) -> torch.Tensor:
    """Run an experts module of transformers: what its experts interface calls.

    Parameters
    ----------
    module : Module
        Decorated by ``use_experts_implementation``.
    hidden_states : tensor of float32, bfloat16 or float16, (T, H)
    top_k_index : tensor of int64, (T, K)
        An id past the last expert's, as expert parallelism has, skips a slot.
    top_k_weights : tensor of any float type, (T, K)
    pack : str
        Empty: in place.
    narrow : bool
        Round intermediate states to bfloat16 where hidden states and weights are in it, and where eager does too.
    threads : int
        0: as many as PyTorch uses.

    Returns
    -------
    tensor, (T, H)
        Of the type of ``hidden_states``.

    Raises
    ------
    InvalidInput
        A gradient is wanted, a tensor is not on the CPU, or the module computes what Colibri does not.
    """
    if torch.compiler.is_compiling():  # the rule becomes a constant of the graph: have what it follows from guarded
        _ = type(getattr(module, "act_fn", None)), [getattr(module, name, None) or 0.0 for name in NUMBERS]
    rule = rule_of(module)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, first), module.down_proj
    up_bias = down_bias = up_scale = down_scale = None
    if module.has_bias:
        up_bias, down_bias = getattr(module, f"{first}_bias"), module.down_proj_bias
    if hasattr(module, "down_proj_scale_inv"):
        up_scale, down_scale = getattr(module, f"{first}_scale_inv"), module.down_proj_scale_inv
    given = (hidden_states, top_k_weights, up, down, up_bias, down_bias, up_scale, down_scale)
    present = [tensor for tensor in given if tensor is not None]
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present)
    if backward or _carries_tangents(present):
        raise InvalidInput(
            expected="a call that needs no gradients: Colibri runs forward only",
            got="gradients enabled, and tensors that require them" if backward else "tensors with tangents",
            at=type(module).__name__,
            hint=("run it under torch.no_grad() or inference_mode(); " if backward else "")
            + 'to differentiate, set_experts_implementation("eager")',
        )
    if hidden_states.device != up.device or up.device.type not in ("cpu", "meta"):
        raise refused(module, "tensors on the CPU", f"hidden states on {hidden_states.device}, weights on {up.device}")
    result: torch.Tensor = torch.ops.colibri.experts.default(
        hidden_states,
        top_k_index,
        top_k_weights,
        up,
        down,
        up_bias,
        down_bias,
        up_scale,
        down_scale,
        rule,
        pack,
        narrow,
        threads,
    )
    return result


def _carries_tangents(tensors: list[torch.Tensor]) -> bool:
    """Say whether forward-mode differentiation goes through here; what is compiled has none."""
    return not torch.compiler.is_compiling() and any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def _run(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    rule: str,
    pack: str,
    narrow: bool,
    threads: int,
) -> torch.Tensor:
    if hidden.dtype not in _HIDDEN:
        owner = rule.partition(",")[0]
        raise refused(owner, "hidden states of float32, bfloat16 or float16", str(hidden.dtype))
    tensors = Tensors(up, down, up_bias, down_bias, up_scale, down_scale)
    threads = threads or _threads(torch.get_num_threads())
    kernel, experts = STORE.find(tensors, rule, pack, hidden.dtype, threads, narrow=narrow)
    n_experts = len(experts)
    ids = ids.detach()
    if ids.numel() and int(ids.max()) >= n_experts:
        ids = ids.masked_fill(ids >= n_experts, -1)
    wide, by = hidden.detach().to(torch.float32), weights.detach().to(torch.float32)
    y = torch.empty(hidden.shape, dtype=torch.float32, device="cpu")
    kernel.run(experts, wide.numpy(), ids.numpy(), by.numpy(), y.numpy())
    return y.to(hidden.dtype)


def _shape(hidden: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)


@cache
def _threads(torch_uses: int) -> int:
    return min(torch_uses, check_threads(None))


_LIBRARY.impl("experts", _run, "CPU")
torch.library.register_fake("colibri::experts", _shape, lib=_LIBRARY)
