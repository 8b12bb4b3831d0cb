"""The arguments of a pool, checked before any process starts."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from coordinator.rank_grid import RankGrid
from shm_broadcast.arguments import function, integer, optional, positive_seconds

from ..calls.call_table import ignore
from ..config import MAX_RESTARTS, RESTART_WINDOW, RESTARTS, PoolConfig, settings_of
from ..control.reference import main_of, worker_name
from ..hosts.place import Hosts, hosts_of
from .binding import assign, bound_here, checked_device, count_gpus, share_of_a_host, worker_threads

if TYPE_CHECKING:
    from ..launchers.ray_cluster import RayCluster

_MOST_WORKERS: Final = 4096
"""Limits the memory for boards and queues that a wrong number may take."""

_BYTES_OVER_HOSTS: Final = 16 << 20
"""A worker's arguments travel to its host in one frame, which delays heartbeats."""


class PoolPlan:
    """A pool's shape, its worker and its settings.

    Attributes:
        worker: the worker's class, in the form of `reference.worker_name`.
        main: how workers load the driver's main module, if it defines the class.
        worker_kwargs: the class's keyword arguments, pickled.
        devices: each rank's device.
        stuck_after: seconds; ``math.inf``: never.
        bound: the cores of the workers on this host.
        hosts: the hosts of the pool; ``None``: this one only.

    All others are the arguments of `pool.WorkerPool`, checked.
    """

    def __init__(
        self,
        worker: type | str,
        *,
        tp: int,
        pp: int,
        dp: int,
        pcp: int,
        dcp: int,
        axes: Mapping[str, int] | None,
        worker_kwargs: Mapping[str, Any] | None,
        device: str | Sequence[str],
        share_gpu: bool,
        launcher: str,
        hosts: Hosts | RayCluster | None,
        start_timeout: float | None,
        on_progress: Callable[[int, int, int, str], None] | None,
        restart: str,
        max_restarts: int | None,
        window: float | None,
        stuck_after: float | None,
        config: PoolConfig | None,
    ) -> None:
        """Check the arguments, and raise ValueError or TypeError, as `pool.WorkerPool`."""
        grid = RankGrid.of_job(tp=tp, pp=pp, dp=dp, pcp=pcp, axes=axes)
        if grid.size > _MOST_WORKERS:
            raise ValueError(f"{grid} are {grid.size} workers; a pool has {_MOST_WORKERS} at most")
        self.grid, self.dcp = grid, integer("dcp", dcp)
        grid.dcp_group_of(0, self.dcp)
        self.start_timeout = optional(positive_seconds)("start_timeout", start_timeout)
        self.on_progress = optional(function)("on_progress", on_progress) or ignore
        self.restart = restart
        self.max_restarts, self.window = _restart_limits(restart, max_restarts, window)
        self.config = config = settings_of(config)
        self.stuck_after = _stuck_after(stuck_after, restart, config)
        device = checked_device(device)
        self.worker, self.worker_kwargs = worker_name(worker), _pickled(worker_kwargs)
        self.main = main_of(self.worker)
        self.hosts = chosen = _hosts(launcher, hosts, grid, device, self.start_timeout)
        with ExitStack() as undo:
            if chosen is not None and chosen.provisioner is not None:
                undo.callback(chosen.provisioner.close)
            if chosen is not None and len(self.worker_kwargs) > _BYTES_OVER_HOSTS:
                raise ValueError(
                    f"worker_kwargs may have {_BYTES_OVER_HOSTS} bytes over hosts, pickled; got "
                    f"{len(self.worker_kwargs)}: give workers a path from which each loads the data"
                )
            self.devices = _devices(device, self.n_workers, share_gpu, chosen)
            self.bound = bound_here(config.bind, len(self.ranks_of(0)))
            undo.pop_all()

    @cached_property
    def n_workers(self) -> int:
        """Return the number of ranks."""
        return self.grid.size

    def ranks_of(self, node: int) -> range:
        """Return the ranks of the workers on one host."""
        n_workers = self.n_workers
        return range(n_workers) if self.hosts is None else self.hosts.ranks_of(node, n_workers)

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """Return the cores of a worker on this host; ``()``: no binding, or on another host."""
        return self.bound[rank] if rank < len(self.bound) else ()

    @property
    def threads(self) -> int:
        """Return the number of CPU threads of each worker on this host."""
        return self.config.threads or worker_threads(max(len(self.ranks_of(0)), 1), self.bound)

    @cached_property
    def output_rank(self) -> int:
        """Return the rank whose reply `WorkerPool.call` returns: the last stage's first rank."""
        first = dict.fromkeys(self.grid.names, 0)
        return self.grid.rank({**first, "pp": self.n_stages - 1})

    @property
    def n_stages(self) -> int:
        """Return the number of stages of the pipeline."""
        return self.grid.sizes["pp"]

    @property
    def in_flight(self) -> int:
        """Return the most calls that are sent and unanswered: one per stage and one that waits."""
        return self.config.in_flight or self.n_stages + 1


