"""Derive the state of members on other hosts from their hosts' heartbeats.

A `HostHeartbeat` is a copy of a host's board at one moment. `RemoteBoards` keeps the latest one of
each other host. It does no input or output: the thread of `coordinator.hosts` transfers the
heartbeats.

A member on another host counts as gone
    - if its host's heartbeat lists it as lost or closed;
    - if the store answers but has no new heartbeat of its host for `SILENCE_SECONDS`, or for
      `SUSPECT_SECONDS` after a connection to that host broke. Only time in which the store answered
      counts, so that a process that was stopped does not blame others;
    - if it hosts the store, and the store's connection is closed, or the store has not answered for
      `SILENCE_SECONDS`.
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
"""A host without a new heartbeat for this time counts as lost."""

SUSPECT_SECONDS: Final = 1.0
"""The same, after a connection to the host broke."""

_DETECTED_WITHIN: Final = 1.7
"""Once the store answers this many seconds after a connection broke, either a heartbeat shows the
member's end, or its host has been silent for `SUSPECT_SECONDS`."""

_SUSPECTED_FOR: Final = 5.0
"""The shorter limit holds for this many seconds after a connection broke."""

_NORMAL_SILENCE: Final = 1.0
"""Messages do not mention a shorter silence, in seconds."""

_LOOK_AGAIN: Final = 1.0
"""The store must be seen silent for this many seconds before its host's member counts as gone.

A process that was stopped, say by SIGSTOP, finds the last answer too old when it continues, but
receives new ones within this time.
"""

_LONGEST_GAP: Final = 0.5
"""A longer gap between two checks of the store's silence, in seconds, restarts the observation."""


class MemberHeartbeat(msgspec.Struct, array_like=True, frozen=True):
    """A member's state in a heartbeat; ``member`` is its member number.

    The other fields are those of `MemberStatus` and `Fingerprints.of_member`.
    """

    member: int
    pid: int
    state: str
    operation: str
    sequence: int
    age: float | None
    fingerprints: tuple[Fingerprint, ...] = ()


class FailureHeartbeat(msgspec.Struct, array_like=True, frozen=True):
    """The reason of an abort: as `Failure`, with member numbers instead of ranks."""

    member: int
    kind: str
    message: str
    culprit: int


class HostHeartbeat(msgspec.Struct, array_like=True, frozen=True):
    """One host's board at one moment.

    Attributes:
        number: a time stamp in ns; it increases with each heartbeat, for all writers.
        members: the members on this host.
        failure: the reason of the abort; None: the group is not aborted.
    """

    number: int
    members: tuple[MemberHeartbeat, ...]
    failure: FailureHeartbeat | None


_DECODER = msgspec.msgpack.Decoder(HostHeartbeat)


def encode_heartbeat(board: Board, members: Iterable[int], number: int) -> bytes:
    """Encode heartbeat ``number`` of this host's board, with these ``members`` on it."""
    states = tuple(
        _member_heartbeat(member, board.member_status(member), board.fingerprints.of_member(member))
        for member in members
    )
    failure, ranks = board.aborted, board.ranks
    reason = failure and FailureHeartbeat(
        ranks.index(failure.rank), failure.kind, failure.message, ranks.index(failure.culprit)
    )
    return msgspec.msgpack.encode(HostHeartbeat(number, states, reason or None))


def decode_heartbeat(raw: bytes) -> HostHeartbeat | None:
    """Decode a heartbeat; return None if ``raw`` is not valid."""
    try:
        return _DECODER.decode(raw)
    except UNDECODABLE:
        return None


def number_of(raw: bytes) -> int:
    """Return the number of an encoded heartbeat; 0 if ``raw`` is not valid."""
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
        tuple(fingerprints),
    )


@dataclass(slots=True)
class _Host:
    name: str
    members: tuple[int, ...]
    received_at: float
    number: int = -1
    heartbeats: dict[int, MemberHeartbeat] = field(default_factory=dict)
    suspected_at: float = -1e9
    logged: bool = False


