"""What can go wrong between processes; `server.errors` and `coordinator.layout.errors` add to it.

    CoordinatorError
    ├── GroupTimeoutError (TimeoutError)      a deadline passed; names who is behind
    ├── PeerLostError (ConnectionError)       a member's process is gone; names it
    ├── PeerProtocolError                     a member on another host sent nonsense, or refused us
    ├── TransportError (ConnectionError)      a connection broke; nobody is known to have died
    ├── GroupAbortedError                     someone aborted; carries the first failure
    ├── GroupClosedError                      you closed it
    ├── DivergenceError                       members issued different operations
    ├── SharedMemoryError                     not enough memory, or a handle that is not valid
    └── MessageError
        ├── MessageDecodeError                a message arrived that is not of its type
        └── MessageTooLargeError              beyond a limit that was set

Wrong arguments raise `ValueError` or `TypeError`, before anything moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DRIVER_RANK: Final = -1
"""The rank of a board's member that is none of the ranks: the process that drives them."""


def name_of(rank: int) -> str:
    """What messages call a member."""
    return "the driver" if rank == DRIVER_RANK else f"rank {rank}"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What one member of a group was last seen doing, as its board slot says.

    Attributes:
        rank: what its board calls it; `DRIVER_RANK` for the process outside the ranks.
        pid: its process id; 0 if it never joined.
        state: ``"absent"``, ``"idle"``, ``"busy"``, ``"closed"`` or ``"lost"``.
        operation: the operation it is in, or was in last; ``""`` if none yet.
        sequence: how many operations it has begun.
        age: seconds since its last progress; ``None`` if it made none.
    """

    rank: int
    pid: int
    state: str
    operation: str = ""
    sequence: int = 0
    age: float | None = None

    def __str__(self) -> str:
        if self.state == "absent":
            return f"{name_of(self.rank)} (never joined)"
        if self.operation:
            seen, since = f"last seen in {self.operation} #{self.sequence}", ""
        else:
            seen, since = "has begun no operation", "joined "
        if self.state in ("closed", "lost"):
            seen = f"{self.state}, {seen}"
        ago = "" if self.age is None else f", {since}{self.age:.1f} s ago"
        return f"{name_of(self.rank)} (pid {self.pid}), {seen}{ago}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group was aborted.

    Attributes:
        rank: the member that reported it.
        kind: the name of the error's class.
        message: its text.
        culprit: the member it happened to; equal to ``rank`` unless a peer was reported.
    """

    rank: int
    kind: str
    message: str
    culprit: int

    def __str__(self) -> str:
        about = "" if self.culprit == self.rank else f" about {name_of(self.culprit)}"
        return f"{name_of(self.rank)} reported{about}: {self.kind}: {self.message}"


class CoordinatorError(Exception):
    """The root of this project's errors."""


class GroupTimeoutError(CoordinatorError, TimeoutError):
    """A deadline passed.

    Of a queue or of `Work.wait`: nothing is lost, the call may be made again. Of a verb of a group:
    what was begun cannot be taken back, so the group is aborted, for all its members.

    Attributes:
        operation: what was waited in.
        timeout: the seconds that were allowed.
        waiting_for: the members that had not arrived, with what they were last doing.
    """

    def __init__(
        self,
        operation: str,
        timeout: float | None,
        waiting_for: tuple[MemberStatus, ...] = (),
        detail: str = "",
    ) -> None:
        self.operation = operation
        self.timeout = timeout
        self.waiting_for = waiting_for
        self.detail = detail
        waited = "" if timeout is None else f" after {timeout:g} s"
        who = "; ".join(str(member) for member in waiting_for)
        text = f"{operation}: timed out{waited}"
        text += f", waiting for {who}" if who else ""
        super().__init__(f"{text} ({detail})" if detail else text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.timeout, self.waiting_for, self.detail)


class PeerLostError(CoordinatorError, ConnectionError):
    """A member's process has ended while others need it.

    Attributes:
        operation: what was waited in.
        peer: the lost member: rank, pid, and the age of its last progress.
    """

    def __init__(self, operation: str, peer: MemberStatus) -> None:
        self.operation = operation
        self.peer = peer
        super().__init__(f"{operation}: lost {peer}")

    @property
    def rank(self) -> int:
        """The lost member's rank in the group."""
        return self.peer.rank

    @property
    def pid(self) -> int:
        """The lost member's process id."""
        return self.peer.pid

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.peer)


class PeerProtocolError(CoordinatorError):
    """A member on another host sent what the protocol does not allow, or refused this one.

    Attributes:
        operation: what was waited in.
        rank: the other member's rank.
        detail: what was wrong.
    """

    def __init__(self, operation: str, rank: int, detail: str) -> None:
        self.operation = operation
        self.rank = rank
        self.detail = detail
        super().__init__(f"{operation}: nothing more is exchanged with {name_of(rank)}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.rank, self.detail)


class TransportError(CoordinatorError, ConnectionError):
    """A library's connection broke and the cause is not known: no member is seen to have died.

    Attributes:
        operation: what was waited in.
        detail: what the library says.
        rank: the member at the other end, where that is known.
    """

    def __init__(self, operation: str, detail: str, rank: int | None = None) -> None:
        self.operation = operation
        self.detail = detail
        self.rank = rank
        where = "a connection" if rank is None else f"the connection with rank {rank}"
        super().__init__(f"{operation}: {where} broke: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.detail, self.rank)


class GroupAbortedError(CoordinatorError):
    """A member aborted the group; every call of every member raises from then on.

    Attributes:
        operation: what was interrupted.
        failure: the first failure that was reported, the same on every member.
    """

    def __init__(self, operation: str, failure: Failure) -> None:
        self.operation = operation
        self.failure = failure
        super().__init__(f"{operation}: group aborted; {failure}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.operation, self.failure)


class GroupClosedError(CoordinatorError):
    """You closed it: the object was shut down in this process, or by its owner in good order."""


class DivergenceError(CoordinatorError):
    """Members of a group issued different operations where the same one was due.

    Attributes:
        rank: the first member, in rank order, that differs from this one.
        ours: what this member issued.
        theirs: what that member issued.
    """

    def __init__(self, rank: int, ours: str, theirs: str) -> None:
        self.rank = rank
        self.ours = ours
        self.theirs = theirs
        super().__init__(f"rank {rank} issued {theirs} where this rank issued {ours}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.ours, self.theirs)


class SharedMemoryError(CoordinatorError):
    """Shared memory could not be had, or a handle does not name what it says."""


class MessageError(CoordinatorError):
    """One message is bad; the queue that carried it is intact."""


class MessageDecodeError(MessageError):
    """A message arrived that cannot be decoded, or is not of the queue's type."""


class MessageTooLargeError(MessageError):
    """A message is larger than a limit that was set.

    Attributes:
        size: the message's bytes.
        limit: the bytes allowed.
    """

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(f"message of {size} bytes; at most {limit} are allowed")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.size, self.limit)
