import math
import os
import pickle
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_cli.errors import InvalidInput
from colibri_cli.formats import pickles

scalars = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.booleans()
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.tuples(inner) | st.dictionaries(keys, inner),
    max_leaves=12,
)


def load(data, builders=None, persistent=None):
    return pickles.load(
        BytesIO(data), builders=builders or {}, persistent=persistent or (lambda identity: identity), at="gate.pt"
    )


@given(value=plain, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
@settings(max_examples=150, deadline=None)
def test_plain_values_come_back(value, protocol):
    found = load(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_shared_and_cyclic_containers_come_back(protocol):
    shared = [1]
    cyclic = {"twice": (shared, shared)}
    cyclic["self"] = cyclic
    found = load(pickle.dumps(cyclic, protocol))
    assert found["self"] is found
    assert found["twice"][0] is found["twice"][1]


def test_the_stream_is_left_behind_the_pickle():
    stream = BytesIO(pickle.dumps([1, 2], 2) + b"rest")
    assert pickles.load(stream, builders={}, persistent=lambda identity: identity, at="") == [1, 2]
    assert stream.read() == b"rest"


def test_calls_are_calls_of_the_builders():
    data = b"\x80\x02cmath\nsqrt\n(K\x04t\x85R."
    assert load(data, builders={"math.sqrt": lambda arguments: ["not the root", arguments]}) == [
        "not the root",
        ((4,),),
    ]


def test_a_global_is_a_word():
    assert load(b"cmath\npi\n.", builders={"math.pi": lambda _: 0}) == pickles.Global("math.pi")


def test_persistent_ids_go_to_the_caller():
    assert load(b"\x80\x02X\x01\x00\x00\x00aQ.", persistent=lambda identity: f"<{identity}>") == "<a>"


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "system"), (eval, "eval"), (exec, "exec"), (getattr, "getattr"), (os.remove, "remove")],
)
def test_nothing_runs_and_the_global_is_named(protocol, function, name, tmp_path):
    marker = tmp_path / "ran"
    data = pickle.dumps([{"weights": Evil(function, f"touch {marker}")}], protocol)
    with pytest.raises(InvalidInput, match=rf"got the global [\w.]*\.{name}, which was not run - at gate.pt"):
        load(data)
    assert not marker.exists()


def test_a_hostile_name_is_printed_on_one_line():
    with pytest.raises(InvalidInput) as caught:
        load(b"\x80\x04\x8c\x01\x1b\x8c\x02\nx\x93.")
    assert r"the global \x1b.\nx, which" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (b"\x80\x02", "pickle exhausted before seeing STOP"),
        (b"\x80\x02.", "a pop from an empty stack"),
        (b"\xff.", "at position 0, opcode b'\\xff' unknown"),
        (b"\x80\x02X\xff\xff\xff\xffab.", "expected 4294967295 bytes in a unicodestring4, but only 3 remain"),
        (
            b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
            "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        (b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.", "bytes8 byte count > sys.maxsize: 18446744073709551615"),
        (b"\x8b\xff\xff\xff\x7fa.", "not enough data in stream to read long4"),
        (b"\x8b\x20\x00\x00\x00" + b"\x7f" * 32 + b".", "a huge integer"),
        (b"]r\xff\xff\xff\xff0h\x00.", "no memo 0"),
        (b"q\x00.", "a pop from an empty stack"),
        (b"t.", "no mark"),
        (b"K\x01u.", "no mark"),
        (b"K\x01(K\x01K\x02u.", "items for what is no dict"),
        (b"}(K\x01u.", "items for what is no dict"),
        (b"}K\x01a.", "items for what is no list"),
        (b"})Ns.", "a dict key of type tuple"),
        (b"}]Ns.", "a dict key of type list"),
        (b"K\x01)R.", "a call of what is no function"),
        (b"K\x01}b.", "attributes for what is no dict"),
        (b"K\x01K\x02\x93.", "a global without a name"),
        (b"ccollections\nOrderedDict\n]R.", "a call of what is no function"),
        (b"Pid\n.", "opcode PERSID"),
        (b"(icollections\nOrderedDict\n.", "opcode INST"),
        (b"ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ"),
        (b"\x82\x01.", "opcode EXT1"),
    ],
)
def test_damage_is_one_clear_error(data, got):
    builders = {"collections.OrderedDict": lambda _: {}}
    with pytest.raises(InvalidInput) as caught:
        load(data, builders=builders)
    assert str(caught.value) == f"Expected a whole pickle of tensors, got {got} - at gate.pt"


def test_a_deep_tuple_as_a_key_does_not_end_the_process():
    with pytest.raises(InvalidInput, match="a dict key of type tuple"):
        load(b"})" + b"\x85" * 200_000 + b"Ns.")


def test_a_pickle_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(pickles, "MAX_OPCODES", 1000)
    assert load(b"(" + b"N" * 990 + b"l.") == [None] * 990
    with pytest.raises(InvalidInput, match="no end in 1000 opcodes"):
        load(b"N" * 1001 + b".")


def test_nan_and_infinity_come_back():
    nan, infinite = load(pickle.dumps([math.nan, math.inf], 2))
    assert math.isnan(nan)
    assert infinite == math.inf
