"""Listen for clients at an address."""

from __future__ import annotations

import ipaddress
import resource
import socket


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


BACKLOG = 2048
"""Maximum connections that wait to be accepted; the system may allow fewer."""


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is ``localhost`` or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; port 0 selects a free port.

    Raises:
        OSError: the address cannot be used; the text has the reason.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no host has such a name"
        raise OSError(f"cannot listen at {host}, port {port}: {reason}") from error
    # Connections inherit TCP_NODELAY; asyncio sets it for its own listeners only. Without it the
    # end of each answer waits 40 ms for the client's ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url(listener: socket.socket) -> str:
    """Return the URL of ``listener``."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
