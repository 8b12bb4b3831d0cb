"""Receives in their turn, without any transport."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest

from coordinator.messages.incoming import OrderedReceive
from device_comm import Work
from shm_broadcast import Deadline, GroupTimeoutError

SOON = Deadline.after(60)


class Arrival:
    """What is to come: a `device_comm.Pending` that the test lets come."""

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


def test_a_receive_asks_once_it_is_there_on_the_cpu() -> None:
    receives = Receives()
    turn = receives.add()
    assert receives.steps == ["begin 0"]
    assert not turn.ready()
    receives.on_cpu[0].came = True
    assert not turn.ready()
    assert receives.steps == ["begin 0", "ask 0"]
    receives.on_device[0].came = True
    assert turn.ready()
    turn.wait(SOON)
    assert receives.steps == ["begin 0", "ask 0"]


def test_a_receive_begins_once_the_one_before_has_asked() -> None:
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
    assert receives.steps == ["begin 0", "ask 0", "ask 1", "begin 2", "ask 2"]


def test_to_wait_goes_on_with_all_before() -> None:
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


def test_thousands_of_receives_under_way() -> None:
    """More than Python nests calls."""
    receives = Receives()
    turns = [receives.add() for _ in range(5000)]
    assert not turns[-1].ready()
    for each in (*receives.on_cpu, *receives.on_device):
        each.came = True
    turns[-1].wait(SOON)
    assert receives.steps == [f"{what} {n}" for n in range(5000) for what in ("begin", "ask")]
    assert all(turn.ready() for turn in turns)
