"""What travels of a dict of tensors: headers and slicing, without any transport."""

from __future__ import annotations

import enum
import os
import pickle
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.messages import wire as plain_data
from coordinator.messages.tensor_dict import (
    INLINE_BYTES,
    Header,
    Slicing,
    TensorMeta,
    decode,
    encode,
    from_payload,
    pack,
    to_payload,
    unpack,
)
from coordinator.messages.wire import MessageCodec
from shm_broadcast import MessageDecodeError
from tests.device_comm.cases_named import Wrapping


class Colour(enum.IntEnum):
    RED = 1


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def through(values: dict[str, Any]) -> dict[str, Any]:
    """The dict as a receiver has it, without slicing."""
    header, parts = pack(values)
    header = decode(encode(header))
    arriving = iter(parts)
    tensors = {
        key: (next(arriving) if meta.numel else torch.empty(0)).reshape(meta.shape)
        for key, meta in header.tensors.items()
    }
    assert next(arriving, None) is None
    return unpack(header, tensors)


def test_the_header_of_a_dict_by_hand() -> None:
    values: dict[str, Any] = {
        "a": torch.zeros(2, 3, dtype=torch.bfloat16),
        "n": 7,
        "x": [1, (2,)],
        "none": None,
    }
    header, parts = pack(values)
    assert header.keys == ["a", "n", "x", "none"]
    assert header.tensors == {"a": TensorMeta("torch.bfloat16", (2, 3), "cpu")}
    assert header.scalars == {"n": 7, "none": None}
    assert [part.shape for part in parts] == [(6,)]
    assert parts[0].untyped_storage().data_ptr() == values["a"].untyped_storage().data_ptr()


def test_values_keep_their_types_and_order() -> None:
    values: dict[str, Any] = {
        "tuple": (1, [2, {"three": {4}}]),
        "int keys": {1: "one", None: 0},
        "enum": Colour.RED,
        "big": 1 << 70,
        "negative": -(1 << 63),
        "bytes": b"\xff",
        "str": "ü",
        "true": True,
        "nan": float("inf"),
        "none": None,
        "dtype": torch.float16,
        "shape": torch.Size([1, 2]),
    }
    found = through(values)
    assert list(found) == list(values)
    assert found == values
    assert [type(value) for value in found.values()] == [type(value) for value in values.values()]


def test_keys_of_any_kind() -> None:
    values: dict[Any, Any] = {
        1: torch.ones(2),
        "1": 1,
        b"1": [1],
        2.5: torch.zeros(1),
        None: None,
        False: {"nested": 1},
        (1, ("a", None)): torch.arange(3),
        (): "empty",
    }
    found = through(values)
    assert list(found) == list(values)
    assert [type(key) for key in found] == [type(key) for key in values]
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value)
        else:
            assert found[key] == value


def test_parameters_and_subclasses_with_memory_of_their_own() -> None:
    x = torch.arange(3.0)
    values = {"p": torch.nn.Parameter(x, requires_grad=False), "s": x.as_subclass(Named)}
    for found in through(values).values():
        assert torch.equal(found, x)


def test_empty_dict_and_empty_tensors() -> None:
    assert through({}) == {}
    header, parts = pack({"empty": torch.empty(0, 5), "one": torch.tensor(3.0)})
    assert [part.tolist() for part in parts] == [[3.0]]
    assert header.tensors["empty"].shape == (0, 5)
    assert header.tensors["one"].shape == ()


def test_non_contiguous_conjugated_and_expanded_tensors() -> None:
    transposed = torch.arange(6).reshape(2, 3).t()
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    negated = torch.tensor([1 + 2j]).conj().imag
    expanded = torch.tensor([[1], [2]]).expand(2, 3)
    found = through({"t": transposed, "c": conjugated, "n": negated, "e": expanded})
    torch.testing.assert_close(found["t"], transposed)
    torch.testing.assert_close(found["c"], conjugated.resolve_conj())
    torch.testing.assert_close(found["n"], torch.tensor([-2.0]))
    torch.testing.assert_close(found["e"], expanded.contiguous())


def test_requires_grad_is_said_and_nothing_travels_with_history() -> None:
    x = torch.ones(2, requires_grad=True)
    header, parts = pack({"x": x * 2, "y": torch.ones(1)})
    assert header.tensors["x"].requires_grad
    assert not header.tensors["y"].requires_grad
    assert not parts[0].requires_grad


