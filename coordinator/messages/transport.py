"""Send messages of any kind to the other members of a group.

No send waits for its receive, over any transport:

    blocking        blocks only while more than `OUTSTANDING_BYTES` to that peer are in flight; data
                    that cannot be sent eagerly is copied and sent in the background
    asynchronous    up to `COPIED_BYTES` of CPU tensors: likewise, and done at once. Larger ones are
                    not copied, and done when the transport has taken them: shared memory before the
                    receive (`device_comm.shm.channel`), torch's groups with the receive

One thread at a time: the data of a second one could land between the parts of a message.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from torch import Tensor

from coordinator.messages.incoming import Communicators
from coordinator.messages.wire import Message
from device_comm import Work
from device_comm.call_number import call_number
from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupTimeoutError
from shm_broadcast._native import Turn

if TYPE_CHECKING:
    from device_comm import Communicator

    MakeMessage: TypeAlias = Callable[[], Message]

OUTSTANDING_BYTES: Final = 64 << 20
"""The most bytes in flight to one peer before a blocking send blocks; one message may exceed it."""

COPIED_BYTES: Final = 1 << 20
"""The largest asynchronous message that is copied if it cannot be sent eagerly."""


class AnotherThreadError(RuntimeError):
    """Another thread sends or receives over the group now; nothing was moved."""

    def __init__(self, does: str) -> None:
        super().__init__(
            f"another thread {does}: a group is for one thread at a time, so give each thread a "
            "group of its own, or lock around these calls"
        )


class Sender:
    """The sends of one member."""

    def __init__(self, routes: Communicators, *, numbered: bool) -> None:
        """Send over ``routes``; ``numbered``: messages have numbers."""
        self._routes = routes
        self._numbered = numbered
        self._under_way: defaultdict[int, deque[tuple[int, Work[None]]]] = defaultdict(deque)
        self._turn = Turn()

    def send(
        self, make: MakeMessage | None, parts: Sequence[Tensor], dst: int, deadline: Deadline
    ) -> None:
        """Send a message, if any, and the tensors behind it; the caller may change them afterwards.

        ``make`` makes the message, which takes its number, once no other thread sends.

        Raises:
            GroupTimeoutError: too much is in flight, and the peer did not receive it in time; the
                group is aborted.
            CoordinatorError: this send or an earlier one failed.
            RuntimeError: another thread is sending.
        """
        with self._turn as acquired:
            self._require(acquired)
            self._send(make, parts, dst, None)
            under_way = self._under_way[dst]
            try:
                while len(under_way) > 1 and _bytes_of(under_way) > OUTSTANDING_BYTES:
                    self._finish_first(under_way, deadline)
            except GroupTimeoutError as error:
                self._routes.cpu.abort(error)
                raise

    def begin(
        self, make: MakeMessage | None, parts: Sequence[Tensor], dst: int
    ) -> list[Work[None]]:
        """As `send`, without blocking; the tensors must not change until the works are done."""
        works: list[Work[None]] = []
        with self._turn as acquired:
            self._require(acquired)
            self._send(make, parts, dst, works)
        return works

    def _send(
        self,
        make: MakeMessage | None,
        parts: Sequence[Tensor],
        dst: int,
        works: list[Work[None]] | None,
    ) -> None:
        """Send without blocking; add works to ``works`` rather than copy large tensors."""
        cpu = self._routes.cpu

        def send(frames: Sequence[Tensor]) -> None:
            copies = works is None or self._copies(parts, dst)
            for frame in frames:
                self._send_eagerly(cpu, frame, dst, copy=False)  # no other code changes a frame
            for part in self._in_order(parts):
                comm = self._routes.of(part.device.type)
                if works is None or (copies and comm is cpu):
                    self._send_eagerly(comm, part, dst)
                else:
                    works.append(self._keep(comm.isend(part, dst), part.nbytes, dst))

        self.whole(make, len(parts), send)
        if call_number():
            cpu.begun.count_sent(dst)

    def _copies(self, parts: Sequence[Tensor], dst: int) -> bool:
        cpu_bytes = sum(part.nbytes for part in parts if part.device.type == "cpu")
        return cpu_bytes <= COPIED_BYTES and (
            cpu_bytes + _bytes_of(self._in_flight(dst)) <= OUTSTANDING_BYTES
        )

    def whole(
        self,
        make: MakeMessage | None,
        n_parts: int,
        send: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Send a message's frames and ``n_parts`` tensors; abort if only a part is sent."""
        n_pieces = 2 if self._numbered and make is not None else 0  # its number, and itself
        try:
            frames = () if make is None else make().frames()
            n_pieces += len(frames) + n_parts
            send(frames)
        except BaseException as error:
            self.abort_if_partial(error, n_pieces)
            raise

    def abort_if_partial(self, error: BaseException, n_parts: int) -> None:
        """Abort the group if ``error`` may have interrupted a message of several parts.

        The communicator has already handled its own errors.
        """
        if n_parts > 1 and not isinstance(error, CoordinatorError):
            self._routes.cpu.abort(error)

    def flush(self, deadline: Deadline) -> None:
        """Wait until nothing is in flight; raises as `send`."""
        for under_way in [*self._under_way.values()]:
            while under_way:
                self._finish_first(under_way, deadline)
        for comm in dict.fromkeys(self._routes):
            comm.flush(deadline)

    def _require(self, acquired: bool) -> None:
        if not acquired:
            raise AnotherThreadError(f"is sending over {self._routes.cpu.name}")

    def _send_eagerly(self, comm: Communicator, x: Tensor, dst: int, *, copy: bool = True) -> None:
        """Send a tensor before its receive; the caller may change it. Never blocks."""
        if comm.sends_eagerly(dst, x.nbytes):
            comm.send(x, dst)
        else:
            self._keep(comm.isend(x.clone() if copy else x, dst), x.nbytes, dst)

    def _keep(self, work: Work[None], size: int, dst: int) -> Work[None]:
        self._under_way[dst].append((size, work))
        self._in_flight(dst)
        return work

    def _in_flight(self, dst: int) -> Sequence[tuple[int, Work[None]]]:
        under_way = self._under_way[dst]
        while under_way and under_way[0][1].is_completed():
            self._finish_first(under_way, NEVER)
        return under_way

    def _finish_first(self, under_way: deque[tuple[int, Work[None]]], deadline: Deadline) -> None:
        under_way[0][1].wait(deadline)
        under_way.popleft()

    def _in_order(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return ``parts`` in the order of their receives: those on the CPU first."""
        if self._routes.device is self._routes.cpu:
            return parts
        return sorted(parts, key=lambda part: part.device.type != "cpu")


def _bytes_of(under_way: Sequence[tuple[int, Work[None]]]) -> int:
    return sum(size for size, _ in under_way)
