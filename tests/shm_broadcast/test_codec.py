"""Encoding: any object, array and tensor comes back equal, and no failure has an effect later."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
import re
import signal
import tracemalloc
import warnings
from contextlib import nullcontext
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shm_broadcast
from shm_broadcast import MessageDecodeError
from shm_broadcast.codec import (
    MAX_BUFFERS,
    OUT_OF_BAND_BYTES,
    MsgpackCodec,
    PickleCodec,
)
from tests.interruptions import interruptions

LARGE = 4 * OUT_OF_BAND_BYTES

DTYPES = sorted(
    {
        each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype) and not str(each).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


class Step(msgspec.Struct):
    number: int
    names: list[str] = []


class Checked(msgspec.Struct):
    value: int

    def __post_init__(self) -> None:
        if self.value == 0:
            raise ZeroDivisionError("wanted")


@dataclasses.dataclass
class Plain:
    value: Any


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
    """Unpickled, it raises a signal."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGALRM,)


class Tagged(torch.Tensor):
    pass


def encoded(message: Any) -> tuple[bytes, list[memoryview]]:
    main, buffers = PickleCodec().encode(message)
    return b"".join(bytes(memoryview(part)) for part in main), list(buffers)


def through(message: Any) -> Any:
    """Encode and decode, with every part copied as a ring does."""
    body, buffers = encoded(message)
    return PickleCodec().decode(body, [bytearray(buffer) for buffer in buffers])


def out_of_band(message: Any) -> list[int]:
    return [buffer.nbytes for buffer in encoded(message)[1]]


# --- objects and arrays ----------------------------------------------------------------------


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
        main, buffers = codec.encode(message)
        assert codec.decode(b"".join(main), buffers) == message


