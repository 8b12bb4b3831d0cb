"""Ask a store that another process keeps, from a thread apart, since it may not answer.

A call that blocks inside the store cannot be interrupted: while the process that hosts the store is
stopped, even asking whether a key exists gets no answer. So a separate thread asks, one question
after the other, and callers wait for that thread.

The caller chooses how questions travel: over an inherited socket, or encrypted between hosts
(`coordinator.curve_store`). To torch it is a store like any other, so process groups can be
made with it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from torch.distributed import DistError, DistStoreError, PrefixStore, Store, TCPStore

from coordinator import key_values as kv
from coordinator.daemon_threads import SingleThreadExecutor, is_done_within
from coordinator.launcher import own_address
from shm_broadcast import NEVER, Board, GroupClosedError
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import (
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    TransportError,
)
from shm_broadcast.eventcount import SLICE_SECONDS, TimedLock
from shm_broadcast.state.table import kind_and_message

T = TypeVar("T")

_log = logging.getLogger(__name__)

ABORTED_KEY = "given up"
"""The key where the first member that cannot go on says why, for all others."""

_MOST_CHARACTERS = 2000
"""Of an error's text, as others are told."""

_FAILURE = msgspec.msgpack.Decoder(Failure)

_FIRST_NAP = 0.0005
_LONGEST_NAP = 0.05

_LOOK_SECONDS = 5 * SLICE_SECONDS
"""How long the thread apart looks for a value before it is asked again."""
_ANSWERED_SECONDS = 1.0
"""How long an answer of the store is waited for at least: also the last look, at the deadline."""
_SHOW_SECONDS: Final = 1.0
"""How often a wait that lasts is shown anew on the board: other ranks may be missing by then."""
_TELL_SECONDS: Final = 10.0
"""After how long a wait the log says for whom; once more whenever it has lasted twice as long."""


