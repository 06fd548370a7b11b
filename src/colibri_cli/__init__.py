"""Colibri: the execution unit for Mixture-of-Experts layers on CPUs.

The public names load on first use, so that ``colibri --help`` pays for none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_cli._core import isa
    from colibri_cli.balance import Balancer
    from colibri_cli.c_header import get_include
    from colibri_cli.errors import ColibriError, InvalidInput, UsageError
    from colibri_cli.experts import Experts
    from colibri_cli.layer import MoELayer
    from colibri_cli.model import Inference, Model
    from colibri_cli.router import GumbelNoise, Router, Routing
    from colibri_cli.shared_expert import SharedExpert
    from colibri_cli.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Balancer",
    "ColibriError",
    "Experts",
    "GumbelNoise",
    "Inference",
    "InvalidInput",
    "MoELayer",
    "Model",
    "Router",
    "Routing",
    "SharedExpert",
    "Tokenizer",
    "UsageError",
    "__version__",
    "get_include",
    "isa",
]

_HOME = {
    "Balancer": "balance",
    "ColibriError": "errors",
    "Experts": "experts",
    "GumbelNoise": "router",
    "Inference": "model",
    "InvalidInput": "errors",
    "MoELayer": "layer",
    "Model": "model",
    "Router": "router",
    "Routing": "router",
    "SharedExpert": "shared_expert",
    "Tokenizer": "tokenizer",
    "UsageError": "errors",
    "get_include": "c_header",
    "isa": "_core",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
