"""Results of `colibri infer`: computed once, rendered as text, JSON, JSON lines or an array file."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from colibri_cli.report import Column, bar, floats, json_lines, json_parts, table
from colibri_cli.tokenizer import Word
from colibri_cli.words import word_answers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from colibri_cli.model import Inference
    from colibri_cli.words import WordAnswer

_SCHEMA = "colibri.infer/1"
_BAR = 40  # columns
_BLOCK = 4096  # rows whose numbers are rendered at a time
_LEGEND = "(a word of several pieces: the sum of their log-probabilities, normalised; +n: further experts)\n"
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green")


@dataclass(frozen=True, slots=True)
class Answer:
    """What `colibri infer` found, ready for every format.

    Attributes
    ----------
    task : str
    classes : tuple of str
    inference : Inference
    words : list of Word
        They cover every token in order.
    pieces : list of str
        One for each token.
    """

    task: str
    classes: tuple[str, ...]
    inference: Inference
    words: list[Word]
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Latency:
    """How long each of several equal runs took.

    Attributes
    ----------
    milliseconds : list of float
    """

    milliseconds: list[float]

    def percentile(self, percent: float) -> float:
        """Give the nearest-rank percentile, a time that was measured."""
        ranked = sorted(self.milliseconds)
        return ranked[max(math.ceil(percent / 100 * len(ranked)), 1) - 1]

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{len(self.milliseconds)} runs, P50 {self.percentile(50):.3f} ms, P99 {self.percentile(99):.3f} ms"


def infer_text(answer: Answer, latency: Latency | None, *, by_piece: bool, terminal: bool) -> str:
    """Show a row a word (or piece), each expert's load, the whole input's classes and the latency."""
    columns = [
        Column("piece" if by_piece else "word", style="bold"),
        Column("experts", style="dim"),
        Column("class", style=_colours(answer.classes)),
        Column("probability", number=True),
    ]
    top_k = answer.inference.routing.expert_ids.shape[1]
    rows = [
        [
            _name_cell(found.word),
            _experts_cell(found.experts, top_k),
            answer.classes[found.label],
            f"{found.probabilities[found.label]:.3f}",
        ]
        for found in _answers(answer, by_piece=by_piece)
    ]
    if rows:
        parts = [
            table(columns, rows, terminal=terminal) + ("" if by_piece else _legend(answer)),
            load_table(answer.inference.routing.load.tolist(), terminal=terminal),
            _prediction_table(answer, terminal=terminal),
        ]
    else:
        parts = ["no tokens\n"]
    if latency is not None:
        columns = [Column(header, number=True) for header in ("runs", "P50 ms", "P99 ms")]
        times = [f"{latency.percentile(percent):.3f}" for percent in (50, 99)]
        parts.append(table(columns, [[str(len(latency.milliseconds)), *times]], terminal=terminal))
    return "\n".join(parts)


def load_table(load: Sequence[int], *, terminal: bool) -> str:
    """Show the tokens each expert got, as a bar beside the numbers."""
    columns = [
        Column("expert", number=True),
        Column("tokens", number=True),
        Column("share", number=True),
        Column("of the busiest", style="cyan"),
    ]
    total, most = max(sum(load), 1), max(*load, 1)
    body = [
        [str(expert), str(tokens), f"{tokens / total:.3f}", bar(tokens / most, _BAR)]
        for expert, tokens in enumerate(load)
    ]
    return table(columns, body, terminal=terminal)


def _experts_cell(experts: Sequence[tuple[int, np.float32]], top_k: int) -> str:
    shown = " ".join(f"{expert}:{weight:.2f}" for expert, weight in experts[:top_k])
    return f"{shown} +{len(experts) - top_k}" if len(experts) > top_k else shown


def _name_cell(word: Word) -> str:
    return f"{word.text} (unknown)" if word.unknown else word.text


def _legend(answer: Answer) -> str:
    """Explain a word's row, where one is more than its only piece's."""
    if len(answer.words) == len(answer.pieces):
        return ""
    return _LEGEND


def _prediction_table(answer: Answer, *, terminal: bool) -> str:
    columns = [
        Column("whole input", style=_colours(answer.classes)),
        Column("probability", number=True),
        Column("of 1", style="cyan"),
    ]
    shares = answer.inference.predict().tolist()
    body = [[name, f"{share:.3f}", bar(share, _BAR)] for name, share in zip(answer.classes, shares, strict=True)]
    return table(columns, body, terminal=terminal)


def _colours(classes: Sequence[str]) -> dict[str, str]:
    return {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(classes)}


def infer_json(answer: Answer, run: Mapping[str, object], latency: Latency | None) -> Iterator[bytes]:
    """Render everything: words, pieces, load and prediction; ``run`` tells how and how fast."""
    inference = answer.inference
    if latency is not None:
        times = {f"p{percent}_ms": round(latency.percentile(percent), 6) for percent in (50, 99)}
        run = {**run, "latency": {"runs": len(latency.milliseconds), **times}}
    return json_parts(
        {
            "schema": _SCHEMA,
            "task": answer.task,
            "classes": list(answer.classes),
            "n_tokens": len(answer.pieces),
            "n_words": len(answer.words),
            "prediction": _prediction_object(answer),
            "load": inference.routing.load.tolist(),
            "words": _objects(answer, by_piece=False),
            "pieces": _objects(answer, by_piece=True),
            "run": run,
        }
    )


def infer_jsonl(answer: Answer, *, by_piece: bool) -> Iterator[bytes]:
    """Render one JSON object a word (or piece)."""
    entries = _objects(answer, by_piece=by_piece)
    return json_lines({"schema": _SCHEMA, **entry} for entry in entries)


def infer_npy(inference: Inference) -> bytes:
    """Give the probabilities, float32 ``(n_tokens, n_classes)``, as the bytes of an ``.npy`` file."""
    buffer = io.BytesIO()
    np.save(buffer, inference.probabilities, allow_pickle=False)
    return buffer.getvalue()


def _objects(answer: Answer, *, by_piece: bool) -> Iterator[dict[str, object]]:
    answers = _answers(answer, by_piece=by_piece)
    while block := list(islice(answers, _BLOCK)):
        shares = floats(np.stack([found.probabilities for found in block]))
        weights = iter(floats(np.array([weight for found in block for _, weight in found.experts], np.float32)))
        for found, probabilities in zip(block, shares, strict=True):
            word = found.word
            if by_piece:
                name: dict[str, object] = {"piece": word.text, "id": int(answer.inference.ids[word.start])}
            else:
                name = {"word": word.text, "start": word.start, "stop": word.stop}
                if word.unknown:
                    name["unknown"] = True
            yield {
                **name,
                "class": answer.classes[found.label],
                "probability": probabilities[found.label],
                "probabilities": probabilities,
                "experts": [{"id": expert, "weight": next(weights)} for expert, _ in found.experts],
            }


def _answers(answer: Answer, *, by_piece: bool) -> Iterator[WordAnswer]:
    pieces = [Word(piece, i, i + 1) for i, piece in enumerate(answer.pieces)] if by_piece else []
    return word_answers(answer.inference, pieces or answer.words)


def _prediction_object(answer: Answer) -> dict[str, object] | None:
    if not answer.pieces:
        return None
    pooled = answer.inference.predict()
    label, shares = int(pooled.argmax()), floats(pooled)
    return {"class": answer.classes[label], "probability": shares[label], "probabilities": shares}
