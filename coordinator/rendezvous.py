"""Connect processes that start together: exchange values, compare settings, authenticate.

It needs only a store; boards, process groups and queues are set up with it. Each swap has a name
and keys:

    NAME/RANK   the number of members as that member has it, a space, and its value
    NAME/count  the number of members that have written their value
    NAME/ended  "all", set by the last member to write, or "not all", set by the first to detect
                that a member has left. The first value stays.

Each member polls one key, whatever the number of members (torch's own wait prints to stderr on a
timeout), and now and then a second key for members that have left.

The store is given, hosted by the launcher, or hosted by rank 0, which binds one address, never all
interfaces. The system may choose the port, which `host_store` returns; searching a free port first
would let another process take it. Several topologies may use one store, at once or in turn, if all
ranks set them up in the same order (`Rendezvous.all_gather_round`).

With a launcher's secret, the first store holds only the address of a second one, which the secret
protects (`coordinator.curve_store`); everything else goes through the second. A process that alters
the first store can prevent the rendezvous, but cannot read or forge anything.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from itertools import chain
from textwrap import shorten
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from coordinator import torch_groups
from coordinator.daemon_threads import submit_in_thread
from coordinator.key_values import Check, StoreAddress
from coordinator.launcher import Launch, own_address, resolve, who_listens
from coordinator.secret import SecretError
from coordinator.store_client import (
    ABORTED_KEY,
    ProxyStore,
    StoreClient,
    address_towards,
    behind_prefixes,
    set_if_absent,
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
from shm_broadcast.process import NO_DESCRIPTOR, describe_os_error

T = TypeVar("T")

_LONGEST_GROUP = 200
_READ_SECONDS = 0.5
"""How long the store's host stays after an abort; waiting members poll more often."""
LEFT_ROUND = "left for the next"
"""The key that a member sets in a round that it left unfinished for its next one."""
_ALL, _NOT_ALL = b"all", b"not all"


