"""Read the environment of a launcher such as torchrun, and resolve host names and addresses."""

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
    """Return this host's address on the route to ``host``, or raise OSError; nothing is sent."""
    # Connecting a datagram socket only looks the route up.
    family, kind, protocol, _, address = resolve(host, port, socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def resolve(
    host: str, port: int, kind: socket.SocketKind
) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str | int, ...]]:
    """Return the first result of ``getaddrinfo`` for a name or address, or raise OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=kind)[0]
    except socket.gaierror as error:
        raise socket.gaierror(
            error.errno, f"{host} cannot be resolved: {error.strerror}"
        ) from error
    return found  # type: ignore[return-value]


def who_listens(address: str, port: int, seconds: float) -> str:
    """Return the IP address of ``address`` that accepts TCP on ``port``, or raise OSError."""
    with socket.create_connection((address, port), seconds) as probe:
        # If no process listens and the system gives this socket the same port, TCP connects the
        # socket to itself.
        if probe.getsockname() == probe.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "no process listens")
        return str(probe.getpeername()[0])


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's rank in the job, and the address of the store.

    Attributes:
        rank: this process's global rank.
        world_size: the number of processes.
        local_rank: this process's number on its host; chooses its GPU.
        master_addr: name or address of the host with the store.
        master_port: the store's port; 0 only in a world of one.
        hosted: whether the launcher hosts the store; otherwise rank 0 does.
        attempt: the number of times that the launcher has restarted the ranks.
        interface: the network interface of gloo's sockets; ``""``: the one on the route to the
            store.
        secret: the launcher's secret, known to all ranks and to no other process; None: no secret.

    Raises:
        ValueError: a value is out of range.
        TypeError: a number is not an integer.
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
        for name in ("rank", "world_size", "local_rank", "master_port"):
            value = getattr(self, name)
            if not isinstance(value, SupportsIndex):
                raise TypeError(f"{name} must be an integer; got {value!r}")
            object.__setattr__(self, name, index(value))  # numpy's integers become int
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
        """Read torchrun's environment variables; without ``RANK`` the process is a world of one.

        Raises:
            ValueError: a variable is missing or is not an integer.
            SecretError: the file named by `SECRET_FILE` holds no valid secret, or other users may
                read it.
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
    """Return a launcher's variable; raise ValueError if it is missing or empty."""
    value = environ.get(name, default)
    if not value:
        raise ValueError(f"the environment names a launcher, but has no {name}")
    return value


def number_in(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    """Return a launcher's variable as an integer; raise ValueError if it is none."""
    value = text_in(environ, name, default)
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a number; the environment has {value!r}") from None
