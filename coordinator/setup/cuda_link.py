"""Builds the backend of a group on CUDA devices: all that work, the best for each operation.

The candidates, in order of preference if nothing was measured:

    ipc       kernels that read and write the memory of peers on this host (CUDA IPC); ranks may
              share a device. Each of its all-reduce algorithms is a candidate too.
    nccl      NCCL on torch's current stream; each rank needs a device of its own
    nccl window
              NCCL's all-reduce in windows of memory that all ranks reach, from NCCL 2.27 on
    multimem  torch's symmetric memory: all-reduce in the NVLink switch between the devices, in
              two shots
    torch     the device's torch process group; only if ipc and nccl were refused
    host      through CPU memory; only if ranks share devices: without NVIDIA's MPS their kernels
              take turns of some milliseconds there, whenever they meet
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from coordinator.setup.candidates import select, try_together
from device_comm.choosing.cache import Key, TableCache, cache_folder
from device_comm.choosing.selection import Candidate
from device_comm.cuda.agree import swap_over
from device_comm.cuda.device.kernel_source import kernel_source
from device_comm.cuda.errors import DeviceError
from device_comm.cuda.ipc.ipc_backend import IpcBackend
from device_comm.cuda.ipc.ipc_way import ways
from device_comm.cuda.launches.abi import MAX_RANKS
from device_comm.cuda.nccl.library import NcclLibrary, NcclUnavailableError
from device_comm.cuda.nccl.nccl_backend import NcclBackend
from device_comm.cuda.nccl.nccl_window import NcclWindow
from device_comm.cuda.symmetric_backend import SymmetricBackend
from device_comm.torch_group.torch_backend import TorchBackend
from device_comm.wrappers.host_staging import HostStaging
from shm_broadcast import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from coordinator.hosts.nodes import Nodes
    from device_comm import Backend, Communicator
    from device_comm.cuda.device.driver import Driver
    from device_comm.cuda.nccl.nccl_memory import NcclMemory
    from shm_broadcast import Deadline

_DRIVER = Path("/proc/driver/nvidia/version")
_MEASURING = 1 / 3
"""The part of what is left for the set-up that measuring may take."""


def cuda_comm(
    device: torch.device,
    nodes: Nodes,
    over: Communicator,
    group: Callable[[], ProcessGroup],
    deadline: Deadline,
    closing: ExitStack,
) -> Backend:
    """The backend of a group of two or more on CUDA devices.

    Args:
        device: this member's device, with an index.
        nodes: which members share a host.
        over: a communicator of the same members on the CPU; name and timeout are taken from it.
        group: makes the device's torch process group, when it is needed.
        deadline: for the set-up.
        closing: closes everything that is built here.

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
        from device_comm.cuda.device.cupy_driver import CupyDriver  # noqa: PLC0415

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

    def find_window() -> tuple[NcclBackend, NcclMemory]:
        if not isinstance(nccl.backend, NcclBackend):
            raise NcclUnavailableError("there is no NCCL between the members")
        return nccl.backend, NcclWindow.allocate(nccl.backend)

    def find_switch() -> Tensor:
        if len(nodes.all()) > 1 or devices < n:
            raise DeviceError("multimem", "the members are not on devices of their own on one host")
        return SymmetricBackend.allocate(device)

    ipc = try_together(
        "ipc",
        find_driver,
        lambda driver: IpcBackend.create(
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
        lambda library: NcclBackend.create(
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
    window = try_together(
        "nccl window",
        find_window,
        lambda found: NcclWindow(*found, deadline),
        swap,
        closing,
    )
    multimem = try_together(
        "multimem",
        find_switch,
        lambda shared: SymmetricBackend(
            group(), shared, name=name, timeout=timeout, watch=board, members=nodes.members
        ),
        swap,
        closing,
    )
    candidates = [ipc, nccl, window, multimem]
    if isinstance(ipc.backend, IpcBackend):
        candidates[1:1] = ways(ipc.backend)
    candidates[-2:] = [
        replace(each, up_to=each.backend.limit)
        if isinstance(each.backend, (NcclWindow, SymmetricBackend))
        else each
        for each in (window, multimem)
    ]
    if devices < n:
        candidates.append(Candidate("host", HostStaging(over.backend, device)))
    elif ipc.backend is None and nccl.backend is None:
        backend = TorchBackend(group(), device, board, nodes.members, name, timeout)
        candidates.append(Candidate("torch", backend))
    able = [each.name for each in candidates if each.backend is not None]
    cache = TableCache(cache_folder(os.environ))
    key = _key(device, n, devices, nodes, able)
    return select(candidates, key, cache, swap, limit=deadline.remaining() * _MEASURING)


def _identity(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _key(device: torch.device, n: int, devices: int, nodes: Nodes, able: list[str]) -> Key:
    """What must be the same for a table of measured times to be used again."""
    places = f"{_several(devices, 'device')} of {_several(len(nodes.all()), 'host')}"
    libraries = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl_version()}"
    kernels = hashlib.sha256(kernel_source().encode()).hexdigest()[:12]
    return Key(
        version=f"{__version__}, kernels {kernels}",
        device=torch.cuda.get_device_name(device),
        driver=_driver_version(),
        libraries=libraries,
        world_size=n,
        topology=f"{_several(n, 'rank')} on {places}{', MPS' if _mps_runs() else ''}",
        candidates=" ".join(able),
    )


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _mps_runs() -> bool:
    """Whether the processes of a device run side by side on it."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def _driver_version() -> str:
    try:
        return _DRIVER.read_text().partition("\n")[0]
    except OSError:
        return "unknown"


def _several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