@dataclass(frozen=True, slots=True)
class StoreClient:
    """One member's way to the store in which the members of its group meet.

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
        seen_on: the board where its waits are shown to whoever looks on, and the member number of
            each rank there; None: nowhere.
        marks: where members say that they have `ABORTED_KEY`; None: nowhere.
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
    seen_on: tuple[Board, Sequence[int]] | None = None
    marks: Store | None = None
    asking: SingleThreadExecutor = field(
        default_factory=partial(SingleThreadExecutor, "ask-store"), compare=False, repr=False
    )

    def ask(self, operation: str, do: Callable[[], T]) -> T:
        """What ``do`` returns, which is called apart, as it asks the store. Collective: no.

        Args:
            operation: what this is, for errors.
            do: calls the store's methods, and none of these.

        Raises:
            GroupTimeoutError: the store has not answered when the deadline passed. The question
                stands, and later ones stand behind it.
            PeerLostError, GroupAbortedError: a member has ended, left, or given up before it has
                answered; only where somebody watches.
            TransportError: the store has gone.
            What ``do`` raises.
        """
        with self._reaching(operation):
            return self._answer(operation, do)

    def wait_for(
        self,
        there: Callable[[], bool],
        operation: str,
        read: Callable[[], T],
        missing: Callable[[], tuple[Sequence[int], Sequence[str]]],
        come: Callable[[], None] = lambda: None,
        left: str = ABORTED_KEY,
    ) -> T:
        """What ``read`` returns once ``there()``, or a member has left. Collective: no.

        Args:
            there: whether what is waited for is there: called apart, many times.
            operation: what this is, for errors.
            read: called apart, once, when it is there, or will not come any more.
            missing: the ranks that are waited for, and what is to be said of them: called apart
                for the log, if it is not there for long, and for the error.
            come: called apart first, together with the first look.
            left: the key among the `marks` that says that a member has left.

        Raises:
            GroupTimeoutError: it is not there in time, or the store does not answer.
            What `ask` raises, and the functions.
        """

        def look() -> list[T]:
            """Look for a while: looks are cheap, and handing them over to a thread is not."""
            over = Deadline.after(_LOOK_SECONDS)
            while not there():
                if over.expired or self.deadline.expired:
                    return [read()] if self._is_marked(left) else []
                time.sleep(self.deadline.remaining(at_most=next(pauses)))
            return [read()]

        def first_look() -> list[T]:
            come()
            return look()

        pauses, began = backoff(), time.monotonic()
        show_after = math.inf if self.seen_on is None else 0.0
        tell_after = _TELL_SECONDS
        with self._reaching(operation), self._showing() as show:
            found = self._answer(operation, first_look)
            while not found:
                waited = time.monotonic() - began
                if waited >= min(show_after, tell_after):
                    absent, remarks = self._answer(operation, missing)
                    show(absent)
                    if waited >= tell_after:
                        self._tell(operation, tell_after, absent, remarks)
                        tell_after *= 2
                    show_after = max(show_after, waited + _SHOW_SECONDS)
                if self.watch is not None:
                    self.watch(operation, lambda: self._answer(operation, there))
                if self.deadline.expired:
                    late = self._late(operation, *self._answer(operation, missing))
                    self.abort(late)
                    raise late
                found = self._answer(operation, look)
        return found[0]

    def abort(self, error: BaseException) -> None:
        """Tell those that wait in this visit why this member leaves it; those that come later leave
        it out. Collective: no.
        """
        self.notify(partial(self._mark, self.marks, self._failure(error)))

    def notify(self, do: Callable[[], None]) -> None:
        """Have ``do`` tell the store what matters to others only, however that ends here.

        Collective: no.
        """
        with suppress(RuntimeError):  # no thread can be started
            wait([self.asking.begin(do)], _ANSWERED_SECONDS)

    def aborted_error(self, operation: str) -> Exception:
        """The error of a wait for what will not come any more, as a member has given up; those who
        share a board with this one are told why, too. Collective: no.

        Raises:
            PeerLostError: its process has ended; only where somebody watches.
        """
        marks = self.marks
        told = b"" if marks is None else self.ask(operation, lambda: marks.get(ABORTED_KEY))
        try:
            failure = _FAILURE.decode(told)
        except UNDECODABLE as error:
            detail = f"the value of {ABORTED_KEY!r} in the store must be of type Failure: {error}"
            return TransportError(operation, detail)
        if failure.kind == PeerLostError.__name__ and self.watch is not None:
            self.watch(operation, lambda: False)  # says more of the lost one
        self._pass_on(failure)
        return GroupAbortedError(operation, failure)

    def _pass_on(self, failure: Failure) -> None:
        """Tell those who share a board with this member what it was told of another one."""
        ranks = [self.global_rank(rank) for rank in range(self.size)]
        if self.seen_on is not None and failure.culprit in ranks:
            board, members = self.seen_on
            culprit = members[ranks.index(failure.culprit)]
            board.report(members[self.rank], failure.kind, failure.message, culprit)

    def _mark(self, marks: Store | None, failure: Failure) -> None:
        """Say in ``marks`` that a member has given up, unless one has said so before."""
        if marks is not None:
            set_if_absent(marks, ABORTED_KEY, msgspec.msgpack.encode(failure))

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, GroupAbortedError):
            return error.failure
        me = self.global_rank(self.rank)
        kind, message = kind_and_message(error)
        culprit = error.rank if isinstance(error, PeerLostError) else me
        return Failure(me, kind, message[:_MOST_CHARACTERS], culprit)

    def _is_marked(self, key: str) -> bool:
        return self.marks is not None and self.marks.check([key])

    def global_rank(self, rank: int) -> int:
        """What errors call the member of that rank in the group."""
        return self.called[rank] if self.called else rank

    def _answer(self, operation: str, do: Callable[[], T]) -> T:
        answer = self.asking.begin(do)
        soon = Deadline.after(_ANSWERED_SECONDS)
        latest = self.deadline if soon.at < self.deadline.at else soon
        try:
            while not is_done_within(answer, latest):
                if self.watch is not None:
                    self.watch(operation, partial(_has_come, answer))
                if latest.expired:
                    silent = f"{self._keeping} does not answer"
                    late = GroupTimeoutError(operation, self.deadline.timeout, detail=silent)
                    # Behind what stands, once the store answers.
                    self.asking.begin(partial(self._mark, self.marks, self._failure(late)))
                    raise late
            return answer.result()
        finally:
            answer.cancel()
            del answer  # an error that it has would keep it

    def _tell(
        self, operation: str, seconds: float, absent: Sequence[int], remarks: Sequence[str]
    ) -> None:
        if absent:
            ranks = ", ".join(str(self.global_rank(rank)) for rank in absent)
            named = f"rank{'s' if len(absent) > 1 else ''} {ranks}"
            what = "; ".join([f"{operation}: waiting for {named} for {seconds:g} s", *remarks])
            _log.warning(what)

    def _late(
        self, operation: str, absent: Sequence[int], remarks: Sequence[str]
    ) -> GroupTimeoutError:
        over = [f"over the store at {self.host}"] if self.host else []
        return GroupTimeoutError(
            operation,
            self.deadline.timeout,
            tuple(MemberStatus(self.global_rank(rank), 0, "absent") for rank in absent),
            "; ".join([*over, *remarks]),
        )

    @contextmanager
    def _showing(self) -> Iterator[Callable[[Sequence[int]], None]]:
        """Inside, what is given here shows on the board that these ranks are waited for."""
        if self.seen_on is None:
            yield lambda _: None
            return
        board, members = self.seen_on
        with board.published_wait(f"set-up of {self.name}") as say:
            yield lambda ranks: say(members[rank] for rank in ranks)

    @contextmanager
    def _reaching(self, operation: str) -> Iterator[None]:
        """Say of a store that cannot be reached any more who kept it; give up where others end."""
        try:
            yield
        except (PeerLostError, GroupAbortedError) as error:
            self.abort(error)
            raise
        except TransportError as error:
            with suppress(TransportError, GroupTimeoutError, DistError):
                # Its keeper may have left because of another member, and that be told elsewhere.
                if self._answer(operation, partial(self._is_marked, ABORTED_KEY)):
                    raise self.aborted_error(operation) from error
            raise
        except DistError as error:
            why = f"the process that keeps it has ended, or given up ({error})"
            detail = f"{self._where} has gone: {why}"
            keeper = None if self.keeper is None else self.global_rank(self.keeper)
            raise TransportError(operation, detail, keeper) from error

    @property
    def _keeping(self) -> str:
        """The store, for errors."""
        kept = "" if self.keeper is None else f", which rank {self.global_rank(self.keeper)} keeps,"
        return self._where + kept

    @property
    def _where(self) -> str:
        return f"the store at {self.host}" if self.host else "the store"


def set_if_absent(store: Store, key: str, value: bytes) -> bytes:
    """Have ``value`` stand where nothing stands yet; what stands there.

    It is one request, so that nobody is lost in between; but for a store written in Python that has
    no `compare_set`.
    """
    try:
        return store.compare_set(key, "", value)  # type: ignore[arg-type] # the stub knows text only
    except DistError:
        raise
    except RuntimeError:
        if not store.check([key]) and store.add(f"{key}/first", 1) == 1:
            store.set(key, value)  # type: ignore[arg-type]
        return store.get(key)


def values_of(store: Store, keys: list[str]) -> list[bytes]:
    """The values of keys that are there, in one request if the store can."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return store.multi_get(keys)
    return [store.get(key) for key in keys]


