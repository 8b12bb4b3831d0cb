"""The state of the members on other hosts, concluded from their hosts' beats.

A `HostHeartbeat` is what a host's board says at one moment. `RemoteBoards` keeps the latest beat
of every other host and concludes the state of its members. It does no input or output: the thread
of `coordinator.hosts` carries the beats.

A member on another host counts as gone
    - when its host's beat says that it has died or left;
    - when the store answers, but has had no new beat of its host for `SILENCE_SECONDS`, or for
      `SUSPECT_SECONDS` after a connection with that host broke. Only time in which the store
      answered is counted, so a process that was itself stopped does not consider others silent;
    - when it hosts the store, and the store's connection has closed, or the store has not answered
      for `SILENCE_SECONDS`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from shm_broadcast import Board
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.errors import MemberStatus, name_of
from shm_broadcast.state.fingerprint import Fingerprint

_log = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 10.0
"""A host counts as lost when there was no new beat of it for so long."""

SUSPECT_SECONDS: Final = 1.0
"""The same, after a connection with the host broke."""

_HEARD_WITHIN: Final = 1.7
"""When the store answers so many seconds after a connection broke, it tells of a member's end on
another host, or that host has been silent for `SUSPECT_SECONDS`."""

_SUSPECTED_FOR: Final = 5.0
"""How long the shorter limit holds after a connection broke, in seconds."""

_NORMAL_SILENCE: Final = 1.0
"""Up to so many seconds without a beat are not mentioned in messages."""

_LOOK_AGAIN: Final = 1.0
"""How long the store must be seen not to answer, in seconds, before its keeper counts as gone.

A process that was stopped (by SIGSTOP, say) finds the last answer too old when it goes on, but gets
new ones in less than that.
"""

_LONGEST_GAP: Final = 0.5
"""Two looks at the store's silence that are further apart, in seconds, begin a new observation."""


class MemberHeartbeat(msgspec.Struct, array_like=True, frozen=True):
    """What a board says about one member.

    Attributes:
        member: its member number.
        pid, state, operation, sequence, age, collective: as in `MemberStatus`.
        tallies: as of `Fingerprints.of_member`.
    """

    member: int
    pid: int
    state: str
    operation: str
    sequence: int
    age: float | None
    collective: int
    fingerprints: tuple[Fingerprint, ...] = ()


class FailureHeartbeat(msgspec.Struct, array_like=True, frozen=True):
    """Why a board was aborted: as `Failure`, with member numbers instead of ranks."""

    member: int
    kind: str
    message: str
    culprit: int


class HostHeartbeat(msgspec.Struct, array_like=True, frozen=True):
    """What one host's board says.

    Attributes:
        number: a time stamp in ns; grows from beat to beat, whichever process writes them.
        members: the members on this host.
        failure: why the group was aborted; None if it was not.
    """

    number: int
    members: tuple[MemberHeartbeat, ...]
    failure: FailureHeartbeat | None


_DECODER = msgspec.msgpack.Decoder(HostHeartbeat)


def encode_heartbeat(board: Board, members: Iterable[int], number: int) -> bytes:
    """Encode the beat of this host.

    Args:
        board: this host's board.
        members: the member numbers of the members on this host.
        number: the beat's number.
    """
    seen = tuple(
        _member_heartbeat(member, board.member_status(member), board.fingerprints.of_member(member))
        for member in members
    )
    failure, ranks = board.aborted, board.ranks
    told = failure and FailureHeartbeat(
        ranks.index(failure.rank), failure.kind, failure.message, ranks.index(failure.culprit)
    )
    return msgspec.msgpack.encode(HostHeartbeat(number, seen, told or None))


def decode_heartbeat(raw: bytes) -> HostHeartbeat | None:
    """What `encode_heartbeat` has encoded; None if ``raw`` is not a beat."""
    try:
        return _DECODER.decode(raw)
    except UNDECODABLE:
        return None


def number_of(raw: bytes) -> int:
    """The number of an encoded beat; 0 if ``raw`` is not a beat."""
    heartbeat = decode_heartbeat(raw)
    return 0 if heartbeat is None else heartbeat.number


