"""Torch process groups made by their own members, without a default process group.

`torch.distributed.new_group` wants a default group, of which there is one per process. Here
a group is built over a store by its members alone, so its cost does not depend on other
ranks, and several topologies live side by side. It is registered with torch under its name
and ranks, so that torch.distributed takes it like one of `new_group`: functions (``src`` and
``dst`` are global ranks there), functional collectives, `destroy_process_group`. What asks
for the default group first needs one: `torch.distributed.get_rank` (use ``group.rank()``),
and DeviceMesh, on which DTensor stands.

All that this project takes from torch.distributed's private parts stands in this file.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import ProcessGroup, Store

    from shm_broadcast.deadline import Deadline

_OPERATION_TIMEOUT = timedelta(days=1)
"""Gloo closes its connections when an operation takes longer; deadlines are kept above it."""

_LONGEST_CONNECT = 600.0


@dataclass(frozen=True, slots=True)
class SocketChoice:
    """Where gloo listens.

    Attributes:
        interface: the name of a network interface; goes before ``address``.
        address: one of this host's addresses; ``""``: torch's choice (GLOO_SOCKET_IFNAME,
            else what the host's name resolves to).
    """

    interface: str = ""
    address: str = ""


def new_process_group(
    store: Store,
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    deadline: Deadline,
    sockets: SocketChoice,
) -> ProcessGroup:
    """Make a process group of ``ranks``, whose members are known to be there.

    Args:
        store: the members' store, with a prefix that only this group uses.
        name: for torch's registry; a number is added if it is taken there.
        ranks: global ranks, in the order of their ranks in the group.
        rank: this member's rank in the group.
        backend: one that `kinds` accepts: ``"gloo"``, ``"nccl"``, or both by device.
        deadline: until when gloo may take to connect.
        sockets: where gloo listens.

    Collective: yes, every member; gloo connects all of them, NCCL at its first operation.

    Raises:
        GroupTimeoutError: the members did not connect in time.
    """
    store = PrefixStore(f"{backend}/", store)
    group = dist.ProcessGroup(store, rank, len(ranks))
    by_device = distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    made = {
        kind: _new_backend(
            kind, PrefixStore(f"{kind}/", store), rank, len(ranks), deadline, sockets
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


def destroy(group: ProcessGroup) -> None:
    """Close the group's connections and forget it; does nothing the second time.

    Collective: no. Operations that wait in it end with an error.
    """
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def handles(group: ProcessGroup, device: torch.device) -> bool:
    """Whether a process group moves tensors on ``device``."""
    return torch.device(device.type) in group._device_types


def kinds(backend: str) -> set[str]:
    """The backends that a name as for `torch.distributed.new_group` asks for.

    Raises:
        ValueError: one that no group can be made with here.
    """
    found = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    if not found <= {dist.Backend.GLOO, dist.Backend.NCCL}:
        raise ValueError(f"cannot make {backend!r} groups; wrap yours with from_process_group()")
    return found


def backend_of(group: ProcessGroup) -> str:
    """``"nccl"`` if that is what moves a process group's CUDA tensors, else ``"gloo"``."""
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
    deadline: Deadline,
    sockets: SocketChoice,
) -> tuple[ProcessGroup.BackendType, Any]:
    if kind == dist.Backend.GLOO:
        return dist.ProcessGroup.BackendType.GLOO, _gloo(store, rank, size, deadline, sockets)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _OPERATION_TIMEOUT
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroup.BackendType.NCCL, nccl


def _gloo(
    store: Store, rank: int, size: int, deadline: Deadline, sockets: SocketChoice
) -> dist.ProcessGroupGloo:
    gloo = dist.ProcessGroupGloo
    if sockets.interface:
        device = gloo.create_device(interface=sockets.interface)
    elif sockets.address:
        device = gloo.create_device(hostname=sockets.address)
    else:
        device = gloo.create_default_device()
    options = gloo._Options()  # type: ignore[attr-defined]
    options._devices = [device]
    options._timeout = timedelta(seconds=max(deadline.remaining(_LONGEST_CONNECT), 0.001))
    try:
        made = gloo(store, rank, size, options)
    except RuntimeError as error:
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
