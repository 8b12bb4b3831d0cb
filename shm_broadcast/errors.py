"""The errors between processes; `server.errors` and `coordinator.layout.checkpoint` add to them.

    CoordinatorError
    ├── GroupTimeoutError (TimeoutError)      a deadline passed; names who is behind
    ├── PeerLostError (ConnectionError)       a member's process is gone; names it
    ├── PeerProtocolError                     a member on another host sent nonsense, or refused us
    ├── TransportError (ConnectionError)      a connection broke; no death is known
    ├── GroupAbortedError                     someone aborted; carries the first failure
    ├── GroupClosedError                      it was closed: here, by its owner, or by a member
    ├── DivergenceError                       members issued different operations
    ├── SharedMemoryError                     not enough memory, or a handle that is not valid
    │   └── ForeignMemoryError                a handle that leads outside the group
    └── MessageError
        ├── MessageDecodeError                a message arrived that is not of its type
        ├── MessageSealError                  a message's seal is wrong, or it is not the next
        ├── MessageRefusedError (TypeError)   an object cannot be sent; raised at both ends
        └── MessageTooLargeError              beyond a limit that was set

Wrong arguments raise `ValueError` or `TypeError`, before anything moves.

Ranks: errors name global ranks. Only errors about wrong arguments, and descriptions of a call
("broadcast from rank 1"), use ranks in the group, as ``src`` and ``dst`` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

DRIVER_RANK: Final = -1
"""Stands for the rank of the driver: the process that starts the ranks and is none of them."""


def name_of(rank: int) -> str:
    """How error messages name the member with this rank."""
    return "the driver" if rank == DRIVER_RANK else f"rank {rank}"


def counted(number: int, thing: str) -> str:
    """How many things, in words: ``"2 processes"``."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """What one member of a group was last seen doing, as its board slot says.

    Attributes:
        rank: what its board calls it; `DRIVER_RANK` for the process outside the ranks.
        pid: its process id, on its host; 0 if it never joined.
        state: ``"absent"``: it never joined; ``"idle"``: between operations; ``"busy"``: in one;
            ``"closed"``: it has closed its end; ``"lost"``: it ended, or dropped its
            end of a queue, without closing; ``"unseen"``: it is on another host, of which nothing
            has been heard yet.
        operation: the operation it is in, or was in last; ``""`` if none yet.
        sequence: how many operations it has begun.
        age: seconds since its last progress; ``None`` if it made none.
        host: the name of its host, at a queue's end its address; ``""`` if it is this host.
        silence: seconds since its host was last heard of; 0 while heartbeats come on time.
        collective: the number of the group's collective that it is in, where these are counted:
            1, 2, ..., the same on all members; 0: not known.
    """

    rank: int
    pid: int
    state: str
    operation: str = ""
    sequence: int = 0
    age: float | None = None
    host: str = ""
    silence: float = 0.0
    collective: int = 0

    def __str__(self) -> str:
        if self.state == "absent":
            return f"{name_of(self.rank)} (never joined)"
        if self.state == "unseen":
            return f"{name_of(self.rank)} (on another host, {self.host}, not visible from here)"
        ended = {"closed": " has left,", "lost": " is lost,"}.get(self.state, ",")
        return f"{self.who}{ended} {self.last_seen}"

    @property
    def who(self) -> str:
        """Its rank, pid and host, for messages."""
        host = f" on {self.host}" if self.host else ""
        silence = f", not heard of for {self.silence:.1f} s" if self.silence else ""
        return f"{name_of(self.rank)} (pid {self.pid}{host}{silence})"

    @property
    def last_seen(self) -> str:
        """What it did last, and how long ago, for messages."""
        if self.operation:
            seen, since = f"last seen in {self.operation} #{self.sequence}", ""
        else:
            seen, since = "has begun no operation", "joined "
        ago = "" if self.age is None else f", {since}{self.age:.1f} s ago"
        return f"{seen}{ago}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a group was aborted.

    Attributes:
        rank: the member that reported the failure.
        kind: the name of the error's class.
        message: the error's text.
        culprit: the member that failed: ``rank`` itself, or a peer that it reports about.
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

    One whose constructor keeps each of its arguments as the attribute of that name is pickled as
    these arguments, its text, its attributes and its notes; any other one as exceptions are.
    """

    def __reduce__(self) -> str | tuple[Any, ...]:
        code = getattr(type(self).__init__, "__code__", None)
        names = code.co_varnames[1 : code.co_argcount] if code else ()
        kept = vars(self)
        if not names or not kept.keys() >= {*names}:
            return super().__reduce__()
        return type(self), tuple(kept[name] for name in names), {**kept, "args": self.args}


