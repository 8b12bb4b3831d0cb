"""What is under way between this member and one peer: receives in an inbox, sends in an outbox.

What a message holds is known only once its header is there, so its later parts are asked
for later. Meanwhile nothing else may be received from that peer: its parts would be taken
for the wrong message. An `Inbox` therefore begins a receive once the one before has asked
for its last part, also if nobody waits for that one any more.

A receive is a generator. It yields each `Work` whose end it needs to go on; it returns,
when it has asked for everything, what is still under way and the receive's last step:

    def receive(comm, src):
        size = yield comm.irecv((1,), torch.int64, src)
        body = comm.irecv((int(size),), torch.float32, src)
        return [body], body.wait
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from device_comm import Work
from shm_broadcast import NEVER, Deadline, GroupTimeoutError

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm import DeviceCommunicator

T = TypeVar("T")

Ask = Callable[["DeviceCommunicator", "Tensor", int], Work[Any]]
"""Asks for what a rank sends next over a communicator, into a tensor."""

Steps = Generator[Work[Any], Any, tuple[Sequence[Work[Any]], Callable[[], T]]]
"""Yields what to wait for; returns what is still under way, and the last step."""


def in_background(comm: DeviceCommunicator, out: Tensor, src: int) -> Work[Any]:
    """An `Ask` that does not wait."""
    return comm.irecv(out=out, src=src)


def waiting(deadline: Deadline) -> Ask:
    """An `Ask` that waits until ``deadline``: less work where nothing else is to be done."""
    return lambda comm, out, src: Work(comm.recv(out=out, src=src, timeout=deadline))


def carry_out(steps: Steps[T], deadline: Deadline) -> T:
    """What a receive brings whose turn it is; whatever it yields is waited for."""
    value = None
    while True:
        try:
            needs = steps.send(value)
        except StopIteration as end:
            parts, last = end.value
            break
        value = needs.wait(deadline)
    for part in parts:
        part.wait(deadline)
    return last()  # type: ignore[no-any-return]


def in_turn(begin: Callable[[], Work[T]]) -> Steps[T]:
    """The steps of a receive in one part."""
    work = begin()
    yield work
    return [], work.wait


class Receipt(Generic[T]):
    """A receive under way; a `device_comm.Pending`. Made by `Inbox.begin`."""

    def __init__(self, inbox: Inbox, steps: Steps[T]) -> None:
        """Queue it in ``inbox``."""
        self._inbox = inbox
        self._steps = steps
        self._needs: Work[Any] | None = None
        self._parts: Sequence[Work[Any]] = ()
        self._last: Callable[[], T] | None = None

    def ready(self) -> bool:
        """Whether everything is there; asks for what can be asked for. Never blocks."""
        self._inbox.advance()
        return self._last is not None and all(part.is_completed() for part in self._parts)

    def wait(self, deadline: Deadline) -> None:
        """Return once everything is there.

        Raises:
            GroupTimeoutError: not yet; it is still under way.
        """
        self._inbox.settle(deadline, self)
        for part in self._parts:
            part.wait(deadline)

    def finish(self) -> T:
        """Take the last step: make the result of what is there."""
        if self._last is None:
            raise RuntimeError("a receive is finished once it is ready, not before")
        return self._last()

    def step(self, deadline: Deadline | None) -> bool:
        """Go on until all parts are asked for; without a deadline, while nothing blocks."""
        while self._last is None:
            value = None
            if self._needs is not None:
                if deadline is None and not self._needs.is_completed():
                    return False
                value = self._needs.wait(deadline)
            try:
                self._needs = self._steps.send(value)
            except StopIteration as end:
                self._parts, self._last = end.value
        return True


class Inbox:
    """The receives from one peer that have not asked for all their parts yet."""

    def __init__(self) -> None:
        """Begin empty."""
        self._waiting: deque[Receipt[Any]] = deque()

    def begin(self, steps: Steps[T]) -> Receipt[T]:
        """Queue a receive, and start it if its turn has come. Never blocks."""
        receipt = Receipt(self, steps)
        self._waiting.append(receipt)
        self.advance()
        return receipt

    def advance(self) -> None:
        """Go on with the receives, in turn, as far as nothing blocks."""
        while self._waiting and self._step(None):
            pass

    def is_busy(self) -> bool:
        """Whether some receive has not asked for all its parts yet. Never blocks."""
        self.advance()
        return bool(self._waiting)

    def settle(self, deadline: Deadline, until: Receipt[Any] | None = None) -> None:
        """Wait until ``until``, or else every receive, has asked for all its parts."""
        while self._waiting and (until is None or until in self._waiting):
            self._step(deadline)

    def _step(self, deadline: Deadline | None) -> bool:
        try:
            done = self._waiting[0].step(deadline)
        except GroupTimeoutError:
            raise
        except BaseException:
            self._waiting.popleft()
            raise
        if done:
            self._waiting.popleft()
        return done


class Outbox:
    """The sends to one peer that are under way, in the order they were begun."""

    def __init__(self) -> None:
        """Begin empty."""
        self._sends: deque[tuple[int, Sequence[Work[None]]]] = deque()

    def add(self, works: Sequence[Work[None]], size: int) -> None:
        """Keep a send of ``size`` bytes; forget those that are done. Never blocks.

        Raises:
            CoordinatorError: an older send failed.
        """
        self._sends.append((size, works))
        while self._sends and all(work.is_completed() for work in self._sends[0][1]):
            self._finish_first(NEVER)

    def shrink(self, limit: int, deadline: Deadline) -> None:
        """Wait until sends of ``limit`` bytes or less, or only one, are under way.

        Raises:
            GroupTimeoutError: the peer has not received them in time.
            CoordinatorError: a send failed.
        """
        while len(self._sends) > 1 and sum(size for size, _ in self._sends) > limit:
            self._finish_first(deadline)

    def flush(self, deadline: Deadline) -> None:
        """Wait until no send is under way.

        Raises:
            What `shrink` raises.
        """
        while self._sends:
            self._finish_first(deadline)

    def _finish_first(self, deadline: Deadline) -> None:
        for work in self._sends[0][1]:
            work.wait(deadline)
        self._sends.popleft()


class Together:
    """Several works as one `device_comm.Pending`."""

    def __init__(self, works: Sequence[Work[Any]]) -> None:
        """Wait for all of ``works``, in this order."""
        self._works = works

    def ready(self) -> bool:
        """Whether all of them are."""
        return all(work.is_completed() for work in self._works)

    def wait(self, deadline: Deadline) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait(deadline)
