"""Text to token ids and back, with sentencepiece; and pieces to words as people see them."""

from __future__ import annotations

import os
import unicodedata
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import sentencepiece

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.checked_file import CheckedFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

_MARK = "\u2581"  # sentencepiece writes a space as this, in front of the piece
_UNKNOWN = "\u2047"
_APOSTROPHES = "'\u2019"
_IN_NUMBERS = ".,:"


@dataclass(frozen=True, slots=True)
class Word:
    """Pieces ``[start, stop)`` of a token sequence, which make one word.

    Attributes
    ----------
    text : str
        The word without sentencepiece's marks.
    start, stop : int
        Positions in the token sequence.
    unknown : bool
        Whether the vocabulary lacks a part of it.
    """

    text: str
    start: int
    stop: int
    unknown: bool = False


class _Kind(Enum):
    LETTERS = auto()
    PUNCTUATION = auto()
    BYTE = auto()  # part of a character
    BLANK = auto()  # the mark or other white space alone
    CONTROL = auto()


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str  # without the mark
    kind: _Kind
    opens: bool  # a space stands in front
    unknown: bool = False


LARGEST_MODEL = 1 << 28  # bytes; the largest vocabularies in use take 5 MB


class Tokenizer:
    """A sentencepiece model.

    Parameters
    ----------
    path : path-like
        A ``.model`` file.

    Raises
    ------
    UsageError
        The file is missing or cannot be read.
    InvalidInput
        It is not a sentencepiece model.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with CheckedFile(path) as file:
            if file.size > LARGEST_MODEL:
                got = f"{file.size:,} bytes"
                raise InvalidInput(expected=f"at most {LARGEST_MODEL:,} bytes", got=got, at=file.name)
            data = file.read(0, file.size)
        if not data:  # sentencepiece would take it and fail at the first text
            raise InvalidInput(expected="a sentencepiece model", got="an empty file", at=os.fspath(path))
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(data)
        except RuntimeError as error:
            got = f"{len(data):,} bytes that do not parse as one"
            raise InvalidInput(expected="a sentencepiece model", got=got, at=os.fspath(path)) from error
        self._vocab_size = int(self._processor.GetPieceSize())
        self._known: dict[int, _Piece] = {}

    def __repr__(self) -> str:
        return f"<Tokenizer: {self._vocab_size} pieces>"

    @property
    def vocab_size(self) -> int:
        """Number of pieces; ids run from 0 to ``vocab_size - 1``."""
        return self._vocab_size

    def encode(self, text: str) -> NDArray[np.int32]:
        """Turn text into token ids.

        Parameters
        ----------
        text : str
            Any Unicode text; the model's own normalisation applies (white space collapses, a byte order mark
            vanishes, what the vocabulary lacks becomes the unknown piece).

        Returns
        -------
        ndarray, int32, shape (n_tokens,)

        Raises
        ------
        InvalidInput
            ``text`` is not a str, or holds a lone surrogate (what undecodable bytes turn into).
        """
        if not isinstance(text, str):
            raise InvalidInput(expected="text (str)", got=type(text).__name__, at="text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(
                expected="Unicode text",
                got=f"the lone surrogate U+{ord(text[error.start]):04X}",
                at=f"text, character {error.start}",
                hint="the text was not UTF-8 where it came from",
            ) from error
        return np.array(self._processor.encode(text), dtype=np.int32)

    def decode(self, ids: ArrayLike) -> str:
        """Turn token ids into text.

        Parameters
        ----------
        ids : array_like of int, shape (n_tokens,)

        Raises
        ------
        InvalidInput
            ``ids`` is not a one-dimensional array of integers, or one is outside the vocabulary.
        """
        return str(self._processor.decode(self._checked(ids)))

    def pieces(self, ids: ArrayLike) -> list[str]:
        """Give the vocabulary's piece for each id, marks included (parameters and errors as `decode`)."""
        return [str(self._processor.IdToPiece(i)) for i in self._checked(ids)]

    def words(self, ids: ArrayLike, text: str | None = None) -> list[Word]:
        """Group token ids into words as people see them; every id belongs to exactly one word.

        A piece with a space in front starts a word. Punctuation and symbols stand apart (repeats such as
        ``...`` together), but an apostrophe between letters and a point, comma or colon between digits belong
        to their word. Control pieces (``</s>``) stand apart.

        Parameters
        ----------
        ids : array_like of int, shape (n_tokens,)
        text : str, optional
            What `encode` made ``ids`` of. It spells what the vocabulary lacks, which is a double question mark
            otherwise; the words are the same.

        Raises
        ------
        InvalidInput
            As `decode` and `encode`; also when ``ids`` are not those of ``text``.
        """
        numbers = self._checked(ids)
        pieces = [self._piece(i) for i in numbers]
        bounds = [*_word_starts(pieces), len(pieces)]
        if text is not None and any(piece.unknown for piece in pieces):
            pieces = self._spelled(pieces, numbers, text)
        return [
            Word(
                self._spell(numbers[start:stop], pieces[start:stop]),
                start,
                stop,
                any(piece.unknown for piece in pieces[start:stop]),
            )
            for start, stop in pairwise(bounds)
        ]

    def _spelled(self, pieces: list[_Piece], numbers: list[int], text: str) -> list[_Piece]:
        """Give the unknown pieces the characters that stand for them in the text."""
        if self.encode(text).tolist() != numbers:
            raise InvalidInput(expected="the ids of the text", got="others", at="ids")
        surfaces = self._processor.encode(text, out_type=str)
        return [
            replace(piece, text=surface.replace(_MARK, " ").strip() or piece.text) if piece.unknown else piece
            for piece, surface in zip(pieces, surfaces, strict=True)
        ]

    def _checked(self, ids: ArrayLike) -> list[int]:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InvalidInput(
                expected="a one-dimensional array of integer ids",
                got=f"{array.dtype} of shape {array.shape}",
                at="ids",
            )
        wrong = np.flatnonzero((array < 0) | (array >= self._vocab_size))
        if wrong.size:
            raise InvalidInput(
                expected=f"ids from 0 to {self._vocab_size - 1}",
                got=str(array[wrong[0]]),
                at=f"ids[{wrong[0]}]",
            )
        numbers: list[int] = array.tolist()
        return numbers

    def _piece(self, number: int) -> _Piece:
        if number not in self._known:
            self._known[number] = self._classify(number)
        return self._known[number]

    def _classify(self, number: int) -> _Piece:
        raw = str(self._processor.IdToPiece(number))
        if self._processor.IsControl(number):
            return _Piece(raw, _Kind.CONTROL, opens=True)
        if self._processor.IsUnknown(number):
            return _Piece(_UNKNOWN, _Kind.LETTERS, opens=False, unknown=True)
        if self._processor.IsByte(number):
            return _Piece(raw, _Kind.BYTE, opens=False)
        spaced = raw.replace(_MARK, " ")
        text = spaced.strip()
        opens = spaced[:1].isspace()
        if not text:
            return _Piece(text, _Kind.BLANK, opens=True)
        if all(unicodedata.category(c)[0] in "PS" for c in text):
            return _Piece(text, _Kind.PUNCTUATION, opens)
        return _Piece(text, _Kind.LETTERS, opens)

    def _spell(self, numbers: list[int], pieces: list[_Piece]) -> str:
        if any(piece.kind is _Kind.BYTE for piece in pieces):
            return str(self._processor.decode(numbers)).strip()
        return "".join(piece.text for piece in pieces) or _MARK


