"""Connect processes that were started together: exchange values, agree on settings, authenticate.

It needs nothing but the store; process groups, boards and queues are set up with it. Each swap has
a name, and keys under that name:

    NAME/RANK   how many members there are, as that one was told, a space, and its value
    NAME/count  the number of members that have put their value
    NAME/ended  how it has ended: with all values, as the last of them says, or without, as whoever
                sees first that a member has left. Only what is said first stands there.

However many members there are, each polls one key: torch's own wait prints to stderr when it times
out. Now and then it looks at a second one, by which it sees that a member has left.

A process learns its rank and where to meet from torchrun's environment (read once, into a
`Launch`) or from explicit arguments. The ranks meet in a torch store: a given one, one that the
launcher hosts, or one that rank 0 hosts. The host binds one address, never all interfaces. It may
let the system choose the port, which `host_store` returns: a free port is never searched first and
bound later, when somebody else may have taken it.

Several topologies may use one store, at once or one after the other, if all ranks set them up in
the same order (`Rendezvous.all_gather_round`).

In the first store the members only learn the address of the second one, which the launcher's secret
protects (`coordinator.curve_store`). Everything else, also the addresses of torch's process
groups, goes through the second. Whoever alters the first store can keep the members from meeting,
but cannot read or forge anything.
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
"""How long who keeps the store stays when it gives up: those that wait look more often."""
LEFT_ROUND = "left for the next"
"""The key by which those in a visit see that a member of theirs has not finished it, and is in its
next one.
"""
_ALL, _NOT_ALL = b"all", b"not all"


@dataclass(frozen=True, slots=True)
class Rendezvous(StoreClient):
    """Swaps bytes between the members of one group, over a store.

    Attributes:
        parent: where each member says which group it came to set up last; None: none does.
        previous: what this one said there before it came to this group.
    """

    parent: Store | None = None
    previous: bytes = b""

    def begin_round(self, place: str) -> Rendezvous:
        """An exchange of the same members under a key prefix, ``place``, that may have been used
        before.

        The store counts each member's visits to the place, which is another one for other members
        `called` so. The n-th visit uses keys of its own, so it meets the other members' n-th
        visits, and never an earlier one's values. A visit in which a member has given up, or that
        it has left for its next one before it was set up, as does one that takes the place of a
        killed process, is left out by those that come later: they meet that member's next one.
        Those that are there already are told, or follow it if they `all_gather_round`.

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
                if not inside.check([ABORTED_KEY]):
                    come_to.append(inside)
                    return inside, self._publish_where(around, count)

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
        return replace(self, store=inside, marks=inside, parent=around, previous=before)

    def all_gather_round(
        self, place: str, what: str, payload: bytes = b""
    ) -> tuple[Rendezvous, list[bytes]]:
        """`begin_round` a place, and `all_gather` there. If a member leaves that visit for its
        next one before all have come, the others follow it.

        Returns:
            The exchange in which all have met, and what they have put.

        Collective: yes, every member.

        Raises:
            What `begin_round` and `all_gather` raise.
        """
        while True:
            inside = self.begin_round(place)
            with inside._abort_on_error():
                found = inside._gather(what, payload, LEFT_ROUND)
            if found is not None:
                return inside, found

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """For all that a member does to set its group up in a visit.

        If it fails inside, those that wait in the visit are told why. Behind it, this member may
        come again while others are still inside: it has put all that they wait for.

        Collective: no.
        """
        with self._abort_on_error():
            yield
        if self.marks is not None:
            self.notify(partial(self.marks.set, _set_up_by(self.rank), ""))

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
        found = self._gather(what, payload, ABORTED_KEY)
        if found is None:
            raise self.aborted_error(f"{self.name} {what}")
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
                raise self.aborted_error(operation)
            return found
        if payload is None:
            raise ValueError(f"{self.name}: member {src} has to give what it broadcasts")
        self.ask(operation, lambda: self._put(key, payload))
        return payload

    def sub(self, name: str, ranks: Sequence[int], deadline: Deadline | None = None) -> Rendezvous:
        """The exchange of a subgroup.

        Args:
            name: the subgroup's name. The same name and ranks may be used again: see `begin_round`.
            ranks: the subgroup's members as ranks in this group, this member's among them.
            deadline: for the subgroup's set-up; None: this exchange's.

        Collective: no.
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
        """Raise if a member has left this visit for its next one. Collective: no.

        Raises:
            GroupAbortedError: one has; names it.
        """
        if self.ask(operation, lambda: self._is_marked(LEFT_ROUND)):
            raise self.aborted_error(operation)

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

    def _publish_where(self, around: Store | None, count: int) -> bytes:
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
            if self.parent is not None and self.parent.check([key]):
                came = self.parent.get(key)
                group = came.partition(b" ")[2].decode(errors="replace")
                if group != self._group and came != self.previous:
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
            if before.check([_set_up_by(self.rank)]) or before.check([LEFT_ROUND]):
                return
            self._mark(before, Failure(me, PeerLostError.__name__, why, me))
            before.set(LEFT_ROUND, "")

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        try:
            yield
        except (GroupTimeoutError, PeerLostError, GroupAbortedError, TransportError):
            raise  # others were told where this member has waited, or cannot be
        except (Exception, KeyboardInterrupt) as error:
            self.abort(error)
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
            lambda: self._publish(what, payload),
            left,
        )

    def _publish(self, what: str, payload: bytes) -> None:
        self._put(f"{what}/{self.rank}", b"%d %b" % (self.size, payload))
        if self.store.add(f"{what}/count", 1) == self.size:
            self._end(what, _ALL)

    def _put_by_all(self, what: str) -> list[bytes] | None:
        """What all have put; None, here and for all others, if not all have by now."""
        ended = self._end(what, _NOT_ALL)
        return list(self._payloads(what).values()) if ended == _ALL else None

    def _end(self, what: str, how: bytes) -> bytes:
        """End a swap, unless it has ended; how it has."""
        return set_if_absent(self.store, f"{what}/ended", how)

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


OPERATION_TIMEOUT = 600.0
"""Default seconds that an operation may take."""

_TERMS = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Settings:
    """How the groups of one topology move tensors, and how long they wait.

    Attributes:
        backend: the device's torch backend, named as for `torch.distributed.new_group`.
        device: the device of the tensors in collectives.
        local_rank: this process's number on its node.
        sockets: where gloo listens.
        timeout: seconds that an operation may take; None: for ever.
        torch_only: whether to move tensors only by torch's process groups.
        checked: debug mode: whether to compare the members' operations before each collective,
            for backends that do not do so anyway.
        stream: the stream that collectives on the device run on; None: the current stream.
        secret: the launcher's secret, which all ranks have and nobody else; None: there is none.
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
        """What all members have to be given alike, by name; nothing of the secret itself."""
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
        """Settings for a backend, with the device that it implies: the CPU for gloo, else a GPU.

        Args:
            backend: None: NCCL if this process sees a GPU, else gloo.
            local_rank: chooses the GPU.
            sockets: where gloo listens; None: torch's choice.
            timeout: seconds that an operation may take; None: for ever.
            torch_only: see the attribute.
            checked: see the attribute; also where ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``.
            stream: see the attribute.
            secret: see the attribute.

        Raises:
            ValueError: ``backend`` names another one than gloo and NCCL, or ``stream`` is not of
                that device.
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
    """`Rendezvous.all_gather_round` a place, and require that all members were given the same.

    Args:
        members: an exchange of them; anybody may read what is said there.
        place: where they meet.
        what: the swap's name.
        terms: what this member was given, by name.

    Collective: yes, every member.

    Raises:
        ValueError: they were not; names a term, and who was given what. All members raise it.
        SecretError: likewise, where only some were given the launcher's secret.
        What `Rendezvous.all_gather_round` raises.
    """
    exchange, payloads = members.all_gather_round(place, what, msgspec.msgpack.encode(terms))
    told = [exchange.decoded(_TERMS, what, each, rank) for rank, each in enumerate(payloads)]
    for name in dict.fromkeys(chain(*told)):
        given: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            given.setdefault(each.get(name, "not given"), []).append(exchange.global_rank(rank))
        if len(given) > 1:
            exchange.let_all_read()
            said = ", ".join(f"{value} on ranks {ranks}" for value, ranks in given.items())
            error = SecretError if name == "secret" else ValueError
            raise error(f"{exchange.name}: {name} is {said}: give all ranks the same")
    return exchange


DEFAULT_TIMEOUT = 60.0
"""Default seconds for all ranks to meet and to set their groups up."""

_STORE_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 4096
_STORE_FILES = 12
"""As many as a store opens by itself, and one more: where torch gets too few, it never answers, or
ends the process.
"""


def meet(
    launch: Launch,
    store: Store | None = None,
    timeout: float | Deadline | None = DEFAULT_TIMEOUT,
    terms: Mapping[str, str] = {},
    board: Board | None = None,
) -> tuple[Rendezvous, str]:
    """Wait until every rank has come to the store.

    Args:
        launch: this process's rank, and where to meet.
        store: a store to meet in instead.
        timeout: seconds for this and for the set-up over the exchange later; ``None``: for ever.
        terms: what all ranks have to be given alike, by name.
        board: where it is shown that this rank waits; member i is rank i. None: nowhere.

    Returns:
        What swaps values between all ranks, under keys of this topology's own; on rank 0 it also
        keeps the store alive that this rank hosts. And this host's address on the route to the
        store; ``""`` if no network leads there.

    Collective: yes, every rank.

    Raises:
        ValueError, SecretError: they were not, as of `config_handshake`.
        GroupTimeoutError: the deadline passed; ``waiting_for`` lists the absent ranks.
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
    """Host a store at one address, for as long as the returned object lives. Collective: no.

    Args:
        address: host name or address, IPv4 or IPv6. If it is not an address of this host (behind
            address translation, for example), this host's address on the route to it is bound.
        port: 0 lets the system choose; the result's ``.port`` is the port that was bound. If a
            store of this process has the port already, both share it.

    Raises:
        ValueError: the address is a wildcard, 0.0.0.0 or ::.
        OSError: the port is in use, the address cannot be resolved, or too few files may be open.
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
    """Connect to a store, waiting until its host listens. Collective: no.

    Args:
        address: host name or address, IPv4 or IPv6.
        port: the store's port.
        timeout: seconds to wait; ``None``: for ever.

    Raises:
        GroupTimeoutError: nobody answered in time, or what answers is no store.
        OSError: this process may have no further file open.
        RuntimeError: it may start no further thread.
    """
    deadline = Deadline.after(timeout)
    while True:
        try:
            host = who_listens(address, port, deadline.remaining(5.0))
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            trouble = f"nobody answers at {address}:{port}: {error}"
        else:
            found = _connected(host, port, deadline)
            if isinstance(found, TCPStore):
                return found
            trouble = f"what listens at {address}:{port} is no store: {found}"
        time.sleep(deadline.remaining(at_most=0.05))
        if deadline.expired:  # one more look would have no time, and find less
            absent = (MemberStatus(0, 0, "absent"),)
            raise GroupTimeoutError("rendezvous", deadline.timeout, absent, trouble)


def _connected(host: str, port: int, deadline: Deadline) -> TCPStore | str:
    """A client of the store at ``host``, which accepts connections, or why that is no store.

    Torch waits without a limit for a host that accepts a connection and never answers. So it
    connects in a daemon thread, which is left behind at the deadline.

    Raises:
        RuntimeError: no thread can be started.
    """
    seconds = deadline.remaining(_STORE_TIMEOUT.total_seconds())
    patience = timedelta(seconds=max(seconds, 0.001))
    connect = partial(TCPStore, host, port, None, False, patience, wait_for_workers=False)
    connecting = submit_in_thread(connect, "store-connect")
    try:
        store = connecting.result(seconds)
    except TimeoutError:
        return "it accepts connections and does not answer"
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    store.set_timeout(_STORE_TIMEOUT)
    return store


def open_store(launch: Launch, deadline: Deadline) -> TCPStore:
    """Host the store of ``launch`` if that is this rank's task, else connect to it.

    Raises:
        GroupTimeoutError: nobody hosts it in time.
        OSError: rank 0 cannot bind its port.
        ValueError: the port is 0, or the address is a wildcard.
    """
    hosts = launch.rank == 0 and not launch.hosted
    if not launch.master_port and not (hosts and launch.world_size == 1):
        raise ValueError(
            "master_port 0 tells nobody where to meet: let one process call host_store() "
            "and give its port to the ranks"
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
    """The store that this process hosts at ``port`` already; raises ``in_use`` if it does not."""
    host = resolve(address, port, socket.SOCK_STREAM)[4][0]
    try:
        return TCPStore(
            str(host), port, None, True, _STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError:
        raise in_use from None


_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 1.0
"""How often a member that waits for the store's host looks whether one has left."""
_ADDRESS = msgspec.msgpack.Decoder(StoreAddress)
_OFFER = "address of the authenticated store"