def _restart_limits(
    restart: str, max_restarts: int | None, window: float | None
) -> tuple[int, float]:
    """Return the most restarts, and the seconds within which they count."""
    if restart not in RESTARTS:
        raise ValueError(f"restart must be one of {', '.join(RESTARTS)}; got {restart!r}")
    max_restarts = optional(integer)("max_restarts", max_restarts)
    window = optional(positive_seconds)("window", window)
    for name, value in (("max_restarts", max_restarts), ("window", window)):
        if restart == "never" and value is not None:
            raise ValueError(f"{name} is for pools that are restarted; got restart='never'")
    return max_restarts or MAX_RESTARTS, window or RESTART_WINDOW


def _stuck_after(seconds: float | None, restart: str, config: PoolConfig) -> float:
    if seconds is not None:
        return positive_seconds("stuck_after", seconds)
    return math.inf if restart == "never" else config.call_seconds


def _hosts(
    launcher: str,
    hosts: Hosts | RayCluster | None,
    grid: RankGrid,
    device: str | Sequence[str],
    timeout: float | None,
) -> Hosts | None:
    if launcher != "ray" and (hosts is None or isinstance(hosts, Hosts)):
        return hosts_of(launcher, hosts)
    from ..launchers.ray_cluster import RayCluster  # noqa: PLC0415 - few use Ray

    if launcher != "ray":
        if isinstance(hosts, RayCluster):
            raise ValueError(f"a Ray cluster is given, so launcher must be 'ray'; got {launcher!r}")
        return hosts_of(launcher, hosts)
    if isinstance(hosts, Hosts):
        raise ValueError("hosts of a Ray cluster are given as a RayCluster")
    cluster = hosts or RayCluster()
    gpus = any(each != "cpu" for each in ([device] if isinstance(device, str) else device))
    one_stage = grid.group_of(0, "pcp", "tp")
    n_stages = grid.size // len(one_stage)
    return cluster.reserve(n_stages, grid.size, gpus=gpus, timeout=timeout)


def _devices(
    device: str | Sequence[str], n_workers: int, share_gpu: bool, hosts: Hosts | None
) -> tuple[str, ...]:
    """Return each rank's device; a single text applies to all hosts."""
    gpus = count_gpus(device)
    if hosts is None or not isinstance(device, str):
        return assign(device, n_workers, gpus, share_gpu)
    nnodes = hosts.nnodes - (not hosts.head_works)
    per_host = share_of_a_host(n_workers, nnodes)
    # A head that runs no workers cannot count the other hosts' GPUs.
    return assign(device, per_host, gpus if hosts.head_works else per_host, share_gpu) * nnodes


def _pickled(worker_kwargs: Mapping[str, Any] | None) -> bytes:
    if worker_kwargs is None:
        return pickle.dumps({})
    if not isinstance(worker_kwargs, Mapping):
        raise TypeError(f"worker_kwargs must be a mapping; got {worker_kwargs!r}")
    for name, value in worker_kwargs.items():  # one by one: the error names the argument
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(f"worker_kwargs[{name!r}] cannot be pickled: {error}") from error
    return pickle.dumps(dict(worker_kwargs))
