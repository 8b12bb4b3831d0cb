"""Operations on a stream of their own: the order in which streams wait, and what is kept alive."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import ALL_VERBS, Backend, Capabilities, Communicator, Identity
from device_comm.wrappers import CudaSideStream, OnStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from device_comm import Operation, Pending
    from shm_broadcast import Deadline


class Log:
    """A side stream that says what happens, and is done when told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = self.captures = False

    @contextmanager
    def as_current(self) -> Iterator[None]:
        self.said.append("enter")
        yield
        self.said.append("leave")

    def stream_wait(self) -> None:
        self.said.append("follow")

    def mark(self) -> Callable[[], bool]:
        self._refuse_captures()
        return self._is_done

    def is_capturing(self) -> bool:
        return self.captures

    def _is_done(self) -> bool:
        self._refuse_captures()
        return self.done

    def _refuse_captures(self) -> None:
        if self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")


class Later:
    """What a backend hands back that finishes in stream order."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def ready(self) -> bool:
        return False

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the device waits
        self._log.said.append("wait")


class Doubling(Backend):
    """Two ranks that hold the same: a sum is twice the input."""

    def __init__(self, log: Log | None, device: str = "cpu") -> None:
        super().__init__(
            Identity.of(0, 2, device), Capabilities("toy", ALL_VERBS, stream_ordered=True)
        )
        self._log = log

    def start(self, operation: Operation) -> Pending | None:
        torch.add(operation.source, operation.source, out=operation.output)
        if self._log is None:
            return None
        self._log.said.append(operation.verb)
        return Later(self._log)


def on_stream(log: Log) -> Communicator:
    return Communicator(OnStream(Doubling(log), log))


def test_a_call_is_behind_and_before_what_the_current_stream_is_given() -> None:
    log = Log()
    comm = on_stream(log)
    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert log.said == ["enter", "all_reduce", "wait", "leave", "follow"]


def test_a_work_is_followed_when_it_is_waited_for() -> None:
    log = Log()
    work = on_stream(log).all_reduce(torch.ones(2), async_op=True)
    assert log.said == ["enter", "all_reduce", "leave"]
    assert not work.is_completed()
    assert work.wait().tolist() == [2, 2]
    assert log.said[3:] == ["enter", "wait", "leave", "follow"]


def test_tensors_live_until_the_stream_has_passed() -> None:
    log = Log()
    comm = on_stream(log)
    x = torch.ones(2)
    alive = weakref.ref(x)
    comm.all_reduce(x, async_op=True)
    del x
    gc.collect()
    assert alive() is not None
    log.done = True
    comm.all_reduce(torch.ones(1))
    gc.collect()
    assert alive() is None


def test_no_event_is_looked_at_in_a_capture() -> None:
    log = Log()
    comm = on_stream(log)
    comm.all_reduce(torch.ones(2), async_op=True)
    log.captures, x = True, torch.ones(2)
    alive = weakref.ref(x)
    assert comm.all_reduce(x, async_op=True).wait().tolist() == [2, 2]
    del x
    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]
    gc.collect()
    assert alive() is not None
    log.captures, log.done = False, True
    comm.all_reduce(torch.ones(2))
    gc.collect()
    assert alive() is None


def test_it_closes_what_it_wraps() -> None:
    inner = Doubling(None)
    OnStream(inner, Log()).close()
    assert inner.closed


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    side: Any = torch.cuda.Stream()
    comm = Communicator(OnStream(Doubling(None, "cuda"), CudaSideStream(side)))
    for _ in range(50):
        x = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(1_000_000)
        x += 1
        y = comm.all_reduce(x)
        work = comm.all_reduce(x, async_op=True)
        del x
        assert (y + work.wait()).eq(4).all().item()
