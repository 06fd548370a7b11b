"""JSON text to values with positions, with every syntax error and as few echoes as possible.

Recursive descent over `json_tokens.tokenize`. After an error the parser goes on where the text makes sense
again: at the next comma, bracket or ``"key":`` of the same level. What an error may have swallowed is marked
(``Node.kind == "damaged"``, ``Node.whole``, ``Document.balanced``), so that a later check does not report it
as missing. A structural error right behind another error is its echo and is not reported.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibri_cli.validate.json_nodes import Fault, Lines, Member, Node, child
from colibri_cli.validate.json_text import INVALID_BYTES, decode
from colibri_cli.validate.json_tokens import Flaw, Token, shown, tokenize

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DEPTH = 64  # a config has a depth of 2
_CLOSING = {"{": "}", "[": "]"}
_WORDS = ("string", "unclosed", "word")
_BRACKET = re.compile(r"[{}\[\]]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_LIKE = re.compile(r"[+-]?\.?[0-9]")
_LITERALS = {"true": True, "false": False, "null": None}
_NOT_FINITE = {"nan", "infinity", "inf"}


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed text.

    Attributes
    ----------
    root : Node
        The value; damaged if there is none.
    faults : list of Fault
        Encoding and syntax errors and duplicate keys, in no order.
    lines : Lines
        Offset to line and column.
    balanced : bool
        Every bracket has its partner. If not, it is not certain which object a member belongs to.
    """

    root: Node
    faults: list[Fault]
    lines: Lines
    balanced: bool


def parse(data: bytes | str) -> Document:
    """Parse a text, whatever is wrong with it."""
    text, faults, readable = decode(data)
    lines = Lines(text)
    if not readable:
        return Document(Node("damaged", 0), faults, lines, balanced=False)
    tokens = tokenize(text)
    parser = _Parser(text, tokens, lines)
    root = parser.document()
    if not parser.closed:
        # A bracket is missing somewhere in front of where it is missed. Indentation may tell where.
        second = _IndentedParser(text, tokens, lines)
        second_root = second.document()
        if second.closed and len(second.faults) <= len(parser.faults):
            parser, root = second, second_root
    return Document(root, faults + parser.faults, lines, parser.balanced)


