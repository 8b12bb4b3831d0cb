"""What a work promises: its result, its failure, its deadline, once and again."""

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

pytestmark = pytest.mark.quick


class Steps:
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


def test_wait_has_the_deadline_of_the_operation_or_its_own() -> None:
    steps = Steps(1)
    Work(None, steps, timeout=5).wait()
    Work(None, steps, timeout=5).wait(7)
    assert [deadline.timeout for deadline in steps.deadlines] == [5, 7]
    reported: list[Exception] = []
    work = Work("result", Steps(3), failed=reported.append)
    with pytest.raises(GroupTimeoutError):
        work.wait(0)
    assert work.wait(1) == "result"
    assert not reported


def test_a_failure_is_reported_once_and_raised_again_and_again() -> None:
    reported: list[Exception] = []
    error = CoordinatorError("broken")
    work = Work("result", Steps(1, error), failed=reported.append)
    for _ in range(2):
        with pytest.raises(CoordinatorError, match="broken") as caught:
            work.wait()
        assert caught.value is error
    assert reported == [error]
    assert work.is_completed()
    assert "failed: broken" in repr(work)


@pytest.mark.parametrize(
    "error", [ValueError("odd"), CoordinatorError("odd"), GroupTimeoutError("making", 0)], ids=repr
)
def test_a_result_that_cannot_be_made_is_tried_again_after_a_deadline_only(
    error: Exception,
) -> None:
    tried: list[int] = []

    def finish() -> str:
        tried.append(1)
        if len(tried) == 1:
            raise error
        return "made"

    work = Work("given", Steps(0), finish)
    with pytest.raises(type(error)) as caught:
        work.wait()
    assert caught.value is error
    if isinstance(error, GroupTimeoutError):
        assert [work.wait(), work.wait()] == ["made", "made"]
        assert tried == [1, 1]
        return
    for _ in range(2):
        with pytest.raises(type(error), match="odd"):
            work.wait()
    assert tried == [1]
    assert work.is_completed()
    assert "failed: odd" in repr(work)


def test_tensors_live_as_long_as_the_operation() -> None:
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    work = Work(None, Steps(1), keep=tensor)
    del tensor
    assert alive() is not None
    work.wait()
    assert alive() is None


def test_awaiting_lets_others_run_and_returns_raises_or_ends_at_the_deadline() -> None:
    async def turns(work: Work[str]) -> tuple[str | BaseException, int]:
        count, waiting = 0, asyncio.ensure_future(work._wait_async())
        while not waiting.done():
            count += 1
            await asyncio.sleep(0)
        return waiting.exception() or waiting.result(), count

    for steps in (0, 1, 5, 50):
        found, count = asyncio.run(asyncio.wait_for(turns(Work("result", Steps(steps))), 10))
        assert found == "result"
        assert steps < 5 or count > 3
    error = CoordinatorError()
    assert asyncio.run(turns(Work("", Steps(5, error))))[0] is error
    found, _ = asyncio.run(asyncio.wait_for(turns(Work("", Steps(10**6), timeout=0.05)), 10))
    assert isinstance(found, GroupTimeoutError)


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
