"""Torch process groups made by their own members, without a default process group.

`torch.distributed.new_group` needs the default group, of which a process has only one, and all its
ranks must call it. Here a group's members alone build it, over a store: the cost does not depend on
other ranks, and a process may have several topologies. The group is registered with torch under its
name and ranks, so torch.distributed accepts it like one of `new_group`: in its functions (where
``src`` and ``dst`` are global ranks), in functional collectives, in `destroy_process_group`. A few
functions ask for the default group first and fail without one: `torch.distributed.get_rank` (use
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
"""Torch's own limit, which is never to be reached: gloo closes its connections at it. Deadlines are
kept by the backend above.
"""

_LONGEST_CONNECT = 600.0

_STORE_SECONDS = 1.0
"""How long gloo may take to say that its time is over."""


@dataclass(frozen=True, slots=True)
class SocketChoice:
    """Where gloo listens.

    Attributes:
        interface: the name of a network interface; if given, ``address`` is not used.
        address: one of this host's addresses; ``""``: torch's choice (the interface in
            GLOO_SOCKET_IFNAME, else what the host's name resolves to).
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
    """Make a process group of ``ranks``; all members must have come to the store before.

    Args:
        store: the members' store, with a key prefix that only this group uses.
        name: its name in torch's registry; a number is added if the name is taken.
        ranks: the members' global ranks, by rank in the group.
        rank: this member's rank in the group.
        backend: one that `kinds` accepts: ``"gloo"``, ``"nccl"``, or both by device.
        sockets: where gloo listens.
        deadline: by when all of gloo's connections must be made; None: two members connect when
            they first exchange something.

    Collective: with a deadline, yes, every member. NCCL connects at its first operation.

    Raises:
        GroupTimeoutError: the members did not connect in time.
    """
    store = PrefixStore(f"{backend}/", store)
    group = dist.ProcessGroup(store, rank, len(ranks))
    by_device = distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    made = {
        kind: _new_backend(
            kind, PrefixStore(f"{kind}/", store), rank, len(ranks), sockets, deadline
        )
        for kind in dict.fromkeys(by_device.values())
    }
    group._set_default_backend(next(iter(made.values()))[0])
    for device, kind in by_device.items():
        group._register_backend(torch.device(device), *made[kind])
    name = _free_name(name)
    group._set_group_name(name)  # type: ignore[arg-type] # a NewType of str
    group._set_group_desc(name)
    _register(group, name, ranks, backend, store)
    return group


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long an operation of a process group may take. Collective: no."""
    distributed_c10d._set_pg_timeout(timeout, group)


def destroy(group: ProcessGroup) -> None:
    """Close the group's connections and remove it from torch's registry; idempotent.

    Collective: no. Operations that wait in it raise.
    """
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def handles(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a process group has a backend for tensors on ``device``."""
    return torch.device(device.type) in group._device_types


def kinds(backend: str) -> set[str]:
    """The backends in a name as `torch.distributed.new_group` takes it, without the devices.

    Raises:
        ValueError: it names another one than gloo and NCCL.
    """
    found = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    if not found <= {dist.Backend.GLOO, dist.Backend.NCCL}:
        raise ValueError(f"cannot make {backend!r} groups; wrap yours with from_process_group()")
    return found


def backend_of(group: ProcessGroup) -> str:
    """``"nccl"`` if a process group uses NCCL for CUDA tensors, else ``"gloo"``."""
    cuda = torch.device("cuda")
    is_nccl = handles(group, cuda) and group._get_backend(cuda).name() == "nccl"
    return "nccl" if is_nccl else "gloo"


def ranks_of(group: ProcessGroup) -> list[int]:
    """The global ranks of a process group's members; ranks in the group if torch knows none."""
    known = distributed_c10d._world.pg_group_ranks.get(group)
    return list(range(group.size())) if known is None else list(known)


def default_store() -> Store:
    """The store of torch's default process group."""
    return distributed_c10d._get_default_store()


def store_of(group: ProcessGroup) -> Store:
    """The store that a process group was made with."""
    known = distributed_c10d._world.pg_map.get(group)
    return group.get_group_store() if known is None else known[1]


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
    # Gloo keeps to its time, but not while the process that hosts the store stands still.
    connecting = submit_in_thread(partial(gloo, store, rank, size, options), "connect-gloo")
    latest = Deadline.after(seconds + _STORE_SECONDS)
    try:
        while not is_done_within(connecting, latest):
            if latest.expired:
                timeout = seconds if deadline is None else deadline.timeout
                detail = "neither gloo nor the store answers"
                raise GroupTimeoutError("connecting gloo", timeout, detail=detail)
        made = connecting.result()
    except RuntimeError as error:
        if deadline is not None:
            deadline.check(f"connecting gloo ({error})")
        raise
    made._set_default_timeout(_OPERATION_TIMEOUT)
    return made


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
