"""Tensors of every dtype travel as their values, out of band if they are large."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from shm_broadcast.codec import OUT_OF_BAND_BYTES, PickleCodec

DTYPES = sorted(
    {
        each
        for each in vars(torch).values()
        if isinstance(each, torch.dtype) and not str(each).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def through(message: Any) -> Any:
    codec = PickleCodec()
    main, buffers = codec.encode(message)
    body = b"".join(bytes(memoryview(part)) for part in main)
    return codec.decode(body, [bytearray(buffer) for buffer in buffers])


def out_of_band(message: Any) -> list[int]:
    _, buffers = PickleCodec().encode(message)
    return [buffer.nbytes for buffer in buffers]


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


def test_more_dimensions_than_numpy_has() -> None:
    tensor = torch.arange(4.0).view([1] * 70 + [4])
    assert_same(through(tensor), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4), (130, 257)])
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    assert_same(through(tensor), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_ones_go_out_of_band(dtype: torch.dtype) -> None:
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
def test_gradients_are_asked_for_and_not_sent(numel: int) -> None:
    leaf = torch.ones(numel, requires_grad=True)
    torch.autograd.backward((leaf * 2).sum())
    got = through(leaf)
    assert got.requires_grad and got.is_leaf and got.grad is None
    torch.autograd.backward(got.sum())
    result = through(leaf * 3)
    assert result.requires_grad and result.is_leaf
    assert torch.equal(result.detach(), torch.full((numel,), 3.0))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters(requires_grad: bool) -> None:
    parameter = torch.nn.Parameter(torch.randn(100, 100), requires_grad=requires_grad)
    assert out_of_band(parameter) == [40_000]
    got = through({"weight": parameter})["weight"]
    assert type(got) is torch.nn.Parameter
    assert got.requires_grad == requires_grad
    assert torch.equal(got, parameter)


def test_a_state_dict() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128))
    state = through(model.state_dict())
    model.load_state_dict(state)
    assert list(state) == list(model.state_dict())
    copy = through(model).state_dict()
    assert all(torch.equal(copy[name], value) for name, value in state.items())


def test_what_arrives_can_be_written() -> None:
    tensors = through([torch.zeros(3), torch.zeros(100_000), torch.tensor(1)])
    for tensor in tensors:
        tensor.add_(1)


def test_the_same_tensor_twice_is_one_tensor() -> None:
    tensor = torch.zeros(100_000)
    first, second = through([tensor, tensor])
    assert first is second


def test_tensors_that_share_a_storage_come_apart() -> None:
    base = torch.zeros(100_000)
    first, second = through([base, base[:50_000]])
    first.fill_(1)
    assert second.sum() == 0


def test_other_layouts_go_torch_s_own_way() -> None:
    sparse = torch.eye(50).to_sparse()
    assert torch.equal(through(sparse).to_dense(), sparse.to_dense())
    meta = through(torch.empty(3, 4, device="meta"))
    assert meta.is_meta and meta.shape == (3, 4)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    parts = [torch.arange(2.0), torch.arange(3.0)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        nested = through(torch.nested.nested_tensor(parts, layout=layout))
    assert nested.is_nested
    for got, wanted in zip(nested.unbind(), parts, strict=True):
        assert torch.equal(got, wanted)


def test_what_surrounds_tensors() -> None:
    message = (torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cpu"), torch.strided)
    assert through(message) == message


class Tagged(torch.Tensor):
    pass


def test_a_subclass_stays_one() -> None:
    tagged = torch.arange(10_000.0).as_subclass(Tagged)
    got = through(tagged)
    assert type(got) is Tagged
    assert torch.equal(got, tagged)