def backoff() -> Iterator[float]:
    """Seconds to sleep between two looks at a store: short at first, then doubled each time."""
    nap = _FIRST_NAP
    while True:
        yield nap
        nap = min(nap * 2, _LONGEST_NAP)


def _has_come(answer: Future[Any]) -> bool:
    """Whether there is an answer, or is soon: this process may have stalled, and not the store."""
    return bool(wait([answer], _ANSWERED_SECONDS).done)


_FOR_EVER = timedelta(days=365)

_BYTES_PER_CHARACTER = 4
"""Of UTF-8, at most."""

_LAST_LOOK_SECONDS = 1.0
"""How long a wait whose time is over may still ask which keys are there."""


class ProxyStore(Store):
    """A store that is asked by messages. Any thread may use it; close it.

    Args:
        ask: sends a question and returns its answer, before the deadline; called by one thread at a
            time. The store's methods raise what it raises.
        timeout: seconds to wait for an answer, and in `wait` for keys; None: for ever.
        address: this host's address on the way to the store; ``""`` if no network leads there.
    """

    _open: ClassVar[list[ProxyStore]] = []
    """References to all open stores. torch keeps only the C++ half of a store alive; the Python
    half, with the methods that it calls, would go with the caller's last reference."""

    def __init__(
        self,
        ask: Callable[[kv.StoreRequest, Deadline], kv.StoreResponse],
        timeout: float | None,
        address: str = "",
    ) -> None:
        super().__init__()
        self.address = address
        self._ask = ask
        longest = _FOR_EVER.total_seconds()
        self.set_timeout(timedelta(seconds=longest if timeout is None else min(timeout, longest)))
        self._numbers = itertools.count(1)
        self._asking = TimedLock()
        self._closed = False
        self._open.append(self)

    def close(self) -> None:
        """Refuse further calls; idempotent."""
        if not self._closed:
            self._closed = True
            self._open.remove(self)

    # --- what torch calls; values are bytes, or text in UTF-8 ------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to a value of at most `coordinator.key_values.MAX_BYTES` bytes."""
        self._answer(kv.Set(self._number(), key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait until ``key`` exists; return its value."""
        self.wait([key])
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number in ``key``, 0 if it does not exist; return the sum."""
        return self._answer(kv.Add(self._number(), key, amount)).count

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._answer(kv.Append(self._number(), key, _bytes(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``; return its value then."""
        question = kv.CompareSet(self._number(), key, _bytes(expected), _bytes(desired))
        return self._answer(question).values[0]

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return bool(self._answer(kv.Delete(self._number(), key)).count)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` exist."""
        return self._exist(keys, self._deadline())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, which must all exist."""
        values: list[bytes] = []
        while len(values) < len(keys):
            asked = next(_askable(keys[len(values) :]))
            values += self._answer(kv.Get(self._number(), asked)).values
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` exist.

        Raises:
            DistStoreError: some do not exist after the timeout, or the store does not answer until
                then.
        """
        deadline = self._deadline() if timeout is None else Deadline.after(timeout.total_seconds())
        late = f"wait timeout after {deadline.timeout:g} s, keys: "
        try:
            for nap in backoff():
                if deadline.expired:
                    break
                if self._exist(keys, deadline):
                    return
                time.sleep(deadline.remaining(at_most=nap))
        except TimeoutError as error:
            if not deadline.expired:
                raise
            raise DistStoreError(f"{late}{', '.join(keys)}; the store does not answer") from error
        last_look = Deadline.after(_LAST_LOOK_SECONDS)
        absent = [key for key in keys if not self._exist([key], last_look)]
        if absent:
            raise DistStoreError(late + ", ".join(absent))

    def has_extended_api(self) -> bool:
        """Whether `multi_get` and the like are offered: yes."""
        return True

    # --------------------------------------------------------------------------------------

    def _number(self) -> int:
        return next(self._numbers)

    def _deadline(self) -> Deadline:
        return Deadline.after(self.timeout.total_seconds())  # type: ignore[attr-defined]

    def _exist(self, keys: Sequence[str], deadline: Deadline) -> bool:
        parts = (kv.Check(self._number(), part) for part in _askable(keys))
        return all(self._answer(part, deadline).count for part in parts)

    def _answer(self, question: kv.StoreRequest, latest: Deadline = NEVER) -> kv.StoreResponse:
        deadline = min(latest, self._deadline(), key=lambda each: each.at)
        with self._asking.owner_lock as mine:
            if not mine:
                self._asking.acquire(deadline, "store", self._require_open)
            self._require_open("store")
            answer = self._ask(question, deadline)
        if answer.error:
            raise ValueError(answer.error)
        return answer

    def _require_open(self, _: str) -> None:
        if self._closed:
            raise GroupClosedError("the store where the group met is closed in this process")


def behind_prefixes(store: Store) -> Store:
    """The store under all `PrefixStore` layers of ``store``."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def address_towards(store: Store) -> str:
    """This host's address on the route to a store; ``""`` if no network leads there."""
    base = behind_prefixes(store)
    if isinstance(base, TCPStore):
        return own_address(base.host, base.port)
    return base.address if isinstance(base, ProxyStore) else ""


def _askable(keys: Sequence[str]) -> Iterator[list[str]]:
    """``keys`` in parts that one question may have."""
    part: list[str] = []
    size = 0
    for key in keys:
        size += len(key)
        if part and size > kv.MAX_BYTES // _BYTES_PER_CHARACTER:
            yield part
            part, size = [], len(key)
        part.append(key)
    if part:
        yield part


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
