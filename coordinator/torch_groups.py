"""Make torch process groups without a default process group.

`torch.distributed.new_group` needs the default group, and all its ranks must call it. Here only the
group's members build it, over a store; a process may have several topologies. The group is
registered with torch under its name and ranks. So torch.distributed accepts it: in its functions
(``src`` and ``dst`` are global ranks), in functional collectives, in `destroy_process_group`.
Functions that need the default group fail without one: `torch.distributed.get_rank` (use
``group.rank()``), and DeviceMesh with DTensor.

All uses of torch.distributed's private names are in this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

from coordinator.daemon_threads import is_done_within, submit_in_thread
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import ProcessGroup, Store


_OPERATION_TIMEOUT = timedelta(days=1)
"""Torch's own timeout. It must never expire, since gloo then closes its connections; `TorchBackend`
enforces the deadlines.
"""

_LONGEST_CONNECT = 600.0

_STORE_SECONDS = 1.0
"""Grace period for gloo to raise its own timeout."""


@dataclass(frozen=True, slots=True)
class SocketChoice:
    """The address on which gloo listens; the address of network ``interface`` precedes ``address``.

    With both empty torch chooses: the interface in GLOO_SOCKET_IFNAME, else the address of the
    host's name.
    """

    interface: str = ""
    address: str = ""


def connect_process_group(
    store: Store,
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    sockets: SocketChoice,
    deadline: Deadline | None,
) -> ProcessGroup:
    """Make a process group of ``ranks``. Collective: with a deadline, yes, every member.

    All members must have reached the store before. NCCL connects at its first operation.

    Args:
        store: the members' store, with a key prefix that only this group uses.
        name: its name in torch's registry; a number is added if the name is taken.
        ranks: the members' global ranks, by rank in the group.
        rank: this member's rank in the group.
        backend: one that `kinds` accepts: ``"gloo"``, ``"nccl"``, or both by device.
        sockets: gloo's address.
        deadline: for gloo's connections; None: two members connect at their first operation.

    Raises:
        GroupTimeoutError: the members did not connect in time.
    """
    store = PrefixStore(f"{backend}/", store)
    group = dist.ProcessGroup(store, rank, len(ranks))
    by_device = distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    backends = {
        kind: _new_backend(
            kind, PrefixStore(f"{kind}/", store), rank, len(ranks), sockets, deadline
        )
        for kind in dict.fromkeys(by_device.values())
    }
    group._set_default_backend(next(iter(backends.values()))[0])
    for device, kind in by_device.items():
        group._register_backend(torch.device(device), *backends[kind])
    name = _free_name(name)
    group._set_group_name(name)  # type: ignore[arg-type] # a NewType of str
    group._set_group_desc(name)
    _register(group, name, ranks, backend, store)
    return group


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a process group's operations."""
    distributed_c10d._set_pg_timeout(timeout, group)


def destroy(group: ProcessGroup) -> None:
    """Close and unregister a process group; idempotent. Operations blocked in it raise."""
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def handles(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether a process group has a backend for tensors on ``device``."""
    return torch.device(device.type) in group._device_types


def kinds(backend: str) -> set[str]:
    """Return the backends in a name that `torch.distributed.new_group` accepts, without devices.

    Raises ValueError for a backend other than gloo and NCCL.
    """
    names = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    if not names <= {dist.Backend.GLOO, dist.Backend.NCCL}:
        raise ValueError(f"cannot make {backend!r} groups; wrap yours with from_process_group()")
    return names


def backend_of(group: ProcessGroup) -> str:
    """Return ``"nccl"`` if a process group uses NCCL for CUDA tensors, else ``"gloo"``."""
    cuda = torch.device("cuda")
    is_nccl = handles(group, cuda) and group._get_backend(cuda).name() == "nccl"
    return "nccl" if is_nccl else "gloo"


def ranks_of(group: ProcessGroup) -> list[int]:
    """Return the members' global ranks; their ranks in the group if torch has no global ones."""
    ranks = distributed_c10d._world.pg_group_ranks.get(group)
    return list(range(group.size())) if ranks is None else list(ranks)


def default_store() -> Store:
    """Return the store of torch's default process group."""
    return distributed_c10d._get_default_store()


def store_of(group: ProcessGroup) -> Store:
    """Return the store with which a process group was made."""
    entry = distributed_c10d._world.pg_map.get(group)
    return group.get_group_store() if entry is None else entry[1]


def _new_backend(
    kind: str,
    store: Store,
    rank: int,
    size: int,
    sockets: SocketChoice,
    deadline: Deadline | None,
) -> tuple[ProcessGroup.BackendType, Any]:
    if kind == dist.Backend.GLOO:
        return dist.ProcessGroup.BackendType.GLOO, _gloo(store, rank, size, sockets, deadline)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _OPERATION_TIMEOUT
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroup.BackendType.NCCL, nccl


def _gloo(
    store: Store, rank: int, size: int, sockets: SocketChoice, deadline: Deadline | None
) -> dist.ProcessGroupGloo:
    gloo = dist.ProcessGroupGloo
    lazy = deadline is None
    if sockets.interface:
        device = gloo.create_device(interface=sockets.interface, lazy_init=lazy)
    elif sockets.address:
        device = gloo.create_device(hostname=sockets.address, lazy_init=lazy)
    else:
        device = gloo.create_default_device(lazy_init=lazy)
    options = gloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    seconds = _LONGEST_CONNECT if deadline is None else deadline.remaining(_LONGEST_CONNECT)
    options._timeout = timedelta(seconds=max(seconds, 0.001))
    # Gloo's timeout does not run while the process that hosts the store is stopped.
    connecting = submit_in_thread(partial(gloo, store, rank, size, options), "connect-gloo")
    latest = Deadline.after(seconds + _STORE_SECONDS)
    try:
        while not is_done_within(connecting, latest):
            if latest.expired:
                timeout = seconds if deadline is None else deadline.timeout
                detail = "neither gloo nor the store answers"
                raise GroupTimeoutError("connecting gloo", timeout, detail=detail)
        backend = connecting.result()
    except RuntimeError as error:
        if deadline is not None:
            deadline.check(f"connecting gloo ({error})")
        raise
    backend._set_default_timeout(_OPERATION_TIMEOUT)
    return backend


def _free_name(name: str) -> str:
    taken = distributed_c10d._world.pg_names.values()
    candidates = itertools.chain([name], (f"{name}#{count}" for count in itertools.count(2)))
    return next(candidate for candidate in candidates if candidate not in taken)


def _register(
    group: ProcessGroup, name: str, ranks: Sequence[int], backend: str, store: Store
) -> None:
    world = distributed_c10d._world
    tag = f"ptd:{name}"
    world.pg_map[group] = (backend, store)
    world.pg_names[group] = name  # type: ignore[assignment]
    world.pg_group_ranks[group] = {each: index for index, each in enumerate(ranks)}
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(dist.Backend(backend)))
    world.pg_to_tag[group] = tag
    world.tags_to_pg.setdefault(tag, []).append(group)
    distributed_c10d._register_process_group(name, group)  # type: ignore[arg-type]