class RemoteBoards:
    """One process's view of the members on other hosts; its board calls it (`RemoteMembers`).

    ``refresh`` writes this host's heartbeat and reads the others' now.
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
        """Start without heartbeats.

        Args:
            ranks: each member's rank, by member number.
            hosts: the member numbers of each other host, by its name.
            keeper: the member whose process hosts the store; None: no member's does.
            store: the store's address, for messages.
            swap: writes this host's heartbeat and reads the others' now.
            clock: returns the time in seconds.
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

    # --- input -----------------------------------------------------------------------------

    def receive(self, heartbeats: Iterable[bytes]) -> list[FailureHeartbeat]:
        """Store the encoded heartbeats, in the order of ``hosts``; return the failures in them."""
        now = self._clock()
        failures = []
        for host, raw in zip(self._hosts, heartbeats, strict=True):
            heartbeat = self._read(raw, host)
            if heartbeat is None:
                continue
            if heartbeat.number > host.number:
                host.number, host.received_at = heartbeat.number, now
                host.heartbeats = {each.member: each for each in heartbeat.members}
            if heartbeat.failure is not None:
                failures.append(heartbeat.failure)
        self._answered_at = now
        return failures

    def pass_on(self, heartbeats: Iterable[bytes], board: Board) -> None:
        """`receive` the heartbeats, and abort ``board`` with the first failure in them."""
        for failure in self.receive(heartbeats):
            if board.aborted is None:
                board.report(failure.member, failure.kind, failure.message, failure.culprit)

    def store_ended(self, why: str) -> None:
        """Record that the store's connection broke: no more heartbeats will arrive."""
        self._ended = why

    # --- queries of the board --------------------------------------------------------------

    def status(self, member: int) -> MemberStatus | None:
        """Return the latest state of ``member``; None if it is on this host."""
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
            None if heartbeat.age is None else heartbeat.age + self._clock() - host.received_at,
            host.name,
            silence if heartbeat.state in ("idle", "busy") and silence > _NORMAL_SILENCE else 0.0,
        )

    def fingerprints(self, member: int) -> Sequence[Fingerprint] | None:
        """Return the latest fingerprints of ``member``; None if it is on this host."""
        host = self._host_of.get(member)
        if host is None:
            return None
        heartbeat = host.heartbeats.get(member)
        return () if heartbeat is None else heartbeat.fingerprints

    def gone(self, member: int) -> bool:
        """Return whether ``member`` died or left, or its host was silent for too long."""
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
        if self._answered_at - host.received_at > limit:
            self._log_lost(host)
            return True
        return member == self._keeper and self._store_is_silent()

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Shorten the silence limit of the hosts of ``members``: a connection to one broke.

        The result returns True once a loss among ``members`` would have been detected. It counts by
        the store's answers, because a machine that stalls this process delays those as well.
        """
        since = self._clock()
        for member in members:
            if member in self._host_of:
                self._host_of[member].suspected_at = since

        def is_detected() -> bool:
            latest = SILENCE_SECONDS if not self._ended else _DETECTED_WITHIN
            return self._answered_at - since >= _DETECTED_WITHIN or self._clock() - since >= latest

        return is_detected

    def mark_dead(self, member: int) -> None:
        """Count ``member`` as dead: the group was aborted with it as the culprit."""
        if member in self._host_of and member not in self._blamed:
            self._blamed.add(member)
            self.refresh()  # for the error: fetches the member's last operation

    def problems(self) -> str:
        """Return a text for errors if hosts or the store are silent; else ``""``."""
        if self._ended:
            return f"no heartbeats of other hosts arrive any more: {self._ended}"
        if self._unanswered() > _NORMAL_SILENCE:
            return (
                f"no heartbeats of other hosts arrive: the store at {self._store}{self._kept()} "
                f"has not answered for {self._unanswered():.1f} s"
            )
        silent = [each for each in self._hosts if self._is_silent(each)]
        return "; ".join(
            f"{each.name} ({self._called(each.members)}) silent for {self._silence(each):.1f} s"
            for each in silent
        )

    def _read(self, raw: bytes, host: _Host) -> HostHeartbeat | None:
        """Decode and validate a heartbeat: without a secret any process may write to the store."""
        heartbeat = decode_heartbeat(raw)
        if heartbeat is None:
            return None
        failure, slots = heartbeat.failure, range(len(self._ranks))
        valid = {each.member for each in heartbeat.members} <= set(host.members) and (
            failure is None or (failure.member in slots and failure.culprit in slots)
        )
        return heartbeat if valid else None

    # --- conclusions ---------------------------------------------------------------------

    def _has_died(self, member: int) -> bool:
        return member in self._blamed or (bool(self._ended) and member == self._keeper)

    def _log_lost(self, host: _Host) -> None:
        if not host.logged:
            host.logged = True
            _log.info(
                "host %s (%s) is lost: silent for %.1f s",
                host.name,
                self._called(host.members),
                self._silence(host),
                extra={"host": host.name, "rank": self._ranks[host.members[0]]},
            )

    def _silence(self, host: _Host) -> float:
        return max(self._clock() - host.received_at, 0.0)

    def _is_silent(self, host: _Host) -> bool:
        states = {each.state for each in host.heartbeats.values()}
        stays = not states or states & {"idle", "busy"}
        return bool(stays) and self._silence(host) > _NORMAL_SILENCE

    def _unanswered(self) -> float:
        return max(self._clock() - self._answered_at, 0.0)

    def _store_is_silent(self) -> bool:
        now = self._clock()
        if self._ended or self._unanswered() <= SILENCE_SECONDS:
            return False
        if now - self._late_until > _LONGEST_GAP:
            self._late_since = now
        self._late_until = now
        return now - self._late_since >= _LOOK_AGAIN

    def _kept(self) -> str:
        return "" if self._keeper is None else f", hosted by {name_of(self._ranks[self._keeper])},"

    def _called(self, members: Sequence[int]) -> str:
        numbers = ", ".join(str(self._ranks[member]) for member in members)
        return f"rank{'s' if len(members) > 1 else ''} {numbers}"
