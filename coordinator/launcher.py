"""Read what a launcher such as torchrun sets, and resolve names and addresses of hosts."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import SupportsIndex

from coordinator.secret import checked_secret, launcher_secret


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


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's rank in the job, and where the ranks meet.

    Attributes:
        rank: this process's global rank.
        world_size: the number of processes.
        local_rank: this process's number on its node; chooses its GPU.
        master_addr: host name or address of the node that hosts the store.
        master_port: the store's port; 0 is for a world of one.
        hosted: whether the launcher hosts the store; otherwise rank 0 does.
        attempt: how often the launcher has restarted the ranks.
        interface: network interface for gloo's sockets; ``""``: the one on the route to the store.
        secret: the launcher's secret, which all ranks have and nobody else; None: there is none.

    Raises:
        ValueError: a value is out of range.
        TypeError: a number is none.
        SecretError: the secret is too short.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    hosted: bool = False
    attempt: int = 0
    interface: str = ""
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the values, and take numbers as Python's."""
        for name in ("rank", "world_size", "local_rank", "master_port"):
            value = getattr(self, name)
            if not isinstance(value, SupportsIndex):
                raise TypeError(f"{name} must be an integer; got {value!r}")
            object.__setattr__(self, name, index(value))  # numpy's, too
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
        if self.local_rank < 0:
            raise ValueError(f"local_rank must be 0 or more; got {self.local_rank}")
        if not 0 <= self.master_port < 1 << 16:
            raise ValueError(f"master_port must be below 65536; got {self.master_port}")
        if self.secret is not None:
            checked_secret(self.secret, "the secret")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """Read the environment variables that torchrun sets.

        Without ``RANK`` the process is a world of one.

        Raises:
            ValueError: a variable is missing or is not a number.
            SecretError: the file that `SECRET_FILE` names holds no secret, or others can read it.
        """
        if "RANK" not in environ:
            return cls(secret=launcher_secret(environ=environ))
        return cls(
            rank=number_in(environ, "RANK"),
            world_size=number_in(environ, "WORLD_SIZE"),
            local_rank=number_in(environ, "LOCAL_RANK", environ["RANK"]),
            master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number_in(environ, "MASTER_PORT"),
            hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=number_in(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
            interface=environ.get("GLOO_SOCKET_IFNAME", ""),
            secret=launcher_secret(environ=environ),
        )


def text_in(environ: Mapping[str, str], name: str, default: str | None = None) -> str:
    """A launcher's variable.

    Raises:
        ValueError: there is none, or it is empty.
    """
    value = environ.get(name, default)
    if not value:
        raise ValueError(f"the environment names a launcher, but has no {name}")
    return value


def number_in(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """A launcher's variable that is a number.

    Raises:
        ValueError: there is none, or it is no number.
    """
    value = text_in(environ, name, default)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a number; the environment has {value!r}") from None
