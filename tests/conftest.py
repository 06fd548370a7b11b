"""What many tests share: small tokenizers."""

import io
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "don't stop: it's 3.14, e-mail (well-known)... 10:30!",
    "l'oiseau bleu, das Öl, el colibrí; 1,000 $",
)


def _train(folder: Path, name: str, **options: Any) -> Path:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 20),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    path = folder / f"{name}.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def letter_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose pieces are single characters: what it does with a text is plain to see."""
    return _train(tmp_path_factory.mktemp("tokenizer"), "letters", model_type="char", vocab_size=100)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A unigram tokenizer that spells unknown characters in bytes."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return _train(folder, "bytes", model_type="unigram", vocab_size=400, byte_fallback=True)
