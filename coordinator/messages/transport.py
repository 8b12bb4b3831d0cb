"""Send and receive messages of any kind between the members of a group.

No send waits for its receive, over any transport:

    blocking        blocks only while more than `OUTSTANDING_BYTES` to that peer are in flight; data
                    that cannot be sent eagerly is copied and sent in the background
    asynchronous    up to `COPIED_BYTES` of CPU tensors: likewise, and done at once. Larger ones are
                    not copied, and done when the transport has taken them: shared memory before the
                    receive (`device_comm.shm.channel`), torch's groups with the receive

One thread at a time: the data of a second one could land between the parts of a message. The sender
encodes the message; if that fails, the receivers get an error frame instead.
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
        self._under_way: dict[int, deque[tuple[int, Work[None]]]] = {}
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
        """As `send`, without blocking; the tensors must not change until the works are done."""
        with self._turn as acquired:
            self._require(acquired)
            return self._begin(make, parts, dst)

    def _begin(
        self, make: MakeMessage | None, parts: Sequence[Tensor], dst: int
    ) -> list[Work[None]]:
        works = []
        cpu_bytes = sum(part.nbytes for part in parts if part.device.type == "cpu")
        copies = cpu_bytes <= COPIED_BYTES and (
            cpu_bytes + _bytes_of(self._under_way.get(dst, ())) <= OUTSTANDING_BYTES
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
        def send(frames: Sequence[Tensor]) -> None:
            for frame in frames:
                # No other code changes a frame.
                self._send_eagerly(self._routes.cpu, frame, dst, copy=False)
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
        for under_way in self._under_way.values():
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
        under_way = self._under_way.setdefault(dst, deque())
        under_way.append((size, work))
        while under_way and under_way[0][1].is_completed():
            self._finish_first(under_way, NEVER)
        return work

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


if TYPE_CHECKING:
    Packed = tuple[bytes, Sequence[Tensor]]
    """The payload of a message, and the tensors behind it."""

    Make = Callable[[], Packed]

T = TypeVar("T")


class MessageTransport:
    """One member's messages to and from the others. The group owns the communicators.

    ``cpu`` moves messages, ``routes`` the tensors behind them; ``wire`` encodes and seals.
    """

    def __init__(self, cpu: Communicator, device: Communicator, wire: MessageCodec) -> None:
        """Use these communicators: the same object twice if the group's device is the CPU."""
        self.cpu = cpu
        self.wire = wire
        self.routes = Communicators(cpu, device)
        self._timeout = cpu.timeout
        self._outgoing = Sender(self.routes, numbered=wire.numbers)
        self._turns: dict[int, OrderedReceive] = {}
        # A turn for each sender. Ranks that are no members get one as well, and are refused later.
        turns = {rank: Turn() for rank in range(cpu.world_size)}
        self._receiving = defaultdict(Turn, turns)
        self._others = [rank for rank in range(cpu.world_size) if rank != cpu.rank]

    def flush(self, linger: float) -> None:
        """Wait for messages in flight, at most ``linger`` seconds."""
        with suppress(CoordinatorError):
            self._outgoing.flush(Deadline.after(linger))

    def send(self, kind: Kind, dst: int, make: Make, timeout: Timeout) -> None:
        """Send the result of ``make``; if it raises, send an error frame instead."""
        deadline = self._deadline(timeout)
        with self._or_refuse(dst):
            payload, parts = make()
        message = partial(self.wire.message, kind, payload, dst)
        self._outgoing.send(message, parts, dst, deadline)

    def isend(
        self, kind: Kind, dsts: Sequence[int], make: Make, result: T, timeout: Timeout
    ) -> Work[T]:
        """Begin to send the result of ``make``; the work returns ``result``."""
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
        """Receive the next message of ``src`` and return its value."""
        deadline = self._deadline(timeout)
        check_peer("src", src, self.cpu.rank, self.cpu.world_size)
        try:
            self._receive(incoming, src, deadline)
            return incoming.result(deadline)
        except BaseException as error:
            incoming.leave(error)
            raise

    def _receive(self, incoming: Receiver[Any], src: int, deadline: Deadline) -> None:
        with self._receiving[src] as acquired:
            self._require_alone(acquired, src)
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
        """Begin to receive the next message of ``src``."""
        pending = self.begin(incoming, src)
        allowed = self._allowed(timeout)
        work: Work[Any] = Work(None, pending, lambda: incoming.result(allowed), allowed)
        return work

    def begin(self, incoming: Receiver[Any], src: int) -> Pending:
        """Begin to receive a message, behind earlier receives. Never blocks."""
        cpu, device = self.routes
        check_peer("src", src, self.cpu.rank, self.cpu.world_size)
        with self._receiving[src] as acquired:
            self._require_alone(acquired, src)
            cpu.begun.count_received(src)
            if device is cpu:
                return cpu.irecv_series(incoming.following, src)
            return self._in_turn(
                src,
                lambda: [device.irecv(out=part, src=src) for part in incoming.on_device],
                lambda: cpu.irecv_series(incoming.following, src),
            )

    def _require_alone(self, acquired: bool, src: int) -> None:
        if not acquired:
            raise AnotherThreadError(f"is receiving from rank {src} over {self.cpu.name}")

    def _await_turn(self, src: int, deadline: Deadline) -> None:
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
        """Broadcast the result of ``make``. Collective: yes, every member."""
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
        """Receive a broadcast of ``src``. Collective: yes, every member."""
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
        """Abort if a message may be half received: the start of the next one is then unknown."""
        if isinstance(error, CoordinatorError):
            torn = isinstance(error, (DivergenceError, MessageDecodeError, MessageSealError))
        else:
            torn = incoming.has_begun
        if torn:
            self.cpu.abort(error)

    def _broadcast_parts(
        self, parts: Sequence[Tensor], deadline: Deadline, src: int | None = None
    ) -> None:
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
        """Wait for a blocking call's work; a GroupTimeoutError aborts the group."""
        try:
            return work.wait(timeout)
        except GroupTimeoutError as error:
            self.cpu.abort(error)
            raise

    def object_of(
        self, src: int, kind: Kind = Kind.OBJECT, dst: int | None = None
    ) -> ObjectReceiver:
        """Return the receiver of the next object of ``src`` to ``dst``; None: this member."""
        return ObjectReceiver(self.wire, kind, src, self.cpu.rank if dst is None else dst)

    def _has_others(self, src: int) -> bool:
        check_rank("src", src, self.cpu.world_size)
        return self.cpu.world_size > 1

    @contextmanager
    def _or_refuse(self, *dsts: int, deadline: Deadline = NEVER) -> Iterator[None]:
        """Enclose the making of a message to ``dsts``; if it raises, send an error frame instead.

        ``dsts`` are ranks, or `EVERYONE` for a broadcast, with its ``deadline``. Raises as
        `refused`.
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
        """Raise MessageRefusedError for a TypeError, else ``error`` itself."""
        if isinstance(error, TypeError):
            raise self.wire.refused(self.cpu.rank, str(error)) from error
        raise error

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(self._allowed(timeout))

    def _allowed(self, timeout: Timeout) -> Timeout:
        return self._timeout if timeout is None else timeout
