"""Decides when a call is late: after its own timeout, or when no call has been answered for long.

A call without its own timeout is not late while the calls before it are being answered.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from shm_broadcast import Deadline

if TYPE_CHECKING:
    from .pending_call import PendingCall


class Lateness:
    """Tells when calls are late. Not thread-safe.

    Args:
        call_seconds: calls are late when none was answered for so long.
    """

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._answered_at = -math.inf
        self._watched: dict[PendingCall, None] = {}
        self._looks_at = math.inf

    def answered(self, call: PendingCall) -> None:
        """Note that every rank has answered ``call``, just now."""
        self._answered_at = time.monotonic()
        self._watched.pop(call, None)

    def resumed(self) -> None:
        """Note that calls can be answered again, from now on."""
        self._answered_at = time.monotonic()

    def due(self, call: PendingCall) -> Deadline:
        """When ``call`` becomes late, if no call is answered before that."""
        if call.timeout is not None:
            return Deadline(call.since + call.timeout, call.timeout)
        since = max(call.since, self._answered_at)
        return Deadline(since + self._call_seconds, self._call_seconds)

    def watch(self, call: PendingCall) -> bool:
        """Have `look` report ``call`` when it is late.

        Returns:
            Whether `look` must be called earlier than it asked for last.
        """
        at = self.due(call).at
        if at < math.inf:
            self._watched[call] = None
        return at < self._looks_at

    def forget(self, call: PendingCall) -> None:
        """Have `look` not report ``call`` any more."""
        self._watched.pop(call, None)

    def look(self) -> tuple[list[PendingCall], float]:
        """The watched calls that are late now, each reported once; and the seconds until it has to
        be called again.
        """
        waiting = [call for call in self._watched if not call.done]
        late = [call for call in waiting if self.due(call).expired]
        self._watched = dict.fromkeys(waiting)
        for call in late:
            del self._watched[call]
        self._looks_at = min((self.due(call).at for call in self._watched), default=math.inf)
        return late, self._looks_at - time.monotonic()
