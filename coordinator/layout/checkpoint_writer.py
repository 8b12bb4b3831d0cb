"""Writing a safetensors file one tensor at a time, so that none but one is in memory whole.

    0        8               8 + length
    ┌────────┬───────────────┬──────────┬──────────┬───
    │ length │ header (JSON) │ tensor 0 │ tensor 1 │ …      little-endian, no gaps
    └────────┴───────────────┴──────────┴──────────┴───

The header maps names to dtype, shape and place; it is padded with spaces to 8 bytes.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

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
    """The header of a file.

    Args:
        tensors: dtype and shape of each, by name, in the order of the file.
        metadata: text by name.

    Raises:
        ValueError: the format has no such dtype.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise ValueError(f"{name}: safetensors has no {dtype}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        place = [start, end]
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": place}
    encoded = msgspec.json.encode(entries)
    return encoded + b" " * (-len(encoded) % 8)


def write_checkpoint(path: Path, header: bytes, tensors: Iterable[Tensor]) -> None:
    """Write a file, which is at ``path`` once it is complete, and replaces what is there.

    Args:
        path: of the file; its folder exists.
        header: from `encode_header`.
        tensors: those of the header, in its order, on any device.

    Raises:
        OSError: it cannot be written; nothing is left of it.

    Collective: no.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(len(header).to_bytes(8, "little"))
            file.write(header)
            for tensor in tensors:
                flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
                file.write(flat.view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