@dataclass(frozen=True, slots=True)
class Rendezvous(StoreClient):
    """Swaps bytes between the members of one group, over a store.

    Attributes:
        parent: the store in which members publish the group that they set up last; None: none.
        previous: this member's earlier entry in ``parent``.
    """

    parent: Store | None = None
    previous: bytes = b""

    def begin_round(self, place: str) -> Rendezvous:
        """Start a round under the key prefix ``place``, which may have been used before.

        The store counts each member's rounds per ``place`` and member list (`called`). The n-th
        round has its own keys: it meets the other members' n-th rounds and never reads an earlier
        one's values. A member leaves a round if it aborts, or starts the next one before its set-up
        is finished, as the replacement of a killed process does. Later members skip that round.
        Members that wait in it get an error, or follow to the next one if they `all_gather_round`.

        Raises GroupTimeoutError if the store does not answer, TransportError if it is lost.
        """
        store, parent = self.store, self.store if self.called else None
        place = f"group-coordinator/{place}{_digest(self.called)}"

        def enter() -> tuple[Store, bytes]:
            while True:
                count = store.add(f"{place}/visits/{self.rank}", 1)
                self._leave(
                    PrefixStore(f"{place}/{each}", store) for each in range(count - 1, 0, -1)
                )
                inside = PrefixStore(f"{place}/{count}", store)
                if not inside.check([ABORTED_KEY]):
                    entered.append(inside)
                    return inside, self._publish_where(parent, count)

        def leave(error: GroupTimeoutError) -> None:
            for each in entered:
                self._mark(each, self._failure(error))

        entered: list[Store] = []
        try:
            inside, before = self.ask(self.name, enter)
        except GroupTimeoutError as error:
            # Once the store answers, it counts this call as a round: abort that one then.
            self.asking.begin(partial(leave, error))
            raise
        return replace(self, store=inside, marks=inside, parent=parent, previous=before)

    def all_gather_round(
        self, place: str, what: str, payload: bytes = b""
    ) -> tuple[Rendezvous, list[bytes]]:
        """`begin_round` and `all_gather` in it. Collective: yes, every member.

        If a member leaves the round before all have arrived, the others follow it to its next one.
        Returns the rendezvous of the round in which all met, and the payloads by rank.
        """
        while True:
            inside = self.begin_round(place)
            with inside._abort_on_error():
                payloads = inside._gather(what, payload, LEFT_ROUND)
            if payloads is not None:
                return inside, payloads

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Enclose the rest of a member's set-up in a round; an exception inside aborts the round.

        Afterwards this member may start another round while others are still inside.
        """
        with self._abort_on_error():
            yield
        if self.marks is not None:
            self.notify(partial(self.marks.set, _set_up_by(self.rank), ""))

    def all_gather(self, what: str, payload: bytes = b"") -> list[bytes]:
        """Write ``payload``, wait for all members', return them by rank.
        Collective: yes, every member.

        Args:
            what: the swap's name, for keys and errors; usable once.
            payload: any bytes; kilobytes, not megabytes.

        Raises:
            GroupTimeoutError: the deadline expired; ``waiting_for`` lists the absent members, and
                is empty if the store did not answer.
            GroupAbortedError: a member aborted or restarted its set-up before all had written.
            PeerLostError: a member exited or left; only with a ``watch``.
            ValueError: a member has another number of members.
            PeerProtocolError: a value in the store is malformed.
            TransportError: the store is lost.
        """
        payloads = self._gather(what, payload, ABORTED_KEY)
        if payloads is None:
            raise self.aborted_error(f"{self.name} {what}")
        return payloads

    def broadcast(self, what: str, payload: bytes | None, src: int = 0) -> bytes:
        """Return the payload of member ``src``, a rank in the group. Collective: yes, every member.

        Arguments and errors as for `all_gather`; ``payload`` only at ``src``, which does not wait.
        """
        key, operation = f"{what}/{src}", f"{self.name} {what}"
        if self.rank != src:
            value = self.wait_for(
                lambda: self.store.check([key]),
                operation,
                lambda: self.store.get(key) if self.store.check([key]) else None,
                lambda: self._missing([src]),
            )
            if value is None:
                raise self.aborted_error(operation)
            return value
        if payload is None:
            raise ValueError(f"{self.name}: member {src} broadcasts and must pass a payload")
        self.ask(operation, lambda: self._put(key, payload))
        return payload

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

    def require_all_stay(self, operation: str) -> None:
        """Raise GroupAbortedError if a member has left this round for its next one."""
        if self.ask(operation, lambda: self._is_marked(LEFT_ROUND)):
            raise self.aborted_error(operation)

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

    def _altered(self, key: str, rank: int, expected: str) -> PeerProtocolError:
        detail = f"the value of {key!r} in the store must be {expected}"
        return PeerProtocolError(self.name, self.global_rank(rank), detail)

    def let_all_read(self) -> None:
        """Wait until all members have read the store. Collective: yes, every member.

        The member that hosts the store waits, or all if that is unknown, at most until the
        deadline.
        """
        with suppress(GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            for rank in range(self.size):
                if rank == self.rank or self.keeper in (None, self.rank):
                    self.broadcast("read", b"" if rank == self.rank else None, rank)

    @property
    def _group(self) -> str:
        return f"{self.name} of ranks {list(self.called)}"

    def _publish_where(self, parent: Store | None, count: int) -> bytes:
        if parent is None:
            return b""
        key = _last_group_of(self.called[self.rank])
        before = parent.get(key) if parent.check([key]) else b""
        parent.set(key, f"{count} {self._group}")
        return before

    def _missing(self, ranks: Sequence[int]) -> tuple[Sequence[int], list[str]]:
        """Return ``ranks``, and a remark for each that last joined the set-up of another group.

        A wrong name, rank or order keeps members apart, and the remark shows it. A member in this
        member's previous group is only late: no remark.
        """
        elsewhere = []
        for rank in map(self.global_rank, ranks):
            key = _last_group_of(rank)
            if self.parent is not None and self.parent.check([key]):
                entry = self.parent.get(key)
                group = entry.partition(b" ")[2].decode(errors="replace")
                if group != self._group and entry != self.previous:
                    name = shorten(group, _LONGEST_GROUP)
                    elsewhere.append(f"rank {rank} last joined the set-up of {name}")
        return ranks, elsewhere

    def _leave(self, visits: Iterable[Store]) -> None:
        """Abort unfinished earlier rounds, latest first, until one is set up or marked."""
        own_rank = self.global_rank(self.rank)
        why = f"rank {own_rank} restarted this set-up without finishing it"
        for before in visits:
            if before.check([_set_up_by(self.rank)]) or before.check([LEFT_ROUND]):
                return
            self._mark(before, Failure(own_rank, PeerLostError.__name__, why, own_rank))
            before.set(LEFT_ROUND, "")

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        try:
            yield
        except (GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            raise  # the wait has informed the other members, or cannot
        except (Exception, KeyboardInterrupt) as error:
            self.abort(error)
            if self.rank == self.keeper:  # the store may end with this process: let the others read
                time.sleep(_READ_SECONDS)
            raise

    def _gather(self, what: str, payload: bytes, left: str) -> list[bytes] | None:
        """Swap payloads; return None on all members if ``left`` is set before all wrote."""
        return self.wait_for(
            lambda: self.store.check([f"{what}/ended"]),
            f"{self.name} {what}",
            lambda: self._put_by_all(what),
            lambda: self._missing(sorted({*range(self.size)} - self._payloads(what).keys())),
            lambda: self._publish(what, payload),
            left,
        )

    def _publish(self, what: str, payload: bytes) -> None:
        self._put(f"{what}/{self.rank}", b"%d %b" % (self.size, payload))
        if self.store.add(f"{what}/count", 1) == self.size:
            self._end(what, _ALL)

    def _put_by_all(self, what: str) -> list[bytes] | None:
        ended = self._end(what, _NOT_ALL)
        return list(self._payloads(what).values()) if ended == _ALL else None

    def _end(self, what: str, how: bytes) -> bytes:
        return set_if_absent(self.store, f"{what}/ended", how)

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


def _set_up_by(rank: int) -> str:
    return f"set up/{rank}"


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
        What `Rendezvous.all_gather_round` raises.
    """
    exchange, payloads = members.all_gather_round(place, what, msgspec.msgpack.encode(terms))
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


