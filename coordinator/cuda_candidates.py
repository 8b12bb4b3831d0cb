"""Build the backend of a group on CUDA devices: the best candidate for each operation.

Each candidate is built in two steps: a check that a member runs alone, then the set-up with the
others. The second step begins only if all members pass the first, so no member waits for one that
cannot take part. A backend that one member cannot use is refused on all of them, with that member's
reason. `device_comm.selection` chooses among the rest by a table of times, measured on this kind of
machine before, or now.

The candidates, in order of preference without measurements:

    ipc       kernels that read and write the memory of peers on this host (CUDA IPC); ranks may
              share a device. Each of its all-reduce algorithms is a candidate too.
    nccl      NCCL on torch's current stream; each rank needs a device of its own
    nccl window
              NCCL's all-reduce in windows of memory that all ranks reach, from NCCL 2.27 on
    multimem  torch's symmetric memory: all-reduce in the NVLink switch between the devices, in
              two shots
    torch     the device's torch process group; only if ipc and nccl are refused
    host      through CPU memory; only if ranks share devices: without NVIDIA's MPS, kernels of
              ranks that wait for each other take turns of some milliseconds
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from device_comm import Backend, Communicator
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.driver import DeviceError, Driver, kernel_source
from device_comm.cuda.ipc.abi import MAX_RANKS
from device_comm.cuda.ipc.ipc_backend import IpcBackend, ipc_algorithms
from device_comm.cuda.nccl.core import NcclMemory
from device_comm.cuda.nccl.library import NcclLibrary, NcclUnavailableError
from device_comm.cuda.nccl.nccl_backend import NcclBackend, NcclWindow
from device_comm.cuda.symmetric_backend import SymmetricBackend
from device_comm.measuring import MEASURED_SIZES, Key, TableCache, cache_folder, measure_candidates
from device_comm.selection import Candidate, SelectingBackend, Selection, Table
from device_comm.torch_backend import TorchBackend
from device_comm.wrappers import HostStaging
from shm_broadcast import CoordinatorError, Deadline, __version__
from shm_broadcast.errors import counted

if TYPE_CHECKING:
    from coordinator.hosts import HostTopology
    from device_comm.cuda.agree import AllGatherBytes


T = TypeVar("T")
_TABLE = msgspec.msgpack.Decoder(Table | None)


def try_together(
    name: str,
    prepare: Callable[[], T],
    build: Callable[[T], Backend],
    swap: AllGatherBytes,
    closing: ExitStack,
) -> Candidate:
    """Build one backend on all members, or on none; return it or the reason as a candidate.

    Args:
        name: the candidate's name.
        prepare: the step that a member does alone; ``build`` gets its result.
        build: sets the backend up together with the other members.
        swap: sends this member's bytes to all members, and returns all members', by rank.
        closing: closes the backend.

    Collective: yes, every member.
    """
    ready: list[T] = []
    refused = _first_refusal(swap, _attempt(lambda: ready.append(prepare())))
    if refused:
        return Candidate(name, None, refused)
    built: list[Backend] = []
    refused = _first_refusal(swap, _attempt(lambda: built.append(build(ready[0]))))
    for backend in built:
        if refused:
            backend.close()
        else:
            closing.callback(backend.close)
    return Candidate(name, None if refused else built[0], refused)


def select(
    candidates: Sequence[Candidate],
    key: Key,
    cache: TableCache,
    swap: AllGatherBytes,
    sizes: Mapping[str, Sequence[int]] = MEASURED_SIZES,
    limit: float = math.inf,
) -> SelectingBackend:
    """Return a backend that chooses among ``candidates`` by rank 0's table, per operation.

    Args:
        candidates: the same on all members, in order of preference; at least one is not refused.
        key: the machine and group that a table must be measured for; rank 0's counts.
        cache: where rank 0 loads and stores tables.
        swap: as for `try_together`.
        sizes: the sizes of a table, in bytes, by verb.
        limit: seconds to measure missing entries. Later set-ups measure the rest; until then the
            nearest size decides, or the order of the candidates.

    Collective: yes, every member.
    """
    if sum(each.backend is not None for each in candidates) < 2:
        return SelectingBackend(Selection(candidates))
    old_table = _TABLE.decode(swap(msgspec.msgpack.encode(cache.load(key)))[0])
    measured = measure_candidates(
        candidates, key.as_dict(), swap, sizes, known=old_table, limit=limit
    )
    table = _TABLE.decode(swap(msgspec.msgpack.encode(measured))[0])
    if table == measured != old_table:
        cache.store(table, key)
    return SelectingBackend(Selection(candidates, table))


def _attempt(step: Callable[[], object]) -> str:
    """Run ``step``; return the reason if it raises a `CoordinatorError`, else ``""``."""
    try:
        step()
    except CoordinatorError as error:
        return str(error) or type(error).__name__
    return ""


def _first_refusal(swap: AllGatherBytes, reason: str) -> str:
    """Return the reason of the first member that failed, or ``""``. Collective: yes."""
    reasons = [each.decode() for each in swap(reason.encode())]
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


_DRIVER = Path("/proc/driver/nvidia/version")
_MEASURING = 1 / 3
"""The fraction of the remaining set-up time that measuring may take."""


def cuda_comm(
    device: torch.device,
    nodes: HostTopology,
    over: Communicator,
    group: Callable[[], ProcessGroup],
    deadline: Deadline,
    closing: ExitStack,
) -> Backend:
    """Return the backend of a group of two or more on CUDA devices.

    Args:
        device: this member's device, with an index.
        nodes: which members share a host.
        over: a communicator of the same members on the CPU; the source of name and timeout.
        group: makes the device's torch process group, if it is needed.
        deadline: for the set-up.
        closing: closes everything that is built here.

    Collective: yes, every member.

    Raises:
        GroupTimeoutError: members did not call in time.
    """
    swap = all_gather_bytes_over(over, deadline)
    identity = str(torch.cuda.get_device_properties(device).uuid)
    identities = swap(identity.encode())
    n, devices = over.world_size, len(set(identities))
    build = _CandidateBuilder(device, devices, nodes, over, group, deadline, swap, closing)
    ipc, nccl = build.ipc(), build.nccl()
    by_protocol = ipc_algorithms(ipc.backend) if isinstance(ipc.backend, IpcBackend) else []
    candidates = [ipc, *by_protocol, nccl, build.window(nccl), build.multimem()]
    if devices < n:
        candidates.append(Candidate("host", HostStaging(over.backend, device)))
    elif ipc.backend is None and nccl.backend is None:
        candidates.append(Candidate("torch", build.torch()))
    usable = [each.name for each in candidates if each.backend is not None]
    cache = TableCache(cache_folder(os.environ))
    key = _key(device, n, devices, nodes, usable)
    return select(candidates, key, cache, swap, limit=deadline.remaining() * _MEASURING)


@dataclass(frozen=True, slots=True)
class _CandidateBuilder:
    """Builds candidates, each on all members or on none; ``devices`` counts the members'."""

    device: torch.device
    devices: int
    nodes: HostTopology
    over: Communicator
    group: Callable[[], ProcessGroup]
    deadline: Deadline
    swap: AllGatherBytes
    closing: ExitStack

    def ipc(self) -> Candidate:

        def find_driver() -> Driver:
            # CuPy is optional and slow to import.
            from device_comm.cuda.cupy_driver import CupyDriver  # noqa: PLC0415

            if len(self.nodes.all()) > 1:
                raise DeviceError("ipc", "the members are on several hosts")
            if self.over.world_size > MAX_RANKS:
                members = f"{self.over.world_size} members"
                raise DeviceError("ipc", f"{members}; the limit is {MAX_RANKS}")
            driver = CupyDriver(self.device)
            self.closing.callback(driver.close)
            return driver

        def create(driver: Driver) -> IpcBackend:
            swap = all_gather_bytes_over(self.over)
            return IpcBackend.create(
                driver, self.over.rank, self.over.world_size, swap, **self._group_arguments
            )

        return self._try("ipc", find_driver, create)

    def nccl(self) -> Candidate:

        def find_library() -> NcclLibrary:
            if self.devices < self.over.world_size:
                shared = counted(self.devices, "device")
                raise NcclUnavailableError(f"{self.over.world_size} members share {shared}")
            return NcclLibrary.of_torch()

        def create(library: NcclLibrary) -> NcclBackend:
            return NcclBackend.create(
                self.over.rank,
                self.over.world_size,
                lambda payload: self.swap(payload or b"")[0],
                device=self.device,
                set_up=self.deadline,
                library=library,
                **self._group_arguments,
            )

        return self._try("nccl", find_library, create)

    def window(self, nccl: Candidate) -> Candidate:

        def find_memory() -> tuple[NcclBackend, NcclMemory]:
            if not isinstance(nccl.backend, NcclBackend):
                raise NcclUnavailableError("the group has no NCCL backend")
            return nccl.backend, NcclWindow.allocate(nccl.backend)

        def create(backend_and_memory: tuple[NcclBackend, NcclMemory]) -> NcclWindow:
            return NcclWindow(*backend_and_memory, self.deadline)

        return _limited(self._try("nccl window", find_memory, create))

    def multimem(self) -> Candidate:

        def find_memory() -> Tensor:
            if len(self.nodes.all()) > 1 or self.devices < self.over.world_size:
                reason = "the members are on several hosts or share devices"
                raise DeviceError("multimem", reason)
            return SymmetricBackend.allocate(self.device)

        def create(shared: Tensor) -> SymmetricBackend:
            return SymmetricBackend(self.group(), shared, **self._group_arguments)

        return _limited(self._try("multimem", find_memory, create))

    def torch(self) -> TorchBackend:
        nodes, over = self.nodes, self.over
        return TorchBackend(
            self.group(), self.device, nodes.board, nodes.members, over.name, over.timeout
        )

    def _try(self, name: str, prepare: Callable[[], T], build: Callable[[T], Backend]) -> Candidate:
        return try_together(name, prepare, build, self.swap, self.closing)

    @property
    def _group_arguments(self) -> dict[str, Any]:
        return {
            "name": self.over.name,
            "timeout": self.over.timeout,
            "watch": self.nodes.board,
            "members": self.nodes.members,
        }


def _limited(candidate: Candidate) -> Candidate:
    """Return the candidate, limited to the sizes that its backend accepts."""
    backend = candidate.backend
    if isinstance(backend, (NcclWindow, SymmetricBackend)):
        return replace(candidate, up_to=backend.limit)
    return candidate


def _key(device: torch.device, n: int, devices: int, nodes: HostTopology, usable: list[str]) -> Key:
    """Return the conditions under which a table of measured times is valid."""
    places = f"{counted(devices, 'device')} of {counted(len(nodes.all()), 'host')}"
    libraries = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {_nccl_version()}"
    kernels = hashlib.sha256(kernel_source().encode()).hexdigest()[:12]
    return Key(
        version=f"{__version__}, kernels {kernels}",
        device=torch.cuda.get_device_name(device),
        driver=_driver_version(),
        libraries=libraries,
        world_size=n,
        topology=f"{counted(n, 'rank')} on {places}{', MPS' if _mps_runs() else ''}",
        candidates=" ".join(usable),
    )


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _mps_runs() -> bool:
    """Return whether MPS runs the processes of a device side by side."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(folder, "control").exists()


def _driver_version() -> str:
    try:
        return _DRIVER.read_text().partition("\n")[0]
    except OSError:
        return "unknown"
