"""Names and addresses of hosts."""

from __future__ import annotations

import errno
import socket


def own_address(host: str, port: int) -> str:
    """This host's address on the route to ``host``; nothing is sent.

    Raises:
        OSError: the name cannot be resolved, or there is no route.
    """
    # Connecting a datagram socket only looks the route up.
    family, kind, protocol, _, address = resolve(host, port, socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def resolve(
    host: str, port: int, kind: socket.SocketKind
) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]:
    """The first result of ``getaddrinfo`` for ``host``, a name or an address.

    Raises:
        OSError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, port, type=kind)[0]
    except socket.gaierror as error:
        raise socket.gaierror(
            error.errno, f"{host} cannot be resolved: {error.strerror}"
        ) from error
    return found  # type: ignore[return-value]


def who_listens(address: str, port: int, seconds: float) -> str:
    """The IP address of ``address`` at which something accepts connections on ``port``.

    Raises:
        OSError: nothing does.
    """
    with socket.create_connection((address, port), seconds) as probe:
        # If nobody listens and the system gave this socket the very same port, TCP connects the
        # socket with itself.
        if probe.getsockname() == probe.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        return str(probe.getpeername()[0])
