from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import AllPending, Work, all_pending
from device_comm.work import PendingThen
from shm_broadcast import CoordinatorError, Deadline, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


class Steps:
    """An operation that is done after it was looked at a number of times."""

    def __init__(self, steps: int, error: Exception | None = None) -> None:
        self.steps = steps
        self.error = error
        self.deadlines: list[Deadline] = []

    def ready(self) -> bool:
        self.steps -= 1
        return self.steps < 0

    def wait(self, deadline: Deadline) -> None:
        self.deadlines.append(deadline)
        if self.steps > 0 and deadline.timeout == 0:
            raise GroupTimeoutError("steps", 0)
        if self.error is not None:
            raise self.error


def test_a_step_is_taken_once_behind_an_operation_that_is_done() -> None:
    taken: list[int] = []
    followed = PendingThen(Steps(2), lambda: taken.append(1))
    assert not followed.ready()
    with pytest.raises(GroupTimeoutError):
        followed.wait(Deadline.after(0))
    assert taken == []
    for _ in range(2):
        followed.wait(Deadline.after(1))
        assert taken == [1]


def test_wait_gives_the_result_again_and_again_and_finishes_once() -> None:
    finished: list[int] = []

    def finish() -> str:
        finished.append(1)
        return "made"

    work = Work("given", Steps(2), finish, timeout=5)
    assert not work.is_completed()
    assert "under way" in repr(work)
    assert [work.wait(), work.wait()] == ["made", "made"]
    assert finished == [1]
    assert work.is_completed()
    assert "done" in repr(work)


def test_wait_allows_what_the_operation_does_unless_told() -> None:
    steps = Steps(1)
    Work(None, steps, timeout=5).wait()
    Work(None, steps, timeout=5).wait(7)
    assert [deadline.timeout for deadline in steps.deadlines] == [5, 7]


def test_a_deadline_is_not_the_end() -> None:
    told: list[Exception] = []
    work = Work("result", Steps(3), failed=told.append)
    with pytest.raises(GroupTimeoutError):
        work.wait(0)
    assert work.wait(1) == "result"
    assert not told


def test_a_failure_is_told_once_and_raised_again_and_again() -> None:
    told: list[Exception] = []
    error = CoordinatorError("broken")
    work = Work("result", Steps(1, error), failed=told.append)
    for _ in range(2):
        with pytest.raises(CoordinatorError, match="broken") as caught:
            work.wait()
        assert caught.value is error
    assert told == [error]
    assert work.is_completed()
    assert "failed: broken" in repr(work)


@pytest.mark.parametrize("error", [ValueError("odd"), CoordinatorError("odd")])
def test_a_result_that_cannot_be_made_is_tried_once(error: Exception) -> None:
    tried: list[int] = []

    def finish() -> str:
        tried.append(1)
        raise error

    work = Work("given", Steps(0), finish)
    for _ in range(3):
        with pytest.raises(type(error), match="odd") as caught:
            work.wait()
        assert caught.value is error
    assert tried == [1]
    assert work.is_completed()
    assert "failed: odd" in repr(work)


def test_a_result_that_takes_too_long_is_tried_again() -> None:
    errors = [GroupTimeoutError("making", 0)]

    def finish() -> str:
        if errors:
            raise errors.pop()
        return "made"

    work = Work("given", Steps(0), finish)
    with pytest.raises(GroupTimeoutError):
        work.wait()
    assert [work.wait(), work.wait()] == ["made", "made"]


def test_tensors_live_as_long_as_the_operation() -> None:
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    work = Work(None, Steps(1), keep=tensor)
    del tensor
    assert alive() is not None
    work.wait()
    assert alive() is None


@pytest.mark.parametrize("steps", [0, 1, 5, 50])
def test_awaiting(steps: int) -> None:
    async def wait() -> str:
        return await Work("result", Steps(steps))

    assert asyncio.run(asyncio.wait_for(wait(), 10)) == "result"


def test_awaiting_lets_others_run_and_raises() -> None:
    async def count(work: Work[str]) -> int:
        turns = 0
        waiting = asyncio.ensure_future(work._wait_async())
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0)
        with pytest.raises(CoordinatorError):
            await waiting
        return turns

    assert asyncio.run(count(Work("", Steps(5, CoordinatorError())))) > 3


def test_awaiting_ends_at_the_deadline() -> None:
    async def wait() -> str:
        return await Work("result", Steps(10**6), timeout=0.05)

    with pytest.raises(GroupTimeoutError):
        asyncio.run(asyncio.wait_for(wait(), 10))


def test_joining() -> None:
    assert all_pending([None, None]) is None
    first, second = Steps(1), Steps(2)
    joined = all_pending([first, None, second])
    assert isinstance(joined, AllPending)
    looks: Callable[[], list[bool]] = lambda: [joined.ready() for _ in range(4)]  # noqa: E731
    assert looks() == [False, False, False, True]
    joined.wait(Deadline.after(1))
    assert len(first.deadlines) == len(second.deadlines) == 1


def test_a_work_of_what_is_made_of_a_result() -> None:
    seen: list[str] = []
    work = Work("result", Steps(3)).then(lambda result: seen.append(result) or len(result))
    assert not work.is_completed()
    with pytest.raises(GroupTimeoutError):
        work.wait(0)
    assert [work.wait(1), work.wait(1)] == [6, 6]
    assert seen == ["result"]
    failing = Work("result", Steps(0, CoordinatorError("lost"))).then(len)
    for _ in range(2):
        with pytest.raises(CoordinatorError, match="lost"):
            failing.wait()
