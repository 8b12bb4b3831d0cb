"""Swaps small values between the members of a group during set-up, over a torch store.

It needs nothing but the store; process groups, boards and queues are set up with it. Each swap has
a name, and keys under that name:

    NAME/RANK   how many members there are, as that one was told, a space, and its value
    NAME/count  the number of members that have put their value
    NAME/all    set by the last of them: all values are there

However many members there are, each polls one key only: torch's own wait prints to stderr when it
times out. None blocks inside the store, which cannot be interrupted: while the process that hosts
the store stands still, even a question whether a key is there gets no answer. So a thread apart
asks, one question after the other, and whoever wants the answer waits for that thread.
"""

from __future__ import annotations

import time
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed import DistError, PrefixStore, Store

from coordinator.apart import Apart, is_done_within
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import Deadline
from shm_broadcast.doorbell import SLICE_SECONDS
from shm_broadcast.errors import (
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    PeerProtocolError,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    import msgspec

T = TypeVar("T")

_GIVEN_UP = "given up"
_FIRST_NAP = 0.0005
_LONGEST_NAP = 0.05
_LONGEST_GROUP = 200

_LOOK_SECONDS = 5 * SLICE_SECONDS
"""How long the thread apart looks for a value before it is asked again."""
_ANSWERED_SECONDS = 1.0
"""How long an answer of the store is waited for at least: also the last look, at the deadline."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Swaps bytes between the members of one group, over a store.

    Attributes:
        store: where the members meet, with a key prefix that nothing else uses.
        rank: this member's rank in the group.
        size: the number of members.
        name: the group's name, for errors.
        deadline: for the whole set-up.
        host: the store's address, for errors.
        keeper: the member whose process hosts the store; None: not a member, or not known.
        called: the members' global ranks, for errors; empty: the same as their ranks in the group.
        watch: raises if a member has ended: called while something is waited for, with what that is
            and with whether it is there; None: nobody knows.
        marks: where those that come to the same place later look: see `visit`; None: nobody does.
        around: where each member says which group it came to set up last; None: none does.
        asking: asks the store, and those of subgroups.
    """

    store: Store
    rank: int
    size: int
    name: str
    deadline: Deadline
    host: str = ""
    keeper: int | None = None
    called: tuple[int, ...] = ()
    watch: Callable[[str, Callable[[], bool]], None] | None = None
    marks: Store | None = None
    around: Store | None = None
    asking: Apart = field(default_factory=partial(Apart, "ask-store"), compare=False, repr=False)

    @classmethod
    def visit(
        cls,
        store: Store,
        place: str,
        rank: int,
        size: int,
        name: str,
        deadline: Deadline,
        host: str = "",
        keeper: int | None = None,
        called: Sequence[int] = (),
        asking: Apart | None = None,
    ) -> Exchange:
        """An exchange under a key prefix, ``place``, that may have been used before.

        The store counts each member's visits to the place, which is another one for other members
        ``called`` so. The n-th visit uses keys of its own, so it meets the other members' n-th
        visits, and never an earlier one's values. A visit in which a member has waited in vain is
        left out by those that come later: they meet that member's next one. Those that are there
        already wait until their own time is over.

        Collective: no.

        Raises:
            GroupTimeoutError: the store does not answer.
            TransportError: it has gone.
        """
        place = f"group-coordinator/{place}{_digest(called)}"
        around = store if called else None
        outside = cls(store, rank, size, name, deadline, host, keeper, tuple(called), around=around)
        if asking is not None:
            outside = replace(outside, asking=asking)

        def come() -> Store:
            if around is not None:
                around.set(_last_group_of(called[rank]), outside._group)
            while True:
                count = store.add(f"{place}/visits/{rank}", 1)
                inside = PrefixStore(f"{place}/{count}", store)
                if not inside.check([_GIVEN_UP]):
                    come_to.append(inside)
                    return inside

        def leave() -> None:
            for each in come_to:
                each.set(_GIVEN_UP, "")

        come_to: list[Store] = []
        with outside._reaching(name):
            try:
                inside = outside._answer(name, come)
            except GroupTimeoutError:
                # Once the store answers, it has taken this for a visit: behind that, it has ended.
                outside.asking.begin(leave)
                raise
        return replace(outside, store=inside, marks=inside)

    def ask(self, operation: str, do: Callable[[], T]) -> T:
        """What ``do`` returns, which is called apart, as it asks the store. Collective: no.

        Args:
            operation: what this is, for errors.
            do: calls the store's methods, and none of this exchange.

        Raises:
            GroupTimeoutError: the store has not answered when the deadline passed. The question
                stands, and later ones stand behind it.
            PeerLostError, GroupAbortedError: as in `all_gather`, before it has answered.
            TransportError: the store has gone.
            What ``do`` raises.
        """
        with self._reaching(operation):
            return self._answer(operation, do)

    def all_gather(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Put ``payload``, wait for everyone's, and return them by rank.

        Args:
            what: the swap's name, for keys and errors. It can be used once.
            payload: any bytes; kilobytes, not megabytes.

        Collective: yes, every member.

        Raises:
            GroupTimeoutError: the deadline passed; ``waiting_for`` lists the absent members. It is
                empty if the store has not answered.
            PeerLostError, GroupAbortedError: a member has ended, left, or given up before it put
                its payload; only of an exchange that is watched.
            ValueError: a member was told that there are more or fewer.
            PeerProtocolError: something else stands in the store.
            TransportError: the store has gone.
        """
        operation = f"{self.name} {what}"
        with self._reaching(operation):
            return self._wait_for(
                f"{what}/all",
                operation,
                lambda: list(self._payloads(what).values()),
                lambda: self._absent(what),
                lambda: self._come(what, payload),
            )

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
        with self._reaching(operation):
            if self.rank != src:
                return self._wait_for(key, operation, lambda: self.store.get(key), lambda: [src])
            if payload is None:
                raise ValueError(f"{self.name}: member {src} has to give what it broadcasts")
            self._answer(operation, lambda: self._put(key, payload))
            return payload

    def sub(self, name: str, ranks: Sequence[int], deadline: Deadline | None = None) -> Exchange:
        """The exchange of a subgroup.

        Args:
            name: the subgroup's name. The same name and ranks may be used again: see `visit`.
            ranks: the subgroup's members as ranks in this group, this member's among them.
            deadline: for the subgroup's set-up; None: this exchange's.

        Collective: no.
        """
        return Exchange.visit(
            self.store,
            name,
            ranks.index(self.rank),
            len(ranks),
            name,
            deadline or self.deadline,
            self.host,
            ranks.index(self.keeper) if self.keeper in ranks else None,
            [self.global_rank(rank) for rank in ranks],
            self.asking,
        )

    def decoded(self, decoder: msgspec.msgpack.Decoder[T], payload: bytes, rank: int) -> T:
        """What a member has put, decoded. Collective: no.

        Raises:
            PeerProtocolError: it is something else; names the member.
        """
        try:
            return decoder.decode(payload)
        except UNDECODABLE as error:
            raise PeerProtocolError(self.name, self.global_rank(rank), str(error)) from error

    def let_all_read(self) -> None:
        """Before a member leaves for what all have read: the store's keeper is the last to leave.

        Collective: yes, every member; the keeper waits, or all if it is not known who that is, but
        not beyond the deadline.
        """
        with suppress(GroupTimeoutError, TransportError):
            for rank in range(self.size):
                if rank == self.rank or self.keeper in (None, self.rank):
                    self.broadcast("read", b"" if rank == self.rank else None, rank)

    def give_up(self) -> None:
        """Have those that come later leave this visit out. Collective: no."""
        if self.marks is not None:
            wait([self.asking.begin(partial(self.marks.set, _GIVEN_UP, ""))], _ANSWERED_SECONDS)

    def global_rank(self, rank: int) -> int:
        """What errors call the member of that rank in the group."""
        return self.called[rank] if self.called else rank

    @property
    def _group(self) -> str:
        """What this member is to set up, as others are told."""
        return f"{self.name} of ranks {list(self.called)}"

    def _elsewhere(self, absent: Sequence[int]) -> Iterator[str]:
        """Which group each of these members came to set up last, if it was another one.

        A slip in its name, its ranks or their order keeps members apart for ever.
        """
        for rank in map(self.global_rank, absent):
            key = _last_group_of(rank)
            if self.around is not None and self.around.check([key]):
                group = self.around.get(key).decode(errors="replace")
                if group != self._group:
                    yield f"rank {rank} came to set up {shorten(group, _LONGEST_GROUP)} last"

    def _answer(self, operation: str, do: Callable[[], T]) -> T:
        answer = self.asking.begin(do)
        soon = Deadline.after(_ANSWERED_SECONDS)
        latest = self.deadline if soon.at < self.deadline.at else soon
        try:
            while not is_done_within(answer, latest):
                if self.watch is not None:
                    self.watch(operation, partial(_has_come, answer))
                if latest.expired:
                    if self.marks is not None:  # behind what stands, once the store answers
                        self.asking.begin(partial(self.marks.set, _GIVEN_UP, ""))
                    silent = f"{self._keeping} does not answer"
                    raise GroupTimeoutError(operation, self.deadline.timeout, detail=silent)
            return answer.result()
        finally:
            answer.cancel()
            del answer  # an error that it has would keep it

    @property
    def _keeping(self) -> str:
        """The store, for errors."""
        kept = "" if self.keeper is None else f", which rank {self.global_rank(self.keeper)} keeps,"
        return self._where + kept

    @property
    def _where(self) -> str:
        return f"the store at {self.host}" if self.host else "the store"

    def _come(self, what: str, payload: bytes) -> None:
        self._put(f"{what}/{self.rank}", b"%d %b" % (self.size, payload))
        if self.store.add(f"{what}/count", 1) == self.size:
            self._put(f"{what}/all", b"")

    def _put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type] # the stub knows text only

    @contextmanager
    def _reaching(self, operation: str) -> Iterator[None]:
        """Say of a store that cannot be reached any more who kept it; give up where others end."""
        try:
            yield
        except (PeerLostError, GroupAbortedError):
            self.give_up()
            raise
        except DistError as error:
            why = f"the process that keeps it has ended, or given up ({error})"
            detail = f"{self._where} has gone: {why}"
            keeper = None if self.keeper is None else self.global_rank(self.keeper)
            raise TransportError(operation, detail, keeper) from error

    def _payloads(self, what: str) -> dict[int, bytes]:
        """What members have put by now, by rank; all of them must have been told the same size."""
        keys = {rank: f"{what}/{rank}" for rank in range(self.size)}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        if self.store.has_extended_api():  # type: ignore[attr-defined]
            values = self.store.multi_get(list(keys.values()))
        else:
            values = [self.store.get(key) for key in keys.values()]
        payloads = {}
        for rank, value in zip(keys, values, strict=True):
            told, _, payloads[rank] = value.partition(b" ")
            if not told.isdigit():
                detail = "what stands in the store is not of this set-up"
                raise PeerProtocolError(self.name, self.global_rank(rank), detail)
            if int(told) != self.size:
                raise ValueError(
                    f"{self.name}: rank {self.global_rank(rank)} was told that there are "
                    f"{int(told)} members, this one that there are {self.size}"
                )
        return payloads

    def _absent(self, what: str) -> list[int]:
        there = self._payloads(what)
        return [rank for rank in range(self.size) if rank not in there]

    def _wait_for(
        self,
        key: str,
        operation: str,
        read: Callable[[], T],
        absent: Callable[[], list[int]],
        come: Callable[[], None] = lambda: None,
    ) -> T:
        """What ``read`` returns once ``key`` is there. All but this thread ask the store.

        Args:
            key: what is waited for.
            operation: what this is, for errors.
            read: called once, when the key is there.
            absent: the ranks that are waited for: called once, if it is not there in time.
            come: called first, together with the first look.
        """

        def there() -> bool:
            return self.store.check([key])

        def look() -> list[T]:
            """Look for a while: looks are cheap, and handing them over to a thread is not."""
            over = Deadline.after(_LOOK_SECONDS)
            while not there():
                if over.expired or self.deadline.expired:
                    return []
                time.sleep(self.deadline.remaining(at_most=next(pauses)))
            return [read()]

        def first_look() -> list[T]:
            come()
            return look()

        def missing() -> tuple[list[int], list[str]]:
            members = absent()
            return members, [*self._elsewhere(members)]

        pauses = naps()
        found = self._answer(operation, first_look)
        while not found:
            if self.watch is not None:
                self.watch(operation, lambda: self._answer(operation, there))
            if self.deadline.expired:
                self.give_up()  # first: the store has just answered
                waiting_for, elsewhere = self._answer(operation, missing)
                over = [f"over the store at {self.host}"] if self.host else []
                raise GroupTimeoutError(
                    operation,
                    self.deadline.timeout,
                    tuple(
                        MemberStatus(self.global_rank(rank), 0, "absent") for rank in waiting_for
                    ),
                    "; ".join([*over, *elsewhere]),
                )
            found = self._answer(operation, look)
        return found[0]


def _has_come(answer: Future[Any]) -> bool:
    """Whether there is an answer, or is soon: this process may have stalled, and not the store."""
    return bool(wait([answer], _ANSWERED_SECONDS).done)


def _last_group_of(rank: int) -> str:
    """Where a rank says which group it came to set up last."""
    return f"group-coordinator/came/{rank}"


def _digest(ranks: Sequence[int]) -> str:
    """Ranks in few characters, as every key has them; none for no ranks."""
    told = b".".join(b"%d" % rank for rank in ranks)
    return f":{blake2b(told, digest_size=12).hexdigest()}" if ranks else ""


def naps() -> Iterator[float]:
    """Seconds to sleep between two looks at a store: short at first, then doubled each time."""
    nap = _FIRST_NAP
    while True:
        yield nap
        nap = min(nap * 2, _LONGEST_NAP)
