"""The errors between processes; `server.errors` and `coordinator.layout.checkpoint` add to them.

    CoordinatorError
    ├── GroupTimeoutError (TimeoutError)      a deadline passed; names the ranks that are behind
    ├── PeerLostError (ConnectionError)       a member's process has exited; names it
    ├── PeerProtocolError                     a remote member broke the protocol or refused us
    ├── TransportError (ConnectionError)      a connection broke; no process is known to have exited
    ├── GroupAbortedError                     a member aborted; carries the first failure
    ├── GroupClosedError                      closed: here, by its owner, or by a member
    ├── DivergenceError                       members issued different operations
    ├── SharedMemoryError                     too little memory, or an invalid handle
    │   └── ForeignMemoryError                a handle that leads outside the group
    └── MessageError
        ├── MessageDecodeError                a received message is not of its type
        ├── MessageSealError                  a message's seal is wrong, or it is not the next
        └── MessageRefusedError (TypeError)   an object cannot be sent; raised at both ends

Wrong arguments raise `ValueError` or `TypeError` before any data moves. Common attributes:
``operation`` is the call that raised the error, ``detail`` the reason. Ranks are global. Only
errors about wrong arguments and descriptions of a call ("broadcast from rank 1") use ranks of the
group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

DRIVER_RANK: Final = -1
"""The rank of the driver: the process that starts the ranks and has none itself."""


def name_of(rank: int) -> str:
    """Return the member's name in error messages."""
    return "the driver" if rank == DRIVER_RANK else f"rank {rank}"


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, such as ``"2 processes"``."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """The last published state of one member of a group.

    Attributes:
        rank: the rank on its board; `DRIVER_RANK` for the process outside the ranks.
        pid: its process id, on its host; 0 if it never joined.
        state: ``"absent"``: never joined; ``"idle"``: between operations; ``"busy"``: in an
            operation; ``"closed"``: closed its end; ``"lost"``: exited, or dropped its end of a
            queue, without closing; ``"unseen"``: on another host, before its first heartbeat.
        operation: its current or last operation; ``""`` before the first.
        sequence: the number of operations that it has begun.
        age: seconds since its last progress; ``None`` before the first.
        host: the name of its host, or the address of a queue's end; ``""`` on this host.
        silence: seconds since the last heartbeat of its host; 0 while heartbeats arrive on time.
        waits_for: the ranks for which its threads wait, on this host; up to 32 for each thread.
    """

    rank: int
    pid: int
    state: str
    operation: str = ""
    sequence: int = 0
    age: float | None = None
    host: str = ""
    silence: float = 0.0
    waits_for: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.state == "absent":
            return f"{name_of(self.rank)} (never joined)"
        if self.state == "unseen":
            return f"{name_of(self.rank)} (on another host, {self.host}, not visible from here)"
        ended = {"closed": " has closed its end,", "lost": " is lost,"}.get(self.state, ",")
        return f"{self.who}{ended} {self.last_seen}"

    @property
    def activity(self) -> str:
        """Return ``"computing"``, ``"waiting"``, ``"idle"``, or the state of a process that ended.

        A process is waiting if a thread waits for another rank, idle if one waits for the driver's
        next message, else computing: it waits for no other process. Of a process on another host
        only ``state`` is known: it is idle between operations.
        """
        if self.state not in ("idle", "busy"):
            return self.state
        if self.host:
            return "idle" if self.state == "idle" else "computing"
        if not self.waits_for:
            return "computing"
        return "idle" if {*self.waits_for} == {DRIVER_RANK} else "waiting"

    @property
    def who(self) -> str:
        """Return rank, pid and host, for messages."""
        host = f" on {self.host}" if self.host else ""
        silence = f", silent for {self.silence:.1f} s" if self.silence else ""
        return f"{name_of(self.rank)} (pid {self.pid}{host}{silence})"

    @property
    def last_seen(self) -> str:
        """Return the last operation and its age, for messages."""
        if self.operation:
            seen, since = f"last seen in {self.operation} #{self.sequence}", ""
        else:
            seen, since = "has begun no operation", "joined "
        ago = "" if self.age is None else f", {since}{self.age:.1f} s ago"
        return f"{seen}{ago}"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a group was aborted.

    Attributes:
        rank: the member that reported the failure.
        kind: the name of the error's class.
        culprit: the member that failed: ``rank`` itself, or a peer of it.
        host: the reporting member's host; ``""`` if it is this host.
    """

    rank: int
    kind: str
    message: str
    culprit: int
    host: str = ""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        about = "" if self.culprit == self.rank else f" about {name_of(self.culprit)}"
        return f"{name_of(self.rank)}{where} reported{about}: {self.kind}: {self.message}"