def _word_starts(pieces: Sequence[_Piece]) -> Iterator[int]:
    for i, piece in enumerate(pieces):
        if i == 0 or not _continues(pieces, i, piece):
            yield i


def _continues(pieces: Sequence[_Piece], i: int, piece: _Piece) -> bool:
    """Whether piece ``i`` belongs to the word of the piece before it."""
    before = pieces[i - 1]
    if _Kind.CONTROL in (piece.kind, before.kind) or piece.opens:
        return False
    if before.kind is _Kind.BLANK:
        return True
    if piece.kind is _Kind.PUNCTUATION:
        repeats = before.kind is _Kind.PUNCTUATION and len(set(before.text + piece.text)) == 1
        return repeats or _joins(before, piece, pieces[i + 1 : i + 2])
    if before.kind is _Kind.PUNCTUATION:
        return i >= 2 and _joins(pieces[i - 2], before, [piece])
    return True


def _joins(left: _Piece, mark: _Piece, right: Sequence[_Piece]) -> bool:
    """Whether a punctuation piece stands inside a word: ``don't``, ``3.14``."""
    if mark.opens or not right or right[0].opens:
        return False
    if left.kind is not _Kind.LETTERS or right[0].kind is not _Kind.LETTERS:
        return False
    before, after = left.text[-1], right[0].text[0]
    if mark.text in tuple(_APOSTROPHES):
        return before.isalpha() and after.isalpha()
    return mark.text in tuple(_IN_NUMBERS) and before.isdigit() and after.isdigit()
