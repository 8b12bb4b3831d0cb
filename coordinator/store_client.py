"""Call a store that another process hosts, from a separate thread.

A call that blocks inside a store cannot be interrupted: while the process that hosts the store is
stopped, even a check for a key does not return. So one thread runs the store's calls in order, and
callers wait for that thread with a deadline.

`ProxyStore` is a torch store whose requests travel by any function: over an inherited socket, or
encrypted between hosts (`coordinator.curve_store`). Torch can make process groups with it.
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
"""The key with the reason of the first member that aborts a round."""

_MOST_CHARACTERS = 2000
"""The longest error text that is sent to other members."""

_FAILURE = msgspec.msgpack.Decoder(Failure)

_FIRST_NAP = 0.0005
_LONGEST_NAP = 0.05

_POLL_SECONDS = 5 * SLICE_SECONDS
"""How long the store's thread polls for a value per call."""
_ANSWERED_SECONDS = 1.0
"""The shortest wait for an answer of the store, also for the last poll at the deadline."""
_SHOW_SECONDS: Final = 1.0
"""How often a long wait's absent ranks are published on the board again."""
_TELL_SECONDS: Final = 10.0
"""The log names the absent ranks after this time, and again after each doubling of it."""


@dataclass(frozen=True, slots=True)
class StoreClient:
    """One member's access to the store of its group's rendezvous.

    Attributes:
        store: the members' store, with a key prefix of their own.
        rank: this member's rank in the group.
        size: the number of members.
        name: the group's name, for errors.
        deadline: for the whole set-up.
        host: the store's address, for errors.
        keeper: the rank in the group whose process hosts the store; None: not a member, or unknown.
        called: the members' global ranks, for errors; empty: the same as their ranks in the group.
        watch: called during waits with the operation and a function that returns whether its result
            is available; raises if a member has exited.
        seen_on: the board on which waits are published, and each rank's member number there.
        marks: the store of `ABORTED_KEY`.
        asking: the thread that calls the store; subgroups share it.
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
        """Run ``do``, which calls the store only, in the store's thread; return its result.

        Raises:
            GroupTimeoutError: the store did not answer before the deadline. The call stays queued,
                and later calls wait behind it.
            PeerLostError, GroupAbortedError: a member exited, left or aborted before; only with a
                ``watch``.
            TransportError: the store is lost.
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
        """Wait until ``there()`` is true or a member has left; return the result of ``read()``.

        All functions run in the store's thread.

        Args:
            there: whether the value exists; called repeatedly.
            operation: for errors.
            read: called once, when the value exists or will never exist.
            missing: returns the awaited ranks and remarks about them, for the log and the error.
            come: called once, before the first ``there``.
            left: the key in `marks` that a leaving member sets.

        Raises:
            GroupTimeoutError: the value does not exist at the deadline, or the store does not
                answer.
            What `ask` and the functions raise.
        """

        def look() -> list[T]:
            over = Deadline.after(_POLL_SECONDS)
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
        log_after = _TELL_SECONDS
        with self._reaching(operation), self._showing() as show:
            values = self._answer(operation, first_look)
            while not values:
                waited = time.monotonic() - began
                if waited >= min(show_after, log_after):
                    absent, remarks = self._answer(operation, missing)
                    show(absent)
                    if waited >= log_after:
                        self._log_wait(operation, log_after, absent, remarks)
                        log_after *= 2
                    show_after = max(show_after, waited + _SHOW_SECONDS)
                if self.watch is not None:
                    self.watch(operation, lambda: self._answer(operation, there))
                if self.deadline.expired:
                    late = self._late(operation, *self._answer(operation, missing))
                    self.abort(late)
                    raise late
                values = self._answer(operation, look)
        return values[0]

    def abort(self, error: BaseException) -> None:
        """Write why this member leaves the round; members that arrive later skip the round."""
        self.notify(partial(self._mark, self.marks, self._failure(error)))

    def notify(self, do: Callable[[], None]) -> None:
        """Run ``do``, which informs other members; its outcome is ignored here."""
        with suppress(RuntimeError):  # no thread can be started
            wait([self.asking.begin(do)], _ANSWERED_SECONDS)

    def aborted_error(self, operation: str) -> Exception:
        """Return the error of a wait in a round that a member aborted; abort the shared board too.

        With a ``watch``, raises PeerLostError if the member's process has exited.
        """
        marks = self.marks
        encoded = b"" if marks is None else self.ask(operation, lambda: marks.get(ABORTED_KEY))
        try:
            failure = _FAILURE.decode(encoded)
        except UNDECODABLE as error:
            detail = f"the value of {ABORTED_KEY!r} in the store must be of type Failure: {error}"
            return TransportError(operation, detail)
        if failure.kind == PeerLostError.__name__ and self.watch is not None:
            self.watch(operation, lambda: False)  # raises an error with more details
        self._pass_on(failure)
        return GroupAbortedError(operation, failure)

    def _pass_on(self, failure: Failure) -> None:
        ranks = [self.global_rank(rank) for rank in range(self.size)]
        if self.seen_on is not None and failure.culprit in ranks:
            board, members = self.seen_on
            culprit = members[ranks.index(failure.culprit)]
            board.report(members[self.rank], failure.kind, failure.message, culprit)

    def _mark(self, marks: Store | None, failure: Failure) -> None:
        if marks is not None:
            set_if_absent(marks, ABORTED_KEY, msgspec.msgpack.encode(failure))

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, GroupAbortedError):
            return error.failure
        own_rank = self.global_rank(self.rank)
        kind, message = kind_and_message(error)
        culprit = error.rank if isinstance(error, PeerLostError) else own_rank
        return Failure(own_rank, kind, message[:_MOST_CHARACTERS], culprit)

    def _is_marked(self, key: str) -> bool:
        return self.marks is not None and self.marks.check([key])

    def global_rank(self, rank: int) -> int:
        """Return the global rank of the member with that rank in the group."""
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
                    silent = f"{self._hosted_store} does not answer"
                    late = GroupTimeoutError(operation, self.deadline.timeout, detail=silent)
                    # Runs once the store answers, behind the calls already queued.
                    self.asking.begin(partial(self._mark, self.marks, self._failure(late)))
                    raise late
            return answer.result()
        finally:
            answer.cancel()
            del answer  # its error's traceback holds this frame, a reference cycle

    def _log_wait(
        self, operation: str, seconds: float, absent: Sequence[int], remarks: Sequence[str]
    ) -> None:
        if absent:
            ranks = ", ".join(str(self.global_rank(rank)) for rank in absent)
            waiting_for = f"rank{'s' if len(absent) > 1 else ''} {ranks}"
            line = "; ".join(
                [f"{operation}: waiting for {waiting_for} for {seconds:g} s", *remarks]
            )
            _log.warning(line)

    def _late(
        self, operation: str, absent: Sequence[int], remarks: Sequence[str]
    ) -> GroupTimeoutError:
        parts = [f"over the store at {self.host}"] if self.host else []
        return GroupTimeoutError(
            operation,
            self.deadline.timeout,
            tuple(MemberStatus(self.global_rank(rank), 0, "absent") for rank in absent),
            "; ".join([*parts, *remarks]),
        )

    @contextmanager
    def _showing(self) -> Iterator[Callable[[Sequence[int]], None]]:
        if self.seen_on is None:
            yield lambda _: None
            return
        board, members = self.seen_on
        with board.published_wait(f"set-up of {self.name}") as publish:
            yield lambda ranks: publish(members[rank] for rank in ranks)

    @contextmanager
    def _reaching(self, operation: str) -> Iterator[None]:
        """Abort on a lost peer; add the store's address and host to errors of the store."""
        try:
            yield
        except (PeerLostError, GroupAbortedError) as error:
            self.abort(error)
            raise
        except TransportError as error:
            with suppress(TransportError, GroupTimeoutError, DistError):
                # Its host may have left because of another member, whose failure is in the marks.
                if self._answer(operation, partial(self._is_marked, ABORTED_KEY)):
                    raise self.aborted_error(operation) from error
            raise
        except DistError as error:
            why = f"the process that hosts it has exited or aborted ({error})"
            detail = f"{self._store_name} is lost: {why}"
            keeper = None if self.keeper is None else self.global_rank(self.keeper)
            raise TransportError(operation, detail, keeper) from error

    @property
    def _hosted_store(self) -> str:
        kept = "" if self.keeper is None else f", hosted by rank {self.global_rank(self.keeper)},"
        return self._store_name + kept

    @property
    def _store_name(self) -> str:
        return f"the store at {self.host}" if self.host else "the store"


