"""What the driver needs of a worker's process, wherever it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shm_broadcast import Deadline
    from shm_broadcast.board.stacks import StackFile

    from ..control.protocol import FromWorker, Resume, Start


class WorkerChannel(Protocol):
    """The driver's end of a control channel; see `control.channel.Channel`."""

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has something to give, or to raise."""

    def send(self, message: Start | Resume, deadline: Deadline = ...) -> None:
        """Send a message."""

    def take(self) -> FromWorker | None:
        """The next message if it has arrived, else ``None``. Raises `ChannelClosedError`."""


class WorkerHandle(Protocol):
    """A worker's process: `local.LocalWorker` here, `distant_worker.DistantWorker` elsewhere.

    Attributes:
        rank: the worker's global rank.
        pid: its process id.
        greeted: whether its `Hello` has come: it can show its stack.
        away: whether its `Left` has come: it waits for `start`.
    """

    rank: int
    pid: int
    greeted: bool
    away: bool

    @property
    def channel(self) -> WorkerChannel:
        """The driver's end of the control channel."""

    @property
    def pidfd(self) -> int:
        """A descriptor that is readable when the process has ended."""

    @property
    def stack_file(self) -> StackFile:
        """Where the worker's stack comes."""

    def start(self, start: Start, deadline: Deadline) -> None:
        """Send the start message. Does nothing if the process has ended."""

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process has ended; False after ``timeout`` seconds."""

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or `STACK_SIGNAL`, unless it has ended.

        The last has its stack come into `stack_file`, and is for a worker whose `Hello` has come.
        """

    def cut_off(self) -> None:
        """End the process, whose end of the control channel is closed, unless it ends by itself."""

    def bury(self) -> str:
        """Wait for a process that has ended, or was killed; how it ended."""

    def close(self) -> None:
        """Close all descriptors, after `bury`; idempotent, from any thread."""
