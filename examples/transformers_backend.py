#!/usr/bin/env python3
"""A model of transformers with its experts run by Colibri: the same text, from the same tensors.

usage: transformers_backend.py [MODEL]      (needs the extra: pip install '.[transformers]')

Without MODEL, a folder or a name on the Hub, a small OLMoE with random weights is made: nothing is downloaded.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

from colibri_cli.integrations.transformers import register


def small_model() -> torch.nn.Module:
    """Make an OLMoE of two layers, sixteen experts each."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=16,
        num_experts_per_tok=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def main() -> None:
    """Generate with transformers' own experts, with Colibri in place, and with Colibri in 8 bits."""
    register()
    register(pack="int8", name="colibri-int8")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval() if len(sys.argv) > 1 else small_model()
    prompt = torch.tensor([[1, 2, 3, 4, 5]])
    for implementation in ("eager", "colibri", "colibri-int8"):
        model.set_experts_implementation(implementation)
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        print(f"{implementation:12} {ids[0, 5:].tolist()}")


if __name__ == "__main__":
    main()