def set_if_absent(store: Store, key: str, value: bytes) -> bytes:
    """Set ``key`` to ``value`` if it is absent; return its value.

    One request, so that an interrupted caller leaves no gap, except in a Python store without
    `compare_set`.
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
    """Return the values of existing keys, in one request if the store supports it."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return store.multi_get(keys)
    return [store.get(key) for key in keys]


def backoff() -> Iterator[float]:
    """Yield the seconds to sleep between two polls: short at first, then doubling."""
    nap = _FIRST_NAP
    while True:
        yield nap
        nap = min(nap * 2, _LONGEST_NAP)


def _has_come(answer: Future[Any]) -> bool:
    """Return whether an answer arrives within a second: this process may have stalled itself."""
    return bool(wait([answer], _ANSWERED_SECONDS).done)


_FOR_EVER = timedelta(days=365)

_BYTES_PER_CHARACTER = 4
"""The longest character in UTF-8."""

_LAST_POLL_SECONDS = 1.0
"""How long an expired wait may take to list the missing keys."""


class ProxyStore(Store):
    """A torch store whose requests another process executes. Any thread may use it; close it.

    Args:
        ask: sends a request and returns the response before the deadline; called by one thread at a
            time. The store's methods raise its exceptions.
        timeout: seconds to wait for a response, and for keys in `wait`; None: no limit.
        address: this host's address on the route to the store; ``""``: no network leads there.
    """

    _open: ClassVar[list[ProxyStore]] = []
    """References to all open stores. Torch keeps only the C++ half of a store alive. Without these,
    the Python half, with the methods that torch calls, goes with the caller's last reference."""

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

    # --- methods that torch calls; values are bytes, or text in UTF-8 -----------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to a value of at most `coordinator.key_values.MAX_BYTES` bytes."""
        self._answer(kv.Set(self._number(), key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait until ``key`` exists; return its value."""
        self.wait([key])
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number in ``key``, 0 if it is missing; return the sum."""
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
        """Return whether all of ``keys`` exist."""
        return self._exist(keys, self._deadline())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, which must all exist."""
        values: list[bytes] = []
        while len(values) < len(keys):
            part = next(_askable(keys[len(values) :]))
            values += self._answer(kv.Get(self._number(), part)).values
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` exist; raise DistStoreError after the timeout."""
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
        last_look = Deadline.after(_LAST_POLL_SECONDS)
        absent = [key for key in keys if not self._exist([key], last_look)]
        if absent:
            raise DistStoreError(late + ", ".join(absent))

    def has_extended_api(self) -> bool:
        """Return True: `multi_get` and `multi_set` are supported."""
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
        with self._asking.owner_lock as acquired:
            if not acquired:
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
    """Return the store under all `PrefixStore` layers."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def address_towards(store: Store) -> str:
    """Return this host's address on the route to a store; ``""`` if no network leads there."""
    base = behind_prefixes(store)
    if isinstance(base, TCPStore):
        return own_address(base.host, base.port)
    return base.address if isinstance(base, ProxyStore) else ""


def _askable(keys: Sequence[str]) -> Iterator[list[str]]:
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
