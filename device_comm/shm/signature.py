"""What ranks must agree on before they touch each other's data, as 56 bytes.

::

     0                1        2        3        4                8
    +--------+--------+--------+--------+----------------+
    | verb   | op     | dtype  | n dims | root u32       |
    +--------+--------+--------+--------+----------------+
    | shape: 5 sizes, u64; of more dimensions the first ones are multiplied   |
    +----------------+----------------+-----------------------------------------+
    | chunk u32      | call u32       |
    +----------------+----------------+

The chunk is the number of the step within the collective, the call that of the call it is part of
(`device_comm.call_number`). Whoever carries out a collective puts them in.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Final

import torch

from device_comm.begun import VERBS
from device_comm.call_number import naming_call
from device_comm.reduce_op import ReduceOp
from shm_broadcast.layout import DTYPE_NAMES

SIGNATURE: Final = struct.Struct("<BBBBI5QII")
COMPARED: Final = 48
CALL: Final = 52
SHAPE_DIMS: Final = 5
NO_OP: Final = 255

_ROOTED = {"broadcast": "from", "scatter": "from", "reduce": "to", "gather": "to"}
DTYPE_CODES: Final = {getattr(torch, name): code for code, name in enumerate(DTYPE_NAMES) if code}
"""The dtypes that signatures tell apart. All others count as one; their sizes still differ."""


@lru_cache(maxsize=1024)
def sign(
    verb: str,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] = (),
    op: ReduceOp | None = None,
    root: int = 0,
) -> bytes:
    """The signature of one collective; chunk 0, in no call."""
    dims = tuple(shape)  # of a torch.Size as well
    if len(dims) > SHAPE_DIMS:
        cut = len(dims) - SHAPE_DIMS + 1
        dims = (math.prod(dims[:cut]), *dims[cut:])
    return SIGNATURE.pack(
        VERBS.index(verb),
        NO_OP if op is None else op,
        0 if dtype is None else DTYPE_CODES.get(dtype, 0),
        len(shape),
        root,
        *dims,
        *(0,) * (SHAPE_DIMS - len(dims)),
        0,
        0,
    )


def with_chunk(signature: bytes, chunk: int) -> bytes:
    """The signature as it stands in the slot of a collective's step number ``chunk``."""
    return signature[:COMPARED] + struct.pack("<I", chunk) + signature[CALL:]


def with_call(signature: bytes, number: int) -> bytes:
    """The signature as part of the call of that number."""
    return signature[:CALL] + struct.pack("<I", number)


def describe(signature: bytes) -> str:
    """A signature in words: ``all_reduce SUM float32[2, 3]``."""
    verb, op, dtype, n_dims, root, *dims, chunk, call = SIGNATURE.unpack(signature)
    words = [VERBS[verb] if verb < len(VERBS) else f"verb {verb}"]
    if op != NO_OP:
        words.append(ReduceOp(op).name)
    if n_dims:
        shown = dims[: min(n_dims, SHAPE_DIMS)]
        words.append(f"{DTYPE_NAMES[dtype]}{shown}")
    if words[0] in _ROOTED:
        words.append(f"{_ROOTED[words[0]]} rank {root}")
    step = f", step {chunk + 1}" if chunk else ""
    return naming_call(" ".join(words) + step, call)
