"""All-reduces in memory that all devices of a group reach: copied there, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from device_comm.backend import Capabilities
    from device_comm.cuda.device.streams import Stream, Streams
    from device_comm.operation import Operation

LIMIT: Final = 16 << 20
"""Bytes of the largest tensor, if nothing else is said."""
_ALIGN: Final = 16


class Staging:
    """The memory that inputs are copied into, and results out of, one all-reduce after the other.

    Attributes:
        limit: the size in bytes of the largest tensor.
    """

    def __init__(self, given: Tensor, taken: Tensor, streams: Streams) -> None:
        """Use memory of equal size; may be the same.

        Args:
            given: bytes, for inputs.
            taken: bytes, for results.
            streams: of their device.
        """
        self.limit = given.nbytes
        self._given = given
        self._taken = taken
        self._streams = streams
        self._last: Stream | None = None

    def reduce(
        self,
        operation: Operation,
        capabilities: Capabilities,
        step: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Carry out an all-reduce, in order on the current stream.

        Args:
            operation: the all-reduce.
            capabilities: of the backend that carries it out.
            step: reduces its first argument into its second one. Both are as long as the
                operation's tensors, rounded up to whole 16 bytes.

        Raises:
            NotImplementedError: the tensor is too large, or the backend does not reduce it so.
        """
        source, output, op = operation.source, operation.output, operation.op
        if not capabilities.reduces(op, source.dtype) or source.nbytes > self.limit:
            raise NotImplementedError(
                f"{operation.name}: no {op.name} of {source.nbytes} bytes of {source.dtype}"
            )
        self._follow()
        padded = -(-source.nbytes // _ALIGN) * _ALIGN
        given, taken = (each[:padded].view(source.dtype) for each in (self._given, self._taken))
        given[: source.numel()].copy_(source.view(-1))
        step(given, taken)
        output.view(-1).copy_(taken[: output.numel()])

    def _follow(self) -> None:
        """Have the current stream wait for the last use of the memory; a graph orders its own."""
        if self._streams.capturing():
            return
        stream, last = self._streams.current(), self._last
        if last is not None and last.address != stream.address:
            last.mark().follow()
        self._last = stream
