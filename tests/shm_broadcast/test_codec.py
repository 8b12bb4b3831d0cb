"""Encoding: any object comes back equal, and nothing that goes wrong lasts."""

from __future__ import annotations

import copyreg
import dataclasses
import datetime
import pickle
import re
import signal
import tracemalloc
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shm_broadcast
from shm_broadcast.codec import (
    MAX_BUFFERS,
    MSGPACK,
    OUT_OF_BAND_BYTES,
    PICKLE,
    MsgpackCodec,
    PickleCodec,
    codec_for,
)
from shm_broadcast.errors import MessageDecodeError
from tests.interruptions import interruptions

LARGE = 4 * OUT_OF_BAND_BYTES


class Step(msgspec.Struct):
    number: int
    names: list[str] = []


@dataclasses.dataclass
class Plain:
    value: Any


class Registered:
    """Picklable only by what its module told copyreg."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("not by itself")


def make_registered(value: int) -> Registered:
    return Registered(value)


class Refuses:
    def __reduce__(self) -> Any:
        raise KeyError("wanted")


class Bomb:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return explode, ()


def explode() -> None:
    raise ZeroDivisionError("wanted")


class Signalling:
    """The process that makes it again gets a signal meanwhile."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGALRM,)


def through(codec: PickleCodec, message: Any) -> Any:
    """Encode and decode, with every part copied as a ring does."""
    main, buffers = codec.encode(message)
    body = b"".join(bytes(memoryview(part)) for part in main)
    return codec.decode(body, [bytearray(buffer) for buffer in buffers])


def sizes(codec: PickleCodec, message: Any) -> list[int]:
    _, buffers = codec.encode(message)
    return [buffer.nbytes for buffer in buffers]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
)
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.frozensets(st.integers())
        | st.builds(Plain, inner)
    ),
    max_leaves=20,
)


@given(st.lists(OBJECTS, min_size=1, max_size=3))
def test_objects_come_back_equal(messages: list[Any]) -> None:
    codec = PickleCodec()
    for message in messages:
        assert through(codec, message) == message


