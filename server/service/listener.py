"""Listen for clients within the limit of open descriptors."""

from __future__ import annotations

import ipaddress
import resource
import socket
from dataclasses import dataclass

from ..driver.limits import open_files
from ..errors import DescriptorLimitError

_OWN = 32
"""Descriptors kept for the process itself: for the event loop, and files that are read."""
SPARE_CONNECTIONS = 16
"""Connections accepted beyond the others, for those who ask how the service is."""
_PER_WORKER = 16
"""Descriptors kept for each worker: queues, channels, process descriptors."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many descriptors clients may use.

    Attributes:
        connections: how many may be open at once, beside `SPARE_CONNECTIONS`.
        accepts: how many the event loop may accept before it looks at the first of them.
    """

    connections: int
    accepts: int


def raise_limit() -> int:
    """Raise the limit of open files as far as this user may; returns the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connection_shares(limit: int, wanted: int, n_workers: int) -> Shares:
    """How many of ``limit`` descriptors clients may take, while workers have not started.

    Args:
        limit: how many descriptors this process may have.
        wanted: how many connections were asked for.
        n_workers: how many will be started.

    Raises:
        DescriptorLimitError: none is left for a connection.
    """
    reserve = _OWN + _PER_WORKER * n_workers
    accepts = reserve // 4
    taken = open_files() + reserve + accepts + SPARE_CONNECTIONS
    if limit <= taken:
        raise DescriptorLimitError(limit, taken + 1)
    return Shares(min(wanted, limit - taken), accepts)


BACKLOG = 2048
"""How many connections may wait to be accepted; the system may allow fewer."""


def parse(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[HOST]:PORT``.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--http must be HOST:PORT; got {text!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach it; of names, ``localhost`` alone counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Args:
        host: a name or an address.
        port: 0: any free one.

    Raises:
        OSError: nothing can listen at this address; says why.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise OSError(f"cannot listen at {host}, port {port}: {reason}") from error
    # Connections inherit it. asyncio sets it only for listeners of its own, and without it the end
    # of each answer waits 40 ms for the client to acknowledge the beginning.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url(listener: socket.socket) -> str:
    """The URL at which clients reach ``listener``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
