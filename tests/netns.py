"""Two network namespaces on this machine, joined by a cable (a veth pair), for tests between hosts.

    with two_hosts("IPv6") as hosts:
        hosts[0].address            # what the other host reaches it by
        enter(hosts[0].name)        # in a process of its own: its later sockets live there

Making them needs root and iproute2; `unavailable` says what is missing. They are removed at the
end, whatever happened.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_RUNS_IN = "/run/netns"


@dataclass(frozen=True)
class Host:
    """One of the two namespaces.

    Attributes:
        name: what ``ip netns`` calls it.
        device: its end of the cable.
        address: its only address there.
        peer: the other's address.
    """

    name: str
    device: str
    address: str
    peer: str

    def unplug(self) -> None:
        """From now on, what this host sends to the other is lost without a word."""
        _ip("-n", self.name, "neigh", "replace", self.peer, "lladdr", "02:00:00:00:de:ad",
            "dev", self.device, "nud", "permanent")  # fmt: skip


def unavailable() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"gc-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@contextmanager
def two_hosts(family: Literal["IPv4", "IPv6"]) -> Iterator[tuple[Host, Host]]:
    """Two joined namespaces that have addresses of ``family`` only, loopback included."""
    nonce = secrets.token_hex(3)
    first, second = ("10.93.0.1", "10.93.0.2") if family == "IPv4" else ("fd93::1", "fd93::2")
    hosts = (
        Host(f"gc-{nonce}-a", f"gc{nonce}a", first, second),
        Host(f"gc-{nonce}-b", f"gc{nonce}b", second, first),
    )
    made: list[str] = []
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            made.append(host.name)
        _ip("link", "add", hosts[0].device, "netns", hosts[0].name, "type", "veth",
            "peer", "name", hosts[1].device, "netns", hosts[1].name)  # fmt: skip
        for host in hosts:
            _configure(host, family)
        yield hosts
    finally:
        for name in made:
            _ip("netns", "delete", name)


def enter(name: str) -> None:
    """Move this thread, and the threads it starts from now on, into the namespace ``name``."""
    with (Path(_RUNS_IN) / name).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _configure(host: Host, family: Literal["IPv4", "IPv6"]) -> None:
    _ip("-n", host.name, "link", "set", "lo", "up")
    _ip("-n", host.name, "link", "set", host.device, "up")
    if family == "IPv4":
        _ip("-n", host.name, "-6", "address", "flush", "dev", "lo")
        _ip("-n", host.name, "-6", "address", "flush", "dev", host.device)
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
    else:
        _ip("-n", host.name, "-4", "address", "flush", "dev", "lo")
        # Without duplicate detection the address can be bound at once.
        _ip("-n", host.name, "address", "add", f"{host.address}/64", "dev", host.device, "nodad")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
