"""Watching over a call that blocks outside of our reach, from a thread beside it.

The call runs where it is made, without a detour through another thread. The guard looks at
the group now and then; should it fail, or the deadline pass, the guard ends what the call waits
for, and the call raises.

Neither the thread nor an error holds anything of a guard that is closed: what belongs to the
group goes with the group.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.torch_group.pending import Boundary, Farewell
    from shm_broadcast.deadline import Deadline

_TICK = 0.02
"""Seconds between two looks at the group."""

_IDLE_TICKS = 50
"""Looks at nothing before the thread ends; the next call starts it again."""

_LEAVE_SECONDS = 0.4
"""How long `Guard.close` waits for the thread, which takes a tick unless the machine is busy."""


@dataclass(eq=False, slots=True)
class _Shift:
    """One call that is watched over; ``error`` is what was seen of the group meanwhile."""

    operation: str
    peers: Sequence[int]
    deadline: Deadline
    farewell: Farewell | None
    error: Exception | None = None


class Guard:
    """Watches over one call at a time."""

    def __init__(self, name: str, boundary: Boundary, end: Callable[[Exception], None]) -> None:
        """Start no thread yet.

        Args:
            name: what the thread is called.
            boundary: looks at the group.
            end: makes the call raise, because of an error that the group is told first: peers may
                notice that the call has ended, and must find why.
        """
        self._name = name
        self._boundary = boundary
        self._end = end
        self._lock = threading.Lock()
        self._shift: _Shift | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def call(
        self,
        block: Callable[[], object],
        operation: str,
        peers: Sequence[int],
        deadline: Deadline,
        farewell: Farewell | None = None,
    ) -> None:
        """Run ``block``, which needs ``peers``, until ``deadline``; ``farewell`` is as for
        `Boundary.wait`.

        Raises:
            GroupTimeoutError: it took too long.
            Exception: the group failed meanwhile, or could not be looked at.
            RuntimeError: what ``block`` raises else.
        """
        shift = _Shift(operation, peers, deadline, farewell)
        with self._lock:
            self._shift = shift
            if self._thread is None:
                thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
        try:
            block()
        except RuntimeError as error:
            if shift.error is not None:
                raise shift.error from error
            raise
        finally:
            self._shift = None
            del shift  # its error would hold this frame, and with it itself

    def close(self) -> None:
        """End the thread: now, or when the call ends that another thread is in."""
        self._over.set()
        thread = self._thread
        if thread is not None and self._shift is None:
            thread.join(_LEAVE_SECONDS)

    def _watch(self) -> None:
        idle = 0
        while not (idle >= _IDLE_TICKS or self._over.is_set()) or not self._leave():
            shift = self._shift
            if shift is None:
                idle += 1
                self._over.wait(_TICK)
            else:
                idle = 0
                self._look(shift)

    def _leave(self) -> bool:
        with self._lock:
            if self._shift is None:
                self._thread = None
            return self._thread is None

    def _look(self, shift: _Shift) -> None:
        try:
            self._boundary.wait(
                lambda: self._shift is not shift,
                shift.deadline,
                shift.operation,
                shift.peers,
                poll=_TICK,
                spin=0,
                farewell=shift.farewell,
            )
        except Exception as error:  # noqa: BLE001 - a call that is not watched over may hang
            shift.error = error.with_traceback(None)  # whose frames hold the shift
            self._end(shift.error)
            while self._shift is shift:
                time.sleep(_TICK)
