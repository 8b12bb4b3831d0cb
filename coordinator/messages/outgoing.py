"""What one member sends to the others, and has under way to each.

No send waits for its receive, whatever moves it:

    blocking        until more than `OUTSTANDING_BYTES` to that peer are under way; what the
                    transport does not take ahead is copied, and goes on in the background
    asynchronous    a message whose tensors on the CPU are of `COPIED_BYTES` or less is treated
                    alike, and is done at once; larger ones are not copied, and done when the
                    transport has taken them: shared memory ahead of the receive (see
                    `device_comm.shm.pipes.spills`), torch's groups with the receive

One thread at a time: another one that sends meanwhile is refused, for what it sends could come
between the parts of a message.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, TypeAlias

from device_comm.call_number import call_number
from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupTimeoutError
from shm_broadcast.timed_lock import new_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from coordinator.messages.framing import Message
    from coordinator.messages.incoming import Routes
    from device_comm import Communicator, Work

    MakeMessage: TypeAlias = Callable[[], Message]

OUTSTANDING_BYTES: Final = 64 << 20
"""What may be under way to one peer before a blocking send waits; one message always may."""

COPIED_BYTES: Final = 1 << 20
"""The largest asynchronous message that is copied where it cannot be sent ahead of its receive."""


class AnotherThreadError(RuntimeError):
    """Another thread does the same over the group at this moment; nothing was moved."""

    def __init__(self, does: str) -> None:
        super().__init__(
            f"another thread {does}: a group is for one thread at a time, so give each thread a "
            "group of its own, or lock around these calls"
        )


class Outgoing:
    """The sends of one member."""

    def __init__(self, routes: Routes, *, numbered: bool) -> None:
        """Send over the communicators ``routes``, messages that are numbered or not."""
        self._routes = routes
        self._numbered = numbered
        self._under_way: dict[int, deque[tuple[int, Work[None]]]] = {}
        self._turn = new_turn()

    def send(
        self, make: MakeMessage | None, parts: Sequence[Tensor], dst: int, deadline: Deadline
    ) -> None:
        """Send a message, if there is one, and the tensors behind it; all may then be changed.

        Args:
            make: makes the message, which takes its number, once no other thread sends.
            parts: the tensors.
            dst: the peer.
            deadline: when to give up.

        Raises:
            GroupTimeoutError: too much is under way, and the peer has not received it in time; the
                group has been aborted.
            CoordinatorError: this send or an older one failed.
            RuntimeError: another thread is sending.
        """
        with self._turn as mine:
            self._require(mine)

            def send_part(part: Tensor) -> None:
                self._ahead(self._routes.of(part.device.type), part, dst)

            self._pass_on(make, parts, dst, send_part)
            under_way = self._under_way.get(dst)
            try:
                while under_way and len(under_way) > 1 and _bytes_of(under_way) > OUTSTANDING_BYTES:
                    self._finish_first(under_way, deadline)
            except GroupTimeoutError as error:
                self._routes.cpu.abort(error)
                raise

    def begin(
        self, make: MakeMessage | None, parts: Sequence[Tensor], dst: int
    ) -> list[Work[None]]:
        """As `send`, without waiting; the tensors must not change until these works are done.

        Raises:
            RuntimeError: another thread is sending.
        """
        with self._turn as mine:
            self._require(mine)
            return self._begin(make, parts, dst)

    def _begin(
        self, make: MakeMessage | None, parts: Sequence[Tensor], dst: int
    ) -> list[Work[None]]:
        works = []
        wanted = sum(part.nbytes for part in parts if part.device.type == "cpu")
        copies = wanted <= COPIED_BYTES and (
            wanted + _bytes_of(self._under_way.get(dst, ())) <= OUTSTANDING_BYTES
        )

        def begin_part(part: Tensor) -> None:
            comm = self._routes.of(part.device.type)
            if copies and comm is self._routes.cpu:
                self._ahead(comm, part, dst)
            else:
                works.append(self._keep(comm.isend(part, dst), part.nbytes, dst))

        self._pass_on(make, parts, dst, begin_part)
        return works

    def _pass_on(
        self,
        make: MakeMessage | None,
        parts: Sequence[Tensor],
        dst: int,
        pass_on: Callable[[Tensor], None],
    ) -> None:
        """Send the message that ``make`` makes, if any, and pass on each of ``parts``."""

        def send(frames: Sequence[Tensor]) -> None:
            for frame in frames:
                self._ahead(self._routes.cpu, frame, dst, copy=False)  # nobody else changes it
            for part in self._in_order(parts):
                pass_on(part)

        self.whole(make, len(parts), send)
        if call_number():
            self._routes.cpu.begun.count_sent(dst)

    def whole(
        self,
        make: MakeMessage | None,
        n_parts: int,
        send: Callable[[Sequence[Tensor]], None],
    ) -> None:
        """Have ``send`` send the frames of the message that ``make`` makes, if any, and ``n_parts``
        tensors behind them; end the group where an error leaves it half sent.
        """
        n_pieces = 2 if self._numbered and make is not None else 0  # its number, and itself
        try:
            frames = () if make is None else make().frames()
            n_pieces += len(frames) + n_parts
            send(frames)
        except BaseException as error:
            self.ends_halfway(error, n_pieces)
            raise

    def ends_halfway(self, error: BaseException, n_parts: int) -> None:
        """End the group if ``error`` may have come between so many parts of a message: its receiver
        would take the next one for the rest. What the communicator has raised, that has judged.
        """
        if n_parts > 1 and not isinstance(error, CoordinatorError):
            self._routes.cpu.abort(error)

    def flush(self, deadline: Deadline) -> None:
        """Wait until nothing is under way.

        Raises:
            What `send` raises.
        """
        for under_way in self._under_way.values():
            while under_way:
                self._finish_first(under_way, deadline)
        for comm in dict.fromkeys(self._routes):
            comm.flush(deadline)

    def _require(self, mine: bool) -> None:
        if not mine:
            raise AnotherThreadError(f"is sending over {self._routes.cpu.name}")

    def _ahead(self, comm: Communicator, x: Tensor, dst: int, *, copy: bool = True) -> None:
        """Send a tensor, which may then be changed, ahead of its receive. Never blocks."""
        if comm.goes_ahead(dst, x.nbytes):
            comm.send(x, dst)
        else:
            self._keep(comm.isend(x.clone() if copy else x, dst), x.nbytes, dst)

    def _keep(self, work: Work[None], size: int, dst: int) -> Work[None]:
        """Keep a send of ``size`` bytes; forget those that are done."""
        under_way = self._under_way.setdefault(dst, deque())
        under_way.append((size, work))
        while under_way and under_way[0][1].is_completed():
            self._finish_first(under_way, NEVER)
        return work

    def _finish_first(self, under_way: deque[tuple[int, Work[None]]], deadline: Deadline) -> None:
        under_way[0][1].wait(deadline)
        under_way.popleft()

    def _in_order(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """As they are received: those on the CPU first."""
        if self._routes.device is self._routes.cpu:
            return parts
        return sorted(parts, key=lambda part: part.device.type != "cpu")


def _bytes_of(under_way: Sequence[tuple[int, Work[None]]]) -> int:
    return sum(size for size, _ in under_way)
