#!/usr/bin/env python3
"""Train the built-in bundle: a mixture of experts that gives every word its coarse part of speech.

Reads top to bottom: recipe, data, tokenizer, model, training, NumPy reading of the bundle, evaluation,
golden values, card. Two stages: the first learns the classes, the second also teaches every expert to
have no opinion on tokens that are not its own, so that a routing bug shows in the answers.
Every figure on the card comes from the exported files, read back by NumPy alone.

    python scripts/train_token_classifier.py --data DIR [--out models] [--dense | --evaluate]

DIR holds ``ud/*.tsv``: ``form<TAB>UPOS[<TAB>SpaceAfter=No]``, a blank line after each sentence.
Needs PyTorch (``pip install '.[train]'``) and sentencepiece 0.2.3 or newer.
One thread and one seed: the same weights again on the same machine with the same PyTorch.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import sentencepiece
import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = ("noun", "verb", "modifier", "function", "other")
UPOS_TO_CLASS = {
    "NOUN": 0, "PROPN": 0,
    "VERB": 1, "AUX": 1,
    "ADJ": 2, "ADV": 2, "NUM": 2,
    "ADP": 3, "DET": 3, "PRON": 3, "CCONJ": 3, "SCONJ": 3, "PART": 3,
    "PUNCT": 4, "SYM": 4, "X": 4, "INTJ": 4,
}  # fmt: skip
LANGUAGES = {
    "en": ("ewt",),
    "fr": ("frgsd", "parisstories", "rhapsodie"),
    "de": ("degsd",),
    "es": ("esgsd",),
    "it": ("markit", "parlamint", "twittiro", "thvalico"),
}

# Letters and signs of the five languages, wanted in the vocabulary whether the training split holds them or not.
CHARACTERS = "ÀÁÂÄÆÇÈÉÊËÌÍÎÏÑÒÓÔÖŒÙÚÛÜŸßàáâäæçèéêëìíîïñòóôöœùúûüÿ¡¿«»‘’“”„–—·°§€£"  # noqa: RUF001 - the look-alikes are meant

# Everyday phrases, which the treebanks hardly hold, each word with its class's first letter: part of the
# training split. The card's own short inputs are not among them.
PHRASES = {
    "en": """hello/o there/m | hello/o everyone/f | hello/o my/f friend/n
        hello/o ,/o how/m are/v you/f ?/o | hi/o there/m | hey/o you/f | good/m evening/n | good/m night/n
        good/m afternoon/n everyone/f | thanks/n a/f lot/n | thank/v you/f very/m much/m
        thank/v you/f all/f | I/f love/v you/f | we/f love/v it/f | see/v you/f later/m
        see/v you/f tomorrow/n | how/m are/v you/f ?/o | what/f is/v your/f name/n ?/o
        please/o help/v me/f | yes/o ,/o please/o | no/o ,/o thanks/n | goodbye/o | bye/o | sorry/m
        welcome/m | the/f world/n is/v big/m | a/f new/m world/n | where/m is/v it/f ?/o
        happy/m birthday/n""",
    "fr": """bonjour/n à/f tous/f | bonjour/n madame/n | bonjour/n ,/o comment/m ça/f va/v ?/o
        bonsoir/n monsieur/n | salut/o les/f amis/n | merci/n beaucoup/m | merci/n à/f toi/f
        je/f t'/f aime/v | je/f vous/f aime/v | tout/m le/f monde/n est/v là/m | bonne/m nuit/n
        bonne/m journée/n | au/f revoir/n | à/f demain/m | s'/f il/f vous/f plaît/v | oui/o ,/o merci/n
        non/o merci/n | où/m est/v la/f gare/n ?/o | je/f ne/m sais/v pas/m""",
    "de": """hallo/o zusammen/m | hallo/o Welt/n | hallo/o ,/o wie/m geht/v es/f dir/f ?/o
        guten/m Morgen/n | guten/m Tag/n | guten/m Abend/n | gute/m Nacht/n | danke/o schön/m
        vielen/m Dank/n | bitte/o sehr/m | auf/f Wiedersehen/n | ich/f liebe/v euch/f | ich/f liebe/v es/f
        er/f liebt/v sie/f | wir/f lieben/v dich/f | ich/f sehe/v dich/f | ich/f kenne/v dich/f
        ich/f mag/v dich/f | du/f liebst/v mich/f | wie/m heißt/v du/f ?/o | ja/o ,/o bitte/o
        nein/o danke/o | ich/f weiß/v es/f nicht/m | wo/m ist/v der/f Bahnhof/n ?/o | bis/f morgen/m
        es/f tut/v mir/f leid/m""",
    "es": """hola/o a/f todos/f | hola/o amigo/n | hola/o ,/o ¿/o qué/f tal/m ?/o | buenos/m días/n
        buenas/m tardes/n | buenas/m noches/n | muchas/m gracias/n | gracias/n a/f ti/f | te/f quiero/v
        te/f quiero/v mucho/m | te/f amo/v | adiós/o | hasta/f mañana/m | hasta/f luego/m | por/f favor/n
        sí/o ,/o por/f favor/n | no/m lo/f sé/v | ¿/o dónde/m está/v la/f estación/n ?/o
        me/f llamo/v Ana/n | el/f mundo/n es/v grande/m""",
    "it": """ciao/o a/f tutti/f | ciao/o amico/n | ciao/o ,/o come/m stai/v ?/o | buon/m giorno/n
        buona/m sera/n | buona/m notte/n | grazie/n mille/m | molte/m grazie/n | grazie/n a/f te/f
        ti/f amo/v | ti/f voglio/v bene/m | arrivederci/o | a/f domani/m | per/f favore/n
        sì/o ,/o grazie/n | non/m lo/f so/v | mi/f chiamo/v Anna/n | dove/m è/v la/f stazione/n ?/o
        il/f mondo/n è/v grande/m""",
}

SPACE = "\u2581"  # sentencepiece's sign for a space before a piece

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.floating[Any]]
Router = Callable[[FloatArray], tuple[IntArray, FloatArray]]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every number that training depends on."""

    seed: int = 1
    vocab_size: int = 12000
    hidden_size: int = 128
    intermediate_size: int = 64
    n_experts: int = 8
    top_k: int = 2
    context: int = 3  # pieces on either side
    # what a batch is made of
    batch_pieces: int = 4096
    sampled_copies: int = 4  # sampled segmentations of each sentence, beside the best one
    sampled_share: float = 0.3  # sentences that take a sampled segmentation
    sampling_alpha: float = 0.3
    sampled_best: int = 16  # segmentations of a word to draw from
    lower_share: float = 0.1  # sentences without capitals
    phrase_copies: int = 6  # of each everyday phrase in an epoch
    short_share: float = 0.25  # sequences cut down to one to three words
    unknown_share: float = 0.02  # pieces replaced by the unknown piece
    # optimisation
    steps: int = 2600  # first stage
    learning_rate: float = 8e-3
    refusal_steps: int = 400  # second stage
    refusal_learning_rate: float = 1e-3
    weight_decay: float = 0.5
    dropout: float = 0.05  # on x
    label_smoothing: float = 0.03
    # routing
    gate_noise: float = 0.25  # standard deviation, on the logits
    load_loss: float = 0.1
    explore_share: float = 0.2  # tokens sent to random experts of their best `explore_depth`
    explore_depth: int = 4
    refusal_share: float = 0.15  # tokens also sent to experts of the worse half, second stage
    refusal_loss: float = 0.2


