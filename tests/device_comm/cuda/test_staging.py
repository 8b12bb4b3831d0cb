"""Who uses the same memory on another stream waits for who used it last."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from device_comm import ALL_VERBS, Capabilities, Operation
from device_comm.cuda.symmetric_backend import Staging

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class NotedStream:
    """A stream that notes who waits for it."""

    def __init__(self, address: int, notes: list[str]) -> None:
        self.address = address
        self.notes = notes

    def mark(self) -> NotedStream:
        return self

    def query(self) -> bool:
        return True

    def stream_wait(self) -> None:
        self.notes.append(f"after {self.address}")


class NotedStreams:
    """The current one is ``now``, each time another object."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.now = 1
        self.captures = False

    def current(self) -> NotedStream:
        return NotedStream(self.now, self.notes)

    def capturing(self) -> bool:
        return self.captures

    def device(self) -> AbstractContextManager[object]:
        return nullcontext()


def test_streams_take_turns() -> None:
    streams = NotedStreams()
    given, taken = torch.zeros(64, dtype=torch.uint8).chunk(2)
    staging = Staging(given, taken, streams)
    has = Capabilities("some", ALL_VERBS)

    def step(given: torch.Tensor, taken: torch.Tensor) -> None:
        streams.notes.append(f"{given.tolist()} on {streams.now}")
        torch.add(given, 1, out=taken)

    for streams.now, streams.captures in (
        (1, False),
        (1, False),
        (2, False),
        (3, True),
        (2, False),
    ):
        x, y = torch.tensor([3.0]), torch.zeros(1)
        staging.reduce(Operation("all_reduce", x, y), has, step)
        assert (x.tolist(), y.tolist()) == ([3.0], [4.0])
    seen = [3.0, 0.0, 0.0, 0.0]
    assert streams.notes == [
        f"{seen} on 1",
        f"{seen} on 1",
        "after 1",
        f"{seen} on 2",
        f"{seen} on 3",
        f"{seen} on 2",
    ]
