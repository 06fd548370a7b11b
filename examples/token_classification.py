#!/usr/bin/env python3
"""Classify the words of a text with the built-in model, then let a load balancer choose the experts."""

import argparse

from colibri_cli import Balancer, Inference, Model
from colibri_cli.words import word_answers

TEXT = "The old captain slowly turned the ship, and the wind carried us home."


def show_words(model: Model, result: Inference) -> None:
    """Print a row a word: its class with the probability, and its experts with their weights."""
    words = model.tokenizer.words(result.ids)
    for answer in word_answers(result, words):
        name = model.classes[answer.label]
        probability = answer.probabilities[answer.label]
        experts = "  ".join(f"{expert}:{weight:.2f}" for expert, weight in answer.experts[:2])
        print(f"{answer.word.text:<12}{name:<10}{probability:.2f}   experts {experts}")


def show_load(title: str, result: Inference) -> None:
    """Print how many tokens each expert took."""
    load = result.routing.load
    print(f"{title}  {load.tolist()}  largest / mean {load.max() / load.mean():.2f}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="*", help="default: a sentence about a captain")
    text = " ".join(parser.parse_args().text) or TEXT

    model = Model.open()  # the bundle that is installed with the package; Model.open(path) for another
    ids = model.tokenizer.encode(text)

    result = model.infer(ids)
    show_words(model, result)
    mean = result.predict()
    print(f"\nthe whole text is mostly {model.classes[mean.argmax()]} ({mean.max():.2f})\n")

    # A balancer is the caller's: it remembers the last tokens from call to call, and may be saved and restored.
    # It changes which experts answer, so it is never on unless asked for.
    balancer = Balancer(model.config.n_experts, window=16, threshold=1.2)
    balanced = model.infer(ids, balancer=balancer)
    show_load("load, gate alone", result)
    show_load("load, balanced  ", balanced)
    moved = (balanced.routing.expert_ids != result.routing.expert_ids).any(axis=1).sum()
    changed = (balanced.classes != result.classes).sum()
    print(f"of {len(ids)} tokens {moved} went to other experts, and {changed} changed class")


if __name__ == "__main__":
    main()