@pytest.mark.parametrize(
    "message",
    [
        re.compile(r"a+(b)", re.IGNORECASE),  # by copyreg, as types
        [int | str, 1 + 2j, np.add, Plain, open],
        datetime.datetime(2024, 2, 29, 1, 2, 3, tzinfo=datetime.UTC),
        (torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cpu"), torch.strided),
        *(
            [b"x" * size, bytearray(b"y" * size), "z" * size, b"x" * size]
            for size in (0, OUT_OF_BAND_BYTES, LARGE, 1 << 20)
        ),
    ],
    ids=lambda each: repr(each)[:20],
)
def test_special_objects_come_back_equal(message: Any) -> None:
    assert through(message) == message
    error = through(ValueError("text", message))
    assert isinstance(error, ValueError) and error.args == ("text", message)


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
    got = through(array)
    wanted = pickle.loads(pickle.dumps(array, 5))  # numpy makes copies of views native-endian
    assert got.dtype == wanted.dtype
    assert got.shape == array.shape
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("order", ["C", "F"])
def test_large_arrays_go_out_of_band(order: Any, writeable: bool) -> None:
    array = np.arange(LARGE, dtype=np.float64).reshape(4, -1, order=order)
    array.flags.writeable = writeable
    assert out_of_band({"a": [array]}) == [array.nbytes]
    got = through(array)
    assert np.array_equal(got, array)
    assert got.flags.writeable == writeable


def test_small_strided_and_object_arrays_stay_in_band() -> None:
    assert out_of_band(np.zeros(OUT_OF_BAND_BYTES - 1, np.uint8)) == []
    assert out_of_band(np.zeros(OUT_OF_BAND_BYTES, np.uint8)) == [OUT_OF_BAND_BYTES]
    rows = np.zeros(3000, dtype=[("x", "f4"), ("y", "i8")])
    rows["y"] = np.arange(3000)
    for array in (np.arange(LARGE)[::2], np.array([None, "a", [1]], dtype=object), rows):
        assert np.array_equal(through(array), array)


def test_buffers_are_the_callers_memory() -> None:
    memory = bytearray(b"x" * LARGE)
    assert through(pickle.PickleBuffer(memory)) == memory
    assert through(pickle.PickleBuffer(b"small")) == b"small"
    _, (buffer,) = encoded(pickle.PickleBuffer(memory))
    memory[3] = 9
    assert buffer[3] == 9


@pytest.mark.parametrize("array", [np.arange(LARGE), torch.zeros(100_000)], ids=["array", "tensor"])
def test_one_object_sent_twice_stays_one(array: Any) -> None:
    first, second = through([array, array])
    assert first is second
    assert out_of_band([array, array]) == [array.nbytes]


@pytest.mark.parametrize("each_bytes", [OUT_OF_BAND_BYTES, 65_536])
def test_buffers_beyond_the_limit_go_in_band(each_bytes: int) -> None:
    arrays = [np.full(each_bytes, index % 256, np.uint8) for index in range(MAX_BUFFERS + 7)]
    assert len(out_of_band(arrays)) == MAX_BUFFERS
    assert all(np.array_equal(a, b) for a, b in zip(through(arrays), arrays, strict=True))


# --- tensors ---------------------------------------------------------------------------------


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose bytes are random; for bool, zeros and ones."""
    count = int(np.prod(shape, dtype=int))
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.is_contiguous()
    assert bits(got) == bits(wanted)
    assert got.requires_grad == wanted.requires_grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (2, 3, 4), (130, 257)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    assert_same(through(tensor), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_tensors_go_out_of_band(dtype: torch.dtype) -> None:
    count = OUT_OF_BAND_BYTES // dtype.itemsize
    assert out_of_band([random_bits(dtype, (count,))]) == [count * dtype.itemsize]
    assert out_of_band([random_bits(dtype, (count - 1,))]) == []


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::3, 5:],
        lambda t: t[7],
        lambda t: t.expand(3, *t.shape),
        lambda t: t[:, :0],
        lambda t: t.unfold(0, 3, 2),
    ],
    ids=["transposed", "strided", "row", "expanded", "empty", "overlapping"],
)
def test_a_view_sends_what_it_shows(view: Any) -> None:
    shown = view(torch.arange(64 * 300, dtype=torch.float32).view(64, 300))
    assert_same(through(shown), shown.contiguous())
    assert sum(out_of_band(shown)) in (0, shown.numel() * 4)


def test_conjugate_and_negative_views() -> None:
    z = torch.randn(5000, dtype=torch.complex64)
    for view in (z.conj(), z.conj().imag, z.conj().resolve_conj(), z.conj()[::2]):
        got = through(view)
        assert torch.equal(got, view)
        assert not got.is_conj() and not got.is_neg()


@pytest.mark.parametrize("numel", [3, 10_000])
def test_requires_grad_is_kept_and_gradients_are_not_sent(numel: int) -> None:
    leaf = torch.ones(numel, requires_grad=True)
    torch.autograd.backward((leaf * 2).sum())
    got = through(leaf)
    assert got.requires_grad and got.is_leaf and got.grad is None
    torch.autograd.backward(got.sum())
    result = through(leaf * 3)
    assert result.requires_grad and result.is_leaf
    assert torch.equal(result.detach(), torch.full((numel,), 3.0))
    for requires_grad in (True, False):
        parameter = torch.nn.Parameter(torch.randn(numel), requires_grad=requires_grad)
        sent = through({"weight": parameter})["weight"]
        assert type(sent) is torch.nn.Parameter
        assert sent.requires_grad == requires_grad
        assert torch.equal(sent, parameter)


def test_received_tensors_can_be_written_and_share_nothing() -> None:
    base = torch.zeros(100_000)
    for tensor in through([torch.zeros(3), torch.tensor(1), base]):
        tensor.add_(1)
    first, second = through([base, base[:50_000]])
    first.fill_(1)
    assert second.sum() == 0
    many_dimensions = torch.arange(4.0).view([1] * 70 + [4])  # more than numpy has
    assert_same(through(many_dimensions), many_dimensions)


def test_other_layouts_and_subclasses_stay_what_they_are() -> None:
    sparse = torch.eye(50).to_sparse()
    assert torch.equal(through(sparse).to_dense(), sparse.to_dense())
    meta = through(torch.empty(3, 4, device="meta"))
    assert meta.is_meta and meta.shape == (3, 4)
    tagged = torch.arange(10_000.0).as_subclass(Tagged)
    got = through(tagged)
    assert type(got) is Tagged
    assert torch.equal(got, tagged)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    parts = [torch.arange(2.0), torch.arange(3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = through(torch.nested.nested_tensor(parts, layout=layout))
    assert nested.is_nested
    for got, wanted in zip(nested.unbind(), parts, strict=True):
        assert torch.equal(got, wanted)


# --- failures, and what is left for the next message -----------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_message_of_many_objects_leaves_no_memory(fails: bool) -> None:
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


@pytest.mark.parametrize("bad", [lambda: 0, Refuses()], ids=["function", "refuses"])
def test_an_object_that_cannot_be_pickled_leaves_the_codec_usable(bad: Any) -> None:
    codec, good = PickleCodec(), ["good", b"x" * 100_000, {"key": 1}]
    fresh, _ = PickleCodec().encode(good)
    for message in ([b"x" * 100_000, np.zeros(LARGE), bad], {"a": bad}):
        with pytest.raises(KeyError if isinstance(bad, Refuses) else TypeError):
            codec.encode(message)
        for _ in range(2):  # nothing is remembered of a message that was sent either
            main, buffers = codec.encode(good)
            assert list(map(bytes, main)) == list(map(bytes, fresh))
            assert len(buffers) == 0


@pytest.mark.parametrize(
    ("codec", "body", "buffers", "match"),
    [
        *(
            (PickleCodec(), body, [], None)
            for body in (b"", b"\x80\x05", b"no pickle", b"\x80\x05N")
        ),
        (PickleCodec(), encoded(Bomb())[0], [], "ZeroDivisionError: wanted"),
        (PickleCodec(), encoded(np.zeros(LARGE))[0], [], None),  # its buffer is missing
        *(
            (MsgpackCodec(Step), body, [], None)
            for body in (b"", b"\xc1", b"\x92\x01", b"\xa1\xff")
        ),
        (MsgpackCodec(Step), msgspec.msgpack.encode({"number": "x"}), [], None),
        (MsgpackCodec(Step), msgspec.msgpack.encode(Step(1)), [b"x"], "out-of-band"),
        (
            MsgpackCodec(Checked),
            msgspec.msgpack.encode({"value": 0}),
            [],
            "ZeroDivisionError: wanted",
        ),
    ],
)
def test_what_cannot_be_decoded_is_one_error(
    codec: Any, body: bytes, buffers: list[bytes], match: str | None
) -> None:
    with pytest.raises(MessageDecodeError, match=match):
        codec.decode(body, buffers)


@pytest.mark.parametrize("error", [ValueError, TimeoutError])
def test_an_error_of_a_signal_handler_is_no_decode_error(error: type[Exception]) -> None:
    def give_up(*_: object) -> None:
        raise error("by the handler")

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with pytest.raises(error, match=r"^by the handler$"):
            through(Signalling())
    finally:
        signal.signal(signal.SIGALRM, before)


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