@given(
    st.sampled_from(["u1", "<i4", ">i4", "f2", "f8", "c16", "?", "S7", "U3", "M8[s]", "V5"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(["C", "F"]),
    st.booleans(),
)
def test_arrays_come_back_equal(dtype: str, shape: list[int], order: Any, strided: bool) -> None:
    count = int(np.prod(shape, dtype=int))
    raw = np.random.default_rng(count).bytes(count * np.dtype(dtype).itemsize)
    array = np.frombuffer(raw, dtype=dtype).reshape(shape, order=order)
    if strided:
        array = array[..., ::2] if shape else array
    got = through(PickleCodec(), array)
    wanted = pickle.loads(pickle.dumps(array, 5))  # numpy makes copies of views native-endian
    assert got.dtype == wanted.dtype
    assert got.shape == array.shape
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_go_out_of_band(order: Any) -> None:
    codec = PickleCodec()
    array = np.arange(LARGE, dtype=np.float64).reshape(4, -1, order=order)
    assert sizes(codec, {"a": [array]}) == [array.nbytes]
    got = through(codec, array)
    assert np.array_equal(got, array)
    assert got.flags.writeable
    got[0, 0] = 5


def test_small_and_strided_arrays_stay_in_band() -> None:
    codec = PickleCodec()
    assert sizes(codec, np.zeros(OUT_OF_BAND_BYTES - 1, np.uint8)) == []
    assert sizes(codec, np.zeros(OUT_OF_BAND_BYTES, np.uint8)) == [OUT_OF_BAND_BYTES]
    strided = np.arange(LARGE)[::2]
    assert np.array_equal(through(codec, strided), strided)


def test_an_array_that_cannot_be_written_stays_so() -> None:
    array = np.arange(LARGE)
    array.flags.writeable = False
    got = through(PickleCodec(), array)
    assert np.array_equal(got, array)
    assert not got.flags.writeable


def test_object_and_structured_arrays() -> None:
    codec = PickleCodec()
    objects = np.array([None, "a", [1]], dtype=object)
    assert through(codec, objects).tolist() == objects.tolist()
    rows = np.zeros(3000, dtype=[("x", "f4"), ("y", "i8")])
    rows["y"] = np.arange(3000)
    assert np.array_equal(through(codec, rows), rows)


def test_pickle_buffers_of_the_caller() -> None:
    codec = PickleCodec()
    memory = bytearray(b"x" * LARGE)
    assert through(codec, pickle.PickleBuffer(memory)) == memory
    assert sizes(codec, pickle.PickleBuffer(memory)) == [LARGE]
    assert through(codec, pickle.PickleBuffer(b"small")) == b"small"


def test_the_same_object_twice_is_one_object() -> None:
    codec = PickleCodec()
    array = np.arange(LARGE)
    first, second = through(codec, [array, array])
    assert first is second
    assert sizes(codec, [array, array]) == [array.nbytes]


def test_nothing_is_remembered_from_the_last_message() -> None:
    codec = PickleCodec()
    message = ["text", {"key": 1}]
    first, _ = codec.encode(message)
    second, _ = codec.encode(message)
    assert first == second


@pytest.mark.parametrize("fails", [False, True])
def test_a_message_of_many_objects_leaves_no_memory_for_later_ones_to_clear(fails: bool) -> None:
    """A pickler's memo keeps its size, of which every later message would clear each byte."""
    many = [*({"number": i} for i in range(100_000)), *[Refuses()] * fails]
    codec = PickleCodec()
    tracemalloc.start()
    try:
        with pytest.raises(KeyError) if fails else nullcontext():
            codec.encode(many)
        codec.encode(1)
        kept, at_most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert at_most > 4 << 20
    assert kept < 1 << 20


def test_what_was_encoded_is_still_the_caller_s_memory() -> None:
    array = np.zeros(LARGE, np.uint8)
    _, (buffer,) = PickleCodec().encode(array)
    array[3] = 9
    assert buffer[3] == 9


@pytest.mark.parametrize("size", [0, OUT_OF_BAND_BYTES, LARGE, 1 << 20])
def test_large_bytes_and_text(size: int) -> None:
    codec = PickleCodec()
    message = [b"x" * size, bytearray(b"y" * size), "z" * size, b"x" * size]
    assert through(codec, message) == message


@pytest.mark.parametrize("each_bytes", [OUT_OF_BAND_BYTES, 65_536])
def test_buffers_beyond_the_limit_go_in_band(each_bytes: int) -> None:
    codec = PickleCodec()
    arrays = [np.full(each_bytes, index % 256, np.uint8) for index in range(MAX_BUFFERS + 7)]
    assert len(sizes(codec, arrays)) == MAX_BUFFERS
    got = through(codec, arrays)
    assert all(np.array_equal(a, b) for a, b in zip(got, arrays, strict=True))


@pytest.mark.parametrize(
    "bad", [lambda: 0, Refuses(), open], ids=["function", "refuses", "builtin"]
)
def test_an_object_that_cannot_be_pickled_leaves_the_codec_usable(bad: Any) -> None:
    codec = PickleCodec()
    fresh, _ = PickleCodec().encode(["good", b"x" * 100_000])
    messages = [[b"x" * 100_000, np.zeros(LARGE), bad], {"a": bad}]
    for message in messages:
        if bad is open:
            codec.encode(message)
            continue
        with pytest.raises(KeyError if isinstance(bad, Refuses) else TypeError):
            codec.encode(message)
        main, buffers = codec.encode(["good", b"x" * 100_000])
        assert list(map(bytes, main)) == list(map(bytes, fresh))
        assert len(buffers) == 0


def test_what_copyreg_knows_can_be_sent() -> None:
    """A pickler with reducers of its own ignores copyreg's, and with it regular expressions."""
    codec = PickleCodec()
    pattern = re.compile(r"a+(b)", re.IGNORECASE)
    assert through(codec, pattern) == pattern
    assert through(codec, [int | str, 1 + 2j, np.add]) == [int | str, 1 + 2j, np.add]
    copyreg.pickle(Registered, lambda each: (make_registered, (each.value,)))
    try:
        assert through(codec, Registered(4)).value == 4
    finally:
        del copyreg.dispatch_table[Registered]


def test_dates_exceptions_and_classes() -> None:
    codec = PickleCodec()
    now = datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC)
    assert through(codec, now) == now
    error = through(codec, ValueError("text", 3))
    assert isinstance(error, ValueError) and error.args == ("text", 3)
    assert through(codec, Plain) is Plain


@pytest.mark.parametrize("body", [b"", b"\x80\x05", b"not a pickle", b"\x80\x05N"])
def test_what_is_no_pickle(body: bytes) -> None:
    with pytest.raises(MessageDecodeError):
        PickleCodec().decode(body, [])


def test_an_object_that_fails_as_it_is_made_again() -> None:
    codec = PickleCodec()
    with pytest.raises(MessageDecodeError, match="ZeroDivisionError: wanted"):
        through(codec, Bomb())
    assert through(codec, "good") == "good"


@pytest.mark.parametrize("error", [ValueError, TimeoutError])
def test_what_a_signal_handler_raises_is_not_the_message_s_fault(error: type[Exception]) -> None:
    def give_up(*_: object) -> None:
        raise error("by the handler")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with pytest.raises(error, match=r"^by the handler$"):
            through(PickleCodec(), Signalling())
    finally:
        signal.signal(signal.SIGALRM, before)


def test_buffers_that_are_missing() -> None:
    codec = PickleCodec()
    main, _ = codec.encode(np.zeros(LARGE))
    with pytest.raises(MessageDecodeError):
        codec.decode(b"".join(bytes(memoryview(part)) for part in main), [])


@given(st.integers(-(2**63), 2**63 - 1), st.lists(st.text()))
def test_a_typed_message(number: int, names: list[str]) -> None:
    codec = codec_for(Step)
    assert codec.code == MSGPACK
    (main,), buffers = codec.encode(Step(number, names))
    assert not buffers
    assert codec.decode(main, buffers) == Step(number, names)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x92\x01", msgspec.msgpack.encode({"number": "x"}), b"\xa1\xff"]
)
def test_what_is_not_of_the_type(body: bytes) -> None:
    with pytest.raises(MessageDecodeError):
        MsgpackCodec(Step).decode(body, [])


