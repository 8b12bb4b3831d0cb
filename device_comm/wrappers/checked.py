"""A debug mode: before each collective the members compare what they have called.

If members call different collectives, the shared-memory backend raises by itself, but torch's
process groups hang or return wrong data, until `device_comm.wrappers.late` finds it out.
`CheckedBackend` wraps a backend over one of these in its place. It precedes every collective by a
small all-gather of its description, which about doubles the cost of small collectives. Messages
between two members are not compared.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from device_comm import Wrapper
from device_comm.operation import REDUCTIONS, ROOTED
from shm_broadcast import DivergenceError

if TYPE_CHECKING:
    from device_comm import Backend, Operation, Pending

_DIGEST_BYTES = 16
_TEXT_BYTES = 144
"""What members exchange: the digest of an operation's description, which is compared, and as much
of the text as errors show."""


class CheckedBackend(Wrapper):
    """Raises `DivergenceError` when members call different collectives."""

    def __init__(self, inner: Backend, over: Backend) -> None:
        """Wrap a backend, which is closed with this one.

        Args:
            inner: the backend to wrap.
            over: carries the comparison, on the CPU: ``inner`` itself, or another backend of the
                same members.
        """
        has = replace(inner.capabilities, detects_divergence=True)
        super().__init__(inner, capabilities=has)
        self._over = over

    def start(self, operation: Operation) -> Pending | None:
        """Compare a collective with the other members', then start it.

        Raises:
            DivergenceError: names the first member that called something else.
        """
        if operation.verb not in ("send", "recv"):
            self._agree(operation)
        return None if operation.moves_nothing else self._inner.start(operation)

    def _agree(self, operation: Operation) -> None:
        ours = _row(_describe(operation))
        row = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
        rows = torch.empty((self.world_size, len(ours)), dtype=torch.uint8, device="cpu")
        pending = self._over.start(operation.instead(row, rows, verb="all_gather"))
        if pending is not None:
            pending.wait(operation.deadline)
        for rank, theirs in enumerate(rows):
            other = bytes(theirs.numpy())
            if other[:_DIGEST_BYTES] != ours[:_DIGEST_BYTES]:
                raise DivergenceError(rank, _text(ours), _text(other))


def _row(description: str) -> bytes:
    text = description.encode()
    digest = blake2b(text, digest_size=_DIGEST_BYTES).digest()
    return digest + text[:_TEXT_BYTES].ljust(_TEXT_BYTES)


def _text(row: bytes) -> str:
    return row[_DIGEST_BYTES:].rstrip().decode()


def _describe(operation: Operation) -> str:
    """The text that must be equal on all members: without sizes that may differ between them."""
    verb, about = operation.verb, [str(operation.verb)]
    if verb != "barrier":
        about += [str(operation.buffer.dtype), str(tuple(operation.shape))]
    if verb in REDUCTIONS:
        about.append(operation.op.name)
    if verb in ROOTED:
        about.append(f"{ROOTED[verb]} {operation.peer}")
    elif operation.dim:
        about.append(f"along dim {operation.dim}")
    sizes = operation.output_sizes or operation.source_sizes
    if sizes is not None and verb != "all_to_all":
        about.append(str(list(sizes)))
    return " ".join(about)
