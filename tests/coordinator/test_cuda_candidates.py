"""The candidates of a group on CUDA devices, and the key of their table of times: no device."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from coordinator import cuda_candidates
from coordinator.cuda_candidates import cuda_comm
from device_comm import ALL_VERBS, Backend, Capabilities, Communicator, Identity
from device_comm.cuda import cupy_driver
from device_comm.cuda.driver import DeviceError, kernel_source
from device_comm.cuda.nccl.library import NcclLibrary
from device_comm.selection import Candidate, Selection
from device_comm.wrappers import HostStaging
from shm_broadcast import Deadline, __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from device_comm import Operation
    from device_comm.measuring import Key

pytestmark = pytest.mark.quick

DEVICE = torch.device("cuda", 0)
LIMIT = 4096
SECONDS = 60.0
IPC = ["ipc", "ipc packets", "ipc one-shot", "ipc two-shot"]


class Still(Backend):
    """Stands in for a backend of the kind that its class is called after: does nothing."""

    packet_bytes = limit = LIMIT
    found: Callable[[], object]

    def __init__(self, *_: object, **__: object) -> None:
        name = type(self).__name__
        device = "cpu" if name == "Cpu" else DEVICE
        super().__init__(Identity.of(0, 2, device), Capabilities(name.lower(), ALL_VERBS))

    def start(self, operation: Operation) -> None:
        """Nothing moves."""

    @classmethod
    def create(cls, *_: object, **__: object) -> Still:
        return cls()

    @classmethod
    def allocate(cls, *_: object) -> object:
        return cls.found()


def kind(name: str, found: Callable[[], object] = object) -> type[Still]:
    """A backend of a name, which ``found`` finds what it needs for."""
    return type(name, (Still,), {"found": staticmethod(found)})


class Machine:
    """Rank 0 of a group, as its set-up sees it.

    ``devices``: 1 if the other rank has the same; ``lacks``: some of "ipc nccl window switch";
    ``hosts``: by rank, the first rank of its host; ``limit``: seconds that measuring was given.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.devices = 2
        self.lacks: set[str] = set()
        self.hosts = (0, 0)
        self.version = "NVRM version: 580.1\nGCC"
        self.chosen: list[tuple[list[Candidate], Key]] = []
        self.limit = 0.0
        self._driver = folder / "version"
        patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(folder))
        patch.setattr(cuda_candidates, "_DRIVER", self._driver)
        patch.setattr(cuda_candidates, "all_gather_bytes_over", lambda *_: self._swap)
        patch.setattr(cuda_candidates, "select", self._select)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-0"))
        patch.setattr(torch.cuda, "get_device_name", lambda _: "Some Card")
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(cupy_driver, "CupyDriver", lambda _: self._has("ipc"))
        patch.setattr(NcclLibrary, "of_torch", lambda: self._has("nccl"))
        for name, needs in (
            ("IpcBackend", ""),
            ("NcclBackend", ""),
            ("NcclWindow", "window"),
            ("SymmetricBackend", "switch"),
            ("TorchBackend", ""),
        ):
            patch.setattr(cuda_candidates, name, kind(name, partial(self._has, needs)))

    def set_up(self) -> tuple[list[Candidate], Key]:
        """The candidates in order, and what their table is kept for."""
        self._driver.write_text(self.version)
        board: Any = None
        nodes: Any = SimpleNamespace(
            board=board, members=(0, 1), all=lambda: [[each] for each in sorted({*self.hosts})]
        )
        over = Communicator(kind("Cpu")())
        group: Any = object
        with ExitStack() as closing:
            cuda_comm(DEVICE, nodes, over, group, Deadline.after(SECONDS), closing)
        return self.chosen.pop()

    def names(self) -> list[str]:
        """The candidates that were not refused, in order."""
        return [each.name for each in self.set_up()[0] if each.backend is not None]

    def key(self) -> Key:
        return self.set_up()[1]

    def _select(self, candidates: list[Candidate], key: Key, *_: object, limit: float) -> Backend:
        self.chosen.append((candidates, key))
        self.limit = limit
        return Still()

    def _swap(self, payload: bytes) -> list[bytes]:
        other = payload.replace(b"GPU-0", b"GPU-1") if self.devices == 2 else payload
        return [payload, other]

    def _has(self, what: str) -> Any:
        if what in self.lacks:
            raise DeviceError(what, "none")
        return SimpleNamespace(close=lambda: None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("devices", "hosts", "lacks", "names"),
    [
        (2, (0, 0), "", [*IPC, "nccl", "nccl window", "multimem"]),
        (2, (0, 0), "switch", [*IPC, "nccl", "nccl window"]),
        (2, (0, 0), "window switch", [*IPC, "nccl"]),
        (2, (0, 0), "nccl switch", IPC),
        (2, (0, 0), "ipc switch", ["nccl", "nccl window"]),
        (2, (0, 0), "ipc nccl switch", ["torch"]),
        (2, (0, 1), "", ["nccl", "nccl window"]),
        (1, (0, 0), "", [*IPC, "host"]),
        (1, (0, 0), "ipc", ["host"]),
    ],
)
def test_candidates_in_order(
    machine: Machine, devices: int, hosts: tuple[int, int], lacks: str, names: list[str]
) -> None:
    machine.devices, machine.hosts, machine.lacks = devices, hosts, {*lacks.split()}
    assert machine.names() == names