def test_the_sender_cuts_what_divides() -> None:
    """arange(8) over two peers: four elements per link."""
    x = torch.arange(8).reshape(2, 4)
    for rank in range(2):
        header, parts = pack({"x": x, "odd": torch.ones(3)}, Slicing(2, rank))
        assert (header.tensors["x"].slices, header.tensors["x"].slice) == (2, rank)
        assert header.tensors["x"].numel_sent == 4
        assert parts[0].tolist() == list(range(4 * rank, 4 * rank + 4))
        assert header.tensors["odd"].slices == 0
        assert parts[1].tolist() == [1, 1, 1]


def test_overrides() -> None:
    x = torch.arange(4)
    header, parts = pack({"residual": x, "x": x}, Slicing(2, 1, {"residual": False, "other": True}))
    assert header.tensors["residual"].slices == 0
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [2, 3]]


def test_cutting_what_does_not_divide_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="'x' has 3 elements, not divisible by 2 ranks"):
        pack({"x": torch.ones(3)}, Slicing(2, 0, {"x": True}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({Colour.RED: 1}, "keys of a tensor dict are text .* tuples of these; got <Colour.RED"),
        ({frozenset(): torch.ones(1)}, r"tuples of these; got frozenset\(\)"),
        ({(1, (torch.bool,)): 1}, "tuples of these; got"),
        ({1 << 70: 1}, r"integers of 64 bits.* tuples of these; got"),
        ({"\udcff": 1}, r"text \(that UTF-8 can write\).* got '\\udcff'"),
        ({(1, "\udcff"): 1}, r"got \(1, '\\udcff'\)"),
        ({float("nan"): 1}, "tuples of these; got nan"),
        ({"f": lambda: 0}, "the value of 'f': cannot pickle a function"),
        ({"s": torch.ones(2).to_sparse()}, "'s' is not a dense tensor"),
        ({"w": Wrapping(torch.ones(2))}, "'w' is not a dense tensor: a Wrapping: pass the tensor"),
        ({"q": torch.ones(2).to(torch.uint8).view(torch.quint8)}, "'q' is quantised: torch.quint8"),
    ],
)
def test_what_cannot_be_sent(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(values)


NO_UTF_8 = b"\x92\x91\xa1\xff\x80"


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", NO_UTF_8, msgspec.msgpack.encode([["k"], {"k": 1}])]
)
def test_bytes_that_are_no_header(data: bytes) -> None:
    with pytest.raises(MessageDecodeError, match="not the header"):
        decode(data)


def test_what_this_side_cannot_restore() -> None:
    with pytest.raises(MessageDecodeError, match=r"unknown dtype 'torch\.float1'"):
        _ = TensorMeta("torch.float1", (1,), "cpu").torch_dtype
    for short_of_memory in ("torch.quint4x2", "torch.quint2x4"):
        meta = TensorMeta(short_of_memory, (1400,), "cpu")
        head = encode(Header(["k"], {"k": meta}, small=[0]))
        payload = len(head).to_bytes(8, "little") + head + b"A" * 1400
        with pytest.raises(MessageDecodeError, match="unknown dtype"):
            from_payload(memoryview(payload))
    with pytest.raises(MessageDecodeError, match="cannot restore an object"):
        unpack(Header(["k"], {}, {}, b"no pickle"), {})
    with pytest.raises(MessageDecodeError, match="the value of a key is missing"):
        unpack(Header(["k"], {}, {}), {})


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    x = torch.arange(4).to(dtype)
    header, parts = pack({"x": x})
    assert decode(encode(header)).tensors["x"].torch_dtype == dtype
    assert torch.equal(parts[0].view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_within_a_value(dtype: torch.dtype) -> None:
    x = torch.arange(4).to(dtype)
    found = through({"cache": {"k": (x, None)}})["cache"]["k"][0]
    assert found.dtype == dtype
    assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))


def test_of_a_view_within_a_value_only_its_elements_are_sent() -> None:
    view = torch.zeros(1 << 20)[:4]
    assert len(MessageCodec().dump([view])) < 1000


shapes = st.lists(st.integers(0, 5), max_size=3)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), shapes | plain.map(lambda value: ("plain", value)), max_size=5))
def test_any_dict_arrives_as_it_was(recipe: dict[str, Any]) -> None:
    values = {
        key: made[1] if isinstance(made, tuple) else torch.randn(made)
        for key, made in recipe.items()
    }
    found = through(values)
    assert list(found) == list(values)
    for key, value in values.items():
        assert type(found[key]) is type(value)
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else None
        assert same is True or found[key] == value


