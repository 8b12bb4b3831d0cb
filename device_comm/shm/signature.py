"""Encode and compare the signatures of collectives: 56 bytes.

::

    0  | verb u8 | op u8 | dtype u8 | n dims u8 | place u32                   |
    8  | shape: 5 sizes, u64; with more dimensions, the first is a product    |
    48 | chunk u32 | call u32 |

``place`` is the root, or the dimension along which ranks split or concatenate. A size that differs
by rank is -1. Backends set ``chunk``, the step's number, and ``call``, the call number.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import lru_cache
from typing import Final

import torch

from device_comm.call_number import VERBS, naming_call
from device_comm.operation import CUT, REDUCTIONS, ROOTED, Operation, ReduceOp
from shm_broadcast.layout import DTYPE_NAMES

SIGNATURE: Final = struct.Struct("<BBBBI5QII")
COMPARED: Final = 48
CALL: Final = 52
SHAPE_DIMS: Final = 5
NO_OP: Final = 255

_SIZE: Final = (1 << 64) - 1
_OP_NAMES: Final = {int(op): op.name for op in ReduceOp}
DTYPE_CODES: Final = {getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES) if code}
"""The dtypes with a code of their own; all others have code 0."""


@lru_cache(maxsize=1024)
def sign(
    verb: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    op: ReduceOp | None = None,
    place: int = 0,
) -> bytes:
    """Return the signature of a collective; chunk 0, call 0."""
    dims = tuple(shape)  # torch.Size is not a plain tuple
    if len(dims) > SHAPE_DIMS:
        cut = len(dims) - SHAPE_DIMS + 1
        dims = (math.prod(dims[:cut]), *dims[cut:])
    return SIGNATURE.pack(
        VERBS.index(verb),
        NO_OP if op is None else op,
        0 if dtype is None else DTYPE_CODES.get(dtype, 0),
        len(shape),
        place,
        *(size & _SIZE for size in dims),
        *(0,) * (SHAPE_DIMS - len(dims)),
        0,
        0,
    )


def signature_of(operation: Operation) -> bytes:
    """Return the signature of a collective; chunk 0, call 0."""
    verb = operation.verb
    if verb == "barrier":
        return sign(verb)
    return sign(
        verb,
        operation.buffer.dtype,
        operation.shape,
        operation.op if verb in REDUCTIONS else None,
        operation.peer if verb in ROOTED else operation.dim,
    )


def signature_with_sizes(operation: Operation) -> bytes:
    """Return the signature; its chunk is a checksum of explicit sizes that all ranks share."""
    signature = signature_of(operation)
    sizes = operation.output_sizes or operation.source_sizes
    if sizes is None or operation.verb == "all_to_all":
        return signature
    return with_chunk(signature, zlib.crc32(repr(list(sizes)).encode()) or 1)


def with_chunk(signature: bytes, chunk: int) -> bytes:
    """Return the signature with step number ``chunk``."""
    return signature[:COMPARED] + struct.pack("<I", chunk) + signature[CALL:]


def collective_text(signature: bytes) -> str:
    """Return the text of a signature `with_sizes`, or of its first bytes."""
    return signature_text(with_chunk(signature.ljust(SIGNATURE.size, b"\0"), 0))


def signature_text(signature: bytes) -> str:
    """Return a signature as text, such as ``all_reduce SUM float32[2, 3]``."""
    verb, op, dtype, n_dims, place, *dims, chunk, call = SIGNATURE.unpack(signature)
    words = [VERBS[verb] if verb < len(VERBS) else f"verb {verb}"]
    if op != NO_OP:
        words.append(_OP_NAMES.get(op, f"op {op}"))
    if n_dims:
        shown = [-1 if size == _SIZE else size for size in dims[: min(n_dims, SHAPE_DIMS)]]
        name = DTYPE_NAMES[dtype] if dtype < len(DTYPE_NAMES) else f"dtype {dtype}"
        words.append(f"{name}{shown}")
    if words[0] in ROOTED:
        words.append(f"{ROOTED[words[0]]} rank {place}")
    elif words[0] in CUT and n_dims > 1:
        words.append(f"along dim {place}")
    step = f", step {chunk + 1}" if chunk else ""
    return naming_call(" ".join(words) + step, call)
