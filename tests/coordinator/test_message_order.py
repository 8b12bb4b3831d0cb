"""Receives from one peer begin and end in their order: without any transport."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest

from coordinator.messages.incoming import OrderedReceive
from device_comm import Work
from shm_broadcast import Deadline, GroupTimeoutError

pytestmark = pytest.mark.quick

SOON = Deadline.after(60)


class Arrival:
    """A `device_comm.Pending` that ends when the test sets ``came``."""

    def __init__(self) -> None:
        self.came = False

    def ready(self) -> bool:
        return self.came

    def wait(self, deadline: Deadline) -> None:
        if not self.came:
            raise GroupTimeoutError("recv", deadline.timeout)


class Receives:
    """Receives from one peer, and in which order each step of theirs was taken."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.on_cpu: list[Arrival] = []
        self.on_device: list[Arrival] = []
        self.last: OrderedReceive | None = None

    def add(self, *, on_cpu: bool = True) -> OrderedReceive:
        number = len(self.on_device)
        self.on_cpu.append(Arrival())
        self.on_device.append(Arrival())
        begin = partial(self._step, "begin", number, self.on_cpu[-1]) if on_cpu else None
        ask = partial(self._step, "ask", number, self.on_device[-1])
        self.last = OrderedReceive(self.last, begin, lambda: [ask()])
        return self.last

    def _step(self, what: str, number: int, arrival: Arrival) -> Work[Any]:
        self.steps.append(f"{what} {number}")
        return Work(None, cast("Any", arrival), timeout=60)


def test_a_receive_begins_once_the_one_before_has_asked() -> None:
    """It asks once its message has arrived on the CPU."""
    receives = Receives()
    first, second, third = receives.add(), receives.add(on_cpu=False), receives.add()
    assert not third.has_asked()
    assert receives.steps == ["begin 0"]
    receives.on_cpu[0].came = True
    assert not third.has_asked()
    assert receives.steps == ["begin 0", "ask 0", "ask 1", "begin 2"]
    assert first.has_asked() and second.has_asked()
    receives.on_cpu[2].came = True
    assert third.has_asked()
    assert not third.ready()
    receives.on_device[2].came = True
    assert third.ready()
    third.wait(SOON)
    assert receives.steps == ["begin 0", "ask 0", "ask 1", "begin 2", "ask 2"]


def test_a_wait_goes_on_with_all_before() -> None:
    receives = Receives()
    first, second = receives.add(), receives.add()
    with pytest.raises(GroupTimeoutError):
        second.wait(SOON)
    assert receives.steps == ["begin 0"]
    for each in (*receives.on_cpu, receives.on_device[1]):
        each.came = True
    second.wait(SOON)
    assert receives.steps == ["begin 0", "ask 0", "begin 1", "ask 1"]
    assert second.ready()
    assert not first.ready()