@given(shapes, st.integers(1, 6), st.none() | st.booleans())
def test_the_slices_of_all_peers_are_the_tensor(
    shape: list[int], peers: int, override: bool | None
) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    overrides = {} if override is None else {"x": override}
    if override and x.numel() % peers:
        with pytest.raises(ValueError, match="not divisible"):
            pack({"x": x}, Slicing(peers, 0, overrides))
        return
    packed = [pack({"x": x}, Slicing(peers, rank, overrides)) for rank in range(peers)]
    metas = [header.tensors["x"] for header, _ in packed]
    sent = [part for _, parts in packed for part in parts]
    assert len({meta.slices for meta in metas}) == 1
    assert all(part.numel() == metas[0].numel_sent for part in sent)
    if metas[0].slices:
        assert metas[0].slices == peers > 1
        assert [meta.slice for meta in metas] == list(range(peers))
        assert torch.equal(torch.cat(sent), x.reshape(-1))
    else:
        assert all(torch.equal(part, x.reshape(-1)) for part in sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("before", [1, 3, 8])
def test_small_tensors_travel_with_their_header(dtype: torch.dtype, before: int) -> None:
    """Wherever in the payload they lie; what is not small follows by itself."""
    small, large = torch.arange(3).to(dtype), torch.ones(INLINE_BYTES, dtype=dtype)
    values = {
        "bytes": torch.ones(before, dtype=torch.uint8),
        "none": torch.empty(0),
        "large": large,
        "strided": torch.arange(6).to(dtype)[::2],
        "small": small,
    }
    payload, apart = to_payload(*pack(values))
    header, found = from_payload(memoryview(bytearray(b"?" + payload))[1:])
    assert [part.numel() for part in apart] == [INLINE_BYTES]
    assert list(found) == ["bytes", "strided", "small"]
    assert header.tensors["large"].numel_sent == INLINE_BYTES
    for key, tensor in found.items():
        assert tensor.data_ptr() % 16 == 0
        assert torch.equal(tensor.view(torch.uint8), values[key].contiguous().view(torch.uint8))


def test_no_more_than_fits_travels_with_a_header() -> None:
    tensors = {
        str(number): torch.ones(INLINE_BYTES // 4 - 1, dtype=torch.uint8) for number in range(6)
    }
    assert len(to_payload(*pack(tensors))[1]) == 2


def test_the_payload_of_a_dict_by_hand() -> None:
    """What may be large is no part of the header, which has 64 bits for its length."""
    values = {"n": 7, "few": torch.tensor([1, 2, 3], dtype=torch.uint8), "more": [1]}
    payload, _ = to_payload(*pack(values))
    length = int.from_bytes(payload[:8], "little")
    keys, tensors, scalars, objects, small = msgspec.msgpack.decode(payload[8 : 8 + length])
    assert (keys, list(tensors), scalars, small) == (["n", "few", "more"], ["few"], {"n": 7}, [0])
    assert objects == b""
    assert payload[8 + length :] == b"\1\2\3" + pickle.dumps({"more": [1]}, protocol=5)
    header, found = from_payload(memoryview(payload))
    assert unpack(header, found)["more"] == [1]


def test_text_that_utf_8_cannot_write() -> None:
    """As `json.loads` makes it of what users send, and Python of file names."""
    values = {"prompt": "a \ud83d", "file": os.fsdecode(b"\xff"), "well": "\U0001f600 \xe9"}
    assert list(pack(values)[0].scalars) == ["well"]
    assert through(values) == values


def test_values_that_msgpack_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel with the objects, which have no limit; plain ones are refused."""
    monkeypatch.setattr(plain_data, "LONGEST", 3)
    values = {"a": b"abc", "b": b"abcd", "c": "abc", "d": "abcd", "e": "\xe9" * 4}
    header, parts = pack(values)
    assert header.scalars == {"a": b"abc", "c": "abc"}
    header, found = from_payload(memoryview(to_payload(header, parts)[0]))
    assert unpack(header, found) == values
    for large in (b"abcd", ["abcd"]):
        with pytest.raises(TypeError, match="of 4, where 3 is the limit"):
            plain_data.encode_plain(large)
    with pytest.raises(TypeError, match="the value of 'b': text or bytes of 4, where 3"):
        pack(values, wire=MessageCodec(pickles=False))


@pytest.mark.parametrize("cut", [1, 100])
def test_a_payload_that_is_cut_short(cut: int) -> None:
    payload, _ = to_payload(*pack({"x": torch.ones(24)}))
    with pytest.raises(MessageDecodeError, match=r"not a tensor dict|not the header"):
        from_payload(memoryview(payload[:-cut]))
