"""Swaps small values between the members of a group during set-up, over a torch store.

It needs nothing but the store; process groups, boards and queues are set up with it. Each swap has
a name, and keys under that name:

    NAME/RANK   how many members there are, as that one was told, a space, and its value
    NAME/count  the number of members that have put their value
    NAME/ended  how it has ended: with all values, as the last of them says, or without, as whoever
                sees first that a member has left. Only what is said first stands there.

However many members there are, each polls one key: torch's own wait prints to stderr when it times
out. Now and then it looks at a second one, by which it sees that a member has left.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from textwrap import shorten
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import PrefixStore, Store

from coordinator.stores.store_asker import GIVEN_UP, StoreAsker, say_first, values_of
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.errors import (
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    PeerLostError,
    PeerProtocolError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import msgspec

    from shm_broadcast.deadline import Deadline

T = TypeVar("T")

_LONGEST_GROUP = 200
_READ_SECONDS = 0.5
"""How long who keeps the store stays when it gives up: those that wait look more often."""
LEFT_FOR_NEXT = "left for the next"
"""The key by which those in a visit see that a member of theirs has not finished it, and is in its
next one.
"""
_ALL, _NOT_ALL = b"all", b"not all"


@dataclass(frozen=True, slots=True)
class Exchange(StoreAsker):
    """Swaps bytes between the members of one group, over a store.

    Attributes:
        around: where each member says which group it came to set up last; None: none does.
        before: what this one said there before it came to this group.
    """

    around: Store | None = None
    before: bytes = b""

    def visit(self, place: str) -> Exchange:
        """An exchange of the same members under a key prefix, ``place``, that may have been used
        before.

        The store counts each member's visits to the place, which is another one for other members
        `called` so. The n-th visit uses keys of its own, so it meets the other members' n-th
        visits, and never an earlier one's values. A visit in which a member has given up, or that
        it has left for its next one before it was set up, as does one that takes the place of a
        killed process, is left out by those that come later: they meet that member's next one.
        Those that are there already are told, or follow it if they `enter`.

        Collective: no.

        Raises:
            GroupTimeoutError: the store does not answer.
            TransportError: it has gone.
        """
        store, around = self.store, self.store if self.called else None
        place = f"group-coordinator/{place}{_digest(self.called)}"

        def come() -> tuple[Store, bytes]:
            while True:
                count = store.add(f"{place}/visits/{self.rank}", 1)
                self._leave(
                    PrefixStore(f"{place}/{each}", store) for each in range(count - 1, 0, -1)
                )
                inside = PrefixStore(f"{place}/{count}", store)
                if not inside.check([GIVEN_UP]):
                    come_to.append(inside)
                    return inside, self._say_where(around, count)

        def leave(error: GroupTimeoutError) -> None:
            for each in come_to:
                self._mark(each, self._failure(error))

        come_to: list[Store] = []
        try:
            inside, before = self.ask(self.name, come)
        except GroupTimeoutError as error:
            # Once the store answers, it has taken this for a visit: behind that, it has ended.
            self.asking.begin(partial(leave, error))
            raise
        return replace(self, store=inside, marks=inside, around=around, before=before)

    def enter(self, place: str, what: str, payload: bytes = b"") -> tuple[Exchange, list[bytes]]:
        """`visit` a place, and `all_gather` there. If a member leaves that visit for its next one
        before all have come, the others follow it.

        Returns:
            The exchange in which all have met, and what they have put.

        Collective: yes, every member.

        Raises:
            What `visit` and `all_gather` raise.
        """
        while True:
            inside = self.visit(place)
            with inside._telling_why():
                found = inside._gather(what, payload, LEFT_FOR_NEXT)
            if found is not None:
                return inside, found

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """For all that a member does to set its group up in a visit.

        If it fails inside, those that wait in the visit are told why. Behind it, this member may
        come again while others are still inside: it has put all that they wait for.

        Collective: no.
        """
        with self._telling_why():
            yield
        if self.marks is not None:
            self.say(partial(self.marks.set, _set_up_by(self.rank), ""))

    def all_gather(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Put ``payload``, wait for everyone's, and return them by rank.

        Args:
            what: the swap's name, for keys and errors. It can be used once.
            payload: any bytes; kilobytes, not megabytes.

        Collective: yes, every member.

        Raises:
            GroupTimeoutError: the deadline passed; ``waiting_for`` lists the absent members. It is
                empty if the store has not answered.
            GroupAbortedError: a member has given up before all had put theirs, or has begun the
                set-up anew.
            PeerLostError: one has ended, or left; only of an exchange that is watched.
            ValueError: a member was told that there are more or fewer.
            PeerProtocolError: something else stands in the store.
            TransportError: the store has gone.
        """
        found = self._gather(what, payload, GIVEN_UP)
        if found is None:
            raise self.given_up(f"{self.name} {what}")
        return found

    def broadcast(self, what: str, payload: bytes | None, src: int = 0) -> bytes:
        """Return the payload of member ``src``.

        Args:
            what: the swap's name, for keys and errors. It can be used once.
            payload: at ``src`` any bytes, kilobytes rather than megabytes; ``None`` elsewhere.
            src: the sender's rank in the group.

        Collective: yes, every member; ``src`` does not wait for the others.

        Raises:
            GroupTimeoutError: ``src`` did not put it in time, or the store does not answer.
            PeerLostError, GroupAbortedError: as in `all_gather`.
            TransportError: the store has gone.
            ValueError: ``payload`` is ``None`` at ``src``.
        """
        key, operation = f"{what}/{src}", f"{self.name} {what}"
        if self.rank != src:
            found = self.wait_for(
                lambda: self.store.check([key]),
                operation,
                lambda: self.store.get(key) if self.store.check([key]) else None,
                lambda: self._missing([src]),
            )
            if found is None:
                raise self.given_up(operation)
            return found
        if payload is None:
            raise ValueError(f"{self.name}: member {src} has to give what it broadcasts")
        self.ask(operation, lambda: self._put(key, payload))
        return payload

    def sub(self, name: str, ranks: Sequence[int], deadline: Deadline | None = None) -> Exchange:
        """The exchange of a subgroup.

        Args:
            name: the subgroup's name. The same name and ranks may be used again: see `visit`.
            ranks: the subgroup's members as ranks in this group, this member's among them.
            deadline: for the subgroup's set-up; None: this exchange's.

        Collective: no.
        """
        members = Exchange(
            self.store,
            ranks.index(self.rank),
            len(ranks),
            name,
            deadline or self.deadline,
            self.host,
            ranks.index(self.keeper) if self.keeper in ranks else None,
            tuple(self.global_rank(rank) for rank in ranks),
            asking=self.asking,
        )
        return members.visit(name)

    def require_all_stay(self, operation: str) -> None:
        """Raise if a member has left this visit for its next one. Collective: no.

        Raises:
            GroupAbortedError: one has; names it.
        """
        if self.ask(operation, lambda: self._is_marked(LEFT_FOR_NEXT)):
            raise self.given_up(operation)

    def decoded(
        self, decoder: msgspec.msgpack.Decoder[T], what: str, payload: bytes, rank: int
    ) -> T:
        """The payload that member ``rank`` has put in the swap ``what``, decoded. Collective: no.

        Raises:
            PeerProtocolError: it is something else; names the member, the key and the type.
        """
        try:
            return decoder.decode(payload)
        except UNDECODABLE as error:
            kind = decoder.type
            name = kind.__name__ if isinstance(kind, type) else kind
            raise self._altered(f"{what}/{rank}", rank, f"of type {name}: {error}") from error

    def _altered(self, key: str, rank: int, expected: str) -> PeerProtocolError:
        detail = f"the value of {key!r} in the store must be {expected}"
        return PeerProtocolError(self.name, self.global_rank(rank), detail)

    def let_all_read(self) -> None:
        """Before a member leaves for what all have read: the store's keeper is the last to leave.

        Collective: yes, every member; the keeper waits, or all if it is not known who that is, but
        not beyond the deadline.
        """
        with suppress(GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            for rank in range(self.size):
                if rank == self.rank or self.keeper in (None, self.rank):
                    self.broadcast("read", b"" if rank == self.rank else None, rank)

    @property
    def _group(self) -> str:
        """What this member is to set up, as others are told."""
        return f"{self.name} of ranks {list(self.called)}"

    def _say_where(self, around: Store | None, count: int) -> bytes:
        """Say which group this member comes to set up, for the ``count``-th time; what it said
        before.
        """
        if around is None:
            return b""
        key = _last_group_of(self.called[self.rank])
        before = around.get(key) if around.check([key]) else b""
        around.set(key, f"{count} {self._group}")
        return before

    def _missing(self, ranks: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """``ranks``, and of each which group it came to set up last, if it was another one.

        A slip in its name, its ranks or their order keeps members apart for ever. Who came last to
        the same as this member before is late, and nowhere else.
        """
        elsewhere = []
        for rank in map(self.global_rank, ranks):
            key = _last_group_of(rank)
            if self.around is not None and self.around.check([key]):
                came = self.around.get(key)
                group = came.partition(b" ")[2].decode(errors="replace")
                if group != self._group and came != self.before:
                    said = shorten(group, _LONGEST_GROUP)
                    elsewhere.append(f"rank {rank} came to set up {said} last")
        return ranks, elsewhere

    def _leave(self, visits: Iterable[Store]) -> None:
        """Tell those in this member's earlier visits, the last one first, as far as it has not set
        its group up there, nor told so before. It may be killed on the way, too.
        """
        me = self.global_rank(self.rank)
        why = f"rank {me} has begun this set-up anew: it did not finish this one"
        for before in visits:
            if before.check([_set_up_by(self.rank)]) or before.check([LEFT_FOR_NEXT]):
                return
            self._mark(before, Failure(me, PeerLostError.__name__, why, me))
            before.set(LEFT_FOR_NEXT, "")

    @contextmanager
    def _telling_why(self) -> Iterator[None]:
        try:
            yield
        except (GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            raise  # others were told where this member has waited, or cannot be
        except (Exception, KeyboardInterrupt) as error:
            self.give_up(error)
            if self.rank == self.keeper:  # the store may end with it, before the others have looked
                time.sleep(_READ_SECONDS)
            raise

    def _gather(self, what: str, payload: bytes, left: str) -> list[bytes] | None:
        """Put ``payload``; what all have put, or None if ``left`` says before that that one has
        left: the same for all.
        """
        return self.wait_for(
            lambda: self.store.check([f"{what}/ended"]),
            f"{self.name} {what}",
            lambda: self._put_by_all(what),
            lambda: self._missing(sorted({*range(self.size)} - self._payloads(what).keys())),
            lambda: self._come(what, payload),
            left,
        )

    def _come(self, what: str, payload: bytes) -> None:
        self._put(f"{what}/{self.rank}", b"%d %b" % (self.size, payload))
        if self.store.add(f"{what}/count", 1) == self.size:
            self._end(what, _ALL)

    def _put_by_all(self, what: str) -> list[bytes] | None:
        """What all have put; None, here and for all others, if not all have by now."""
        ended = self._end(what, _NOT_ALL)
        return list(self._payloads(what).values()) if ended == _ALL else None

    def _end(self, what: str, how: bytes) -> bytes:
        """End a swap, unless it has ended; how it has."""
        return say_first(self.store, f"{what}/ended", how)

    def _put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type] # the stub knows text only

    def _payloads(self, what: str) -> dict[int, bytes]:
        """What members have put by now, by rank; all of them must have been told the same size."""
        ranks = {f"{what}/{rank}": rank for rank in range(self.size)}
        keys = self._there([*ranks])
        payloads = {}
        for key, value in zip(keys, values_of(self.store, keys), strict=True):
            rank = ranks[key]
            told, _, payloads[rank] = value.partition(b" ")
            if not told.isdigit():
                raise self._altered(key, rank, "a number of members, a space and a value")
            if int(told) != self.size:
                raise ValueError(
                    f"{self.name}: rank {self.global_rank(rank)} was told that there are "
                    f"{int(told)} members, this one that there are {self.size}"
                )
        return payloads

    def _there(self, keys: list[str]) -> list[str]:
        """Those of ``keys`` that the store has; halves are asked for, as few ranks are late."""
        if self.store.check(keys):
            return keys
        half = len(keys) // 2
        return [*self._there(keys[:half]), *self._there(keys[half:])] if half else []


def _set_up_by(rank: int) -> str:
    """Where a member says that it has done its part in a visit."""
    return f"set up/{rank}"


def _last_group_of(rank: int) -> str:
    """Where a rank says which group it came to set up last."""
    return f"group-coordinator/came/{rank}"


def _digest(ranks: Sequence[int]) -> str:
    """Ranks in few characters, as every key has them; none for no ranks."""
    told = b".".join(b"%d" % rank for rank in ranks)
    return f":{blake2b(told, digest_size=12).hexdigest()}" if ranks else ""
