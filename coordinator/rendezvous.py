"""Connect processes that start together: exchange values, compare settings, authenticate.

It needs only a store; boards, process groups and queues are set up with it. Each swap has a name
and keys:

    NAME/RANK   the number of members as that member has it, a space, and its value
    NAME/count  the number of members that have written their value
    NAME/all    set by the last member to write

Each member polls one key, whatever the number of members (torch's own wait prints to stderr on a
timeout), and now and then a second key, with the reason of the first member that aborted. Several
topologies may use one store, at once or in turn, if all ranks set them up in the same order.

A call that blocks inside a store cannot be interrupted: while the process that hosts the store is
stopped, even a check for a key does not return. So one thread runs the store's calls in order, and
callers wait for that thread with a deadline.

With a launcher's secret, all values but the first are sealed (`coordinator.stores.SealedStore`): a
process that alters the store can prevent the rendezvous and read the values, but cannot forge any.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import chain
from textwrap import shorten
from typing import Any, Final, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from coordinator import torch_groups
from coordinator.daemon_threads import SingleThreadExecutor, is_done_within
from coordinator.launcher import Launch
from coordinator.secret import SecretError
from coordinator.stores import (
    DEFAULT_TIMEOUT,
    SealedStore,
    address_towards,
    backoff,
    base_of,
    behind_prefixes,
    open_store,
    values_of,
)
from coordinator.torch_groups import SocketChoice
from shm_broadcast import Board
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import (
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    PeerProtocolError,
    TransportError,
)
from shm_broadcast.eventcount import SLICE_SECONDS
from shm_broadcast.state.table import kind_and_message

T = TypeVar("T")

_log = logging.getLogger(__name__)

ABORTED_KEY = "aborted"
"""The key with the reason of the first member that aborts a round."""

_LONGEST_GROUP = 200
_LONGEST_REASON = 2000
_READ_SECONDS = 0.5
"""How long the store's host stays after an abort; waiting members poll more often."""
_POLL_SECONDS = 5 * SLICE_SECONDS
"""How long the store's thread polls for a value per call."""
_ANSWERED_SECONDS = 1.0
"""The shortest wait for an answer of the store, also for the last poll at the deadline."""
_SHOW_SECONDS: Final = 1.0
"""How often a long wait's absent ranks are published on the board again."""
_LOG_SECONDS: Final = 10.0
"""The log names the absent ranks after this time, and again after each doubling of it."""
_FAILURE = msgspec.msgpack.Decoder(Failure)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Swaps bytes between the members of one group, over a store.

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
        parent: the store in which members publish the group that they set up last; None: none.
        previous: this member's earlier entry in ``parent``.
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
    parent: Store | None = None
    previous: bytes = b""
    asking: SingleThreadExecutor = field(
        default_factory=partial(SingleThreadExecutor, "ask-store"), compare=False, repr=False
    )

    def begin_round(self, place: str) -> Rendezvous:
        """Start a round under the key prefix ``place``, which may have been used before.

        The store counts each member's rounds per ``place`` and member list (`called`). The n-th
        round has its own keys: it meets the other members' n-th rounds and never reads an earlier
        one's values. Members skip a round that another member has aborted before.

        Raises GroupTimeoutError if the store does not answer, TransportError if it is lost.
        """
        store, parent = self.store, self.store if self.called else None
        place = f"group-coordinator/{place}{_digest(self.called)}"

        def enter() -> tuple[Store, bytes]:
            while True:
                count = store.add(f"{place}/rounds/{self.rank}", 1)
                inside = PrefixStore(f"{place}/{count}", store)
                if self.deadline.expired:  # the caller has left: its next round is another one
                    self._mark(inside, self._failure(self._silent_store(self.name)))
                if self.deadline.expired or not inside.check([ABORTED_KEY]):
                    return inside, self._publish_group(parent, count)

        inside, before = self.ask(self.name, enter)
        return replace(self, store=inside, marks=inside, parent=parent, previous=before)

    def sub(self, name: str, ranks: Sequence[int], deadline: Deadline | None = None) -> Rendezvous:
        """Return the rendezvous of a subgroup, in a new round.

        ``ranks`` are ranks in this group, this member's among them. ``deadline`` None: this
        rendezvous's.
        """
        members = Rendezvous(
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
        return members.begin_round(name)

    def all_gather(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Write ``payload``, wait for all members', return them by rank.
        Collective: yes, every member.

        Args:
            what: the swap's name, for keys and errors; usable once.
            payload: any bytes; kilobytes, not megabytes.

        Raises:
            GroupTimeoutError: the deadline expired; ``waiting_for`` lists the absent members, and
                is empty if the store did not answer.
            GroupAbortedError: a member aborted before all had written.
            PeerLostError: a member exited or left; only with a ``watch``.
            ValueError: a member has another number of members.
            PeerProtocolError: a value in the store is malformed.
            SecretError: a value is not sealed with the members' secret.
            TransportError: the store is lost.
        """
        return self._wait_for(
            f"{what}/all",
            f"{self.name} {what}",
            lambda: [*self._payloads(what).values()],
            lambda: sorted({*range(self.size)} - self._payloads(what).keys()),
            lambda: self._publish(what, payload),
        )

    def broadcast(self, what: str, payload: bytes | None, src: int = 0) -> bytes:
        """Return the payload of member ``src``, a rank in the group. Collective: yes, every member.

        Arguments and errors as for `all_gather`; ``payload`` only at ``src``, which does not wait.
        """
        key, operation = f"{what}/{src}", f"{self.name} {what}"
        if self.rank != src:
            return self._wait_for(key, operation, lambda: self.store.get(key), lambda: [src])
        if payload is None:
            raise ValueError(f"{self.name}: member {src} broadcasts and must pass a payload")
        self.ask(operation, lambda: self._put(key, payload))
        return payload

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

    def abort(self, error: BaseException) -> None:
        """Write why this member leaves the round; members that arrive later skip the round."""
        mark = partial(self._mark, self.marks, self._failure(error))
        with suppress(RuntimeError):  # no thread can be started
            wait([self.asking.begin(mark)], _ANSWERED_SECONDS)

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Enclose a member's set-up in a round; an exception inside aborts the round."""
        try:
            yield
        except (GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            raise  # the wait has informed the other members, or cannot
        except (Exception, KeyboardInterrupt) as error:
            self.abort(error)
            if self.rank == self.keeper:  # the store may end with this process: let the others read
                time.sleep(_READ_SECONDS)
            raise

    def let_all_read(self) -> None:
        """Wait until all members have read the store. Collective: yes, every member.

        The member that hosts the store waits, or all if that is unknown, at most until the
        deadline.
        """
        with suppress(GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            for rank in range(self.size):
                if rank == self.rank or self.keeper in (None, self.rank):
                    self.broadcast("read", b"" if rank == self.rank else None, rank)

    def decoded(
        self, decoder: msgspec.msgpack.Decoder[T], what: str, payload: bytes, rank: int
    ) -> T:
        """Decode the payload that member ``rank`` wrote in the swap ``what``.

        Raises PeerProtocolError with the member, the key and the type if it is malformed.
        """
        try:
            return decoder.decode(payload)
        except UNDECODABLE as error:
            kind = decoder.type
            name = kind.__name__ if isinstance(kind, type) else kind
            raise self._altered(f"{what}/{rank}", rank, f"of type {name}: {error}") from error

    def global_rank(self, rank: int) -> int:
        """Return the global rank of the member with that rank in the group."""
        return self.called[rank] if self.called else rank

    # --- values in the store ------------------------------------------------------------------

    def _publish(self, what: str, payload: bytes) -> None:
        self._put(f"{what}/{self.rank}", b"%d %b" % (self.size, payload))
        if self.store.add(f"{what}/count", 1) == self.size:
            self._put(f"{what}/all", b"")

    def _put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)  # type: ignore[arg-type] # the stub knows text only

    def _payloads(self, what: str) -> dict[int, bytes]:
        ranks = {f"{what}/{rank}": rank for rank in range(self.size)}
        keys = self._existing([*ranks])
        payloads = {}
        for key, value in zip(keys, values_of(self.store, keys), strict=True):
            rank = ranks[key]
            size, _, payloads[rank] = value.partition(b" ")
            if not size.isdigit():
                raise self._altered(key, rank, "a number of members, a space and a value")
            if int(size) != self.size:
                raise ValueError(
                    f"{self.name}: rank {self.global_rank(rank)} has a group of {int(size)} "
                    f"members, this one has a group of {self.size}"
                )
        return payloads

    def _existing(self, keys: list[str]) -> list[str]:
        """Return those of ``keys`` that exist; bisect, since few ranks are late."""
        if self.store.check(keys):
            return keys
        half = len(keys) // 2
        return [*self._existing(keys[:half]), *self._existing(keys[half:])] if half else []

    def _altered(self, key: str, rank: int, expected: str) -> PeerProtocolError:
        detail = f"the value of {key!r} in the store must be {expected}"
        return PeerProtocolError(self.name, self.global_rank(rank), detail)

    @property
    def _group(self) -> str:
        return f"{self.name} of ranks {list(self.called)}"

    def _publish_group(self, parent: Store | None, count: int) -> bytes:
        if parent is None:
            return b""
        key = _last_group_of(self.called[self.rank])
        before = parent.get(key) if parent.check([key]) else b""
        parent.set(key, f"{count} {self._group}")
        return before

    def _elsewhere(self, ranks: Sequence[int]) -> list[str]:
        """Return a remark for each of ``ranks`` that last joined the set-up of another group.

        A wrong name, rank or order keeps members apart, and the remark shows it. A member in this
        member's previous group is only late: no remark.
        """
        remarks = []
        for rank in map(self.global_rank, ranks):
            key = _last_group_of(rank)
            if self.parent is not None and self.parent.check([key]):
                entry = self.parent.get(key)
                group = entry.partition(b" ")[2].decode(errors="replace")
                if group != self._group and entry != self.previous:
                    name = shorten(group, _LONGEST_GROUP)
                    remarks.append(f"rank {rank} last joined the set-up of {name}")
        return remarks

    def _mark(self, marks: Store | None, failure: Failure) -> None:
        if marks is not None and marks.add(f"{ABORTED_KEY}/first", 1) == 1:
            marks.set(ABORTED_KEY, msgspec.msgpack.encode(failure))  # type: ignore[arg-type]

    # --- waits --------------------------------------------------------------------------------

    def _wait_for(
        self,
        key: str,
        operation: str,
        read: Callable[[], T],
        absent: Callable[[], Sequence[int]],
        first: Callable[[], None] = lambda: None,
    ) -> T:
        """Wait until ``key`` exists or a member aborts; return the result of ``read()``.

        All functions run in the store's thread: ``first`` once before, ``absent`` for the log and
        the error.
        """

        def poll() -> list[T]:
            over = Deadline.after(_POLL_SECONDS)
            while not self.store.check([key]):
                if over.expired or self.deadline.expired:
                    return []
                time.sleep(self.deadline.remaining(at_most=next(pauses)))
            return [read()]

        def begin() -> list[T]:
            first()
            return poll()

        def missing() -> tuple[Sequence[int], list[str]]:
            ranks = absent()
            return ranks, self._elsewhere(ranks)

        def exists() -> bool:
            return self._answer(operation, lambda: self.store.check([key]))

        pauses, began = backoff(), time.monotonic()
        look_after, log_after = 0.0, _LOG_SECONDS
        with self._reaching(operation), self._shown() as show:
            values = self._answer(operation, begin)
            while not values:
                # Members that began together time out together, and all name the absent ranks.
                patient = self.deadline.remaining(_ANSWERED_SECONDS) >= _ANSWERED_SECONDS
                if patient and self._answer(operation, self._is_aborted):
                    raise self._aborted_error(operation)
                if self.watch is not None:
                    self.watch(operation, exists)
                waited = time.monotonic() - began
                if self.deadline.expired or waited >= look_after:
                    ranks, remarks = self._answer(operation, missing)
                    if self.deadline.expired:
                        late = self._timed_out(operation, ranks, remarks)
                        self.abort(late)
                        raise late
                    show(ranks)
                    if waited >= log_after:
                        self._log_wait(operation, log_after, ranks, remarks)
                        log_after *= 2
                    look_after = waited + _SHOW_SECONDS
                values = self._answer(operation, poll)
        return values[0]

    def _answer(self, operation: str, do: Callable[[], T]) -> T:
        answer = self.asking.begin(do)
        soon = Deadline.after(_ANSWERED_SECONDS)
        latest = self.deadline if soon.at < self.deadline.at else soon
        try:
            while not is_done_within(answer, latest):
                if self.watch is not None:
                    self.watch(operation, partial(_is_done_soon, answer))
                if latest.expired:
                    late = self._silent_store(operation)
                    # Runs once the store answers, behind the calls already queued.
                    self.asking.begin(partial(self._mark, self.marks, self._failure(late)))
                    raise late
            return answer.result()
        finally:
            answer.cancel()
            del answer  # its error's traceback holds this frame, a reference cycle

    @contextmanager
    def _reaching(self, operation: str) -> Iterator[None]:
        """Abort on a lost peer; add the store's address and host to errors of the store."""
        try:
            yield
        except (PeerLostError, GroupAbortedError) as error:
            self.abort(error)
            raise
        except DistError as error:
            why = f"the process that hosts it has exited or aborted ({error})"
            detail = f"{self._store_name} is lost: {why}"
            keeper = None if self.keeper is None else self.global_rank(self.keeper)
            raise TransportError(operation, detail, keeper) from error

    @contextmanager
    def _shown(self) -> Iterator[Callable[[Sequence[int]], None]]:
        if self.seen_on is None:
            yield lambda _: None
            return
        board, members = self.seen_on
        with board.published_wait(f"set-up of {self.name}") as publish:
            yield lambda ranks: publish(members[rank] for rank in ranks)

    def _log_wait(
        self, operation: str, seconds: float, absent: Sequence[int], remarks: Sequence[str]
    ) -> None:
        if absent:
            ranks = ", ".join(str(self.global_rank(rank)) for rank in absent)
            waiting_for = f"rank{'s' if len(absent) > 1 else ''} {ranks}"
            line = f"{operation}: waiting for {waiting_for} for {seconds:g} s"
            _log.warning("; ".join([line, *remarks]))

    # --- errors -------------------------------------------------------------------------------

    def _is_aborted(self) -> bool:
        return self.marks is not None and self.marks.check([ABORTED_KEY])

    def _aborted_error(self, operation: str) -> Exception:
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
        ranks = [self.global_rank(rank) for rank in range(self.size)]
        if self.seen_on is not None and failure.culprit in ranks:
            board, members = self.seen_on
            culprit = members[ranks.index(failure.culprit)]
            board.report(members[self.rank], failure.kind, failure.message, culprit)
        return GroupAbortedError(operation, failure)

    def _failure(self, error: BaseException) -> Failure:
        if isinstance(error, GroupAbortedError):
            return error.failure
        own_rank = self.global_rank(self.rank)
        kind, message = kind_and_message(error)
        culprit = error.rank if isinstance(error, PeerLostError) else own_rank
        return Failure(own_rank, kind, message[:_LONGEST_REASON], culprit)

    def _timed_out(
        self, operation: str, absent: Sequence[int], remarks: Sequence[str]
    ) -> GroupTimeoutError:
        parts = [f"over the store at {self.host}"] if self.host else []
        return GroupTimeoutError(
            operation,
            self.deadline.timeout,
            tuple(MemberStatus(self.global_rank(rank), 0, "absent") for rank in absent),
            "; ".join([*parts, *remarks]),
        )

    def _silent_store(self, operation: str) -> GroupTimeoutError:
        kept = "" if self.keeper is None else f", hosted by rank {self.global_rank(self.keeper)},"
        detail = f"{self._store_name}{kept} does not answer"
        return GroupTimeoutError(operation, self.deadline.timeout, detail=detail)

    @property
    def _store_name(self) -> str:
        return f"the store at {self.host}" if self.host else "the store"


def _is_done_soon(answer: Future[Any]) -> bool:
    """Return whether an answer arrives within a second: this process may have stalled itself."""
    return bool(wait([answer], _ANSWERED_SECONDS).done)


def _last_group_of(rank: int) -> str:
    return f"group-coordinator/came/{rank}"


def _digest(ranks: Sequence[int]) -> str:
    joined = b".".join(b"%d" % rank for rank in ranks)
    return f":{blake2b(joined, digest_size=12).hexdigest()}" if ranks else ""


OPERATION_TIMEOUT = 600.0
"""Default seconds per operation."""

_TERMS = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Settings:
    """How the groups of one topology move tensors, and their timeout.

    Attributes:
        backend: the device's torch backend, named as for `torch.distributed.new_group`.
        device: the device of the collectives' tensors.
        local_rank: this process's number on its host.
        sockets: the address on which gloo listens.
        timeout: seconds per operation; None: no limit.
        torch_only, checked, secret: as for `coordinator.init`.
        stream: the stream of the device's collectives; None: the current stream.
    """

    backend: str
    device: torch.device
    local_rank: int
    sockets: SocketChoice
    timeout: float | None
    torch_only: bool
    checked: bool
    stream: torch.cuda.Stream | None = None
    secret: bytes | None = field(default=None, repr=False)

    def terms(self) -> dict[str, str]:
        """Return the settings that all members must share, by name, without the secret."""
        return {
            "secret": "not given" if self.secret is None else "given",
            "backend": self.backend,
            "torch_only": str(self.torch_only),
            "checked": str(self.checked),
        }

    @classmethod
    def of(
        cls,
        backend: str | None,
        local_rank: int,
        sockets: SocketChoice | None = None,
        timeout: float | None = OPERATION_TIMEOUT,
        *,
        torch_only: bool = False,
        checked: bool = False,
        stream: torch.cuda.Stream | None = None,
        secret: bytes | None = None,
    ) -> Settings:
        """Return settings for a backend and its device: the CPU for gloo, else a GPU.

        ``backend`` None: NCCL if this process sees a GPU, else gloo. ``local_rank`` chooses the
        GPU. ``sockets`` None: torch's choice. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turns ``checked``
        on as well.

        Raises:
            ValueError: a backend other than gloo and NCCL, or a ``stream`` on another device.
        """
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cpu")
        if "nccl" in torch_groups.kinds(backend):
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        if stream is not None and stream.device != device:
            raise ValueError(f"a stream of {stream.device} is not for a group on {device}")
        return cls(
            backend,
            device,
            local_rank,
            sockets or SocketChoice(),
            timeout,
            torch_only,
            checked or dist.get_debug_level() == dist.DebugLevel.DETAIL,
            stream,
            secret,
        )


def config_handshake(
    members: Rendezvous, place: str, what: str, terms: Mapping[str, str]
) -> Rendezvous:
    """Meet in a round and compare all members' settings. Collective: yes, every member.

    Args:
        members: their rendezvous; any process may read the settings there.
        place, what: the key prefix, and the swap's name.
        terms: this member's settings, by name.

    Raises:
        ValueError: settings differ; names the first and the ranks with each value. All members
            raise it.
        SecretError: likewise, if only some members have the launcher's secret.
        What `Rendezvous.all_gather` raises.
    """
    exchange = members.begin_round(place)
    with exchange.setting_up():
        payloads = exchange.all_gather(what, msgspec.msgpack.encode(terms))
    settings = [exchange.decoded(_TERMS, what, each, rank) for rank, each in enumerate(payloads)]
    for name in dict.fromkeys(chain(*settings)):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, each in enumerate(settings):
            ranks_by_value.setdefault(each.get(name, "not given"), []).append(
                exchange.global_rank(rank)
            )
        if len(ranks_by_value) > 1:
            exchange.let_all_read()
            values = ", ".join(
                f"{value} on ranks {ranks}" for value, ranks in ranks_by_value.items()
            )
            error = SecretError if name == "secret" else ValueError
            raise error(f"{exchange.name}: {name} is {values}: give all ranks the same")
    return exchange


def meet(
    launch: Launch,
    store: Store | None = None,
    timeout: float | Deadline | None = DEFAULT_TIMEOUT,
    terms: Mapping[str, str] = {},
    board: Board | None = None,
) -> tuple[Rendezvous, str]:
    """Wait until every rank has reached the store. Collective: yes, every rank.

    Args:
        launch: this process's rank, and the address of the store.
        store: a store to use instead.
        timeout: seconds for this and for later set-up over the rendezvous; None: no limit.
        terms: settings that all ranks must share, by name.
        board: where this rank's wait is published; member i is rank i. None: nowhere.

    Returns:
        The rendezvous of all ranks; on rank 0 it keeps the hosted store alive. And this host's
        address on the route to the store; ``""``: no network leads there.

    Raises:
        ValueError, SecretError: ``terms`` differ, as for `config_handshake`.
        GroupTimeoutError: the deadline expired; ``waiting_for`` lists the absent ranks.
        OSError: rank 0 cannot bind the store's port.
    """
    deadline = Deadline.after(timeout)
    keeper = 0 if store is None and not launch.hosted else None
    if store is None:
        store = open_store(launch, deadline)
    base = base_of(store)
    host = f"{base.host}:{base.port}" if isinstance(base, TCPStore) else ""
    members = Rendezvous(store, launch.rank, launch.world_size, "world", deadline, host, keeper)
    if board is not None:
        members = replace(members, seen_on=(board, range(launch.world_size)))
    exchange = config_handshake(members, f"world/{launch.attempt}", "rendezvous", terms)
    return exchange, address_towards(store)


_NONCE_BYTES = 16


def authenticated(exchange: Rendezvous, secret: bytes | None, closing: ExitStack) -> Rendezvous:
    """Return the rendezvous, with all further values sealed. Collective: yes, every member.

    Without a secret, or if its store is sealed, it is returned itself. Each member contributes to
    the key's salt, so no value of an earlier round is valid.

    Raises SecretError if a member does not have this secret, or the store was altered.
    """
    if secret is None or isinstance(behind_prefixes(exchange.store), SealedStore):
        return exchange
    nonces = exchange.all_gather("nonces", os.urandom(_NONCE_BYTES))
    sealed = SealedStore(exchange.store, secret, b"".join(nonces))
    closing.callback(sealed.close)
    proofs = exchange.all_gather("proofs", sealed.proof(exchange.rank))
    others = [
        exchange.global_rank(rank)
        for rank, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, sealed.proof(rank))
    ]
    if others:
        exchange.let_all_read()
        raise SecretError(
            f"{exchange.name}: ranks {others} do not have the secret of rank "
            f"{exchange.global_rank(exchange.rank)}, or another process has written to the store"
        )
    return replace(exchange, store=sealed)
