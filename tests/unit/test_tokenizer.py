from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_cli.errors import InvalidInput, UsageError
from colibri_cli.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def letters(letter_model: Path) -> Tokenizer:
    return Tokenizer(letter_model)


@pytest.fixture(scope="module")
def unigrams(byte_model: Path) -> Tokenizer:
    return Tokenizer(byte_model)


@pytest.mark.parametrize("text", ["the quick brown fox", "don't stop", "das Öl", "1,000 $"])
def test_text_survives_the_round_trip(unigrams: Tokenizer, text: str):
    ids = unigrams.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert unigrams.decode(ids) == text
    assert "".join(unigrams.pieces(ids)).replace("▁", " ").strip() == text


@pytest.mark.parametrize("text", ["", " ", "\t\n", "\ufeff"])
def test_text_without_content_has_no_tokens(letters: Tokenizer, text: str):
    ids = letters.encode(text)
    assert ids.shape == (0,)
    assert ids.dtype == np.int32
    assert letters.decode(ids) == ""
    assert letters.pieces(ids) == []
    assert letters.words(ids) == []


def test_line_ends_become_one_space(letters: Tokenizer):
    expected = letters.encode("the dog").tolist()
    assert letters.encode("the\r\ndog").tolist() == expected
    assert letters.encode("the\n\n dog\n").tolist() == expected


def test_what_the_vocabulary_lacks_becomes_the_unknown_piece(letters: Tokenizer):
    ids = letters.encode("the\0dog")
    assert len(ids) == len(letters.encode("the dog"))
    assert [word.text for word in letters.words(ids)] == ["the⁇dog"]


def test_long_text_is_encoded_whole(letters: Tokenizer):
    ids = letters.encode("dog " * 50_000)
    assert letters.decode(ids[-4:]) == "dog"
    assert len(ids) == 4 * 50_000


def test_lone_surrogate_is_refused_by_place(letters: Tokenizer):
    with pytest.raises(InvalidInput, match=r"got the lone surrogate U\+DCFF - at text, character 4"):
        letters.encode("the \udcff dog")


def test_only_text_is_encoded(letters: Tokenizer):
    with pytest.raises(InvalidInput, match=r"Expected text \(str\), got bytes"):
        letters.encode(b"dog")  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("method", ["decode", "pieces", "words"])
@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_unknown_id_is_named_with_its_place(letters: Tokenizer, method: str, bad: int):
    with pytest.raises(InvalidInput, match=rf"got {bad} - at ids\[2\]$"):
        getattr(letters, method)(np.array([3, 4, bad, bad]))


@pytest.mark.parametrize("ids", [np.zeros((2, 2), np.int32), np.array([1.5]), np.array(["a"]), np.array(3)])
def test_ids_must_be_a_row_of_integers(letters: Tokenizer, ids: np.ndarray):
    with pytest.raises(InvalidInput, match="Expected a one-dimensional array of integer ids"):
        letters.decode(ids)


def test_vocab_size_bounds_the_ids(letters: Tokenizer):
    assert len(letters.pieces(np.arange(letters.vocab_size))) == letters.vocab_size
    with pytest.raises(InvalidInput):
        letters.pieces([letters.vocab_size])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the quick dog", ["the", "quick", "dog"]),
        ("stop, dog!", ["stop", ",", "dog", "!"]),
        ("don't", ["don't"]),
        ("l'oiseau", ["l'oiseau"]),
        ("'dog'", ["'", "dog", "'"]),
        ("3.14", ["3.14"]),
        ("1,000 $", ["1,000", "$"]),
        ("10:30", ["10:30"]),
        ("dog. 3", ["dog", ".", "3"]),
        ("dog.3", ["dog", ".", "3"]),
        ("dog: 3", ["dog", ":", "3"]),
        ("3.", ["3", "."]),
        ("e-mail", ["e", "-", "mail"]),
        ("(well)", ["(", "well", ")"]),
        ("dog...", ["dog", "..."]),
        ("dog!.", ["dog", "!", "."]),
        ("dog . . .", ["dog", ".", ".", "."]),
        (", dog", [",", "dog"]),
        ("é dog", ["⁇", "dog"]),
    ],
)
def test_words_are_what_people_see(letters: Tokenizer, text: str, words: list[str]):
    assert [word.text for word in letters.words(letters.encode(text))] == words


def test_the_text_spells_what_the_vocabulary_lacks(letters: Tokenizer):
    text = "the x日本 ☃"
    ids = letters.encode(text)
    spelled, plain = letters.words(ids, text), letters.words(ids)
    assert [(word.text, word.unknown) for word in spelled] == [("the", False), ("x日本", True), ("☃", True)]
    assert [word.text for word in plain] == ["the", "x⁇", "⁇"]
    assert [(w.start, w.stop, w.unknown) for w in plain] == [(w.start, w.stop, w.unknown) for w in spelled]
    with pytest.raises(InvalidInput, match="Expected the ids of the text, got others - at ids"):
        letters.words(ids, "the")


def test_control_and_blank_pieces_stand_apart(letters: Tokenizer):
    bos, eos = 1, 2
    mark = letters.encode("a")[0]
    assert letters.pieces([bos, eos, mark]) == ["<s>", "</s>", "▁"]
    dog = letters.encode("dog")
    words = letters.words([bos, *dog, eos, mark])
    assert [word.text for word in words] == ["<s>", "dog", "</s>", "▁"]


def test_bytes_of_a_character_are_put_together(unigrams: Tokenizer):
    ids = unigrams.encode("dog 日本 fox")
    assert any(piece.startswith("<0x") for piece in unigrams.pieces(ids))
    assert [word.text for word in unigrams.words(ids)] == ["dog", "日本", "fox"]


@settings(max_examples=50, deadline=None)
@given(text=st.text(alphabet="ab1 .,'-()é日\n", max_size=30))
def test_every_piece_is_in_exactly_one_word(unigrams: Tokenizer, text: str):
    ids = unigrams.encode(text)
    words = unigrams.words(ids)
    assert [word.start for word in words] == [0, *(word.stop for word in words)][: len(words)]
    assert (words[-1].stop if words else 0) == len(ids)
    assert all(word.start < word.stop and word.text for word in words)
    spelled = "".join(word.text for word in words if word.text != "▁")
    assert spelled == "".join(unigrams.decode(ids).split())


@pytest.mark.parametrize("damage", ["empty", "cut short", "garbage", "zeros"])
def test_a_file_that_is_no_model_is_refused_quietly(
    damage: str, letter_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    whole = letter_model.read_bytes()
    data = {"empty": b"", "cut short": whole[:-10], "garbage": b"no model", "zeros": bytes(100)}[damage]
    path = tmp_path / "bad.model"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"Expected a sentencepiece model, got .* - at .*bad\.model"):
        Tokenizer(path)
    assert capfd.readouterr().err == ""


def test_a_missing_model_cannot_be_run(tmp_path: Path):
    with pytest.raises(UsageError, match="no such file"):
        Tokenizer(tmp_path / "none.model")
    with pytest.raises(UsageError, match="got a directory"):
        Tokenizer(tmp_path)
