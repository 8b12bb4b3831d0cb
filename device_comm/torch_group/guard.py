"""Watching over a call that blocks outside of our reach, from a thread beside it.

The call runs where it is made, without a detour through another thread. The guard looks at
the group now and then; should it fail, the guard ends what the call waits for, and the call
raises.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.torch_group.pending import Boundary

_TICK = 0.02
"""Seconds between two looks at the group."""

_IDLE_TICKS = 50
"""Looks at nothing before the thread ends; the next call starts it again."""


class _Shift:
    """One call that is watched over; ``error`` is what was seen of the group meanwhile."""

    def __init__(self, operation: str, peers: Sequence[int]) -> None:
        self.operation = operation
        self.peers = peers
        self.error: Exception | None = None


class Guard:
    """Watches over one call at a time."""

    def __init__(self, name: str, boundary: Boundary, end: Callable[[], None]) -> None:
        """Start no thread yet.

        Args:
            name: what the thread is called.
            boundary: looks at the group.
            end: makes the call raise.
        """
        self._name = name
        self._boundary = boundary
        self._end = end
        self._lock = threading.Lock()
        self._shift: _Shift | None = None
        self._on_duty = False

    def call(self, block: Callable[[], object], operation: str, peers: Sequence[int]) -> None:
        """Run ``block``, which needs ``peers``.

        Raises:
            Exception: the group failed meanwhile, or could not be looked at.
            RuntimeError: what ``block`` raises else.
        """
        shift = _Shift(operation, peers)
        with self._lock:
            self._shift = shift
            if not self._on_duty:
                threading.Thread(target=self._watch, name=self._name, daemon=True).start()
                self._on_duty = True
        try:
            block()
        except RuntimeError as error:
            if shift.error is not None:
                raise shift.error from error
            raise
        finally:
            self._shift = None

    def _watch(self) -> None:
        idle = 0
        while idle < _IDLE_TICKS or not self._leave():
            shift = self._shift
            if shift is None:
                idle += 1
                time.sleep(_TICK)
            else:
                idle = 0
                self._look(shift)

    def _leave(self) -> bool:
        with self._lock:
            self._on_duty = self._shift is not None
            return not self._on_duty

    def _look(self, shift: _Shift) -> None:
        try:
            self._boundary.wait(
                lambda: self._shift is not shift,
                Deadline.after(_TICK),
                shift.operation,
                shift.peers,
                spin=0,
            )
        except GroupTimeoutError:
            return
        except Exception as error:  # noqa: BLE001 - a call that is not watched over may hang
            shift.error = error
            self._end()
            while self._shift is shift:
                time.sleep(_TICK)