# --- data ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sentence:
    """Text, where each word starts in it (code points), each word's class, and the language."""

    text: str
    starts: list[int]
    labels: list[int]
    language: str


def read_sentences(directory: Path) -> Iterator[Sentence]:
    """Yield the sentences of ``ud/*.tsv``, files in the order of their names."""
    language_of = {prefix: language for language, prefixes in LANGUAGES.items() for prefix in prefixes}
    for path in sorted((directory / "ud").glob("*.tsv")):
        language = language_of[path.name.split("-")[0]]
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            text, starts, labels = "", [], []
            for line in block.splitlines():
                form, upos, *rest = line.split("\t")
                starts.append(len(text))
                labels.append(UPOS_TO_CLASS[upos.split("+")[0]])
                text += form if rest else form + " "
            if starts:
                yield Sentence(text.rstrip(), starts, labels, language)


def split_sentences(sentences: list[Sentence]) -> tuple[list[Sentence], list[Sentence], list[Sentence]]:
    """Split into training, development (every 16th) and test (every 10th of the rest)."""
    development = sentences[15::16]
    rest = [sentence for index, sentence in enumerate(sentences) if index % 16 != 15]
    test = rest[9::10]
    train = [sentence for index, sentence in enumerate(rest) if index % 10 != 9]
    return train, development, test


def phrases() -> Iterator[Sentence]:
    """Yield the everyday phrases."""
    class_of = {name[0]: label for label, name in enumerate(CLASSES)}
    for language, block in PHRASES.items():
        for phrase in re.split(r"\||\n", block):
            text, starts, labels = "", [], []
            for form, letter in re.findall(r"(\S+)/(\w)", phrase):
                glued = form in ",.?" or text.endswith(("¿", "'"))
                text += form if glued or not text else " " + form
                starts.append(len(text) - len(form))
                labels.append(class_of[letter])
            yield Sentence(text, starts, labels, language)


def lower(sentence: Sentence) -> Sentence:
    """Return the sentence without capitals, or as it is where that would move its letters."""
    text = sentence.text.lower()
    return dataclasses.replace(sentence, text=text) if len(text) == len(sentence.text) else sentence


# --- tokenizer ----------------------------------------------------------------------------------------


def train_tokenizer(sentences: list[Sentence], recipe: Recipe) -> bytes:
    """Return a serialised cased unigram model; one thread, since the order of its sums is the result."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(sentence.text for sentence in sentences),
        model_writer=model,
        model_type="unigram",
        vocab_size=recipe.vocab_size,
        character_coverage=1.0,
        required_chars=CHARACTERS,
        bos_id=-1,
        eos_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A sentence as pieces.

    ids, labels : one a piece; a piece has the class of the word that owns its first letter.
    boundaries : the pieces that follow a space, and the number of pieces.
    word_piece, word : pairs (piece, word); a word's label is the sum over its pieces. A word that owns no
    first letter borrows the piece that covers its own.
    """

    ids: IntArray
    labels: IntArray
    boundaries: IntArray
    word_piece: IntArray
    word: IntArray


