"""What the model says of each word: the answers for its pieces, put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from colibri_cli.model import Inference
    from colibri_cli.tokenizer import Word

_BLOCK = 4096  # words turned into Python objects at a time


@dataclass(frozen=True, slots=True)
class WordAnswer:
    """One word and what the model says of it.

    Attributes
    ----------
    word : Word
    label : int
        Position in the model's ``classes``.
    probabilities : ndarray, float32, shape (n_classes,)
    experts : list of (int, float32)
        Expert ids and their routing weights, by falling weight; the weights add up to 1.
    """

    word: Word
    label: int
    probabilities: NDArray[np.float32]
    experts: list[tuple[int, np.float32]]


def word_answers(inference: Inference, words: Sequence[Word]) -> Iterator[WordAnswer]:
    """Put the answers for the pieces of each word together.

    A word's class is the argmax of the sum of its pieces' log-probabilities, and its probabilities are the
    softmax of that sum. An expert's weight is its mean over the pieces, 0 where it was not chosen. A word
    of one piece keeps that piece's values to the last bit.

    Parameters
    ----------
    inference : Inference
        For ``n_tokens`` ids.
    words : sequence of Word
        Adjoining words, at least one piece each, none past ``n_tokens``.
    """
    for first in range(0, len(words), _BLOCK):
        block = words[first : first + _BLOCK]
        start, stop = block[0].start, block[-1].stop
        expert_ids = inference.routing.expert_ids[start:stop].tolist()
        weights = inference.routing.expert_weights[start:stop].tolist()
        for word, label, shares in zip(block, *_classes(inference, block), strict=True):
            pieces = slice(word.start - start, word.stop - start)
            yield WordAnswer(word, label, shares, _experts(expert_ids[pieces], weights[pieces]))


def _classes(inference: Inference, words: Sequence[Word]) -> tuple[list[int], NDArray[np.float32]]:
    starts = np.array([word.start for word in words])
    single = np.array([word.stop - word.start == 1 for word in words])
    pieces = inference.probabilities[words[0].start : words[-1].stop].astype(np.float64)
    # A probability that underflowed to 0 must not rule a class out for good: log 0 is minus infinity.
    logs = np.log(np.maximum(pieces, np.finfo(np.float32).tiny))
    sums = np.add.reduceat(logs, starts - words[0].start, axis=0)
    shares = np.exp(sums - sums.max(axis=1, keepdims=True))
    probabilities = (shares / shares.sum(axis=1, keepdims=True)).astype(np.float32)
    probabilities[single] = inference.probabilities[starts[single]]
    labels = np.where(single, inference.classes[starts], sums.argmax(axis=1))
    return labels.tolist(), probabilities


def _experts(expert_ids: list[list[int]], weights: list[list[float]]) -> list[tuple[int, np.float32]]:
    totals: dict[int, float] = {}
    for chosen, shares in zip(expert_ids, weights, strict=True):
        for expert, share in zip(chosen, shares, strict=True):
            totals[expert] = totals.get(expert, 0.0) + share
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return [(expert, np.float32(total / len(expert_ids))) for expert, total in ranked]
