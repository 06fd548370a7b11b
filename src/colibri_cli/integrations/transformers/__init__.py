"""Hugging Face transformers run their MoE layers with Colibri.

``register()``, then ``from_pretrained(..., experts_implementation="colibri")`` or
``model.set_experts_implementation("colibri")``. The model, its router and its tensors stay transformers' own; what
changes is who multiplies the experts.

``rules`` reads the formula off an experts module, ``operator`` is the operator that PyTorch sees, ``store`` finds the
experts that belong to its tensors, and ``float8`` decodes block-scaled weights.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from colibri_cli.checks import check_choice
from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.topology import check_threads

try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise UsageError(
        expected="transformers of 5.24 or later, with torch",
        got=str(error),
        at="colibri_cli.integrations.transformers",
        hint="pip install '.[transformers]' in Colibri's folder",
    ) from error

from colibri_cli.integrations.transformers.operator import STORE, forward

if TYPE_CHECKING:
    import torch

__all__ = ["forget", "layers", "register"]

_PACKS = ("float32", "bfloat16", "int8", "int4")


def register(
    pack: str | None = None, threads: int | None = None, name: str = "colibri", intermediate_dtype: str | None = None
) -> None:
    """Make Colibri an experts implementation of transformers, for FP8 experts too.

    Nothing is registered on import: which weights are held, and how, is for the caller to say. Several names may be
    registered, with different options; a name registered again takes the new ones from the next call on.

    Parameters
    ----------
    pack : {"float32", "bfloat16", "int8", "int4"}, optional
        Copy each layer's weights, once, into the kernels' own layout: faster, most of all where few tokens share an
        expert, for the memory of the copy. Default: run the module's float32, bfloat16 or float16 tensors where they
        are.
    threads : int, optional
        Default: as many as PyTorch uses at the time of a call, up to what the CPU affinity and the cgroup's quota
        allow. The answer does not depend on it.
    name : str
        What to give as ``experts_implementation``.
    intermediate_dtype : {"float32"}, optional
        "float32": a layer is computed in float32 and rounded once, at the end. Default: where hidden states and weights
        are bfloat16, intermediate states are rounded to it as well, as eager rounds them (and more), and sums are in
        blocks (docs/numerics.md): faster on processors with AVX512_BF16, and several times with AMX.

    Raises
    ------
    InvalidInput
        An option is not as above, or the name is another implementation's.
    """
    if pack is not None:
        check_choice("pack", pack, _PACKS)
    if threads is not None:
        check_threads(threads)
    if intermediate_dtype is not None:
        check_choice("intermediate_dtype", intermediate_dtype, ("float32",))
    if not isinstance(name, str) or name in ("", "eager"):
        raise InvalidInput(expected='a name other than "eager"', got=repr(name), at="name")
    implementation = partial(forward, pack=pack or "", narrow=intermediate_dtype is None, threads=threads or 0)
    for interface in (ExpertsInterface, FP8ExpertsInterface):
        before = interface._global_mapping.get(name)
        if before is not None and getattr(before, "func", None) is not forward:
            raise InvalidInput(expected="a name of its own", got=f"{name!r}, which transformers has", at="name")
    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register(name, implementation)


def layers(model: torch.nn.Module) -> list[str]:
    """List the modules of a model that an experts implementation runs.

    transformers take any ``experts_implementation`` for a family whose experts do not go through their experts
    interface, and pass over it in silence; such a model has none.

    Parameters
    ----------
    model : Module

    Returns
    -------
    list of str
        The modules' names, as ``model.get_submodule`` takes them.

    Raises
    ------
    InvalidInput
        There is none: whatever was registered, the model runs its own code.
    """
    names = [name for name, module in model.named_modules() if hasattr(module, "is_concatenated")]
    if not names:
        raise InvalidInput(
            expected="a model whose experts go through transformers' experts interface",
            got=f"{type(model).__name__}, where nothing does",
            at="model",
            hint="transformers run it as they always do, whatever experts_implementation says",
        )
    return names


def forget() -> None:
    """Drop what was packed; the next call of each layer packs it again.

    Needed only for packed weights that were changed behind PyTorch's back: through ``.data`` or another library's view
    of their memory. Its version counter, which tells Colibri of every other change, does not see that.
    """
    STORE.clear()
