"""What is said of a connection that broke: the cause, once it can be known, or just that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from device_comm import torch_waiting
from device_comm.torch_waiting import ErrorTranslator
from device_comm.watch import LoneWatch
from shm_broadcast import Deadline, GroupTimeoutError, MemberStatus, PeerLostError
from shm_broadcast.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

LOST = PeerLostError("tp recv", MemberStatus(1, 4, "lost"))
BROKE = RuntimeError("Connection closed by peer\nand a trace")


class SlowNews(LoneWatch):
    """Tells after so many looks that a peer was lost, and after so many what there is to know."""

    def __init__(self, lost_at: float, known_at: float) -> None:
        super().__init__(0)
        self.looks = 0
        self._lost_at = lost_at
        self._known_at = known_at

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        assert list(members) == [1]
        return lambda: self.looks >= self._known_at

    def wait(self, ready: Callable[[], bool], deadline: Deadline, *_: object, **__: object) -> None:
        while not ready():
            if self.looks >= self._lost_at:
                raise LOST
            if deadline.expired:
                raise GroupTimeoutError("tp recv", deadline.timeout)
            self.looks += 1
            time.sleep(0.001)


def translated(watch: SlowNews, timeout: float) -> Exception:
    return ErrorTranslator(watch).translate(BROKE, "tp recv", [1], Deadline.after(timeout))


def test_the_cause_is_waited_for_however_long_its_news_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_waiting, "_CAUSE_SECONDS", 0.0)
    assert translated(SlowNews(lost_at=200, known_at=300), timeout=60) is LOST


def test_a_deadline_that_is_near_leaves_time_for_the_cause() -> None:
    assert translated(SlowNews(lost_at=50, known_at=10**9), timeout=0.01) is LOST


def test_nobody_is_blamed_once_it_is_known_that_all_are_there() -> None:
    watch = SlowNews(lost_at=10**9, known_at=5)
    error = translated(watch, timeout=60)
    assert isinstance(error, TransportError)
    assert error.rank == 1
    assert "Connection closed by peer" in str(error)
    assert "trace" not in str(error)
    assert watch.looks == 5


def test_what_never_gets_known_is_not_waited_for_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_waiting, "_CAUSE_SECONDS", 0.0)
    began = time.monotonic()
    error = translated(SlowNews(lost_at=10**9, known_at=10**9), timeout=0.05)
    assert isinstance(error, TransportError)
    assert 0.05 <= time.monotonic() - began < 30


def test_what_broke_after_the_deadline_was_late() -> None:
    error = translated(SlowNews(lost_at=10**9, known_at=10**9), timeout=0)
    assert isinstance(error, GroupTimeoutError)
    assert error.timeout == 0