def _member_heartbeat(
    member: int, status: MemberStatus, fingerprints: Iterable[Fingerprint]
) -> MemberHeartbeat:
    return MemberHeartbeat(
        member,
        status.pid,
        status.state,
        status.operation,
        status.sequence,
        status.age,
        status.collective,
        tuple(fingerprints),
    )


@dataclass(slots=True)
class _Host:
    """What is known of one other host; times are of this process's clock, in seconds."""

    name: str
    members: tuple[int, ...]
    heard_at: float
    number: int = -1
    heartbeats: dict[int, MemberHeartbeat] = field(default_factory=dict)
    suspected_at: float = -1e9
    told_lost: bool = False


class RemoteBoards:
    """One process's view of the members on other hosts; its board asks it (`RemoteMembers`).

    Attributes:
        refresh: writes this host's beat and reads the others', now.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        hosts: Mapping[str, Sequence[int]],
        *,
        keeper: int | None = None,
        store: str = "",
        swap: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without a beat of any host.

        Args:
            ranks: each member's rank, by member number.
            hosts: the member numbers of each other host, by its name.
            keeper: the member whose process hosts the store; None if no member's does.
            store: the store's address, for messages.
            swap: writes this host's beat and reads the others', now.
            clock: returns a time in seconds.
        """
        now = clock()
        self._ranks = ranks
        self._hosts = [_Host(name, tuple(members), now) for name, members in hosts.items()]
        self._host_of = {member: host for host in self._hosts for member in host.members}
        self._keeper = keeper
        self._store = store
        self.refresh = swap
        self._clock = clock
        self._answered_at = now
        self._ended = ""
        self._blamed: set[int] = set()
        self._late_since = self._late_until = -1e9

    # --- what comes in -------------------------------------------------------------------

    def receive(self, heartbeats: Iterable[bytes]) -> list[FailureHeartbeat]:
        """Take in the encoded beats of the other hosts, in the order of ``hosts``.

        Returns:
            The failures that they report.
        """
        now = self._clock()
        failures = []
        for host, raw in zip(self._hosts, heartbeats, strict=True):
            heartbeat = self._read(raw, host)
            if heartbeat is None:
                continue
            if heartbeat.number > host.number:
                host.number, host.heard_at = heartbeat.number, now
                host.heartbeats = {each.member: each for each in heartbeat.members}
            if heartbeat.failure is not None:
                failures.append(heartbeat.failure)
        self._answered_at = now
        return failures

    def pass_on(self, heartbeats: Iterable[bytes], board: Board) -> None:
        """`receive` the beats, and abort this host's board for the first failure that they
        report.
        """
        for failure in self.receive(heartbeats):
            if board.aborted is None:
                board.report(failure.member, failure.kind, failure.message, failure.culprit)

    def store_ended(self, why: str) -> None:
        """Note that the connection to the store has broken: no more beats will come."""
        self._ended = why

    # --- what a board asks ---------------------------------------------------------------

    def status(self, member: int) -> MemberStatus | None:
        """The latest known state of ``member``; None if it is on this host."""
        host = self._host_of.get(member)
        if host is None:
            return None
        heartbeat = host.heartbeats.get(member)
        if heartbeat is None:
            return MemberStatus(self._ranks[member], 0, "unseen", host=host.name)
        silence = self._silence(host)
        return MemberStatus(
            self._ranks[member],
            heartbeat.pid,
            "lost" if heartbeat.state != "closed" and self._has_died(member) else heartbeat.state,
            heartbeat.operation,
            heartbeat.sequence,
            None if heartbeat.age is None else heartbeat.age + self._clock() - host.heard_at,
            host.name,
            silence if heartbeat.state in ("idle", "busy") and silence > _NORMAL_SILENCE else 0.0,
            heartbeat.collective,
        )

    def fingerprints(self, member: int) -> Sequence[Fingerprint] | None:
        """The latest known tallies of ``member``; None if it is on this host."""
        host = self._host_of.get(member)
        if host is None:
            return None
        heartbeat = host.heartbeats.get(member)
        return () if heartbeat is None else heartbeat.fingerprints

    def gone(self, member: int) -> bool:
        """Whether ``member`` has died or left, or its host has been silent for too long."""
        host = self._host_of.get(member)
        if host is None:
            return False
        heartbeat = host.heartbeats.get(member)
        if (heartbeat is not None and heartbeat.state in ("lost", "closed")) or self._has_died(
            member
        ):
            return True
        suspected = self._answered_at < host.suspected_at + _SUSPECTED_FOR
        limit = SUSPECT_SECONDS if suspected else SILENCE_SECONDS
        if self._answered_at - host.heard_at > limit:
            self._tell_lost(host)
            return True
        return member == self._keeper and self._store_is_silent()

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """A connection with one of ``members`` broke: shorten the limit for their hosts.

        Returns:
            A function that returns whether by now it is known which of them has gone, if one has.
            It counts by the store's answers: a machine that stalls this process stalls them, too.
        """
        since = self._clock()
        for member in members:
            if member in self._host_of:
                self._host_of[member].suspected_at = since

        def known() -> bool:
            latest = SILENCE_SECONDS if not self._ended else _HEARD_WITHIN
            return self._answered_at - since >= _HEARD_WITHIN or self._clock() - since >= latest

        return known

    def mark_dead(self, member: int) -> None:
        """Count ``member`` as dead: the group was aborted with it as the culprit."""
        if member in self._host_of and member not in self._blamed:
            self._blamed.add(member)
            self.refresh()  # its host's latest beat says what it did last, for the error

    def problems(self) -> str:
        """A text for error messages if hosts or the store are silent; else ``""``."""
        if self._ended:
            return f"other hosts are not heard any more: {self._ended}"
        if self._unanswered() > _NORMAL_SILENCE:
            return (
                f"other hosts are not heard: the store at {self._store}{self._kept()} has not "
                f"answered for {self._unanswered():.1f} s"
            )
        silent = [each for each in self._hosts if self._is_silent(each)]
        return "; ".join(
            f"{each.name} ({self._called(each.members)}) not heard of for "
            f"{self._silence(each):.1f} s"
            for each in silent
        )

    def _read(self, raw: bytes, host: _Host) -> HostHeartbeat | None:
        """Decode a beat of ``host``; None if it is not valid.

        Without a secret the store is open to anybody, so a beat is checked like any input.
        """
        heartbeat = decode_heartbeat(raw)
        if heartbeat is None:
            return None
        told, known = heartbeat.failure, range(len(self._ranks))
        fits = {each.member for each in heartbeat.members} <= set(host.members) and (
            told is None or (told.member in known and told.culprit in known)
        )
        return heartbeat if fits else None

    # --- conclusions ---------------------------------------------------------------------

    def _has_died(self, member: int) -> bool:
        return member in self._blamed or (bool(self._ended) and member == self._keeper)

    def _tell_lost(self, host: _Host) -> None:
        if not host.told_lost:
            host.told_lost = True
            about = host.name, self._called(host.members), self._silence(host)
            what = {"host": host.name, "rank": self._ranks[host.members[0]]}
            _log.info("host %s (%s) is lost: not heard of for %.1f s", *about, extra=what)

    def _silence(self, host: _Host) -> float:
        return max(self._clock() - host.heard_at, 0.0)

    def _is_silent(self, host: _Host) -> bool:
        states = {each.state for each in host.heartbeats.values()}
        stays = not states or states & {"idle", "busy"}
        return bool(stays) and self._silence(host) > _NORMAL_SILENCE

    def _unanswered(self) -> float:
        return max(self._clock() - self._answered_at, 0.0)

    def _store_is_silent(self) -> bool:
        """Whether the store has not answered for `SILENCE_SECONDS`, and this was seen by looks in
        close succession for `_LOOK_AGAIN`.
        """
        now = self._clock()
        if self._ended or self._unanswered() <= SILENCE_SECONDS:
            return False
        if now - self._late_until > _LONGEST_GAP:
            self._late_since = now
        self._late_until = now
        return now - self._late_since >= _LOOK_AGAIN

    def _kept(self) -> str:
        return "" if self._keeper is None else f", kept by {name_of(self._ranks[self._keeper])},"

    def _called(self, members: Sequence[int]) -> str:
        numbers = ", ".join(str(self._ranks[member]) for member in members)
        return f"rank{'s' if len(members) > 1 else ''} {numbers}"