class CoordinatorError(Exception):
    """The root of this project's errors.

    If the constructor stores each argument as the attribute of that name, `pickle` keeps the
    attributes, the text and the notes; otherwise as of any exception.
    """

    def __reduce__(self) -> str | tuple[Any, ...]:
        code = getattr(type(self).__init__, "__code__", None)
        names = code.co_varnames[1 : code.co_argcount] if code else ()
        kept = vars(self)
        if not names or not kept.keys() >= {*names}:
            return super().__reduce__()
        return type(self), tuple(kept[name] for name in names), {**kept, "args": self.args}


class GroupTimeoutError(CoordinatorError, TimeoutError):
    """A deadline passed; ``waiting_for`` are the members that the call waited for.

    From a queue or `Work.wait`: no data is lost, and the call may be repeated. From a group's
    operation: the operation cannot be undone, so the group is aborted for all members. ``timeout``
    is in seconds; ``None`` if there was no limit.
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


class PeerLostError(CoordinatorError, ConnectionError):
    """A member that others wait for is lost: its process exited, or its host is out of reach."""

    def __init__(self, operation: str, peer: MemberStatus) -> None:
        self.operation = operation
        self.peer = peer
        closed = peer.state == "closed"
        end = f"{peer.who} has closed the group" if closed else f"lost {peer.who}"
        super().__init__(f"{operation}: {end}, {peer.last_seen}")

    @property
    def rank(self) -> int:
        """Return the lost member's rank on its board."""
        return self.peer.rank

    @property
    def pid(self) -> int:
        """Return the lost member's process id."""
        return self.peer.pid


class PeerProtocolError(CoordinatorError):
    """A member on another host violated the protocol, or refused this member."""

    def __init__(self, operation: str, rank: int, detail: str) -> None:
        self.operation = operation
        self.rank = rank
        self.detail = detail
        super().__init__(f"{operation}: nothing more is exchanged with {name_of(rank)}: {detail}")


class TransportError(CoordinatorError, ConnectionError):
    """A library's connection broke for an unknown reason; no process is known to have exited.

    ``rank`` is the member at the other end; ``None`` if unknown.
    """

    def __init__(self, operation: str, detail: str, rank: int | None = None) -> None:
        self.operation = operation
        self.detail = detail
        self.rank = rank
        where = "a connection" if rank is None else f"the connection with rank {rank}"
        super().__init__(f"{operation}: {where} broke: {detail}")


class GroupAbortedError(CoordinatorError):
    """A member aborted the group; every later call of every member raises this error.

    ``failure`` is the first reported failure, the same on every member.
    """

    def __init__(self, operation: str, failure: Failure) -> None:
        self.operation = operation
        self.failure = failure
        super().__init__(f"{operation}: the group was aborted: {failure}")


class GroupClosedError(CoordinatorError):
    """The object was closed: in this process, by its owner, or by another member.

    ``rank`` is the member that closed the group; ``None``: this process, or the object is no group.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


def closed_by(operation: str, rank: int) -> GroupClosedError:
    """Return the error of an operation of a group that the member ``rank`` (global) has closed."""
    return GroupClosedError(f"{operation}: {name_of(rank)} has closed the group", rank)


class DivergenceError(CoordinatorError):
    """Members of a group called different operations where all must call the same one.

    ``rank`` is the first member, in rank order, that differs from this one; ``ours`` and ``theirs``
    are the calls.
    """

    def __init__(self, rank: int, ours: str, theirs: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self._named = False
        self._name(rank)

    def name_globally(self, global_ranks: Sequence[int]) -> None:
        """Replace the rank in the group by the global rank; later calls have no effect."""
        if not self._named:
            self._name(global_ranks[self.rank])
            self._named = True

    def _name(self, rank: int) -> None:
        self.rank = rank
        self.args = (f"rank {rank} issued {self.theirs} where this rank issued {self.ours}",)


class SharedMemoryError(CoordinatorError):
    """Memory is short or refused, or a handle does not lead to its segment."""


class ForeignMemoryError(SharedMemoryError):
    """A handle leads to a process or memory of another user, or outside the group.

    The memory was not opened. The handle is forged, or its member changed its user after joining.
    """


class MessageError(CoordinatorError):
    """One message is bad; the queue that carried it stays usable."""


class MessageDecodeError(MessageError):
    """A received message cannot be decoded, or is not of the queue's type."""


class MessageSealError(MessageError):
    """A message's seal is wrong: it was forged, altered, replayed, or meant for another rank.

    ``rank`` is the sender that the message names.
    """

    def __init__(self, rank: int, detail: str) -> None:
        self.rank = rank
        self.detail = detail
        super().__init__(f"a message of {name_of(rank)} was not opened: {detail}")


class MessageRefusedError(MessageError, TypeError):
    """An object cannot be sent; raised at the sender and at the waiting receivers."""

    def __init__(self, rank: int, detail: str) -> None:
        self.rank = rank
        self.detail = detail
        super().__init__(f"{name_of(rank)} sends nothing: {detail}")
