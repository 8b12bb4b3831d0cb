"""Decides whether a broken pool may be restarted, and after which pause. Pure logic."""

from __future__ import annotations

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class RestartBudget:
    """Counts the restarts of one pool.

    Args:
        most: how many restarts there may be within ``window``.
        window: seconds.
    """

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._restarted_at: list[float] = []
        self._in_vain = 0

    def take(self, now: float, worked: bool) -> float | None:
        """Count a restart.

        Args:
            now: the time, in seconds of any clock.
            worked: whether the workers have answered a call since the last restart.

        Returns:
            The seconds to wait before it: none at first, and after each restart in vain twice as
            many. ``None``: the pool may not be restarted: there were as many within the window, or
            in vain one after the other, however long they took.
        """
        self._restarted_at = [at for at in self._restarted_at if at > now - self._window]
        self._in_vain = 0 if worked else self._in_vain + 1
        if max(len(self._restarted_at), self._in_vain - 1) >= self._most:
            return None
        self._restarted_at.append(now)
        if self._in_vain <= 1:
            return 0.0
        return min(_FIRST_PAUSE_SECONDS * 2.0 ** (self._in_vain - 2), _LONGEST_PAUSE_SECONDS)