class GroupTimeoutError(CoordinatorError, TimeoutError):
    """A deadline passed.

    Raised by a queue or by `Work.wait`: nothing is lost, the call may be made again. Raised by a
    group's operation: it cannot be taken back, so the group is aborted for all its members.

    Attributes:
        operation: the call that timed out.
        timeout: its limit in seconds; ``None`` if there was none.
        waiting_for: the members that it waited for, and what they were last doing.
        detail: what else is known; ``""`` if nothing.
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
    """A member that others wait for has gone: its process has ended, or its host is out of reach.

    Attributes:
        operation: the call that waited for it.
        peer: the lost member: rank, pid, host, what it did last, and how long ago.
    """

    def __init__(self, operation: str, peer: MemberStatus) -> None:
        self.operation = operation
        self.peer = peer
        left = peer.state == "closed"
        what = f"{peer.who} has left the group" if left else f"lost {peer.who}"
        super().__init__(f"{operation}: {what}, {peer.last_seen}")

    @property
    def rank(self) -> int:
        """The lost member's rank: what its board calls it."""
        return self.peer.rank

    @property
    def pid(self) -> int:
        """The lost member's process id."""
        return self.peer.pid


class PeerProtocolError(CoordinatorError):
    """A member on another host sent what the protocol does not allow, or refused this one.

    Attributes:
        operation: the call that found it.
        rank: the other member's rank.
        detail: what was wrong.
    """

    def __init__(self, operation: str, rank: int, detail: str) -> None:
        self.operation = operation
        self.rank = rank
        self.detail = detail
        super().__init__(f"{operation}: nothing more is exchanged with {name_of(rank)}: {detail}")


class TransportError(CoordinatorError, ConnectionError):
    """A library's connection broke for an unknown reason: no member is known to have died.

    Attributes:
        operation: the call that used the connection.
        detail: what the library says.
        rank: the member at the other end, where that is known.
    """

    def __init__(self, operation: str, detail: str, rank: int | None = None) -> None:
        self.operation = operation
        self.detail = detail
        self.rank = rank
        where = "a connection" if rank is None else f"the connection with rank {rank}"
        super().__init__(f"{operation}: {where} broke: {detail}")


class GroupAbortedError(CoordinatorError):
    """A member aborted the group; every call of every member raises from then on.

    Attributes:
        operation: what was interrupted.
        failure: the first failure that was reported, the same on every member.
    """

    def __init__(self, operation: str, failure: Failure) -> None:
        self.operation = operation
        self.failure = failure
        super().__init__(f"{operation}: the group was aborted: {failure}")


class GroupClosedError(CoordinatorError):
    """The object was closed: in this process, or by its owner or a member in another one.

    Attributes:
        rank: the other member of a group that has closed it, its global rank; None: it was closed
            here, or is no group.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


def closed_by(operation: str, rank: int) -> GroupClosedError:
    """The error of an operation of a group that the member with this global rank has closed."""
    return GroupClosedError(f"{operation}: {name_of(rank)} has closed the group", rank)


class DivergenceError(CoordinatorError):
    """Members of a group called different operations where all must call the same one.

    Attributes:
        rank: the first member, in rank order, that differs from this one: its global rank.
        ours: what this member called.
        theirs: what that member called.
    """

    def __init__(self, rank: int, ours: str, theirs: str) -> None:
        self.ours = ours
        self.theirs = theirs
        self._named = False
        self._name(rank)

    def name_globally(self, global_ranks: Sequence[int]) -> None:
        """Make it name the member by its global rank; called where the group is known.

        Args:
            global_ranks: of each rank in the group. Later calls do nothing.
        """
        if not self._named:
            self._name(global_ranks[self.rank])
            self._named = True

    def _name(self, rank: int) -> None:
        self.rank = rank
        self.args = (f"rank {rank} issued {self.theirs} where this rank issued {self.ours}",)


class SharedMemoryError(CoordinatorError):
    """Too little memory is free, the system refuses to share any, or a handle does not lead to the
    segment that it names.
    """


class ForeignMemoryError(SharedMemoryError):
    """A handle leads to a process or memory of another user, or outside the group.

    Somebody else has made the handle, or a member that has changed its user since it joined; the
    memory was not opened.
    """


class MessageError(CoordinatorError):
    """One message is bad; the queue that carried it is intact."""


class MessageDecodeError(MessageError):
    """A message arrived that cannot be decoded, or is not of the queue's type."""


class MessageSealError(MessageError):
    """A message's seal is wrong: it was forged, altered, replayed, or meant for another rank.

    Attributes:
        rank: the member that the message names as its sender.
        detail: what is wrong with it.
    """

    def __init__(self, rank: int, detail: str) -> None:
        self.rank = rank
        self.detail = detail
        super().__init__(f"a message of {name_of(rank)} was not opened: {detail}")


class MessageRefusedError(MessageError, TypeError):
    """An object cannot be sent; raised at the sender, and at those that wait to receive it.

    Attributes:
        rank: the sender's global rank.
        detail: why it cannot be sent.
    """

    def __init__(self, rank: int, detail: str) -> None:
        self.rank = rank
        self.detail = detail
        super().__init__(f"{name_of(rank)} sends nothing: {detail}")


class MessageTooLargeError(MessageError):
    """A message is larger than a limit that was set.

    Attributes:
        size: the message's size in bytes.
        limit: the bytes that are allowed.
    """

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit
        super().__init__(f"message of {size} bytes; at most {limit} are allowed")