class _Parser:
    """One walk over the tokens."""

    def __init__(self, text: str, tokens: list[Token], lines: Lines) -> None:
        self.faults: list[Fault] = []
        self.balanced = self.closed = True
        self._text = text
        self._tokens = tokens
        self._lines = lines
        self._at = 0
        self._open: list[Token] = []  # the brackets around the current token
        self._keys: list[str | int] = []  # the way to the current value
        self._echo = False  # an error was just reported: a structural error now is its echo
        self._in_list = False  # the last key had no colon: more of them are elements of a list without its bracket
        self._surplus = 0  # closing brackets whose opening ones are missing

    # --- tokens -------------------------------------------------------------------------------------------

    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _take(self) -> Token:
        token = self._tokens[self._at]
        self._at += 1
        self._report(token.gap)
        if token.kind == "unclosed":
            self._suspect(token)
        return token

    def _kind_after(self) -> str:
        """Return the kind of the token behind the current one, which is not the last."""
        return self._tokens[self._at + 1].kind

    def _at_key(self) -> bool:
        """Whether ``"key":`` comes next: a member, wherever it stands."""
        return self._peek().kind == "string" and self._kind_after() == ":"

    def _at_value(self) -> bool:
        """Whether a value comes next that is JSON, as far as can be seen from its first token."""
        token = self._peek()
        source = self._source(token)
        return (
            token.kind in ("{", "[")
            or token.value is not None
            or source in _LITERALS
            or _NUMBER.fullmatch(source) is not None
        )

    def _source(self, token: Token) -> str:
        return self._text[token.start : token.stop]

    # --- errors -------------------------------------------------------------------------------------------

    def _report(self, flaws: Sequence[Flaw]) -> None:
        if flaws:
            pointer = self._pointer()
            self.faults += [Fault(f.start, pointer, f.expected, f.found, "syntax") for f in flaws]

    def _pointer(self) -> str:
        pointer = "$"
        for key in self._keys:
            pointer = child(pointer, key)
        return pointer

    def _unexpected(self, token: Token, expected: str) -> None:
        """Report a structural error at ``token``, unless it is an echo."""
        source = self._source(token)
        hidden = token.kind == "end" and token.flaws
        if not self._echo and not hidden and not INVALID_BYTES.search(source):
            found = shown(source)
            if token.kind == "end":
                found = "the end of the file" if self._at else "an empty file"
            elif token.kind not in _WORDS:
                found = f"'{found}'"
            self._report([Flaw(token.start, expected, found)])
        self._echo = True

    def _bad_word(self, token: Token, expected: str) -> None:
        source = self._source(token)
        if not INVALID_BYTES.search(source):  # `decode` has reported those
            self._report([Flaw(token.start, expected, shown(source))])

    def _skip(self, node: Node, stops: str = ",}]") -> None:
        """Go on to the next comma, closing bracket or key of this level; what lies between is lost."""
        node.whole = False
        depth = 0
        while (token := self._peek()).kind != "end":
            if depth == 0 and (token.kind in stops or (node.kind == "object" and self._at_key())):
                return
            depth += (token.kind in "{[") - (token.kind in "}]")
            self._suspect(self._take())

    def _suspect(self, token: Token) -> None:
        """Note a doubtful string that may hide brackets."""
        if token.kind in ("string", "unclosed") and _BRACKET.search(self._source(token)):
            self.balanced = False

    # --- grammar ------------------------------------------------------------------------------------------

    def document(self) -> Node:
        """Parse everything."""
        while self._peek().kind != "end" and not self._at_document():
            self._unexpected(self._peek(), "a JSON value")
            self._take()
        first = self._peek()
        if first.kind == "end":
            self._unexpected(first, "a JSON value")
            root = Node("damaged", first.start)
        elif self._at_key():
            self._unexpected(first, "'{'")
            root = Node("object", first.start)
            self._contents(root, Token("{", first.start, first.start))
        else:
            root = self._value()
        self._rest(root)
        end = self._tokens[-1]
        self._report(end.gap + end.flaws)
        return root

    def _at_document(self) -> bool:
        """Whether a value comes next that is not a stray one in front of the document's object."""
        if self._peek().kind in _CLOSING or self._at_key():
            return True
        following = self._tokens[self._at + 1]
        before_object = following.kind == "{" or (following.kind == "string" and self._tokens[self._at + 2].kind == ":")
        return self._at_value() and not before_object

    def _rest(self, root: Node) -> None:
        """Parse what follows the value of the document: most likely its object was closed too early."""
        while (token := self._peek()).kind != "end":
            echo = self._echo = self._echo or self._surplus > 0
            self._surplus -= self._surplus > 0
            self._unexpected(token, "the end of the file")
            if root.kind == "object" and (token.kind == "," or self._at_key()):
                self.balanced = False
                self._contents(root, Token("{", root.start, root.start), follows_item=True)
            elif token.kind not in _CLOSING:
                if token.kind in ("string", "unclosed", ":"):  # what is left of members
                    self.balanced = False
                self._take()
            elif echo:
                self._take()
                self._skip_container()
            else:
                return  # a second document

    def _value(self) -> Node:
        if self._peek().kind in _CLOSING:
            return self._container()
        token = self._take()
        source = self._source(token)
        if token.kind != "word":
            return self._string(token, source)
        if source in _LITERALS:
            return Node("null" if source == "null" else "boolean", token.start, source, _LITERALS[source])
        if number := _NUMBER.fullmatch(source):
            return _number(token.start, number)
        if source.lstrip("+-").lower() in _NOT_FINITE:
            self._bad_word(token, "a finite number")
        elif _NUMBER_LIKE.match(source):
            self._bad_word(token, "a number as JSON writes it")
        else:
            self._bad_word(token, "a JSON value")
        self._echo = True
        return Node("damaged", token.start)

    def _string(self, token: Token, source: str) -> Node:
        self._report(token.flaws)
        if token.value is not None:
            return Node("string", token.start, shown(source), token.value)
        self._echo = token.kind == "unclosed"
        return Node("damaged", token.start)

    def _container(self) -> Node:
        opening = self._take()
        if len(self._open) == MAX_DEPTH:
            self._report([Flaw(opening.start, f"at most {MAX_DEPTH} levels of nesting", "more")])
            self._skip_container()
            return Node("damaged", opening.start)
        node = Node("object" if opening.kind == "{" else "array", opening.start)
        self._contents(node, opening)
        return node

    def _skip_container(self) -> None:
        depth = 1
        while depth and self._peek().kind != "end":
            token = self._take()
            depth += (token.kind in "{[") - (token.kind in "}]")
        self._echo = depth > 0

    def _contents(self, node: Node, opening: Token, *, follows_item: bool = False) -> None:
        """Parse members or elements up to the bracket that closes ``opening``."""
        self._open.append(opening)
        separator = None if follows_item else opening  # the bracket or the comma right in front
        while not self._ended(node, separator):
            token = self._peek()
            if token.kind == ",":
                if separator is None:
                    self._echo = False
                else:
                    self._unexpected(token, "a key" if node.kind == "object" else "a value")
                    node.whole = node.whole and node.kind == "object"
                separator = self._take()
                continue
            if separator is None:
                self._unexpected(token, f"',' or '{_CLOSING[opening.kind]}'")
                if not self._at_item(node):
                    _spoil_last(node)
                    self._skip(node)
                    continue
            self._echo = False
            separator = None
            if node.kind == "object":
                self._member(node)
            else:
                self._element(node)
        self._open.pop()

    def _at_item(self, node: Node) -> bool:
        if node.kind == "array":
            return self._at_value()
        return self._at_key() or (self._peek().kind == "word" and self._kind_after() == ":")

    def _element(self, node: Node) -> None:
        token = self._peek()
        if token.kind == ":" or self._at_key():
            self._unexpected(token, "a value without a key")
            self.balanced = False  # a brace was meant, or no bracket at all
            self._skip(node, "}]")
        else:
            self._keys.append(len(node.items))
            value = self._value()
            node.items.append(value)
            # What is wrong in it may have swallowed others.
            node.whole = node.whole and value.whole and value.kind != "damaged"
            self._keys.pop()

    def _member(self, node: Node) -> None:
        token = self._peek()
        if token.kind not in _WORDS:
            self._unexpected(token, "a key")
            if token.kind == "{" and token.start == self._open[-1].stop:
                self._take()  # the brace stands there twice
                node.whole = False
            else:
                self._skip(node)
            return
        self._take()
        self._report(token.flaws)
        key = token.value
        if token.kind == "word":
            key = self._source(token)
            self._bad_word(token, "a key in double quotes")
        self._echo = token.value is None and self._peek().kind != ":"
        if token.kind == "word" and self._at_key():
            return  # a stray word in front of a key
        self._keys.append("?" if key is None else key)
        if key in node.keys:
            self._duplicate(key, token.start, node.keys[key])
        value = self._member_value(node)
        self._keys.pop()
        if key is None:
            node.whole = False
            return
        node.keys.setdefault(key, token.start)
        if value is not None:
            node.members.append(Member(key, token.start, value))

    def _member_value(self, node: Node) -> Node | None:
        """Parse ``: value``; None where neither is to be found."""
        token = self._peek()
        if token.kind == ":":
            self._take()
            self._in_list = False
        else:
            echo = self._echo = self._echo or self._in_list
            self._unexpected(token, "':'")
            if self._at_end_of_member():
                self._in_list = True
                return None
            if self._source(token) in ("=", "=>", ":="):
                self._take()
            elif echo or not self._at_value():
                self._skip(node)
                return None
        while (token := self._peek()).kind == ":":
            self._unexpected(token, "a value")
            self._take()
        if self._at_end_of_member():
            self._unexpected(token, "a value")
            if self._at_key():  # most likely the first of an object without its bracket
                self.balanced = False
                self._surplus += 1
            return Node("damaged", token.start)
        return self._value()

    def _at_end_of_member(self) -> bool:
        return self._peek().kind in (",", "}", "]", "end") or self._at_key()

    def _duplicate(self, key: str, start: int, first: int) -> None:
        line, column = self._lines.position(first)
        found = f"{shown(json.dumps(key, ensure_ascii=False))} again, first at {line}:{column}"
        self.faults.append(Fault(start, self._pointer(), "each key once", found, "duplicate-key"))

    # --- the ends of objects and arrays -------------------------------------------------------------------

    def _ended(self, node: Node, separator: Token | None) -> bool:
        """Whether ``node`` ends here, by its bracket, which is taken, or by an error."""
        token = self._peek()
        opening = self._open[-1]
        closing = _CLOSING[opening.kind]
        if token.kind == "end":
            self._unexpected(token, self._missing_bracket())
            self.balanced = self.closed = node.whole = False
            return True
        if len(self._open) > 1 and self._outdented(token, opening):
            self._unexpected(token, self._missing_bracket())
            node.whole = False
            return True
        if token.kind == closing:
            if separator is not None and separator.kind == ",":
                self._unexpected(separator, f"no comma in front of '{closing}'")
            self._take()
            return True
        if token.kind in ("}", "]"):
            return self._wrong_bracket(node, token)
        inside_object = len(self._open) > 1 and self._open[-2].kind == "{"
        if node.kind == "array" and inside_object and node.items and node.whole and self._at_key():
            self._unexpected(token, self._missing_bracket())
            node.whole = False
            return True
        return False

    def _wrong_bracket(self, node: Node, token: Token) -> bool:
        """Take a bracket for a slip of the right one, for the one of the value around, or for a stray one."""
        self._unexpected(token, self._missing_bracket())
        node.whole = False
        is_last = self._kind_after() == "end"
        nested = len(self._open) > 1
        if nested and token.kind == _CLOSING[self._open[-2].kind] and (len(self._open) > 2 or is_last):
            return True
        self._take()
        return nested or is_last

    def _missing_bracket(self) -> str:
        opening = self._open[-1]
        line, _ = self._lines.position(opening.start)
        return f"'{_CLOSING[opening.kind]}' for the '{opening.kind}' in line {line}"

    def _outdented(self, token: Token, opening: Token) -> bool:  # noqa: ARG002 # for the subclass
        """Whether ``token`` stands too far to the left to be inside ``opening``."""
        return False


