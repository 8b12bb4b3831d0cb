"""Messages from one peer, sorted by the way they go.

In a ring of two stages the next stage is the previous one: activations and gradients come from
the same peer, in the order in which it sent them, which need not be the order in which they are
asked for. A message therefore says which way it goes, and is kept for who asks for that.

    want(NEXT) ──┐   ┌── unseen: receives that were begun, header not there yet
    want(PREV) ──┤   ├── arrived[way]: header there, nobody asked for it yet
                 └───┴── a `Request` has its message once one of its way is there

Only `Request.finish` communicates with other peers (it gathers slices), so that order is the
caller's. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from coordinator.pipeline.message import NEXT, PREV, from_dict, way_of
from shm_broadcast import GroupTimeoutError, MessageDecodeError

if TYPE_CHECKING:
    from coordinator.boxes import Receipt, Steps
    from coordinator.tensor_dict import Header
    from coordinator.tensor_mail import TensorMail
    from shm_broadcast import Deadline


class _Arrival:
    """A message that is coming."""

    receipt: Receipt[dict[str, Any]]


class Request:
    """A message that was asked for; a `device_comm.Pending`. Made by `Lanes.want`."""

    def __init__(self, lanes: Lanes) -> None:
        """Wait for a message of ``lanes``."""
        self._lanes = lanes
        self.arrival: _Arrival | None = None

    def ready(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""
        if self.arrival is None:
            self._lanes.poll()
        return self.arrival is not None and self.arrival.receipt.ready()

    def wait(self, deadline: Deadline) -> None:
        """Return once the message is there.

        Raises:
            GroupTimeoutError: not yet; it is still under way.
        """
        self._lanes.begin()
        while self.arrival is None:
            self._lanes.settle(deadline)
            self._lanes.begin()
        self.arrival.receipt.wait(deadline)

    def finish(self) -> Any:
        """The tree. Collective: yes over the peers' group, if it came in slices."""
        if self.arrival is None:
            raise RuntimeError("a message is finished once it is ready, not before")
        return from_dict(self.arrival.receipt.finish())


class Lanes:
    """What one peer sends to this stage."""

    def __init__(
        self, mail: TensorMail, src: int, peers: TensorMail | None, *, once: bool = False
    ) -> None:
        """Sort the messages of ``src``.

        Args:
            mail: the pipeline group's.
            src: a rank in it.
            peers: the mail of the group that receives the other slices.
            once: only the first message has a header; the others are as it says.
        """
        self._mail = mail
        self._src = src
        self._peers = peers
        self._once = once
        self._known: Header | None = None
        self._unseen: deque[_Arrival] = deque()
        self._arrived: dict[str, deque[_Arrival]] = {NEXT: deque(), PREV: deque()}
        self._wanting: dict[str, deque[Request]] = {NEXT: deque(), PREV: deque()}

    def want(self, way: str) -> Request:
        """Ask for the next message that goes ``way``. Never blocks."""
        request = Request(self)
        if self._arrived[way]:
            request.arrival = self._arrived[way].popleft()
        else:
            self._wanting[way].append(request)
            self.begin()
        return request

    def begin(self) -> None:
        """Have a receive begun for every request that has no message yet. Never blocks."""
        while len(self._unseen) < sum(map(len, self._wanting.values())):
            arrival = _Arrival()
            self._unseen.append(arrival)
            arrival.receipt = self._mail.begin(self._src, self._steps(arrival))

    def settle(self, deadline: Deadline) -> None:
        """Wait until the header of one more message is there, of those that were begun."""
        first = self._unseen[0]
        try:
            self._mail.settle_receipt(self._src, first.receipt, deadline)
        except GroupTimeoutError:
            raise
        except BaseException:
            self._forget(first)
            raise
        if first in self._unseen:
            self._forget(first)
            raise MessageDecodeError(f"a message of rank {self._src} could not be read")

    def poll(self) -> None:
        """Sort what is there. Never blocks."""
        self.begin()
        if self._unseen:
            self._unseen[0].receipt.ready()

    def _steps(self, arrival: _Arrival) -> Steps[dict[str, Any]]:
        if self._known is not None:
            self._sort(arrival, self._known)
            return self._mail.receive_parts(self._known, self._src, self._peers)

        def seen(header: Header) -> None:
            if self._once:
                self._known = header
            self._sort(arrival, header)

        return (yield from self._mail.dict_steps(self._src, self._peers, seen))

    def _sort(self, arrival: _Arrival, header: Header) -> None:
        way = way_of(header)
        self._forget(arrival)
        if self._wanting[way]:
            self._wanting[way].popleft().arrival = arrival
        else:
            self._arrived[way].append(arrival)

    def _forget(self, arrival: _Arrival) -> None:
        if arrival in self._unseen:
            self._unseen.remove(arrival)
