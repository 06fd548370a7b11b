#!/usr/bin/env python3
"""Measure a whole model of transformers with Colibri's experts, grouped_mm's and eager's; JSON to a file.

usage: bench_transformers.py --output FILE [--layers N] [--rounds N] [--arms ...] [--dtypes ...] [--threads ...]
       (needs the package with its extra "transformers", installed)

The model has OLMoE's shape (hidden 2048, intermediate 1024, 64 experts, top 8, 16 heads) and random weights: 1.6 GB a
layer in float32, and as much again where they are packed. Each arm is a process of its own, and one runs at a time; the
arms take turns, `--rounds` times, every other round backwards. A process measures, for each number of threads:

- decode: tokens a second of `generate()` after the first token, from a prompt of 32;
- prefill: tokens a second of 512 tokens;
- experts_share: the part of either's time that the experts' modules took;
- peak_bytes: the most memory that it held;

each the median of its tries, and of the rounds. Then how many of the numbers that the MoE layers give differ in their
bits between a prompt in a batch of 8 and the same alone, and between one thread and two: on the same inputs, so that
what attention makes of a batch is left out.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from colibri_cli.formats.files import write_atomically
from colibri_cli.topology import describe

ARMS = ("colibri", "colibri-packed", "grouped_mm", "eager")
SIZES = {"hidden_size": 2048, "intermediate_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
VOCABULARY = 1024  # the head is no part of the question
PREFILL, PROMPT, GENERATED = 512, 32, 32


class Stopwatch:
    """The time since the first token, and how much of it the experts' modules took; a streamer of transformers too."""

    def __init__(self) -> None:
        self.restart()

    def restart(self, calls: int = 0) -> None:
        """Begin anew."""
        self.calls, self.experts, self.entered = calls, 0.0, 0.0
        self.began = time.perf_counter()

    def enter(self, *_: object) -> None:
        """Note that an experts module begins."""
        self.entered = time.perf_counter()

    def leave(self, *_: object) -> None:
        """Note that it ends."""
        self.experts += time.perf_counter() - self.entered

    def put(self, _: object) -> None:
        """Take the prompt, or a token: what comes after the first token is measured."""
        self.calls += 1
        if self.calls == 2:
            self.restart(self.calls)

    def end(self) -> None:
        """Take the end of a text."""

    def result(self, n_tokens: int) -> tuple[float, float]:
        """Give tokens a second, and the experts' part of the time."""
        seconds = time.perf_counter() - self.began
        return n_tokens / seconds, self.experts / seconds


def measure(arm: str, dtype: str, n_layers: int, threads: list[int], tries: int) -> dict[str, Any]:
    """Make the model and measure it, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, OlmoeConfig

    from colibri_cli.integrations.transformers import register

    register()
    register(pack=dtype, name="colibri-packed")
    torch.manual_seed(0)
    config = OlmoeConfig(
        **SIZES,
        num_experts=64,
        num_experts_per_tok=8,
        num_hidden_layers=n_layers,
        vocab_size=VOCABULARY,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), experts_implementation=arm).eval()
    layers = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    watch = Stopwatch()
    for layer in layers:
        layer.register_forward_pre_hook(watch.enter)
        layer.register_forward_hook(watch.leave)
    ids = torch.randint(0, VOCABULARY, (1, PREFILL), generator=torch.Generator().manual_seed(1))
    prompt = ids[:, :PROMPT]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0, "streamer": watch}
    found: dict[str, Any] = {}
    with torch.inference_mode():
        model(ids)  # packs, warms
        for n in threads:
            torch.set_num_threads(n)
            decode, prefill = [], []
            for _ in range(tries):
                watch.restart()
                model.generate(prompt, max_new_tokens=1 + GENERATED, **options)
                decode.append(watch.result(GENERATED))
                watch.restart()
                model(ids, use_cache=False)
                prefill.append(watch.result(PREFILL))
            for what, results in (("decode", decode), ("prefill", prefill)):
                per_second, share = (statistics.median(values) for values in zip(*results, strict=True))
                found[f"{what}/{n}"] = {"tokens_per_second": per_second, "experts_share": share}
        found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        found["bits"] = count_bits(model, layers, torch)
    return found


def count_bits(model: Any, layers: list[Any], torch: Any) -> dict[str, float]:
    """Give the shares of the MoE layers' numbers whose bits a batch of 8, or a second thread, changes."""
    seen: list[tuple[Any, ...]] = []
    hooks = [layer.register_forward_hook(lambda module, inputs, _: seen.append((module, *inputs))) for layer in layers]
    prompts = torch.randint(0, VOCABULARY, (8, PROMPT), generator=torch.Generator().manual_seed(2))
    model(prompts, use_cache=False)
    for hook in hooks:
        hook.remove()
    n_alone = n_whole = batch = threads = 0
    for layer, *inputs in seen:
        torch.set_num_threads(1)
        whole, alone = layer(*inputs), layer(*(value[:PROMPT] for value in inputs))
        torch.set_num_threads(2)
        batch += int((whole[:PROMPT] != alone).sum())
        threads += int((layer(*inputs) != whole).sum())
        n_alone, n_whole = n_alone + alone.numel(), n_whole + whole.numel()
    return {"batch": batch / n_alone, "threads": threads / n_whole}


def medians(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Take the median of each number over the rounds."""
    return {
        key: medians([result[key] for result in results])
        if isinstance(results[0][key], dict)
        else statistics.median(result[key] for result in results)
        for key in results[0]
    }


def main() -> int:
    """Run the script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tries", type=int, default=3, help="within a process")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        options = (arguments.layers, arguments.threads, arguments.tries)
        print(json.dumps(measure(arguments.arms[0], arguments.dtypes[0], *options)))
        return 0
    if arguments.output is None:
        parser.error("--output is needed")
    numbers = ["--layers", arguments.layers, "--tries", arguments.tries, "--threads", *arguments.threads]
    results: dict[str, dict[str, Any]] = {}
    for dtype in arguments.dtypes:
        rounds: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arguments.arms}
        for i in range(arguments.rounds):
            for arm in arguments.arms[:: -1 if i % 2 else 1]:
                command = [sys.executable, __file__, "--worker", "--arms", arm, "--dtypes", dtype, *map(str, numbers)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rounds[arm].append(json.loads(done.stdout.splitlines()[-1]))
                print(dtype, "round", i + 1, arm, rounds[arm][-1], flush=True)
        results[dtype] = {arm: medians(found) for arm, found in rounds.items()}
    run = {"layers": arguments.layers, "rounds": arguments.rounds, "cpu": describe()["cpu"], "results": results}
    write_atomically(arguments.output, (json.dumps(run, indent=1) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
