"""JSON objects of files from outside: each key once, and an error instead of a traceback."""

from __future__ import annotations

import json
from collections import Counter

from colibri_cli.errors import InvalidInput
from colibri_cli.formats.tensor import shown


def read_object(data: bytes, at: str, what: str = "a JSON object") -> dict[str, object]:
    """Parse an object.

    Parameters
    ----------
    data : bytes
        UTF-8.
    at, what : str
        Where it is and what it stands for, for messages.

    Raises
    ------
    InvalidInput
        It is not JSON, not an object, nested too deeply, or names a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise InvalidInput(expected="each key once", got=f"{shown(twice)} twice", at=at)
        return members

    try:
        found = json.loads(data.decode(), object_pairs_hook=unique)
    except InvalidInput:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also text that is not UTF-8, and integers too long
        raise InvalidInput(expected=what, got=shown(str(error)), at=at) from error
    if not isinstance(found, dict):
        raise InvalidInput(expected="a JSON object", got=f"a {type(found).__name__}", at=at)
    return found
