"""How long calls take: on a clock of their own, and by a device's events that are told."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import (
    ALL_VERBS,
    Backend,
    Capabilities,
    Communicator,
    Identity,
    Operation,
    measuring,
)
from device_comm.measuring import GraphStopwatch, HostStopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """Goes on by what each call takes, in turn."""

    def __init__(self, *takes: float) -> None:
        self.now = 0.0
        self._takes = iter(takes)

    def call(self) -> None:
        self.now += next(self._takes)


class Quiet(Backend):
    """Does nothing, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(Identity.of(0, 2), Capabilities("quiet", ALL_VERBS, stream_ordered=True))
        self.did: list[str] = []

    def start(self, operation: Operation) -> None:
        self.did.append(operation.verb)

    def check(self) -> None:
        self.did.append("check")

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        self.did.append("begin")
        yield
        self.did.append("end")


def test_the_quickest_series_counts_after_all_have_met() -> None:
    clock, backend = Clock(8, 1, 2, 1, 4, 5), Quiet()
    comm = Communicator(backend)
    seconds = HostStopwatch(comm, comm, lambda: clock.now).time(clock.call, 2, 3)
    assert seconds == 1.5
    assert backend.did == ["barrier"] * 3


class Event:
    """Says when it was recorded, on the device's clock: so many replays of 40 ms, the first and
    the last twice as long."""

    replays = 0

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, _: object) -> None:
        first_and_last = (Event.replays >= 1) + (Event.replays >= 6)
        self.at = 40.0 * (Event.replays + first_and_last)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Stream:
    device = torch.device("cuda", 0)

    def __init__(self, _: object = None) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass


class Graph:
    """What was called between begin and end is what it consists of."""

    log: list[str]

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.log.append("begins")

    def capture_end(self) -> None:
        self.log.append("ends")

    def replay(self) -> None:
        Event.replays += 1


def test_calls_are_captured_and_replayed_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Quiet()
    Graph.log, Event.replays = backend.did, 0
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(measuring, "CudaEvent", lambda _: Event())
    monkeypatch.setattr(Event, "passed", Event.query, raising=False)
    seconds = GraphStopwatch(Communicator(backend)).time(lambda: backend.did.append("call"), 20, 3)
    assert seconds == pytest.approx(0.040 / 20)
    assert Event.replays == 6, "each series has one before it, in which the ranks come together"
    assert backend.did == ["begin", "begins", *["call"] * 20, "ends", "end", *["check"] * 3]


@pytest.mark.parametrize(
    ("seconds", "effort"),
    [(1e-9, (20, 5)), (0.001, (20, 5)), (0.002, (10, 2)), (0.02, (2, 2)), (3.0, (2, 2))],
)
def test_slow_calls_are_made_less_often(seconds: float, effort: tuple[int, int]) -> None:
    assert measuring._effort(seconds) == effort
