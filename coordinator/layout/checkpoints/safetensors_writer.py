"""Writes a safetensors file tensor by tensor, so that only one whole tensor is in memory.

    0        8               8 + length
    ┌────────┬───────────────┬──────────┬──────────┬───
    │ length │ header (JSON) │ tensor 0 │ tensor 1 │ …      little-endian, no gaps
    └────────┴───────────────┴──────────┴──────────┴───

The header maps names to dtype, shape and byte range; it is padded with spaces to 8 bytes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import torch

from device_comm.torch_group.carried_types import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from coordinator.layout.checkpoints.replacement import Replacement

_METADATA = "__metadata__"

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """The encoded header of a file.

    Args:
        tensors: each tensor's dtype and shape, by name, in the order of the file.
        metadata: texts by name.

    Raises:
        ValueError: the format does not support a dtype, a tensor has the name that the format
            keeps for the texts, or ``metadata`` has another key or value than a text.
    """
    texts = dict(metadata or {})
    if not all(isinstance(text, str) for pair in texts.items() for text in pair):
        raise ValueError(f"metadata must be texts by name; got {texts}")
    if _METADATA in tensors:
        raise ValueError(f"safetensors keeps the name {_METADATA} for itself")
    entries: dict[str, object] = {_METADATA: texts} if texts else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise ValueError(f"{name}: safetensors has no {dtype}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        place = [start, end]
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": place}
    encoded = msgspec.json.encode(entries)
    return encoded + b" " * (-len(encoded) % 8)


def write_checkpoint(file: Replacement, header: bytes, tensors: Iterable[Tensor]) -> None:
    """Write a file, and finish it.

    Where several write the same file at once, each writes all of it, and the last one's stays.

    Args:
        file: a new one.
        header: from `encode_header`.
        tensors: the header's tensors, in its order, on any device.

    Raises:
        OSError: the file cannot be written; names it.

    Collective: no.
    """
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        file.write(as_bytes(plain).numpy().data)
    file.finish()
