"""Send and receive messages of any kind between the members of a group.

No send waits for its receive, whatever moves it:

    blocking        until more than `OUTSTANDING_BYTES` to that peer are under way; what the
                    transport does not take ahead is copied, and goes on in the background
    asynchronous    a message whose tensors on the CPU are of `COPIED_BYTES` or less is treated
                    alike, and is done at once; larger ones are not copied, and done when the
                    transport has taken them: shared memory ahead of the receive (see
                    `device_comm.shm.channel`), torch's groups with the receive

One thread at a time: another one that sends meanwhile is refused, for what it sends could come
between the parts of a message.

The sender encodes the message; if that fails, the receivers get a notice in its
place. `coordinator.messages.transport` and `coordinator.messages.incoming` are the two ends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

from torch import Tensor

from coordinator.messages.incoming import Communicators, ObjectReceiver, OrderedReceive, Receiver
from coordinator.messages.wire import EVERYONE, Kind, Message, MessageCodec
from device_comm import AllPending, Pending, Work
from device_comm.call_number import call_number
from device_comm.verbs.checks import Timeout, check_peer, check_rank
from shm_broadcast import (
    NEVER,
    CoordinatorError,
    Deadline,
    DivergenceError,
    GroupTimeoutError,
    MessageDecodeError,
    MessageSealError,
)
from shm_broadcast._native import Turn

if TYPE_CHECKING:
    from device_comm import Communicator

if TYPE_CHECKING:
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


class Sender:
    """The sends of one member."""

    def __init__(self, routes: Communicators, *, numbered: bool) -> None:
        """Send over the communicators ``routes``, messages that are numbered or not."""
        self._routes = routes
        self._numbered = numbered
        self._under_way: dict[int, deque[tuple[int, Work[None]]]] = {}
        self._turn = Turn()

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
                self._send_eagerly(self._routes.of(part.device.type), part, dst)

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
                self._send_eagerly(comm, part, dst)
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
                self._send_eagerly(
                    self._routes.cpu, frame, dst, copy=False
                )  # nobody else changes it
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
            self.abort_if_partial(error, n_pieces)
            raise

    def abort_if_partial(self, error: BaseException, n_parts: int) -> None:
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

    def _send_eagerly(self, comm: Communicator, x: Tensor, dst: int, *, copy: bool = True) -> None:
        """Send a tensor, which may then be changed, ahead of its receive. Never blocks."""
        if comm.sends_eagerly(dst, x.nbytes):
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


if TYPE_CHECKING:
    Packed = tuple[bytes, Sequence[Tensor]]
    """The payload of a message, and the tensors behind it."""

    Make = Callable[[], Packed]

T = TypeVar("T")


class MessageTransport:
    """One member's messages to and from the others. The communicators stay the group's.

    Attributes:
        cpu: moves messages.
        wire: how they are written.
        routes: the communicators of the tensors behind them.
    """

    def __init__(self, cpu: Communicator, device: Communicator, wire: MessageCodec) -> None:
        """Send and receive over these; they are one where the group's device is the CPU."""
        self.cpu = cpu
        self.wire = wire
        self.routes = Communicators(cpu, device)
        self._timeout = cpu.timeout
        self._outgoing = Sender(self.routes, numbered=wire.numbers)
        self._turns: dict[int, OrderedReceive] = {}
        # Of each member, who receives from it; of what is no member, which is refused later.
        turns = {rank: Turn() for rank in range(cpu.world_size)}
        self._receiving = defaultdict(Turn, turns)
        self._others = [rank for rank in range(cpu.world_size) if rank != cpu.rank]

    def flush(self, linger: float) -> None:
        """Let messages that are under way arrive; give up after ``linger`` seconds."""
        with suppress(CoordinatorError):
            self._outgoing.flush(Deadline.after(linger))

    def send(self, kind: Kind, dst: int, make: Make, timeout: Timeout) -> None:
        """Send what ``make`` makes; if it cannot, say so in its place."""
        deadline = self._deadline(timeout)
        with self._or_refuse(dst):
            payload, parts = make()
        message = partial(self.wire.message, kind, payload, dst)
        self._outgoing.send(message, parts, dst, deadline)

    def isend(
        self, kind: Kind, dsts: Sequence[int], make: Make, result: T, timeout: Timeout
    ) -> Work[T]:
        """Begin to send what ``make`` makes; the work has a ``result``."""
        with self._or_refuse(*dsts):
            payload, parts = make()
        works = self._begin_to_each(partial(self.wire.message, kind, payload), parts, dsts)
        return self._sending(works, result, timeout)

    def _begin_to_each(
        self, make: Callable[[int], Message], parts: Sequence[Tensor], dsts: Sequence[int]
    ) -> list[Work[None]]:
        works: list[Work[None]] = []
        n_begun = 0
        try:
            for dst in dsts:
                works += self._outgoing.begin(partial(make, dst), parts, dst)
                n_begun += 1
        except BaseException as error:
            if n_begun or not isinstance(error, AnotherThreadError):
                self._outgoing.abort_if_partial(error, len(dsts))
            raise
        return works

    def _sending(self, works: Sequence[Work[None]], result: T, timeout: Timeout) -> Work[T]:
        return Work(result, AllPending(works) if works else None, timeout=self._allowed(timeout))

    def receive(self, incoming: Receiver[T], src: int, timeout: Timeout) -> T:
        """The next message of ``src``. Collective: no."""
        deadline = self._deadline(timeout)
        check_peer("src", src, self.cpu.rank, self.cpu.world_size)
        try:
            self._receive(incoming, src, deadline)
            return incoming.result(deadline)
        except BaseException as error:
            incoming.leave(error)
            raise

    def _receive(self, incoming: Receiver[Any], src: int, deadline: Deadline) -> None:
        with self._receiving[src] as mine:
            self._require_alone(mine, src)
            self._await_turn(src, deadline)
            self.cpu.begun.count_received(src)
            try:
                self.cpu.recv_series(incoming.following, src, timeout=deadline)
                for part in incoming.on_device:
                    self.routes.device.recv(out=part, src=src, timeout=deadline)
            except BaseException as error:
                self._abort_if_partial(error, incoming)
                raise

    def ireceive(self, incoming: Receiver[T], src: int, timeout: Timeout) -> Work[T]:
        """Begin to receive the next message of ``src``. Collective: no."""
        pending = self.begin(incoming, src)
        allowed = self._allowed(timeout)
        work: Work[Any] = Work(None, pending, lambda: incoming.result(allowed), allowed)
        return work

    def begin(self, incoming: Receiver[Any], src: int) -> Pending:
        """Begin to receive a message, behind what was asked for before. Never blocks."""
        cpu, device = self.routes
        check_peer("src", src, self.cpu.rank, self.cpu.world_size)
        with self._receiving[src] as mine:
            self._require_alone(mine, src)
            cpu.begun.count_received(src)
            if device is cpu:
                return cpu.irecv_series(incoming.following, src)
            return self._in_turn(
                src,
                lambda: [device.irecv(out=part, src=src) for part in incoming.on_device],
                lambda: cpu.irecv_series(incoming.following, src),
            )

    def _require_alone(self, mine: bool, src: int) -> None:
        """Refuse a second thread that receives from ``src``: each could get parts of a message."""
        if not mine:
            raise AnotherThreadError(f"is receiving from rank {src} over {self.cpu.name}")

    def _await_turn(self, src: int, deadline: Deadline) -> None:
        """Wait until the receives that were begun before have asked for all their tensors."""
        if src in self._turns:
            self._turns[src].has_asked(deadline)

    def _in_turn(
        self,
        src: int,
        ask: Callable[[], Sequence[Work[Any]]],
        begin: Callable[[], Work[None]] | None = None,
    ) -> OrderedReceive:
        turn = self._turns[src] = OrderedReceive(self._turns.get(src), begin, ask)
        return turn

    def _broadcast(
        self, kind: Kind, make: Make, result: Any, timeout: Timeout, async_op: bool
    ) -> Any:
        """Broadcast what ``make`` makes on this member. Collective: yes, every member."""
        if async_op:
            return self.isend(kind, self._others, make, result, timeout)
        deadline = self._deadline(timeout)
        with self._or_refuse(EVERYONE, deadline=deadline):
            payload, parts = make()
        self._broadcast_message(
            partial(self.wire.message, kind, payload, EVERYONE), parts, deadline
        )
        return result

    def _broadcast_message(
        self, make: Callable[[], Message], parts: Sequence[Tensor], deadline: Deadline
    ) -> None:
        def send(frames: Sequence[Tensor]) -> None:
            self._broadcast_parts(frames, deadline)
            self._broadcast_parts(parts, deadline)

        self._outgoing.whole(make, len(parts), send)

    def _receive_broadcast(
        self, incoming: Receiver[Any], src: int, timeout: Timeout, async_op: bool
    ) -> Any:
        """What ``src`` broadcasts. Collective: yes, every member."""
        if async_op:
            return self.ireceive(incoming, src, timeout)
        deadline = self._deadline(timeout)
        try:
            while parts := incoming.following():
                self._broadcast_parts(parts, deadline, src)
            self._broadcast_parts(incoming.on_device, deadline, src)
        except BaseException as error:
            self._abort_if_partial(error, incoming)
            raise
        return incoming.result(deadline)

    def _abort_if_partial(self, error: BaseException, incoming: Receiver[Any]) -> None:
        """End the group if ``error`` may leave a message half received: nobody knows any more where
        the next one begins.
        """
        if isinstance(error, CoordinatorError):
            torn = isinstance(error, (DivergenceError, MessageDecodeError, MessageSealError))
        else:
            torn = incoming.has_begun
        if torn:
            self.cpu.abort(error)

    def _broadcast_parts(
        self, parts: Sequence[Tensor], deadline: Deadline, src: int | None = None
    ) -> None:
        """Broadcast tensors, from this member or from ``src``."""
        root = self.cpu.rank if src is None else src
        works: list[Work[Tensor]] = []
        for part in parts:
            comm = self.routes.of(part.device.type)
            if len(parts) > 1 and comm.capabilities.overlaps:
                works.append(comm.broadcast_(part, src=root, async_op=True))
            else:
                comm.broadcast_(part, src=root, timeout=deadline)
        for work in works:
            self.finish(work, deadline)

    def finish(self, work: Work[T], timeout: Timeout = None) -> T:
        """The end of a blocking call; what cannot be taken back ends the group.

        Raises:
            GroupTimeoutError: not done in time; the group has been aborted.
        """
        try:
            return work.wait(timeout)
        except GroupTimeoutError as error:
            self.cpu.abort(error)
            raise

    def object_of(
        self, src: int, kind: Kind = Kind.OBJECT, dst: int | None = None
    ) -> ObjectReceiver:
        """The next message of ``src``, an object; ``dst`` as of `Receiver`, None: this member."""
        return ObjectReceiver(self.wire, kind, src, self.cpu.rank if dst is None else dst)

    def _has_others(self, src: int) -> bool:
        """Whether the group has more than one member; ``src`` has to be one of them."""
        check_rank("src", src, self.cpu.world_size)
        return self.cpu.world_size > 1

    @contextmanager
    def _or_refuse(self, *dsts: int, deadline: Deadline = NEVER) -> Iterator[None]:
        """Make what is sent to ``dsts``; if that fails, tell them so in its place.

        Args:
            dsts: ranks, or `EVERYONE`: who takes part in a broadcast of this one's.
            deadline: of the broadcast.

        Raises:
            ValueError: one of ``dsts`` is not another rank of the group.
            What `refused` raises.
        """
        for dst in dsts:
            if dst != EVERYONE:
                check_peer("dst", dst, self.cpu.rank, self.cpu.world_size)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - `refused` raises it
            with suppress(CoordinatorError, AnotherThreadError):
                if dsts == (EVERYONE,):
                    refusal = partial(self.wire.error_frame, error, EVERYONE)
                    self._broadcast_message(refusal, (), deadline)
                else:
                    self._begin_to_each(partial(self.wire.error_frame, error), (), dsts)
            self.refused(error)

    def refused(self, error: Exception) -> NoReturn:
        """Raise what the sender of a message gets whose making has raised ``error``.

        Raises:
            MessageRefusedError: in the place of a TypeError: a value cannot be sent.
            Exception: any other ``error`` itself.
        """
        if isinstance(error, TypeError):
            raise self.wire.refused(self.cpu.rank, str(error)) from error
        raise error

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(self._allowed(timeout))

    def _allowed(self, timeout: Timeout) -> Timeout:
        return self._timeout if timeout is None else timeout
