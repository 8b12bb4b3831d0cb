"""A launcher of your own: it starts the other hosts of a pool by a command, as ``ssh``.

    python examples/launcher.py

Here the command is empty: the other host is a second process of this machine.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from group_coordinator import Hosts, WorkerContext, WorkerPool, serve_host


class CommandLauncher:
    """Starts each host by ``command_for(node)`` and this file; a `HostProvisioner`."""

    def __init__(self, command_for: Callable[[int], Sequence[str]]) -> None:
        """Start nothing yet."""
        self._command_for = command_for
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, hosts: Hosts, address: str, port: int) -> None:
        """Start the process of host ``hosts.node_rank``; replace an earlier one."""
        node = hosts.node_rank
        self._end(node)
        words = [sys.executable, __file__, *map(str, (hosts.nnodes, node, address, port))]
        process = subprocess.Popen([*self._command_for(node), *words], stdin=subprocess.PIPE)
        self._running[node] = process
        if process.stdin is not None and hosts.secret is not None:
            with suppress(BrokenPipeError):  # the command has ended: `problem` returns its status
                process.stdin.write(hosts.secret)  # not an argument: other users can read those
                process.stdin.close()

    def problem(self, node: int) -> str:
        """Return why the process of a host has ended; ``""`` if it runs."""
        status = self._running[node].poll()
        return "" if status is None else f"its process has ended with status {status}"

    def close(self) -> None:
        """End all processes."""
        for node in tuple(self._running):
            self._end(node)

    def _end(self, node: int) -> None:
        if node in self._running:
            process = self._running.pop(node)
            process.terminate()
            process.wait()


class Adder:
    """A worker."""

    def __init__(self, context: WorkerContext) -> None:
        self.tp = context.groups.tp

    def total(self, number: float) -> float:
        """Return the sum of ``number`` over all ranks."""
        return float(self.tp.all_reduce(torch.tensor(number)).item())


def main() -> None:
    """Run a pool of four workers, two on each host."""
    launcher = CommandLauncher(lambda _: [])  # over ssh: lambda node: ["ssh", f"host{node}"]
    hosts = Hosts(2, 0, "127.0.0.1", 0, secrets.token_bytes(32), provisioner=launcher)
    with WorkerPool(Adder, tp=4, launcher="hosts", hosts=hosts) as pool:
        print(f"the sum is {pool.call('total', 10):g} on {len({*hosts_of(pool)})} hosts")


def hosts_of(pool: WorkerPool) -> list[str]:
    """Return the host of each worker; ``""`` is this one."""
    return [worker.host for worker in pool.status()]


if __name__ == "__main__":
    if sys.argv[1:]:
        nnodes, node, address, port = sys.argv[1:]
        serve_host(Hosts(int(nnodes), int(node), address, int(port), sys.stdin.buffer.read()))
    else:
        main()