def test_a_typed_message_has_no_buffers() -> None:
    (main,), _ = MsgpackCodec(Step).encode(Step(1))
    with pytest.raises(MessageDecodeError, match="out-of-band"):
        MsgpackCodec(Step).decode(main, [b"x"])


class Checked(msgspec.Struct):
    value: int

    def __post_init__(self) -> None:
        if self.value == 0:
            raise ZeroDivisionError("wanted")


def test_a_type_that_refuses_a_value_in_its_own_way() -> None:
    body = msgspec.msgpack.encode({"value": 0})
    with pytest.raises(MessageDecodeError, match="ZeroDivisionError: wanted"):
        MsgpackCodec(Checked).decode(body, [])


def test_the_default_codec_is_pickle() -> None:
    assert codec_for(None).code == PICKLE


def test_an_interrupted_message_leaves_nothing_to_the_next() -> None:
    codec, value = PickleCodec(), ["first", np.ones(LARGE)]
    for _ in interruptions(lambda: codec.encode(value), shm_broadcast):
        value[0] = "changed"  # a memo that has it already would say that it is as it was
        main, buffers = codec.encode(value)
        assert not any(codec.encode(None)[1])
        got = codec.decode(b"".join(main), buffers)
        assert got[0] == "changed"
        assert np.array_equal(got[1], value[1])
        value[0] = "first"
