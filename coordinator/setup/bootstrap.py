"""The rendezvous: how processes that were started together find each other.

A process learns its rank and where to meet from torchrun's environment (read once, into a
`Launch`) or from explicit arguments. The ranks meet in a torch store: a given one, one that the
launcher hosts, or one that rank 0 hosts. The host binds one address, never all interfaces. It may
let the system choose the port, which `host_store` returns: a free port is never searched first and
bound later, when somebody else may have taken it.

Several topologies may use one store, at once or one after the other, if all ranks set them up in
the same order (`Exchange.enter`).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed import Store, TCPStore

from coordinator.apart import begin_apart
from coordinator.setup.addresses import own_address, resolve, who_listens
from coordinator.setup.exchange import Exchange
from coordinator.setup.settings import enter_on_terms
from coordinator.stores.asked_store import address_towards, behind_prefixes
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError, MemberStatus
from shm_broadcast.machine.liveness import NO_DESCRIPTOR
from shm_broadcast.machine.system_calls import why

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.setup.launcher import Launch
    from shm_broadcast import Board

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
) -> tuple[Exchange, str]:
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
        ValueError, SecretError: they were not, as of `enter_on_terms`.
        GroupTimeoutError: the deadline passed; ``waiting_for`` lists the absent ranks.
        OSError: rank 0 cannot bind the store's port.
    """
    deadline = Deadline.after(timeout)
    keeper = 0 if store is None and not launch.hosted else None
    if store is None:
        store = open_store(launch, deadline)
    base = behind_prefixes(store)
    host = f"{base.host}:{base.port}" if isinstance(base, TCPStore) else ""
    members = Exchange(store, launch.rank, launch.world_size, "world", deadline, host, keeper)
    if board is not None:
        members = replace(members, seen_on=(board, range(launch.world_size)))
    exchange = enter_on_terms(members, f"world/{launch.attempt}", "rendezvous", terms)
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
    connecting = begin_apart(connect, "store-connect")
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
            no_store = f"no store can be hosted at {address}:{port}: {why(error)}"
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
