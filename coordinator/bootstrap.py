"""How processes that were started together find each other.

Who a process is and where the others are comes from torchrun's environment (read once,
into a `Launch`) or from explicit arguments. The ranks meet in a torch store: one that is
given, one that the launcher hosts, or one that rank 0 hosts. Whoever hosts it binds one
address, never all of them, and may leave the choice of the port to the system: `host_store`
tells the port afterwards, so no port is ever probed first and bound later.

Several topologies may use one store, at once or one after the other: ranks that set up the
same topologies in the same order meet (`Exchange.visit`).
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import Store, TCPStore

from coordinator.exchange import Exchange
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError, MemberStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_TIMEOUT = 60.0
"""Seconds that all ranks have to meet."""

_STORE_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Launch:
    """Who this process is among those started together, and where they meet.

    Attributes:
        rank: its global rank.
        world_size: how many processes.
        local_rank: its number among those of its node; chooses its device.
        master_addr: host name or address of the node that hosts the store.
        master_port: the store's port; 0 is for a world of one.
        hosted: the launcher hosts the store already; otherwise rank 0 will.
        attempt: how often the launcher has restarted the ranks.
        interface: network interface for gloo's sockets; ``""``: the one that leads to the store.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    hosted: bool = False
    attempt: int = 0
    interface: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
        if self.local_rank < 0:
            raise ValueError(f"local_rank must be 0 or more; got {self.local_rank}")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"master_port must be below 65536; got {self.master_port}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """What torchrun, or whoever speaks its language, says about this process.

        Without ``RANK`` the process is alone: a world of one.

        Raises:
            ValueError: a variable is missing or is not a number.
        """
        if "RANK" not in environ:
            return cls()
        return cls(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", environ["RANK"]),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=_number(environ, "MASTER_PORT"),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
            interface=environ.get("GLOO_SOCKET_IFNAME", ""),
        )


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks are there: what they need to go on.

    Attributes:
        launch: who this process is.
        exchange: swaps values between all ranks, in a part of the store for this topology. It keeps
            a store that rank 0 hosts alive.
        address: this host's address on the way to the store; ``""`` if the store is not TCP.
    """

    launch: Launch
    exchange: Exchange
    address: str


def meet(
    launch: Launch,
    store: Store | None = None,
    timeout: float | Deadline | None = DEFAULT_TIMEOUT,
) -> Meeting:
    """Wait until every rank has come.

    Args:
        launch: who this process is, and where to meet.
        store: meet in this one instead.
        timeout: seconds for this and for all set-up that follows; ``None``: for ever.

    Collective: yes, every rank.

    Raises:
        GroupTimeoutError: the deadline passed; ``waiting_for`` lists the absent ranks.
        OSError: rank 0 cannot bind the store's port.
    """
    deadline = Deadline.after(timeout)
    if store is None:
        store = open_store(launch, deadline)
    host = f"{store.host}:{store.port}" if isinstance(store, TCPStore) else ""
    exchange = Exchange.visit(
        store, f"world/{launch.attempt}", launch.rank, launch.world_size, "world", deadline, host
    )
    exchange.all_gather("rendezvous")
    address = own_address(store.host, store.port) if isinstance(store, TCPStore) else ""
    return Meeting(launch, exchange, address)


def host_store(address: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Host a store at one address; it lives as long as what is returned.

    Args:
        address: host name or address, IPv4 or IPv6. Where this host does not own it (it is
            translated on the way), the address on the way to it is bound.
        port: 0 lets the system choose; ``.port`` of the result is the one that was bound. A
            port that another store of this process has is shared with it.

    Raises:
        ValueError: the address is a wildcard, 0.0.0.0 or ::.
        OSError: the port is in use, or the address cannot be resolved.
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
    """Connect to a store, waiting for its host to come up.

    Args:
        address: host name or address, IPv4 or IPv6.
        port: its port.
        timeout: seconds to wait; ``None``: for ever.

    Raises:
        GroupTimeoutError: nobody answered in time.
    """
    deadline = Deadline.after(timeout)
    while True:
        try:
            host = _who_listens(address, port, deadline.remaining(5.0))
            break
        except OSError as error:
            if deadline.expired:
                raise GroupTimeoutError(
                    "rendezvous",
                    deadline.timeout,
                    (MemberStatus(0, 0, "absent"),),
                    f"nobody answers at {address}:{port}: {error}",
                ) from error
            time.sleep(deadline.remaining(at_most=0.05))
    return TCPStore(host, port, None, False, _STORE_TIMEOUT, wait_for_workers=False)


def _who_listens(address: str, port: int, seconds: float) -> str:
    """The address where something accepts connections at ``port``.

    Raises:
        OSError: nothing does.
    """
    with socket.create_connection((address, port), seconds) as probe:
        # Where nobody listens, TCP may connect a socket with itself, if it got that very port.
        if probe.getsockname() == probe.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        return str(probe.getpeername()[0])


def own_address(host: str, port: int) -> str:
    """This host's address on the way to another; nothing is sent."""
    family, kind, protocol, _, address = _resolve(host, port, socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def open_store(launch: Launch, deadline: Deadline) -> TCPStore:
    """The store where the ranks of ``launch`` meet: host it, or connect to it.

    Raises:
        GroupTimeoutError: nobody hosts it in time.
        OSError: rank 0 cannot bind its port.
        ValueError: the port is not known, or the address is that of all interfaces.
    """
    if launch.rank == 0 and not launch.hosted:
        return host_store(launch.master_addr, launch.master_port)
    if not launch.master_port:
        raise ValueError(
            "master_port 0 tells nobody where to meet: let one process call host_store() "
            "and give its port to the ranks"
        )
    return connect_store(launch.master_addr, launch.master_port, deadline)


def _listen(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, bind_to = _resolve(address, port, socket.SOCK_STREAM)
    if ipaddress.ip_address(bind_to[0]).is_unspecified:
        raise ValueError(f"a store listens at one address, not at all of this host's: {address!r}")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(bind_to)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind((own_address(address, port or 1), port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _shared_store(address: str, port: int, in_use: OSError) -> TCPStore:
    """The store that this process hosts at ``port`` already, if it is that."""
    host = _resolve(address, port, socket.SOCK_STREAM)[4][0]
    try:
        return TCPStore(
            str(host), port, None, True, _STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError:
        raise in_use from None


def _resolve(
    host: str, port: int, kind: socket.SocketKind
) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]:
    return socket.getaddrinfo(host, port, type=kind)[0]  # type: ignore[return-value]


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = environ.get(name, default)
    if value is None:
        raise ValueError(f"the environment has RANK but not {name}")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a number; the environment has {value!r}") from None