class _IndentedParser(_Parser):
    """A parser for a text that lacks a bracket: believes in indentation where that tells where it is."""

    def __init__(self, text: str, tokens: list[Token], lines: Lines) -> None:
        super().__init__(text, tokens, lines)
        self._indentation = [len(line) - len(line.lstrip(" \t")) for line in text.split("\n")]

    def _outdented(self, token: Token, opening: Token) -> bool:
        line, column = self._lines.position(token.start)
        opening_line, _ = self._lines.position(opening.start)
        own, outer = column - 1, self._indentation[opening_line - 1]
        if line == opening_line or own > self._indentation[line - 1]:
            return False  # not the first on its line
        return own < outer if token.kind in ("}", "]") else own <= outer and self._at_key()


def _spoil_last(node: Node) -> None:
    """Doubt the last value: text follows it that may have been meant as a part of it."""
    for value in node.items[-1:] or [member.value for member in node.members[-1:]]:
        if value.kind not in ("object", "array"):
            value.kind = "damaged"


def _number(start: int, number: re.Match[str]) -> Node:
    source = number[0]
    is_integer = number[1] is None and number[2] is None
    try:
        value: float = int(source) if is_integer else float(source)
    except ValueError:  # more digits than Python is willing to convert
        value = float(source)
    if isinstance(value, float) and value.is_integer():
        value, is_integer = int(value), True
    return Node("integer" if is_integer else "number", start, shown(source), value)