def authenticated(
    exchange: Rendezvous, secret: bytes | None, closing: ExitStack, bind_host: str = ""
) -> Rendezvous:
    """The exchange, moved to a store that only its members can use.

    Args:
        exchange: in any store. It is returned itself if its store is authenticated already.
        secret: the launcher's secret; None: the exchange is returned itself.
        closing: closes the connections.
        bind_host: the address at which member 0 listens; ``""``: its address on the route to the
            first store, or loopback if that is not a `TCPStore`.

    Collective: yes, every member.

    Raises:
        GroupTimeoutError: member 0 did not come in time, or has another secret.
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
    told = exchange.broadcast(_OFFER, offer)
    at = exchange.decoded(_ADDRESS, _OFFER, told, 0)
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
    """A connection to a store that a secret protects.

    Args:
        at: where it is.
        rank: this member's rank.
        secret: the secret.
        deadline: when to give up; its seconds are the limit of later questions, too.
        closing: closes the connection.
        watch: raises if its host will not answer any more: called now and then.

    Raises:
        ValueError: ``at`` is no address.
        GroupTimeoutError: its host did not answer in time, or has another secret.
        TransportError, PeerProtocolError: as for `StoreGuestClient.ask`.
    """
    from coordinator.curve_store import StoreGuestClient  # noqa: PLC0415 - loads ZeroMQ

    guest = StoreGuestClient(at, rank, secret)
    closing.callback(guest.close)
    while True:
        latest = min(deadline, Deadline.after(_LOOK_SECONDS), key=lambda each: each.at)
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
