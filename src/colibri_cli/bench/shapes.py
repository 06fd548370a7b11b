"""Layers of published models, by name: the work that Colibri and its peers are compared on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from colibri_cli.errors import UsageError

WEIGHT_TYPES = ("float32", "bfloat16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Shape:
    """One MoE layer of SwiGLU experts without bias, whatever the model adds to them.

    Attributes
    ----------
    name : str
    hidden_size, intermediate_size, n_experts, top_k : int
    """

    name: str
    hidden_size: int
    intermediate_size: int
    n_experts: int
    top_k: int

    @property
    def expert_weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def n_weights(self) -> int:
        """Weights of all experts."""
        return self.n_experts * self.expert_weights

    def flops(self, n_tokens: int) -> int:
        """Operations that a batch's matrices take."""
        return 2 * n_tokens * self.top_k * self.expert_weights

    def shrunk(self, n_experts: int) -> Shape:
        """Give the same layer with fewer experts, and a name that says so.

        Raises
        ------
        UsageError
            It has fewer experts than that, or a token needs more.
        """
        if not self.top_k <= n_experts <= self.n_experts:
            raise UsageError(
                expected=f"{self.top_k} to {self.n_experts} experts for {self.name}", got=str(n_experts), at="--experts"
            )
        if n_experts == self.n_experts:
            return self
        return replace(self, name=f"{self.name}-of-{n_experts}", n_experts=n_experts)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("token-classifier", 128, 512, 8, 2),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("gpt-oss-20b", 2880, 2880, 32, 4),
        Shape("deepseek-v3", 7168, 2048, 256, 8),
    )
}
