"""Pools over hosts: network namespaces, each with a name of its own."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from server.config import PoolConfig
from server.errors import HostError
from server.hosts.host_supervisor import serve_host
from server.hosts.place import Hosts
from server.pool import WorkerPool
from tests.coordinator.hosts import move_to
from tests.patience import PATIENCE_SECONDS, until
from tests.ranks import run_ranks
from tests.server.workers import Worker
from tests.warm_forks import warm_fork_servers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tests.netns import Host

PORT = 29411
SECRET = b"known to both hosts, and to no one else"
PATIENT = 7.0
"""Seconds of silence after which a host counts as lost, in other tests: longer than stalls."""


def place(node: int, hosts: Sequence[Host], **changes: Any) -> Hosts:
    given: dict[str, Any] = {
        "nnodes": 2,
        "node_rank": node,
        "master_addr": hosts[0].address,
        "master_port": PORT,
        "secret": SECRET,
        "silence_seconds": PATIENT,
    }
    return Hosts(**{**given, **changes})


def over_hosts(
    rank: int,
    n: int,
    folder: str,
    hosts: Sequence[Host],
    body: Callable[..., Any],
    args: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> Any:
    """One process of `run_ranks`: 0 is the head, and runs ``body(pool, *args)``; others host only.

    Args:
        rank, n, folder, hosts: of `run_over`.
        body, args: what to do with the pool.
        options: further arguments of the pool.
        changes: other attributes of `Hosts`, on both.

    Returns:
        What ``body`` returns; of another host how and when its part has ended, and its children.
    """
    move_to(folder, hosts, rank)
    warm_fork_servers()
    here = place(rank, hosts, **(changes or {}))
    if rank:
        note(folder, "supervisor", os.getpid())
        try:
            serve_host(here, PATIENCE_SECONDS)
        except HostError as error:
            return str(error), time.monotonic(), living_children()
        return "dismissed", time.monotonic(), living_children()
    defaults = {
        "worker": Worker,
        "tp": 2,
        "start_timeout": PATIENCE_SECONDS,
        "config": PoolConfig(leave_seconds=PATIENCE_SECONDS),
    }
    given = {**defaults, **(options or {})}
    with WorkerPool(**given, launcher="hosts", hosts=here) as pool:
        return body(pool, *args)


def run_over(
    folder: str | Path,
    hosts: Sequence[Host],
    body: Callable[..., Any],
    *args: Any,
    options: dict[str, Any] | None = None,
    may_die: Collection[int] = (),
    **changes: Any,
) -> list[Any]:
    """Run a pool over all hosts; what `over_hosts` returns on each."""
    given = (args, options, {"nnodes": len(hosts), **changes})
    return run_ranks(len(hosts), over_hosts, str(folder), hosts, body, *given, may_die=may_die)


def living_children() -> list[str]:
    found = psutil.Process().children(recursive=True)
    return [str(each) for each in found if each.name() in {"pool-reaper", "pool-worker"}]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def note(folder: str, what: str, value: float) -> None:
    """Publish a number to the other processes, by a file."""
    part = Path(folder) / f"{what}.{os.getpid()}.part"  # several hosts may note the same
    part.write_text(repr(value))
    part.rename(Path(folder) / what)


def noted(folder: str, what: str) -> float:
    until((Path(folder) / what).exists, f"{what} was not noted")
    return float((Path(folder) / what).read_text())


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    os.kill(pid, number)
    return time.monotonic()
