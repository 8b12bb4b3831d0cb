"""Pickle tensors with their elements as an out-of-band buffer, which need not be copied.

A tensor is sent by value: of a view only its elements, in contiguous order; tensors that shared a
storage no longer do; a tensor on another device is copied to the host, and at the receiver to the
device of the same name.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final, cast

import torch

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NUMPY_KNOWS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""For each item size in bytes a dtype that numpy has too (it has no bfloat16)."""

_NUMPY_DIMS: Final = 64
"""The most dimensions of a numpy array."""


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    strided = tensor.layout == torch.strided and not tensor.is_nested
    plain = strided and not tensor.is_quantized and not tensor.is_meta
    if not plain:
        reduced: tuple[Any, ...] = tensor.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        return reduced
    device = None if tensor.is_cpu else str(tensor.device)
    return _rebuild_tensor, (
        _values(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        device,
        tensor.requires_grad,
    )


def _values(tensor: torch.Tensor) -> pickle.PickleBuffer | bytes:
    if tensor.numel() == 0:
        return b""
    values = tensor.detach() if tensor.requires_grad else tensor
    if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_conj() or tensor.is_neg():
        values = values.resolve_conj().resolve_neg().cpu().contiguous()
    if values.dim() > _NUMPY_DIMS:
        values = values.view(-1)
    array = values.view(_NUMPY_KNOWS[values.itemsize]).numpy()
    return pickle.PickleBuffer(cast("Buffer", array))


def _reduce_parameter(parameter: torch.nn.Parameter) -> tuple[Any, ...]:
    return torch.nn.Parameter, (parameter.detach(), parameter.requires_grad)


def _rebuild_tensor(
    memory: Buffer,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: str | None,
    requires_grad: bool,
) -> torch.Tensor:
    values = memoryview(memory)
    if values.nbytes:
        writable = bytearray(memory) if values.readonly else memory
        tensor = torch.frombuffer(writable, dtype=dtype).view(shape)
    else:
        tensor = torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).view(shape)
    if device is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


REDUCERS: Final[dict[type, Any]] = {
    torch.Tensor: _reduce_tensor,
    torch.nn.Parameter: _reduce_parameter,
}
"""The reducer of each type, for `pickle.Pickler.dispatch_table`."""
