"""Other libraries that run an MoE layer, and Colibri beside them: a module each, driven the same way.

A module says what its library is and can do (`PEER`) without importing it, and loads it only in `load`, which a worker
calls in a process of its own. So one peer never sees another's threads, allocator or floating-point modes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colibri_cli.bench.peers.peer import Peer

OURS = "colibri"

# The name that a user gives -> the module that drives it.
MODULES = {
    OURS: "colibri_cli.bench.peers.colibri",
    "torch": "colibri_cli.bench.peers.pytorch",
    "onnxruntime": "colibri_cli.bench.peers.onnx_runtime",
    "ggml": "colibri_cli.bench.peers.ggml_graph",
}


def find(name: str) -> Peer:
    """Describe a peer; it need not be installed."""
    found: Peer = import_module(MODULES[name]).PEER
    return found