def test_on_a_shared_device_the_way_through_the_host_takes_part(machine: Machine) -> None:
    """Over the backend of the CPU, on tensors of the device; the others say why they do not."""
    machine.devices = 1
    candidates, key = machine.set_up()
    host = candidates[-1].backend
    assert isinstance(host, HostStaging)
    assert (host.device, host.capabilities.backend) == (DEVICE, "host")
    assert key.candidates.endswith(" host")
    assert {each.name: each.unavailable for each in candidates if each.backend is None} == {
        "nccl": "rank 0: 2 members share 1 device",
        "nccl window": "rank 0: the group has no NCCL backend",
        "multimem": "rank 0: multimem: the members are on several hosts or share devices",
    }


def test_candidates_have_limits_of_bytes_and_time(machine: Machine) -> None:
    """Measuring leaves most of the time to the rest of the set-up."""
    candidates, _ = machine.set_up()
    limits = {each.name: each.up_to for each in candidates if each.up_to is not None}
    assert limits == dict.fromkeys(("ipc packets", "nccl window", "multimem"), LIMIT)
    assert Selection(candidates).candidate("all_reduce", LIMIT + 1).name == "ipc"
    assert 0 < machine.limit <= SECONDS / 3


def test_a_table_is_kept_for_all_that_its_times_depend_on(machine: Machine) -> None:
    key = machine.key()
    kernels = hashlib.sha256(kernel_source().encode()).hexdigest()[:12]
    assert key.as_dict() == {
        "version": f"{__version__}, kernels {kernels}",
        "device": "Some Card",
        "driver": "NVRM version: 580.1",
        "libraries": f"torch {torch.__version__}, CUDA 13.0, NCCL 2.27.5",
        "world_size": "2",
        "topology": "2 ranks on 2 devices of 1 host",
        "candidates": " ".join([*IPC, "nccl", "nccl window", "multimem"]),
    }


def test_other_kernels_another_version_or_mps_need_another_table(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = [machine.key(), machine.key()]
    assert keys[0] == keys[1]
    for name, other in (
        ("kernel_source", lambda: f"{kernel_source()} "),
        ("__version__", f"{__version__}.1"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cuda_candidates, name, other)
            keys.append(machine.key())
    machine.version = "NVRM version: 580.2"
    keys.append(machine.key())
    (tmp_path / "control").touch()
    keys.append(machine.key())
    assert keys[-1].topology == "2 ranks on 2 devices of 1 host, MPS"
    machine.devices = 1
    keys.append(machine.key())
    assert len({*keys}) == len(keys) - 1