class Sampler:
    """Draws a segmentation for each space-separated word, in proportion to its probability to the power alpha.

    sentencepiece samples too, but its seed does not give the same draws in another process.
    """

    def __init__(self, tokenizer: sentencepiece.SentencePieceProcessor, recipe: Recipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe
        self._rng = np.random.default_rng(recipe.seed)
        self._choices: dict[str, tuple[list[list[str]], FloatArray]] = {}

    def draw(self, word: str) -> list[str]:
        """Return the pieces of one word, which starts with the space sign."""
        if word not in self._choices:
            found = self._tokenizer.nbest_encode(word[1:], nbest_size=self._recipe.sampled_best, return_type=str)
            segmentations = [pieces for pieces in found if "".join(pieces) == word]
            scores = [sum(self._score(piece) for piece in pieces) for pieces in segmentations]
            weights = np.exp(self._recipe.sampling_alpha * (np.array(scores) - max(scores)))
            self._choices[word] = segmentations, np.cumsum(weights / weights.sum())
        segmentations, cumulated = self._choices[word]
        drawn = int(np.searchsorted(cumulated, self._rng.random()))
        return segmentations[min(drawn, len(segmentations) - 1)]

    def _score(self, piece: str) -> float:
        return float(self._tokenizer.get_score(self._tokenizer.piece_to_id(piece)))


def to_pieces(
    tokenizer: sentencepiece.SentencePieceProcessor, sentence: Sentence, sampler: Sampler | None = None
) -> Pieces:
    """Segment a sentence: the best segmentation, or a sampled one."""
    mapping = tokenizer.encode(sentence.text, return_type="offset_mapping")
    pieces: list[str] = mapping["pieces"]
    surfaces = [sentence.text[begin:end] for begin, end in mapping["offsets"]]
    firsts = [end - len(surface.lstrip()) for (_, end), surface in zip(mapping["offsets"], surfaces, strict=True)]
    boundaries = [index for index, piece in enumerate(pieces) if piece.startswith(SPACE)]
    if sampler is not None:
        pieces, firsts, boundaries = _resample(pieces, firsts, boundaries, sentence.text, sampler)
    ids = [tokenizer.piece_to_id(piece) for piece in pieces]
    starts = np.array(sentence.starts)
    owner = np.searchsorted(starts, firsts, side="right") - 1
    orphans = np.setdiff1d(np.arange(len(starts)), owner)
    covering = np.searchsorted(firsts, starts[orphans], side="right") - 1
    return Pieces(
        ids=np.array(ids),
        labels=np.array(sentence.labels)[owner],
        boundaries=np.array([*boundaries, len(ids)]),
        word_piece=np.concatenate([np.arange(len(ids)), covering]),
        word=np.concatenate([owner, orphans]),
    )


def copies_of(
    tokenizer: sentencepiece.SentencePieceProcessor, sentence: Sentence, sampler: Sampler, recipe: Recipe
) -> list[Pieces]:
    """Return the sentence as it is, without capitals, and in sampled segmentations."""
    sampled = [to_pieces(tokenizer, sentence, sampler) for _ in range(recipe.sampled_copies)]
    return [to_pieces(tokenizer, sentence), to_pieces(tokenizer, lower(sentence)), *sampled]


def _resample(
    pieces: list[str], firsts: list[int], boundaries: list[int], text: str, sampler: Sampler
) -> tuple[list[str], list[int], list[int]]:
    """Draw each word's pieces anew; a word that normalisation changes keeps its own."""
    new_pieces: list[str] = []
    new_firsts: list[int] = []
    new_boundaries: list[int] = []
    for start, stop in itertools.pairwise([*boundaries, len(pieces)]):
        new_boundaries.append(len(new_pieces))
        word = "".join(pieces[start:stop])
        if text.startswith(word[1:], firsts[start]):
            drawn = sampler.draw(word)
            lengths = itertools.accumulate((len(piece) for piece in drawn[:-1]), initial=0)
            new_pieces += drawn
            new_firsts += [firsts[start] + max(0, length - 1) for length in lengths]
        else:
            new_pieces += pieces[start:stop]
            new_firsts += firsts[start:stop]
    return new_pieces, new_firsts, new_boundaries


# --- model --------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """The bundle's network in PyTorch; with one expert and ``top_k`` 1 it is a dense FFN."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        hidden, intermediate, experts = recipe.hidden_size, recipe.intermediate_size, recipe.n_experts
        offsets = 2 * recipe.context + 1
        padded_vocab = recipe.vocab_size + 1  # the last row stands for "outside the input" and stays zero
        self.embedding = nn.Embedding(padded_vocab, hidden, padding_idx=recipe.vocab_size)
        self.context = _normal(offsets, hidden, hidden, scale=(offsets * hidden) ** -0.5)
        self.router = _normal(experts, hidden, scale=hidden**-0.5)
        self.w1 = _normal(experts, intermediate, hidden, scale=(2 / hidden) ** 0.5)
        self.b1 = nn.Parameter(torch.zeros(experts, intermediate))
        self.w2 = _normal(experts, hidden, intermediate, scale=(1 / intermediate) ** 0.5)
        self.b2 = nn.Parameter(torch.zeros(experts, hidden))
        self.head = nn.Linear(hidden, len(CLASSES))

    def forward(self, padded_ids: Tensor, positions: Tensor) -> Tensor:
        """Return log-probabilities (T, C), routed as the bundle will be."""
        x = self.mix(padded_ids, positions)
        scores, chosen = (x @ self.router.T).topk(self.recipe.top_k)
        log_probabilities: Tensor = self.head(self.experts(x, chosen, scores.softmax(dim=1))).log_softmax(dim=1)
        return log_probabilities

    def mix(self, padded_ids: Tensor, positions: Tensor) -> Tensor:
        """Return x (T, H): each piece's neighbourhood through one full matrix per offset."""
        embedded = self.embedding(padded_ids)
        length = len(padded_ids) - 2 * self.recipe.context
        mixed = sum(embedded[j : j + length] @ matrix.T for j, matrix in enumerate(self.context))
        return functional.dropout(
            torch.as_tensor(mixed)[positions - self.recipe.context], self.recipe.dropout, self.training
        )

    def experts(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts (T, H)."""
        output = torch.zeros_like(x)
        for expert in range(self.recipe.n_experts):
            token, k = torch.nonzero(expert_ids == expert, as_tuple=True)
            inner = functional.relu(functional.linear(x[token], self.w1[expert], self.b1[expert]))
            y = functional.linear(inner, self.w2[expert], self.b2[expert])
            output = output.index_add(0, token, y * weights[token, k, None])
        return output


def _normal(*shape: int, scale: float) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * scale)


# --- training -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences in one row of ids, ``context`` padding ids between them; ``positions`` are the pieces."""

    padded_ids: Tensor
    positions: Tensor
    labels: Tensor


def batches(copies: list[list[Pieces]], recipe: Recipe, rng: np.random.Generator) -> Iterator[Batch]:
    """Yield batches without end; every sentence comes once an epoch."""
    padding = np.full(recipe.context, recipe.vocab_size)
    rows: list[IntArray] = [padding]
    positions: list[IntArray] = []
    labels: list[IntArray] = []
    length, n_pieces = recipe.context, 0
    while True:
        for index in rng.permutation(len(copies)):
            copy = int(rng.random() < recipe.lower_share)
            if rng.random() < recipe.sampled_share:
                copy = 2 + int(rng.integers(recipe.sampled_copies))
            pieces = copies[index][copy]
            start, stop = 0, len(pieces.ids)
            if rng.random() < recipe.short_share:
                n_words = len(pieces.boundaries) - 1
                first = rng.integers(n_words)
                last = min(first + rng.integers(1, 4), n_words)
                start, stop = pieces.boundaries[first], pieces.boundaries[last]
            ids = pieces.ids[start:stop].copy()
            ids[rng.random(len(ids)) < recipe.unknown_share] = 0
            rows += [ids, padding]
            positions.append(np.arange(length, length + len(ids)))
            labels.append(pieces.labels[start:stop])
            length += len(ids) + recipe.context
            n_pieces += len(ids)
            if n_pieces >= recipe.batch_pieces:
                arrays = (np.concatenate(parts) for parts in (rows, positions, labels))
                yield Batch(*(torch.from_numpy(array) for array in arrays))
                rows, positions, labels = [padding], [], []
                length, n_pieces = recipe.context, 0


def loss_of(model: Classifier, batch: Batch, *, refuse: bool) -> Tensor:
    """Return the training loss: cross-entropy, even load and, in the second stage, refusal."""
    recipe = model.recipe
    x = model.mix(batch.padded_ids, batch.positions)
    logits = x @ model.router.T
    noisy = logits + torch.randn_like(logits) * recipe.gate_noise
    ranking = noisy.detach().argsort(dim=1, descending=True)
    chosen = ranking[:, : recipe.top_k].clone()
    if recipe.n_experts > recipe.top_k:
        explore = torch.rand(len(x)) < recipe.explore_share
        chosen[explore] = _random_columns(ranking[explore, : recipe.explore_depth], recipe.top_k)
    output = model.experts(x, chosen, logits.gather(1, chosen).softmax(dim=1))
    loss = functional.cross_entropy(model.head(output), batch.labels, label_smoothing=recipe.label_smoothing)
    if recipe.n_experts > recipe.top_k:
        share = functional.one_hot(chosen, recipe.n_experts).float().mean(dim=(0, 1))
        loss = loss + recipe.load_loss * recipe.n_experts * (share * logits.softmax(dim=1).mean(dim=0)).sum()
    if refuse and recipe.n_experts > recipe.top_k:
        some = torch.rand(len(x)) < recipe.refusal_share
        wrong = _random_columns(ranking[some, recipe.n_experts // 2 :], recipe.top_k)
        weights = logits[some].detach().gather(1, wrong).softmax(dim=1)
        refused = model.head(model.experts(x[some].detach(), wrong, weights))
        loss = loss - recipe.refusal_loss * refused.log_softmax(dim=1).mean()
    return loss


def _random_columns(table: Tensor, count: int) -> Tensor:
    return table.gather(1, torch.rand(table.shape).argsort(dim=1)[:, :count])


def train(
    model: Classifier,
    stream: Iterator[Batch],
    steps: int,
    peak: float,
    *,
    refuse: bool,
    report: Callable[[str], None],
) -> None:
    """Run one stage: AdamW, a short warm-up, then a cosine to nothing."""
    warm_up = min(100, steps // 10 + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=model.recipe.weight_decay, fused=True
    )
    model.train()
    started = time.perf_counter()
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, next(stream), refuse=refuse)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()
        if (step + 1) % 200 == 0 or step + 1 == steps:
            seconds = time.perf_counter() - started
            report(f"step {step + 1}/{steps}: loss {loss.item():.4f}, {seconds:.0f} s")


# --- the exported files, read by NumPy alone ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Weights:
    """The bundle's tensors, ``[out][in]``, all of one dtype."""

    embedding: FloatArray  # [vocab, hidden]
    context: FloatArray  # [2 * context + 1, hidden, hidden]
    router: FloatArray  # [experts, hidden]
    w1: FloatArray  # [experts, intermediate, hidden]
    b1: FloatArray
    w2: FloatArray  # [experts, hidden, intermediate]
    b2: FloatArray
    head_weight: FloatArray  # [classes, hidden]
    head_bias: FloatArray

    def as_type(self, dtype: type) -> Weights:
        """Return the same weights in another precision."""
        return Weights(*(getattr(self, field.name).astype(dtype) for field in dataclasses.fields(self)))


def weights_of(model: Classifier) -> Weights:
    """Copy the trained tensors out of PyTorch."""
    tensors = (
        model.embedding.weight[: model.recipe.vocab_size], model.context, model.router,
        model.w1, model.b1, model.w2, model.b2, model.head.weight, model.head.bias,
    )  # fmt: skip
    return Weights(*(tensor.detach().numpy().copy() for tensor in tensors))


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Return the bundle's ``config.json``."""
    return {
        "schema_version": 1,
        "task": "token-classification",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "n_experts": recipe.n_experts,
        "top_k": recipe.top_k,
        "n_classes": len(CLASSES),
        "classes": list(CLASSES),
        "activation": "relu",
        "gated": False,
        "dtype": "float32",
        "context": recipe.context,
        "tokenizer": "tokenizer.model",
        "router": {"kind": "topk-softmax", "gating": "exact"},
        "balance": {"enabled": False, "window": 64, "threshold": 1.8, "candidates": 4, "prefer": "score"},
        "artifact": "experts/expert_{i}.bin",
    }


def write_bundle(directory: Path, tokenizer: bytes, weights: Weights, recipe: Recipe) -> None:
    """Write the bundle: float32, little-endian, row-major."""
    (directory / "experts").mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(recipe), indent=2) + "\n", encoding="utf-8")
    (directory / "tokenizer.model").write_bytes(tokenizer)
    files = {
        "embedding.bin": [weights.embedding],
        "context.bin": [weights.context],
        "router_weights.bin": [weights.router],
        "head.bin": [weights.head_weight, weights.head_bias],
    }
    for expert in range(recipe.n_experts):
        parts = [weights.w1[expert], weights.b1[expert], weights.w2[expert], weights.b2[expert]]
        files[f"experts/expert_{expert}.bin"] = parts
    for name, arrays in files.items():
        (directory / name).write_bytes(b"".join(array.astype("<f4").tobytes() for array in arrays))


def read_bundle(directory: Path) -> tuple[sentencepiece.SentencePieceProcessor, Weights, dict[str, Any]]:
    """Read a bundle back."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]

    def read(name: str, *shapes: tuple[int, ...]) -> list[FloatArray]:
        flat = np.fromfile(directory / name, dtype="<f4")
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        if len(flat) != ends[-1]:
            raise SystemExit(f"Expected {ends[-1]} floats, got {len(flat)} - at {directory / name}")
        return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]

    expert_shapes = ((intermediate, hidden), (intermediate,), (hidden, intermediate), (hidden,))
    experts = [read(config["artifact"].format(i=i), *expert_shapes) for i in range(config["n_experts"])]
    w1, b1, w2, b2 = (np.stack(parts) for parts in zip(*experts, strict=True))
    (embedding,) = read("embedding.bin", (config["vocab_size"], hidden))
    (context,) = read("context.bin", (2 * config["context"] + 1, hidden, hidden))
    (router,) = read("router_weights.bin", (config["n_experts"], hidden))
    head_weight, head_bias = read("head.bin", (config["n_classes"], hidden), (config["n_classes"],))
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    return tokenizer, Weights(embedding, context, router, w1, b1, w2, b2, head_weight, head_bias), config


def mix(weights: Weights, ids: IntArray, sequence: IntArray) -> FloatArray:
    """Return x (T, H); ``sequence`` (T,) names the input each piece belongs to."""
    embedded = weights.embedding[ids]
    x = np.zeros_like(embedded)
    reach = len(weights.context) // 2
    for offset, matrix in zip(range(-reach, reach + 1), weights.context, strict=True):
        here = np.arange(max(0, -offset), len(ids) - max(0, offset))
        here = here[sequence[here] == sequence[here + offset]]
        x[here] += embedded[here + offset] @ matrix.T
    return x


def run_experts(weights: Weights, x: FloatArray, expert_ids: IntArray, expert_weights: FloatArray) -> FloatArray:
    """Return class logits (T, C): the chosen experts' weighted sum through the head."""
    h = np.zeros_like(x)
    for expert in range(len(weights.w1)):
        token, k = np.nonzero(expert_ids == expert)
        inner = np.maximum(x[token] @ weights.w1[expert].T + weights.b1[expert], 0)
        y = inner @ weights.w2[expert].T + weights.b2[expert]
        np.add.at(h, token, y * expert_weights[token, k, None])
    return h @ weights.head_weight.T + weights.head_bias


def log_softmax(logits: FloatArray) -> FloatArray:
    """Return the logarithm of the softmax over the last axis."""
    shifted: FloatArray = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def softmax_of_ranks(*ranks: int) -> Router:
    """Return the router that takes these ranks (0 is the best); ``softmax_of_ranks(0, 1)`` is the model's."""

    def route(logits: FloatArray) -> tuple[IntArray, FloatArray]:
        ids = np.argsort(-logits, axis=1, kind="stable")[:, list(ranks)]  # stable: ties to the lower id
        return ids, np.exp(log_softmax(np.take_along_axis(logits, ids, axis=1)))

    return route


def route_taylor(logits: FloatArray) -> tuple[IntArray, FloatArray]:
    """Route with exp as a second-order Taylor polynomial, reduced to half octaves."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :2]
    chosen = np.take_along_axis(logits, ids, axis=1)
    z = np.maximum(chosen - chosen.max(axis=1, keepdims=True), -87)
    half_octaves = np.rint(z * (2 / math.log(2)))
    f = z - half_octaves * (math.log(2) / 2)
    exponential = (1 + f + f * f / 2) * np.exp2(half_octaves / 2)
    return ids, exponential / exponential.sum(axis=1, keepdims=True)


def random_router(seed: int) -> Router:
    """Return the router that takes two random experts, with the gate's own weights for them."""

    def route(logits: FloatArray) -> tuple[IntArray, FloatArray]:
        ids = np.argsort(np.random.default_rng(seed).random(logits.shape), axis=1)[:, :2]
        return ids, np.exp(log_softmax(np.take_along_axis(logits, ids, axis=1)))

    return route


def balanced_router(balance: dict[str, Any], sequence: IntArray | None = None) -> Router:
    """Return the router with load balancing over one stream, or with fresh rings for each ``sequence``."""

    def route(logits: FloatArray) -> tuple[IntArray, FloatArray]:
        n_experts, top_k = logits.shape[1], 2
        rankings = np.argsort(-logits, axis=1, kind="stable").tolist()
        ids = np.empty((len(logits), top_k), dtype=np.int64)
        expert_weights = np.empty((len(logits), top_k), dtype=logits.dtype)
        for t, ranking in enumerate(rankings):
            if t == 0 or (sequence is not None and sequence[t] != sequence[t - 1]):
                entries: list[list[tuple[int, int]]] = []
                sums = [0] * n_experts
            limit = balance["threshold"] * sum(sums) / n_experts
            candidates, others = ranking[: balance["candidates"]], ranking[balance["candidates"] :]
            left = [expert for expert in candidates if sums[expert] <= limit]
            left += [expert for expert in others if sums[expert] <= limit][: max(0, top_k - len(left))]
            idle = sorted((sums[expert], expert) for expert in ranking if expert not in left)
            left += [expert for _, expert in idle[: max(0, top_k - len(left))]]
            chosen = sorted(left, key=ranking.index)[:top_k]
            ids[t] = chosen
            expert_weights[t] = np.exp(log_softmax(logits[t, chosen]))
            entries.append([(e, round(float(w) * 2**24)) for e, w in zip(chosen, expert_weights[t], strict=True)])
            for expert, weight in entries[-1]:
                sums[expert] += weight
            if len(entries) > balance["window"]:
                for expert, weight in entries.pop(0):
                    sums[expert] -= weight
        return ids, expert_weights

    return route


# --- evaluation ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Words:
    """Sentences end to end: pieces, and the words that they make."""

    ids: IntArray  # (T,)
    sequence: IntArray  # (T,)
    word_piece: IntArray  # pairs (piece, word)
    word: IntArray
    labels: IntArray  # (W,)
    language: npt.NDArray[np.str_]  # (W,)
    piece_language: npt.NDArray[np.str_]  # (T,)

    def predict(self, log_probabilities: FloatArray) -> IntArray:
        """Return each word's class: the largest sum of its pieces' log-probabilities."""
        totals = np.zeros((len(self.labels), log_probabilities.shape[1]), dtype=log_probabilities.dtype)
        np.add.at(totals, self.word, log_probabilities[self.word_piece])
        best: IntArray = totals.argmax(axis=1)
        return best

    def accuracy(self, predicted: IntArray) -> float:
        """Return the share of words with the right class."""
        return float((predicted == self.labels).mean())


def words_of(
    tokenizer: sentencepiece.SentencePieceProcessor, sentences: list[Sentence], span: int | None = None
) -> Words:
    """Lay sentences end to end; with ``span``, each run of that many space-separated words is an input."""
    ids, sequence, word_piece, word, labels, languages, piece_languages = [], [], [], [], [], [], []
    n_pieces = n_words = n_inputs = 0
    for sentence in sentences:
        pieces = to_pieces(tokenizer, sentence)
        ids.append(pieces.ids)
        stops = pieces.boundaries[span::span] if span else pieces.boundaries[-1:]
        input_of = np.searchsorted(stops, np.arange(len(pieces.ids)), side="right")
        sequence.append(n_inputs + input_of)
        word_piece.append(n_pieces + pieces.word_piece)
        word.append(n_words + pieces.word)
        labels += sentence.labels
        languages += [sentence.language] * len(sentence.labels)
        piece_languages += [sentence.language] * len(pieces.ids)
        n_pieces += len(pieces.ids)
        n_words += len(sentence.labels)
        n_inputs += len(stops) + 1
    return Words(
        ids=np.concatenate(ids),
        sequence=np.concatenate(sequence),
        word_piece=np.concatenate(word_piece),
        word=np.concatenate(word),
        labels=np.array(labels),
        language=np.array(languages),
        piece_language=np.array(piece_languages),
    )


def infer(weights: Weights, words: Words, route: Router) -> tuple[FloatArray, IntArray, FloatArray]:
    """Return log-probabilities (T, C), expert ids (T, K) and expert weights (T, K)."""
    x = mix(weights, words.ids, words.sequence)
    expert_ids, expert_weights = route(x @ weights.router.T)
    return log_softmax(run_experts(weights, x, expert_ids, expert_weights)), expert_ids, expert_weights


def accuracy_of(weights: Weights, words: Words, route: Router) -> float:
    """Return the word accuracy under a way of routing."""
    return words.accuracy(words.predict(infer(weights, words, route)[0]))


def top_router(weights: Weights) -> Router:
    """Return the model's own rule: the two best, or the only one of a dense model."""
    return softmax_of_ranks(*range(min(2, len(weights.router))))


SHORT_INPUTS = (
    "hello world",
    "Hello world",
    "thank you",
    "good morning",
    "ich liebe dich",
    "bonjour le monde",
)

# The golden values come from the first six of these in which no token sits on a near tie.
GOLDEN_TEXTS = (
    "hello world",
    "The small bird hovers in front of the red flowers, and then it is gone.",
    "Le petit oiseau boit le nectar des fleurs sans jamais se poser.",
    "Der kleine Vogel fliegt schnell von Blume zu Blume.",
    "El colibrí bate sus alas cincuenta veces por segundo.",
    "Il colibrì pesa meno di una moneta!",
    "Two experts answer for every word; the other six stay asleep.",
    "Qui a vu le plus petit oiseau du monde ?",
    "Where do they sleep at night?",
)
NEAR_TIE = 1e-3


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def macro_f1(predicted: IntArray, labels: IntArray) -> tuple[float, list[tuple[float, float, float]]]:
    """Return macro-F1 and each class's precision, recall and F1."""
    rows = []
    for label in range(len(CLASSES)):
        hits = float(((predicted == label) & (labels == label)).sum())
        precision, recall = hits / max(1, (predicted == label).sum()), hits / max(1, (labels == label).sum())
        rows.append((precision, recall, 2 * precision * recall / max(1e-9, precision + recall)))
    return float(np.mean([f1 for _, _, f1 in rows])), rows


def unevenness(expert_ids: IntArray, n_experts: int, block: int = 512) -> tuple[float, float]:
    """Return the largest load over the mean load in blocks of 512 tokens: on average, and the worst block."""
    ratios = []
    for start in range(0, len(expert_ids) - block + 1, block):
        load = np.bincount(expert_ids[start : start + block].ravel(), minlength=n_experts)
        ratios.append(load.max() / load.mean())
    return float(np.mean(ratios)), float(np.max(ratios))


def describe(directory: Path, splits: tuple[list[Sentence], list[Sentence], list[Sentence]]) -> str:
    """Return the card's figures: every number from the exported files, on the test split."""
    tokenizer, weights, config = read_bundle(directory)
    training, development, test = splits
    seen = {sentence.text for sentence in training}
    unseen = [sentence for sentence in test if sentence.text not in seen]
    words = words_of(tokenizer, test)
    top = top_router(weights)
    logp, expert_ids, expert_weights = infer(weights, words, top)
    predicted = words.predict(logp)
    accuracy = words.accuracy(predicted)
    exact = words.predict(infer(weights.as_type(np.float64), words, top)[0])
    held_out = words_of(tokenizer, development)
    f1, rows = macro_f1(predicted, words.labels)
    summary = (
        f"Test split: {len(test)} sentences, {len(words.labels)} words, {len(words.ids)} pieces. "
        f"**Word accuracy {accuracy:.4f}, macro-F1 {f1:.4f}** "
        f"(development {accuracy_of(weights, held_out, top):.4f}). "
        f"Without the {len(test) - len(unseen)} sentences whose text also occurs in the training split: "
        f"{accuracy_of(weights, words_of(tokenizer, unseen), top):.4f}. "
        f"The same files in float64 change {int((exact != predicted).sum())} words."
    )
    parts = [
        summary,
        table(
            ["class", "words", "precision", "recall", "F1"],
            [
                [name, str(int((words.labels == label).sum())), *(f"{value:.3f}" for value in rows[label])]
                for label, name in enumerate(CLASSES)
            ],
        ),
        table(
            ["language", "words", "accuracy", "macro-F1"],
            [
                [
                    language,
                    str(int(here.sum())),
                    f"{(predicted == words.labels)[here].mean():.4f}",
                    f"{macro_f1(predicted[here], words.labels[here])[0]:.4f}",
                ]
                for language in LANGUAGES
                for here in [words.language == language]
            ],
        ),
    ]
    spans = {span: words_of(tokenizer, test, span) for span in (1, 2, 3)}
    parts += [
        "Spans of the test sentences as inputs of their own:",
        table(
            ["input", "word accuracy"],
            [
                [f"{span} word{'s' * (span > 1)}", f"{accuracy_of(weights, part, top):.4f}"]
                for span, part in spans.items()
            ],
        ),
        table(
            ["input", "words with class and probability"],
            [_read_aloud(tokenizer, weights, t) for t in SHORT_INPUTS],
        ),
    ]
    if config["n_experts"] > 1:
        parts += _describe_routing(weights, config, words, accuracy, expert_ids, expert_weights)
    return "\n\n".join(parts)


def _describe_routing(
    weights: Weights,
    config: dict[str, Any],
    words: Words,
    accuracy: float,
    expert_ids: IntArray,
    expert_weights: FloatArray,
) -> list[str]:
    n_experts = config["n_experts"]
    routers = {
        "two random experts": random_router(0),
        "ranks 7 and 8 instead of 1 and 2": softmax_of_ranks(n_experts - 2, n_experts - 1),
        "ranks 2 and 3": softmax_of_ranks(1, 2),
        "the best expert alone": softmax_of_ranks(0),
        "Taylor gating": route_taylor,
        "balanced, one stream": balanced_router(config["balance"]),
        "balanced, fresh rings for each sentence": balanced_router(config["balance"], words.sequence),
    }
    rows, loads = [["top 2, exact (the model)", f"{accuracy:.4f}", ""]], [("off", expert_ids)]
    for name, route in routers.items():
        logp, ids, _ = infer(weights, words, route)
        result = words.accuracy(words.predict(logp))
        rows.append([name, f"{result:.4f}", f"{100 * (result - accuracy):+.2f}"])
        if name == "balanced, one stream":
            loads.append(("on", ids))
    labels = np.empty(len(words.ids), dtype=np.int64)
    labels[words.word_piece[: len(words.ids)]] = words.labels[words.word[: len(words.ids)]]
    experts = []
    for expert in range(n_experts):
        here = (expert_ids == expert).any(axis=1)
        shares = [
            expert_weights[expert_ids == expert][labels[np.nonzero(expert_ids == expert)[0]] == label].sum()
            for label in range(len(CLASSES))
        ]
        total = float(sum(shares))
        by_language = [(expert_ids[words.piece_language == language] == expert).mean() * 2 for language in LANGUAGES]
        experts.append(
            [str(expert), f"{here.mean():.1%}"]
            + [f"{share / total:.0%}" for share in shares]
            + [f"{share:.1%}" for share in by_language]
        )
    return [
        "Routing, on the test split:",
        table(["routing", "word accuracy", "points"], rows),
        "Largest load over mean load in 512 tokens:",
        table(
            ["balancing", "mean", "worst"],
            [[name, *(f"{ratio:.2f}" for ratio in unevenness(ids, n_experts))] for name, ids in loads],
        ),
        "What each expert takes: share of pieces, routing weight by class, share of each language's pieces:",
        table(["expert", "pieces", *CLASSES, *LANGUAGES], experts),
    ]


def _read_aloud(tokenizer: sentencepiece.SentencePieceProcessor, weights: Weights, text: str) -> list[str]:
    starts = list(itertools.accumulate((len(word) + 1 for word in text.split()[:-1]), initial=0))
    sentence = Sentence(text, starts, [0] * len(starts), "en")
    words = words_of(tokenizer, [sentence])
    logp = infer(weights, words, top_router(weights))[0]
    totals = np.zeros((len(starts), len(CLASSES)))
    np.add.at(totals, words.word, logp[words.word_piece])
    probabilities = np.exp(log_softmax(totals))
    answers = [
        f"{word} {CLASSES[row.argmax()]} {row.max():.2f}" for word, row in zip(text.split(), probabilities, strict=True)
    ]
    return [f"`{text}`", " · ".join(answers)]


def golden_values(directory: Path) -> list[dict[str, Any]]:
    """Return six inputs with their routing and probabilities, in float64 from the float32 files."""
    tokenizer, weights, _ = read_bundle(directory)
    weights = weights.as_type(np.float64)
    golden: list[dict[str, Any]] = []
    for text in GOLDEN_TEXTS:
        ids = np.array(tokenizer.encode(text))
        x = mix(weights, ids, np.zeros_like(ids))
        logits = x @ weights.router.T
        best = -np.sort(-logits, axis=1)[:, :3]
        if (best[:, :-1] - best[:, 1:]).min() < NEAR_TIE or len(golden) == 6:
            continue
        expert_ids, expert_weights = softmax_of_ranks(0, 1)(logits)
        probabilities = np.exp(log_softmax(run_experts(weights, x, expert_ids, expert_weights)))
        golden.append(
            {
                "text": text,
                "ids": ids.tolist(),
                "expert_ids": expert_ids.tolist(),
                "expert_weights": expert_weights.tolist(),
                "probabilities": probabilities.tolist(),
            }
        )
    return golden


def check_export(model: Classifier, directory: Path, sentences: list[Sentence]) -> None:
    """Compare PyTorch's answers with NumPy's from the exported files; exit with an error where they part."""
    tokenizer, weights, _ = read_bundle(directory)
    words = words_of(tokenizer, sentences)
    reach = model.recipe.context
    positions = np.arange(len(words.ids)) + reach * (words.sequence + 1)
    padded = np.full(positions[-1] + reach + 1, model.recipe.vocab_size)
    padded[positions] = words.ids
    model.eval()
    with torch.no_grad():
        ours = model(torch.from_numpy(padded), torch.from_numpy(positions)).numpy()
    theirs = infer(weights, words, top_router(weights))[0]
    if not np.array_equal(words.predict(ours), words.predict(theirs)):
        raise SystemExit(f"Expected PyTorch's classes, got other ones - at {directory}")


# --- the card and the door ----------------------------------------------------------------------------

MARKS = ("<!-- figures: begin, written by scripts/train_token_classifier.py -->", "<!-- figures: end -->")


def write_card(directory: Path, figures: str, golden: list[dict[str, Any]], recipe: Recipe) -> None:
    """Renew the part of the card between the marks; the prose around it stays."""
    pieces = [
        table(
            ["input", "experts of each piece", "class of each piece, with probability"],
            [
                [
                    f"`{value['text']}`",
                    " ".join(f"{first},{second}" for first, second in value["expert_ids"]),
                    " ".join(f"{CLASSES[int(np.argmax(row))]} {max(row):.3f}" for row in value["probabilities"]),
                ]
                for value in golden
            ],
        )
    ]
    settings = [[f"`{name}`", str(value)] for name, value in dataclasses.asdict(recipe).items()]
    body = "\n\n".join(
        [
            "## Figures",
            figures,
            "## Golden routing",
            *pieces,
            "## Hyper-parameters",
            table(["name", "value"], settings),
        ]
    )
    card = directory / "README.md"
    before, _, rest = card.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    card.write_text(f"{before}{MARKS[0]}\n\n{body}\n\n{MARKS[1]}{after}", encoding="utf-8")


def train_bundle(
    splits: tuple[list[Sentence], list[Sentence], list[Sentence]],
    recipe: Recipe,
    out: Path,
    report: Callable[[str], None],
) -> None:
    """Train both stages on the training split and write the bundle."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)
    sentences = splits[0] + list(phrases()) * recipe.phrase_copies
    tokenizer_bytes = train_tokenizer(sentences, recipe)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=tokenizer_bytes)
    sampler = Sampler(tokenizer, recipe)
    copies = [copies_of(tokenizer, sentence, sampler, recipe) for sentence in sentences]
    report(f"{len(sentences)} sentences, {sum(len(best.ids) for best, *_ in copies)} pieces")
    model = Classifier(recipe)
    stream = batches(copies, recipe, np.random.default_rng(recipe.seed))
    train(model, stream, recipe.steps, recipe.learning_rate, refuse=False, report=report)
    train(model, stream, recipe.refusal_steps, recipe.refusal_learning_rate, refuse=True, report=report)
    write_bundle(out, tokenizer_bytes, weights_of(model), recipe)
    check_export(model, out, splits[1])


def main() -> None:
    """Parse the command line, train, evaluate the files and renew the card."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="directory that holds ud/*.tsv")
    parser.add_argument("--out", type=Path, default=Path("models"), help="the bundle (default: models)")
    parser.add_argument(
        "--dense", action="store_true", help="one FFN of the same active size, for comparison; give --out"
    )
    parser.add_argument("--evaluate", action="store_true", help="train nothing: evaluate the bundle in --out")
    arguments = parser.parse_args()
    if arguments.dense and arguments.out == parser.get_default("out"):
        parser.error("--dense needs an --out of its own: it must not replace the bundle")
    recipe = Recipe()
    if arguments.dense:
        active = recipe.top_k * recipe.intermediate_size
        recipe = dataclasses.replace(recipe, n_experts=1, top_k=1, intermediate_size=active)
    splits = split_sentences(list(read_sentences(arguments.data)))
    if not arguments.evaluate:
        train_bundle(splits, recipe, arguments.out, lambda line: print(line, file=sys.stderr, flush=True))
    figures = describe(arguments.out, splits)
    print(figures)
    if arguments.dense:
        return
    golden = golden_values(arguments.out)
    lines = ",\n".join(json.dumps(value, ensure_ascii=False) for value in golden)
    (arguments.out / "golden.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    if (arguments.out / "README.md").exists():
        write_card(arguments.out, figures, golden, recipe)


if __name__ == "__main__":
    main()
