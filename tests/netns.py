"""Hosts as network namespaces: two joined by a veth pair, or several on a bridge.

They have no names: each ends with a process that waits for the end of its input, so nothing is left
by a killed test run. They need root, iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CLONE_NEWNET = 0x40000000
_KEEPER = ("unshare", "--net", "sh", "-c", "echo made && exec cat")
_DEVICE = "cable"
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Host:
    """A namespace: the process that keeps it, its only address, and those of the others."""

    pid: int
    address: str
    peers: tuple[str, ...]

    def enter(self) -> None:
        """Move this thread, and the threads it starts from now on, to this host."""
        enter_network_of(self.pid)

    def unplug(self) -> None:
        """Lose all packets of this host to the others from now on, without an error."""
        nobody = ("lladdr", "02:00:00:00:de:ad", "nud", "permanent")
        for peer in self.peers:
            self.ip("neigh", "replace", peer, "dev", _DEVICE, *nobody)

    def plug(self) -> None:
        """Undo `unplug`."""
        for peer in self.peers:
            self.ip("neigh", "del", peer, "dev", _DEVICE)

    def ip(self, *arguments: str) -> None:
        """Run iproute2's ``ip`` on this host."""
        command = ["nsenter", "--net", f"--target={self.pid}", "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def unavailable() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    missing = [each for each in ("ip", "unshare", "nsenter") if shutil.which(each) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    try:
        with two_hosts("IPv4"):
            return None
    except RuntimeError as error:
        return str(error)


def enter_network_of(pid: int) -> None:
    """Move this thread, and those that it starts, to the network of process ``pid``, as root."""
    with Path(f"/proc/{pid}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def isolate() -> None:
    """Move this thread, and those that it starts, to a network with loopback only, as root."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@contextmanager
def two_hosts(
    family: Literal["IPv4", "IPv6"], latency: float = 0.0, loss: float = 0.0
) -> Iterator[tuple[Host, Host]]:
    """Two joined namespaces that have addresses of ``family`` only, loopback included.

    ``latency`` is in seconds, ``loss`` a share of the packets: with either, the cable cannot be
    unplugged. Raises RuntimeError if they cannot be made here.
    """
    with ExitStack() as stack:
        first, second = _apart(2, family, stack)
        hosts = first, second
        if latency or loss:
            stack.enter_context(_slow_cable(hosts, latency, loss))
        else:
            there = ("peer", "name", _DEVICE, "netns", str(hosts[1].pid))
            hosts[0].ip("link", "add", _DEVICE, "type", "veth", *there)
        for host in hosts:
            _configure(host, family)
        yield hosts


@contextmanager
def hosts_on_a_switch(n: int) -> Iterator[tuple[Host, ...]]:
    """``n`` namespaces, each with one cable to all others; IPv4."""
    with ExitStack() as stack:
        hosts = _apart(n, "IPv4", stack)
        switch = Host(stack.enter_context(_namespace()), "", ())
        switch.ip("link", "add", "switch", "type", "bridge")
        switch.ip("link", "set", "switch", "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            there = ("peer", "name", _DEVICE, "netns", str(host.pid))
            switch.ip("link", "add", port, "type", "veth", *there)
            switch.ip("link", "set", port, "master", "switch", "up")
            _configure(host, "IPv4")
        yield hosts


def _apart(n: int, family: Literal["IPv4", "IPv6"], stack: ExitStack) -> tuple[Host, ...]:
    network = "10.93.0." if family == "IPv4" else "fd93::"
    addresses = [f"{network}{number}" for number in range(1, n + 1)]
    return tuple(
        Host(stack.enter_context(_namespace()), mine, tuple(a for a in addresses if a != mine))
        for mine in addresses
    )


@contextmanager
def _namespace() -> Iterator[int]:
    with _kept(_KEEPER) as pid:
        yield pid


@contextmanager
def _slow_cable(hosts: tuple[Host, Host], latency: float, loss: float) -> Iterator[None]:
    places = [_DEVICE, *(str(host.pid) for host in hosts)]
    with _kept([sys.executable, "-m", "tests.slow_cable", *places, str(latency), str(loss)]):
        yield


@contextmanager
def _kept(command: Sequence[str]) -> Iterator[int]:
    """A process that says "made" and then lives as long as its standard input; its pid."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=_ROOT) as keeper:
        if keeper.stdout is None or keeper.stdout.readline() != b"made\n":
            _, error = keeper.communicate()
            raise RuntimeError(error.decode().strip())
        yield keeper.pid


def _configure(host: Host, family: Literal["IPv4", "IPv6"]) -> None:
    host.ip("link", "set", "lo", "up")
    host.ip("link", "set", _DEVICE, "up")
    if family == "IPv4":
        host.ip("-6", "address", "flush", "dev", "lo")
        host.ip("-6", "address", "flush", "dev", _DEVICE)
        host.ip("address", "add", f"{host.address}/24", "dev", _DEVICE)
    else:
        host.ip("-4", "address", "flush", "dev", "lo")
        # Without duplicate detection the address can be bound at once.
        host.ip("address", "add", f"{host.address}/64", "dev", _DEVICE, "nodad")
