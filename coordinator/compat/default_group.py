"""Meeting as users of torch's default process group do: it is found, or made on the way."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore

from coordinator.setup import torch_groups
from coordinator.setup.launcher import Launch
from coordinator.setup.settings import Settings
from coordinator.setup.topology import Topology
from coordinator.stores.secret import launcher_secret

if TYPE_CHECKING:
    from contextlib import ExitStack

    from shm_broadcast import Deadline

_OPERATION_TIMEOUT = timedelta(minutes=30)
"""What torch's own default group allows each operation."""


def meet_with_default_group(
    world_size: int,
    rank: int,
    method: str,
    local_rank: int,
    backend: str,
    deadline: Deadline,
    closing: ExitStack,
) -> Topology:
    """Meet all ranks, and make torch's default process group if there is none.

    Args:
        world_size: how many ranks; -1: what the environment or torch's group says.
        rank: this process's; -1: likewise.
        method: ``"env://"``, ``"tcp://host:port"`` or ``"file://path"``.
        local_rank: this process's number on its node; -1: the environment's, or the rank.
        backend: ``"nccl"`` stands for gloo where there is no GPU.
        deadline: when all have to have come.
        closing: what is made for the topology is closed with it.

    Collective: yes, every rank.

    Raises:
        GroupTimeoutError: some ranks did not come in time; names them.
        GroupAbortedError: a rank has given up meanwhile; says why.
        ValueError: the method is unknown, or wants what was not given.
    """
    if not torch.cuda.is_available():
        backend = "gloo"
    if dist.is_initialized():
        launch = _launch_of_default_group(local_rank)
        there = (launch.world_size, launch.rank)
        if world_size not in (-1, there[0]) or rank not in (-1, there[1]):
            raise ValueError(
                f"torch's default group, which is there already, has {there[0]} ranks, and this is "
                f"rank {there[1]}; asked for were {world_size} and {rank}"
            )
        settings = Settings.of(backend, launch.local_rank, secret=launch.secret)
        return Topology.meet(
            launch, settings, closing, store=torch_groups.default_store(), timeout=deadline
        )
    launch = _launch(world_size, rank, method, local_rank)
    store = None
    if method.startswith("file://"):
        store = FileStore(method.removeprefix("file://"), launch.world_size)
    settings = Settings.of(backend, launch.local_rank, secret=launch.secret)
    topology = Topology.meet(launch, settings, closing, store=store, timeout=deadline)
    where = HashStore() if topology.exchange is None else topology.exchange.store
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("default", where),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_OPERATION_TIMEOUT,
        )
    except RuntimeError:
        if topology.nodes is not None:  # one that has connected and then given up says why
            topology.nodes.board.check("connecting torch's default group")
        raise
    return topology


def _launch(world_size: int, rank: int, method: str, local_rank: int) -> Launch:
    if method == "env://":
        found = Launch.from_environment()
        return replace(
            found,
            rank=found.rank if rank < 0 else rank,
            world_size=found.world_size if world_size < 0 else world_size,
            local_rank=found.local_rank if local_rank < 0 else local_rank,
        )
    if rank < 0 or world_size < 0:
        raise ValueError(f"{method!r} needs rank and world_size")
    local_rank = rank if local_rank < 0 else local_rank
    launch = Launch(rank, world_size, local_rank, secret=launcher_secret())
    parts = urlsplit(method)
    if parts.scheme == "tcp":
        return replace(launch, master_addr=parts.hostname or "", master_port=parts.port or 0)
    if parts.scheme == "file":
        return launch
    raise ValueError(f"distributed_init_method must be env://, tcp:// or file://; got {method!r}")


def _launch_of_default_group(local_rank: int) -> Launch:
    rank = dist.get_rank()
    local_rank = rank if local_rank < 0 else local_rank
    return Launch(rank, dist.get_world_size(), local_rank, secret=launcher_secret())