DEFAULT_TIMEOUT = 60.0
"""Default seconds for all ranks to meet and to set their groups up."""

_STORE_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 4096
_STORE_FILES = 12
"""The files that a store opens, and one more. With too few, torch's store never answers, or
exits the process.
"""


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
    base = behind_prefixes(store)
    host = f"{base.host}:{base.port}" if isinstance(base, TCPStore) else ""
    members = Rendezvous(store, launch.rank, launch.world_size, "world", deadline, host, keeper)
    if board is not None:
        members = replace(members, seen_on=(board, range(launch.world_size)))
    exchange = config_handshake(members, f"world/{launch.attempt}", "rendezvous", terms)
    return exchange, address_towards(store)


def host_store(address: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Host a store at one address, as long as the returned object lives.

    Args:
        address: host name or address, IPv4 or IPv6. If it is not an address of this host, for
            example behind address translation, this host's address on the route to it is bound.
        port: 0 lets the system choose; the result's ``.port`` is the bound port. If a store of this
            process has the port already, both share it.

    Raises:
        ValueError: the address is a wildcard, 0.0.0.0 or ::.
        OSError: the port is in use, the address cannot be resolved, or the limit of open files is
            reached.
    """
    try:
        listener = _listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return _shared_store(address, port, error)
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        None,
        True,
        _STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def connect_store(
    address: str, port: int, timeout: float | Deadline | None = DEFAULT_TIMEOUT
) -> TCPStore:
    """Connect to the store at ``address``, a host name, IPv4 or IPv6; wait until its host listens.

    ``timeout``: seconds to wait; None: no limit.

    Raises:
        GroupTimeoutError: no process answered in time, or the process that answers is not a store.
        OSError: the limit of open files is reached.
        RuntimeError: no thread can be started.
    """
    deadline = Deadline.after(timeout)
    while True:
        try:
            host = who_listens(address, port, deadline.remaining(5.0))
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            problem = f"no process answers at {address}:{port}: {error}"
        else:
            store = _connected(host, port, deadline)
            if isinstance(store, TCPStore):
                return store
            problem = f"the server at {address}:{port} is no store: {store}"
        time.sleep(deadline.remaining(at_most=0.05))
        if deadline.expired:  # one more attempt would have no time, and a vaguer error
            absent = (MemberStatus(0, 0, "absent"),)
            raise GroupTimeoutError("rendezvous", deadline.timeout, absent, problem)


def _connected(host: str, port: int, deadline: Deadline) -> TCPStore | str:
    """Return a client of the store at ``host``, or the reason why that is not a store.

    Torch waits without limit for a host that never answers: it connects in a daemon thread, which
    is abandoned at the deadline.
    """
    seconds = deadline.remaining(_STORE_TIMEOUT.total_seconds())
    limit = timedelta(seconds=max(seconds, 0.001))
    connect = partial(TCPStore, host, port, None, False, limit, wait_for_workers=False)
    future = submit_in_thread(connect, "store-connect")
    try:
        store = future.result(seconds)
    except TimeoutError:
        return "it accepts connections and does not answer"
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    store.set_timeout(_STORE_TIMEOUT)
    return store


def open_store(launch: Launch, deadline: Deadline) -> TCPStore:
    """Host the store of ``launch`` if this rank is to, else `connect_store`.

    Raises ValueError if the port is 0 or the address a wildcard, OSError if rank 0 cannot bind the
    port.
    """
    hosts = launch.rank == 0 and not launch.hosted
    if not launch.master_port and not (hosts and launch.world_size == 1):
        raise ValueError(
            "master_port 0 is no port to connect to: call host_store() in one process and pass its "
            "port to all ranks"
        )
    if hosts:
        return host_store(launch.master_addr, launch.master_port)
    return connect_store(launch.master_addr, launch.master_port, deadline)


def _listen(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, bind_to = resolve(address, port, socket.SOCK_STREAM)
    if ipaddress.ip_address(bind_to[0]).is_unspecified:
        raise ValueError(f"a store listens at one address, not at all of this host's: {address!r}")
    with ExitStack() as undo:
        try:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(bind_to)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listener.bind((own_address(address, port or 1), port))
            listener.listen(_BACKLOG)
            with ExitStack() as files:
                for _ in range(_STORE_FILES):
                    files.callback(os.close, os.dup(listener.fileno()))
        except OSError as error:
            no_store = f"no store can be hosted at {address}:{port}: {describe_os_error(error)}"
            raise OSError(error.errno, no_store) from error
        undo.pop_all()
    return listener


def _shared_store(address: str, port: int, in_use: OSError) -> TCPStore:
    host = resolve(address, port, socket.SOCK_STREAM)[4][0]
    try:
        return TCPStore(
            str(host), port, None, True, _STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError:
        raise in_use from None


_LOOPBACK = "127.0.0.1"
_CHECK_SECONDS = 1.0
"""How often a member that waits for the store's host checks whether a member has left."""
_ADDRESS = msgspec.msgpack.Decoder(StoreAddress)
_OFFER = "address of the authenticated store"


def authenticated(
    exchange: Rendezvous, secret: bytes | None, closing: ExitStack, bind_host: str = ""
) -> Rendezvous:
    """Return the rendezvous, moved to a store that only its members can use.
    Collective: yes, every member.

    Without a secret, or if its store is authenticated, it is returned itself. Member 0 listens at
    ``bind_host``; ``""``: its address on the route to the first store, or loopback if that is no
    `TCPStore`.

    Raises:
        GroupTimeoutError: member 0 did not arrive in time, or has another secret.
        PeerProtocolError: the address in the first store is not valid.
    """
    base = behind_prefixes(exchange.store)
    if secret is None or isinstance(base, ProxyStore):
        return exchange
    offer = None
    if exchange.rank == 0:
        from coordinator.curve_store import StoreServer  # noqa: PLC0415 - loads ZeroMQ

        listen_at = bind_host or address_towards(base) or _LOOPBACK
        host = StoreServer(range(exchange.size), listen_at, secret)
        closing.callback(host.close)
        offer = msgspec.msgpack.encode(host.at)
    payload = exchange.broadcast(_OFFER, offer)
    at = exchange.decoded(_ADDRESS, _OFFER, payload, 0)
    try:
        store = connect_secret_store(
            at,
            exchange.rank,
            secret,
            exchange.deadline,
            closing,
            lambda: exchange.require_all_stay(f"{exchange.name} authenticated store"),
        )
    except ValueError as error:
        detail = f"the value of '{_OFFER}/0' in the store: {error}"
        raise PeerProtocolError(exchange.name, 0, detail) from error
    except GroupTimeoutError as error:
        exchange.abort(error)
        raise
    return replace(exchange, store=store, host=at.address, keeper=0)


def connect_secret_store(
    at: StoreAddress,
    rank: int,
    secret: bytes,
    deadline: Deadline,
    closing: ExitStack,
    watch: Callable[[], None] = lambda: None,
) -> ProxyStore:
    """Connect member ``rank`` to a store that a secret protects.

    Args:
        at: the store's address.
        rank, secret: this member's.
        deadline: for the connection; its seconds also limit later requests.
        closing: closes the connection.
        watch: called now and then; raises if the store's host will never answer.

    Raises:
        ValueError: ``at`` is not valid.
        GroupTimeoutError: the host did not answer in time, or has another secret.
        TransportError, PeerProtocolError: as for `StoreGuestClient.ask`.
    """
    from coordinator.curve_store import StoreGuestClient  # noqa: PLC0415 - loads ZeroMQ

    guest = StoreGuestClient(at, rank, secret)
    closing.callback(guest.close)
    while True:
        latest = min(deadline, Deadline.after(_CHECK_SECONDS), key=lambda each: each.at)
        try:
            guest.ask(Check(0, []), latest)
            break
        except GroupTimeoutError:
            watch()
            if latest is deadline:
                raise
    where = urlsplit(at.address)
    address = own_address(where.hostname or "", where.port or 1)
    store = ProxyStore(guest.ask, deadline.timeout, address)
    closing.callback(store.close)
    return store
