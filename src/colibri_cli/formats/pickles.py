"""A pickle machine that builds dicts, lists, tuples, numbers and text, and runs nothing.

`pickle` imports and calls what a file names. This machine imports nothing: a global is a word that is
looked up in the caller's table, and a call is a call of the caller's own builder. Opcodes are split by the
standard library's `pickletools`, which only parses.
"""

from __future__ import annotations

import pickletools
import warnings
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from io import BytesIO

MAX_OPCODES = 1 << 22  # some 40 a tensor; bounds the objects that a hostile file can ask for
_MAX_BITS = 128  # the magic number of a legacy PyTorch file has 80
_WHOLE = "a whole pickle of tensors"
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to, such as ``torch.FloatStorage``; never imported."""

    name: str


class _Malformed(Exception):  # turned into InvalidInput by `load`, which knows the file
    """The opcodes make no sense."""


def load(
    stream: BytesIO,
    *,
    builders: Mapping[str, Callable[[tuple[object, ...]], object]],
    persistent: Callable[[object], object],
    at: str,
) -> object:
    """Read one pickle from the stream and leave the stream behind its last byte.

    Parameters
    ----------
    stream : BytesIO
    builders : mapping
        Every global that is allowed, by dotted name, with what stands for a call of it: a function from
        the tuple of arguments to a value, which raises `InvalidInput` where they make no sense.
    persistent : callable
        From a persistent id, as pickled, to a value.
    at : str
        The place, for messages.

    Raises
    ------
    InvalidInput
        A global that is not in the table, an opcode that tensors do not need, a damaged or huge pickle.
    """
    machine = _Machine(builders, persistent, at)
    try:
        with warnings.catch_warnings(action="ignore"):  # pickletools unescapes names, right or wrong
            for opcode, argument, _ in islice(pickletools.genops(stream), MAX_OPCODES):
                if opcode.name == "STOP":
                    return machine.pop()
                machine.step(opcode.name, argument)
    except InvalidInput:
        raise
    except IndexError as error:
        raise InvalidInput(expected=_WHOLE, got="a pop from an empty stack", at=at) from error
    except (_Malformed, ValueError) as error:  # ValueError is pickletools' word for damage
        raise InvalidInput(expected=_WHOLE, got=shown(str(error)), at=at) from error
    raise InvalidInput(expected=_WHOLE, got=f"no end in {MAX_OPCODES} opcodes", at=at)


class _Machine:
    def __init__(
        self,
        builders: Mapping[str, Callable[[tuple[object, ...]], object]],
        persistent: Callable[[object], object],
        at: str,
    ) -> None:
        self._builders = builders
        self._persistent = persistent
        self._at = at
        self._stack: list[object] = []
        self._outer: list[list[object]] = []  # the stacks below the marks
        self._memo: dict[int, object] = {}

    def pop(self) -> object:
        return self._stack.pop()

    def step(self, name: str, argument: object) -> None:
        stack = self._stack
        match name:
            case "INT" | "BININT" | "BININT1" | "BININT2" | "LONG" | "LONG1" | "LONG4":
                if _integer(argument).bit_length() > _MAX_BITS:
                    raise _Malformed("a huge integer")
                stack.append(argument)
            case "FLOAT" | "BINFLOAT" | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8":
                stack.append(argument)
            case "UNICODE" | "BINUNICODE" | "SHORT_BINUNICODE" | "BINUNICODE8":
                stack.append(argument)
            case "STRING" | "BINSTRING" | "SHORT_BINSTRING":  # Python 2's
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[name])
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self._outer.append(stack)
                self._stack = []
            case "POP_MARK":
                self._above_mark()
            case "POP":
                stack.pop()
            case "DUP":
                stack.append(stack[-1])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self._memo[_integer(argument)] = stack[-1]
            case "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                if argument not in self._memo:
                    raise _Malformed(f"no memo {argument}")
                stack.append(self._memo[_integer(argument)])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = [stack.pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(items)))
            case "TUPLE":
                items = self._above_mark()
                self._stack.append(tuple(items))
            case "EMPTY_LIST":
                stack.append([])
            case "LIST":
                items = self._above_mark()
                self._stack.append(items)
            case "APPEND":
                item = stack.pop()
                self._list().append(item)
            case "APPENDS":
                items = self._above_mark()
                self._list().extend(items)
            case "EMPTY_DICT":
                stack.append({})
            case "DICT":
                items = self._above_mark()
                self._stack.append({})
                self._set_items(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set_items([key, value])
            case "SETITEMS":
                self._set_items(self._above_mark())
            case "GLOBAL":
                self._push_global(str(argument).replace(" ", ".", 1))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                self._push_global(f"{_text(module)}.{_text(attribute)}")
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                if not isinstance(function, Global) or not isinstance(arguments, tuple):
                    raise _Malformed("a call of what is no function")
                stack.append(self._builders[function.name](arguments))
            case "BUILD":
                # Attributes of an OrderedDict (a state dict's _metadata): nothing that weights need.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise _Malformed("attributes for what is no dict")
            case "BINPERSID":
                stack.append(self._persistent(stack.pop()))
            case _:
                raise _Malformed(f"opcode {name}")

    def _above_mark(self) -> list[object]:
        if not self._outer:
            raise _Malformed("no mark")
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _list(self) -> list[object]:
        top = self._stack[-1]
        if not isinstance(top, list):
            raise _Malformed("items for what is no list")
        return top

    def _set_items(self, items: list[object]) -> None:
        top = self._stack[-1]
        if not isinstance(top, dict) or len(items) % 2:
            raise _Malformed("items for what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a tuple recurses without a guard in CPython: a deep one would end the process.
            if not isinstance(key, str | int | float | None):
                raise _Malformed(f"a dict key of type {type(key).__name__}")
            top[key] = value

    def _push_global(self, name: str) -> None:
        if name not in self._builders:
            raise InvalidInput(
                expected="tensors and plain containers only",
                got=f"the global {shown(name)}, which was not run",
                at=self._at,
                hint="save the weights alone, as in torch.save(module.state_dict(), FILE)",
            )
        self._stack.append(Global(name))


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise _Malformed("an integer that is none")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Malformed("a global without a name")
    return value
