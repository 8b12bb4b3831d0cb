"""What the head and the other hosts of a pool say to each other, over the link between them.

host -> head    HostHello; then Pulse, OfWorker, WorkerEnded, WorkerStack, HostSees; HostGaveUp at
                the end, if the head was silent
head -> host    HostAdmitted or HostRefused; then Pulse, BeginGeneration, ToWorker, SignalWorker,
                MarkCall, LookAround; HostDismissed at the end
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from shm_broadcast.onlooker.programs import BoardSeen  # noqa: TC001 - decoded by this type

from ..control.protocol import FromWorker, Resume, Start  # noqa: TC001 - decoded by these types
from ..pool_config import PoolConfig  # noqa: TC001


class HostHello(msgspec.Struct, frozen=True, tag=True):
    """A host's first message.

    Attributes:
        name: its host name.
        address: its address on the way to the head.
        pid: the process that speaks.
        node: which host it says it is.
        facts: what has to be the same on all hosts, by name.
        visitor: random text, the same whenever this process comes again.
    """

    name: str
    address: str
    pid: int
    node: int
    facts: dict[str, str]
    visitor: str = ""

    @property
    def who(self) -> str:
        """The host's name and address, for messages."""
        return f"host {self.name} ({self.address})"


class HostAdmitted(msgspec.Struct, frozen=True, tag=True):
    """The host takes part.

    Attributes:
        n_workers: the pool's workers on all hosts.
        ranks: those that this host runs.
        config: the pool's settings.
        stays: whether the host is to come again when the link has broken.
    """

    n_workers: int
    ranks: tuple[int, ...]
    config: PoolConfig
    stays: bool


class HostRefused(msgspec.Struct, frozen=True, tag=True):
    """The host takes no part."""

    reason: str


class HostDismissed(msgspec.Struct, frozen=True, tag=True):
    """The pool was shut down."""


class BeginGeneration(msgspec.Struct, frozen=True, tag=True):
    """Begin a generation: make its board, and start the missing workers.

    Attributes:
        generation: its number.
        missing: the ranks to start.
        in_flight: how many calls may be under way at once.
        seconds: how long the start may take; ``None``: for ever.
    """

    generation: int
    missing: tuple[int, ...]
    in_flight: int
    seconds: float | None


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """Pass a message on to a worker. In `Start.handles` the host fills its own memory in."""

    rank: int
    message: Start | Resume


class SignalWorker(msgspec.Struct, frozen=True, tag=True):
    """Send a worker a signal; `STACK_SIGNAL` asks for a `WorkerStack`."""

    rank: int
    number: int


class MarkCall(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for a call any more."""

    generation: int
    number: int


class Pulse(msgspec.Struct, frozen=True, tag=True):
    """What the sender's board says; sent at once when it was aborted, and in short intervals.

    Attributes:
        generation: the board's; 0 before the first.
        beat: an encoded `coordinator.hosts.remote_boards.Beat`; empty before the first generation.
    """

    generation: int
    beat: bytes


class OfWorker(msgspec.Struct, frozen=True, tag=True):
    """A message of a worker.

    Attributes:
        since: the generation in which the worker was started, here and below: what is said of one
            that was replaced meanwhile is not about the one in its place.
    """

    rank: int
    since: int
    message: FromWorker


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended, or could not be started.

    Attributes:
        how: such as ``"killed by SIGKILL"``.
        stack: its stacks, if it could write them.
    """

    rank: int
    since: int
    how: str
    stack: str


class WorkerStack(msgspec.Struct, frozen=True, tag=True):
    """The stack that was asked for."""

    rank: int
    since: int
    text: str


class LookAround(msgspec.Struct, frozen=True, tag=True):
    """Asks a host for a `HostSees` of the same number."""

    number: int


class HostSees(msgspec.Struct, frozen=True, tag=True):
    """What a host sees of its processes.

    Attributes:
        number: the question's.
        key: of the pool's board on that host.
        boards: all boards of these processes; empty if they cannot be looked at.
    """

    number: int
    key: str
    boards: tuple[BoardSeen, ...]


class HostGaveUp(msgspec.Struct, frozen=True, tag=True):
    """The host ends its workers, since it has not heard of the head; read by a head that goes on.

    Attributes:
        seconds: for how long.
    """

    seconds: float


FromHost: TypeAlias = (
    HostHello | Pulse | OfWorker | WorkerEnded | WorkerStack | HostSees | HostGaveUp
)
FromHead: TypeAlias = (
    HostAdmitted
    | HostRefused
    | HostDismissed
    | BeginGeneration
    | ToWorker
    | SignalWorker
    | MarkCall
    | LookAround
    | Pulse
)
