"""Makes an NCCL communicator, in steps that can be given up.

A blocking communicator is what operations need: a non-blocking one hands each call to a thread of
its own, which costs tens of microseconds. But a blocking one cannot be given up while it is made,
and a rank that never comes would be waited for without end. So a non-blocking one is made first;
the blocking one is split from it, in the background as well; then the first one is freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.cuda.nccl.library import NcclResult
from device_comm.cuda.nccl.shared_handle import NcclHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.cuda.nccl.library import NcclLibrary

    Settle = Callable[[Callable[[], bool]], None]
    """Waits until a condition holds; raises if it has to be given up."""


class NcclForming:
    """A communicator that is being made: call `finish`, or `abort` if that raises."""

    def __init__(self, library: NcclLibrary, world_size: int, unique_id: bytes, rank: int) -> None:
        """Begin, on the current CUDA device.

        Raises:
            NcclError: NCCL refuses.
        """
        self._library = library
        self._rank = rank
        self._first = library.begin_init(world_size, unique_id, rank)
        self._begun = [self._first]

    def finish(self, settle: Settle) -> NcclHandle:
        """Make the communicator. Collective: yes, every member.

        Raises:
            NcclError: NCCL refuses.
            CoordinatorError: what ``settle`` raises.
        """
        settle(self._is_settled)
        made = self._library.begin_split(self._first, self._rank)
        settle(self._is_settled)
        self._begun.append(made())
        self._library.finalize(self._first)
        settle(self._is_settled)
        self._library.destroy(self._begun.pop(0))
        return NcclHandle(self._library, self._begun.pop())

    def abort(self) -> None:
        """Give up what was begun."""
        while self._begun:
            self._library.abort(self._begun.pop())

    def _is_settled(self) -> bool:
        result = self._library.async_result(self._first)
        if result not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
            raise self._library.error("set-up", result, self._first)
        return result == NcclResult.SUCCESS
