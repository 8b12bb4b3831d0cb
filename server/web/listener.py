"""Where the service listens, and who may reach it there."""

from __future__ import annotations

import ipaddress
import socket

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
