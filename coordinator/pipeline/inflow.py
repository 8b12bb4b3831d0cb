"""Messages from one peer, sorted by the way they go.

In a ring of two stages the next stage is the previous one: activations and gradients come from
the same peer, in the order in which it sent them, which need not be the order in which they are
asked for. A message therefore says which way it goes, and is kept until that way is asked for.

    want(NEXT) ──┐   ┌── coming: receives that were begun, not there or not looked at yet
    want(PREV) ──┤   ├── arrived[way]: there, and nobody asked for it yet
                 └───┴── a `Request` has its message once one of its way is there

Only `Request.finish` communicates with other peers (it gathers slices), so that order is the
caller's. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from coordinator.pipeline.message import NEXT, PREV, WAY, from_dict, way_of
from shm_broadcast import CoordinatorError, Deadline

if TYPE_CHECKING:
    from coordinator.messages.incoming import IncomingDict
    from coordinator.messages.messenger import Messenger
    from device_comm import Pending
    from device_comm.verbs.arguments import Timeout


class Request:
    """A message that was asked for; a `device_comm.Pending`. Made by `Inflow.want`."""

    def __init__(self, inflow: Inflow) -> None:
        """Wait for a message of ``inflow``."""
        self._inflow = inflow
        self.message: IncomingDict | None = None

    def ready(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
        try:
            while self.message is None and self._inflow.has_come():
                self._inflow.settle(Deadline.after(0))
        except CoordinatorError:  # a receive has failed, as `wait` says
            return True
        return self.message is not None

    def wait(self, deadline: Deadline) -> None:
        """Return once the message is there.

        Raises:
            GroupTimeoutError: not yet; it is still under way.
        """
        while self.message is None:
            self._inflow.settle(deadline)

    def finish(self, timeout: Timeout) -> Any:
        """The tree. Collective: yes over the peers' group, if it came in slices.

        Raises:
            MessageRefusedError: its sender could not send it.
        """
        if self.message is None:
            raise RuntimeError("a message is finished once it is ready, not before")
        way_of(self.message.header())
        return from_dict(self.message.result(timeout), self.message.refused)

    def leave(self, error: BaseException) -> None:
        """As `Incoming.leave`, of a message that is there."""
        if self.message is not None:
            self.message.leave(error)


class Inflow:
    """What one peer sends to this stage.

    Attributes:
        src: the peer, a rank in the pipeline group.
    """

    def __init__(self, messenger: Messenger, src: int, peers: Messenger | None) -> None:
        """Sort the messages of ``src``.

        Args:
            messenger: the pipeline group's.
            src: a rank in it.
            peers: of the group that receives the other slices.
        """
        self._messenger = messenger
        self.src = src
        self._peers = peers
        self._coming: deque[tuple[IncomingDict, Pending]] = deque()
        self._arrived: dict[str, deque[IncomingDict]] = {NEXT: deque(), PREV: deque()}
        self._wanting: list[tuple[str, Request]] = []

    def want(self, way: str) -> Request:
        """Ask for the next message that goes ``way``. Never blocks."""
        request = Request(self)
        if self._arrived[way]:
            request.message = self._arrived[way].popleft()
        else:
            self._begin(len(self._wanting) + 1)
            self._wanting.append((way, request))
        return request

    def has_come(self) -> bool:
        """Whether a message is there that was not sorted, or failed. Never blocks."""
        return bool(self._coming) and self._coming[0][1].ready()

    def settle(self, deadline: Deadline) -> None:
        """Wait until one more message is there, and sort it.

        Raises:
            GroupTimeoutError: none is; it is still under way.
        """
        if not self._coming:  # a signal handler has raised while it was sorted
            self._messenger.cpu.check()
        self._coming[0][1].wait(deadline)
        try:
            message, _ = self._coming.popleft()
            self._sort(message)
        except BaseException as error:  # a signal handler's
            self._messenger.cpu.abort(error)
            raise

    def _sort(self, message: IncomingDict) -> None:
        try:
            way = way_of(message.header())
            wanted = [each for each in self._wanting if each[0] == way]
        except CoordinatorError:  # who has waited longest gets it, and the error
            wanted = self._wanting
        if wanted:
            first = wanted[0]
            self._wanting.remove(first)
            first[1].message = message
        else:
            self._arrived[way].append(message)
            self._begin(len(self._wanting))

    def _begin(self, n_wanted: int) -> None:
        """Have so many receives begun, one for every request without a message. Never blocks."""
        while len(self._coming) < n_wanted:
            message = self._messenger.incoming_dict(self.src, self._peers, WAY)
            self._coming.append((message, self._messenger.begin(message, self.src)))
