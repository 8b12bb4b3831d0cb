"""Tensor dicts and trees as bytes: headers, payloads and slices, without any transport."""

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
from coordinator.tree import from_dict, to_dict
from shm_broadcast import MessageDecodeError
from tests.coordinator.sent import agree
from tests.device_comm.cases_named import Wrapping

pytestmark = pytest.mark.quick


class Colour(enum.IntEnum):
    RED = 1


class Named(torch.Tensor):
    """A subclass with memory of its own."""


def through(values: dict[Any, Any]) -> dict[Any, Any]:
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


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

# --- what is sent is received --------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {
            "tuple": (1, [2, {"three": {4}}]),
            "int keys": {1: "one", None: 0},
            "enum": Colour.RED,
            "big": 1 << 70,
            "negative": -(1 << 63),
            "bytes": b"\xff",
            "str": "ü",
            "true": True,
            "inf": float("inf"),
            "none": None,
            "dtype": torch.float16,
            "shape": torch.Size([1, 2]),
        },
        {
            1: torch.ones(2),
            "1": 1,
            b"1": [1],
            2.5: torch.zeros(1),
            None: None,
            False: {"nested": 1},
            (1, ("a", None)): torch.arange(3),
            (): "empty",
        },
        # not text in UTF-8, as `json.loads` and file names in Python may be
        {"prompt": "a \ud83d", "file": os.fsdecode(b"\xff"), "well": "\U0001f600 \xe9"},
    ],
    ids=["empty", "types", "keys", "text"],
)
def test_values_and_keys_keep_their_types_and_order(values: dict[Any, Any]) -> None:
    found = through(values)
    agree(found, values)
    assert [type(key) for key in found] == [type(key) for key in values]


def test_tensors_of_any_kind_arrive() -> None:
    """Parameters, subclasses with memory of their own, views, lazy ones."""
    x = torch.arange(3.0)
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    sent = {
        "parameter": torch.nn.Parameter(x, requires_grad=False),
        "subclass": x.as_subclass(Named),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "conjugated": conjugated,
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "expanded": torch.tensor([[1], [2]]).expand(2, 3),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.0),
    }
    plain = {
        "parameter": x,
        "subclass": x,
        "conjugated": conjugated.resolve_conj(),
        "negated": torch.tensor([-2.0]),
    }
    agree(through(sent), sent | plain)


shapes = st.lists(st.integers(0, 5), max_size=3)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(), shapes.map(torch.randn) | plain, max_size=5))
def test_any_dict_arrives_as_it_was(values: dict[str, Any]) -> None:
    agree(through(values), values)


@pytest.mark.parametrize(
    "keys", [(1, True, 1.0), (0.0, -0.0, False), ((1,), (True,), (1.0,)), (True, 1)]
)
def test_equal_keys_of_trees_keep_their_types(keys: tuple[Any, ...]) -> None:
    """One after the other, as the nesting of earlier messages is cached."""
    x = torch.zeros(1)
    for key in keys:
        for tree in ({key: x}, {"outer": [{key: x, "beside": None}]}):
            assert repr(from_dict(to_dict(tree))) == repr(tree)


# --- headers and payloads ------------------------------------------------------------------


def test_a_payload_by_hand() -> None:
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
    assert header.tensors["large"].numel_sent == INLINE_BYTES
    agree(found, {key: values[key] for key in ("bytes", "strided", "small")})
    assert all(tensor.data_ptr() % 16 == 0 for tensor in found.values())


def test_few_bytes_travel_with_a_header() -> None:
    tensors = {
        str(number): torch.ones(INLINE_BYTES // 4 - 1, dtype=torch.uint8) for number in range(6)
    }
    assert len(to_payload(*pack(tensors))[1]) == 2
    view = torch.zeros(1 << 20)[:4]
    assert len(MessageCodec().dump([view])) < 1000


def test_values_that_are_too_long_for_msgpack_are_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- slices --------------------------------------------------------------------------------


@given(shapes, st.integers(1, 6), st.none() | st.booleans())
def test_the_slices_of_all_peers_are_the_tensor(
    shape: list[int], peers: int, override: bool | None
) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    overrides = {} if override is None else {"x": override}
    if override and x.numel() % peers:
        why = f"'x' has {x.numel()} elements, not divisible by {peers} ranks"
        with pytest.raises(ValueError, match=why):
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


# --- what is refused -----------------------------------------------------------------------


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
def test_what_cannot_be_sent_is_refused(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(values)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc0", b"\x92\x91\xa1\xff\x80", msgspec.msgpack.encode([["k"], {"k": 1}])],
    ids=["empty", "null", "no UTF-8", "no tensors"],
)
def test_bytes_that_are_no_header_are_refused(data: bytes) -> None:
    with pytest.raises(MessageDecodeError, match="not the header"):
        decode(data)


@pytest.mark.parametrize("cut", [1, 100])
def test_a_payload_that_is_cut_short_is_refused(cut: int) -> None:
    payload, _ = to_payload(*pack({"x": torch.ones(24)}))
    with pytest.raises(MessageDecodeError, match=r"not a tensor dict|not the header"):
        from_payload(memoryview(payload[:-cut]))


def test_what_this_side_cannot_restore_is_refused() -> None:
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
