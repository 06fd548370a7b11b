"""PyTorch, through the experts of transformers' OLMoE: its grouped matrix product, and its loop over experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from colibri_cli.bench.peers.peer import Batch, Bound, Kind, Peer, Weights

if TYPE_CHECKING:
    from pathlib import Path

    from colibri_cli.bench.shapes import Shape

_FLOATS_ONLY = "transformers' experts run floating-point weights alone"
PEER = Peer(
    name="torch",
    requirements=("torch>=2.9", "transformers>=5.0"),
    modules=("torch", "transformers"),
    kinds=tuple(
        Kind(implementation, dtype, bits)
        for dtype, bits in (("float32", 32), ("bfloat16", 16))
        for implementation in ("grouped_mm", "eager")
    ),
    lacks={"int8": _FLOATS_ONLY, "int4": _FLOATS_ONLY},
    base_bytes=512 << 20,
)


class TorchEngine:
    """The module, and its inputs in the weights' own type: what a model in that type would hand it."""

    def __init__(self, kind: Kind, shape: Shape, weights: Weights) -> None:
        import torch
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

        config = OlmoeConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_experts=shape.n_experts,
            num_experts_per_tok=shape.top_k,
        )
        config._experts_implementation = kind.name
        self._torch: Any = torch
        self._dtype = getattr(torch, kind.dtype)
        with torch.device("meta"):
            self._experts = OlmoeExperts(config)
        self._experts.gate_up_proj = self._parameter(weights.gate_up)
        self._experts.down_proj = self._parameter(weights.down)
        self._experts.eval()

    def _parameter(self, array: np.ndarray[Any, Any]) -> Any:
        """Convert an expert at a time, so that no second copy of all is needed."""
        tensor = self._torch.empty(array.shape, dtype=self._dtype)
        for e, expert in enumerate(array):
            tensor[e].copy_(self._torch.from_numpy(np.array(expert)))
        return self._torch.nn.Parameter(tensor, requires_grad=False)

    def versions(self) -> dict[str, str]:
        """Name both packages and the instruction set."""
        import transformers

        capability = self._torch.backends.cpu.get_cpu_capability()
        return {"torch": f"{self._torch.__version__}, {capability}", "transformers": transformers.__version__}

    def prepare(self, threads: int) -> None:
        """Resize the pool."""
        self._torch.set_num_threads(threads)

    def bind(self, batch: Batch) -> Bound:
        """Convert the batch once, outside what is timed."""
        torch = self._torch
        hidden, weights = (torch.from_numpy(part).to(self._dtype) for part in (batch.hidden, batch.weights))
        ids = torch.from_numpy(batch.ids).long()
        kept = [hidden]

        def call() -> None:
            with torch.inference_mode():
                kept[0] = self._experts(hidden, ids, weights)

        return Bound(call, lambda: kept[0].float().numpy())


def load(kind: Kind, shape: Shape, weights: Weights, folder: Path) -> TorchEngine:  # noqa: ARG001  # as every peer's
    """Copy the weights into the module's parameters."""
    return TorchEngine(kind, shape, weights)
