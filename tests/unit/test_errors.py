import copy
import pickle

import pytest

from colibri_cli import ColibriError, InvalidInput, UsageError

FIELDS = {"expected": "4 bytes", "got": "7", "at": "input.bin"}


@pytest.mark.parametrize("kind", [ColibriError, InvalidInput, UsageError])
def test_the_mould(kind):
    assert str(kind(**FIELDS)) == "Expected 4 bytes, got 7 - at input.bin"
    assert str(kind(**FIELDS, hint="cut it")) == "Expected 4 bytes, got 7 - at input.bin\nhint: cut it"


def test_the_parts_are_there_to_be_read():
    error = InvalidInput(**FIELDS, hint="cut it")
    assert (error.expected, error.got, error.at, error.hint) == ("4 bytes", "7", "input.bin", "cut it")
    assert InvalidInput(**FIELDS).hint is None


def test_one_tree_and_its_exit_codes():
    assert issubclass(InvalidInput, ColibriError)
    assert issubclass(InvalidInput, ValueError)
    assert issubclass(UsageError, ColibriError)
    assert not issubclass(UsageError, ValueError)
    assert (InvalidInput.exit_code, UsageError.exit_code) == (1, 2)


@pytest.mark.parametrize("kind", [ColibriError, InvalidInput, UsageError])
@pytest.mark.parametrize("hint", [None, "cut it"])
def test_an_error_crosses_processes(kind, hint):
    error = kind(**FIELDS, hint=hint)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - our own bytes
        assert type(twin) is kind
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__
