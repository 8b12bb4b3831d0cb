"""What moves the tensors of a group on CUDA devices: everything that works, the best for each.

Candidates, in order of preference where nothing was measured:

    ipc       kernels that reach into the memory of peers on this host; ranks may share a device.
              Its protocols are candidates of their own for all-reduce.
    nccl      NCCL on torch's current stream
    multimem  torch's symmetric memory: all-reduce in the switch between the devices
    torch     the device's torch process group; only if ipc and nccl were refused
    host      by way of the host; only if ranks share devices and ipc was refused
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coordinator.candidates import select, try_together
from device_comm.cuda.abi import MAX_RANKS
from device_comm.cuda.agree import swap_over
from device_comm.cuda.errors import DeviceError
from device_comm.cuda.ipc_comm import IpcComm
from device_comm.cuda.ipc_way import ways
from device_comm.cuda.nccl_comm import NcclComm
from device_comm.cuda.nccl_library import NcclLibrary, NcclUnavailableError
from device_comm.cuda.symmetric_comm import SymmetricComm
from device_comm.host_comm import HostComm
from device_comm.select import Candidate
from device_comm.select_cache import Key, TableCache, cache_folder
from device_comm.torch_comm import TorchComm

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch.distributed import ProcessGroup

    from coordinator.nodes import Nodes
    from device_comm import DeviceCommunicator
    from device_comm.cuda.driver import Driver
    from shm_broadcast import Deadline

_DRIVER = Path("/proc/driver/nvidia/version")


def cuda_comm(
    device: torch.device,
    nodes: Nodes,
    over: DeviceCommunicator,
    group: ProcessGroup,
    deadline: Deadline,
    closing: ExitStack,
) -> DeviceCommunicator:
    """The communicator of a group of two or more on CUDA devices.

    Args:
        device: this member's, with an index.
        nodes: who shares a host.
        over: of the same members, on the CPU; its name and timeout are the result's too.
        group: the device's torch process group.
        deadline: of set-up.
        closing: what is built is closed with it.

    Collective: yes, every member.

    Raises:
        GroupTimeoutError: some members did not come in time.
    """
    swap = swap_over(over, deadline)
    identities = [each.decode() for each in swap(_identity(device).encode())]
    n, devices = over.world_size, len(set(identities))
    name, timeout, board = over.name, over.timeout, nodes.board

    def find_driver() -> Driver:
        # CuPy is optional, and takes long to import
        from device_comm.cuda.cupy_driver import CupyDriver  # noqa: PLC0415

        if len(nodes.all()) > 1:
            raise DeviceError("ipc", "the members are on several hosts")
        if n > MAX_RANKS:
            raise DeviceError("ipc", f"{n} members; {MAX_RANKS} are possible")
        driver = CupyDriver(device)
        closing.callback(driver.close)
        return driver

    def find_nccl() -> NcclLibrary:
        if devices < n:
            raise NcclUnavailableError(f"{n} members share {_several(devices, 'device')}")
        return NcclLibrary.of_torch()

    def find_switch() -> None:
        if len(nodes.all()) > 1 or devices < n:
            raise DeviceError("multimem", "the members are not on devices of their own on one host")
        SymmetricComm.check(device)

    ipc = try_together(
        "ipc",
        find_driver,
        lambda driver: IpcComm.create(
            driver,
            over.rank,
            n,
            swap_over(over),
            name=name,
            timeout=timeout,
            watch=board,
            members=nodes.members,
        ),
        swap,
        closing,
    )
    nccl = try_together(
        "nccl",
        find_nccl,
        lambda library: NcclComm.create(
            over.rank,
            n,
            lambda payload: swap(payload or b"")[0],
            device=device,
            name=name,
            timeout=timeout,
            watch=board,
            members=nodes.members,
            set_up=deadline,
            library=library,
        ),
        swap,
        closing,
    )
    multimem = try_together(
        "multimem",
        find_switch,
        lambda _: SymmetricComm(
            group, device, name=name, timeout=timeout, watch=board, members=nodes.members
        ),
        swap,
        closing,
    )
    candidates = [ipc, nccl, multimem]
    if isinstance(ipc.comm, IpcComm):
        candidates[1:1] = ways(ipc.comm)
    if isinstance(multimem.comm, SymmetricComm):
        candidates[-1] = replace(multimem, up_to=multimem.comm.limit)
    if ipc.comm is None and nccl.comm is None:
        if devices < n:
            candidates.append(Candidate("host", HostComm(over, device)))
        else:
            comm = TorchComm(group, device, board, nodes.members, name, timeout)
            candidates.append(Candidate("torch", comm))
    able = [each.name for each in candidates if each.comm is not None]
    cache = TableCache(cache_folder(os.environ))
    return select(candidates, _key(device, n, devices, nodes, able), cache, swap)


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _key(device: torch.device, n: int, devices: int, nodes: Nodes, able: list[str]) -> Key:
    """What a table that is measured here is good for."""
    places = f"{_several(devices, 'device')} of {_several(len(nodes.all()), 'host')}"
    libraries = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl_version()}"
    return Key(
        device=torch.cuda.get_device_name(device),
        driver=_driver_version(),
        libraries=libraries,
        world_size=n,
        topology=f"{_several(n, 'rank')} on {places}",
        candidates=" ".join(able),
    )


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver_version() -> str:
    try:
        return _DRIVER.read_text().partition("\n")[0]
    except OSError:
        return "unknown"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
