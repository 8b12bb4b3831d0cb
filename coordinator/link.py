"""What one member holds of its group, and how it comes to hold it.

A `Link` is built by all members of a group together, over an `Exchange`: the board of the
node, the process groups, and the communicators over these. A group of one has neither
process group nor board of its own and costs nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch

from coordinator import torch_groups
from coordinator.checked_comm import CheckedComm
from coordinator.cuda_link import cuda_comm
from coordinator.nodes import Nodes, find_nodes
from coordinator.torch_groups import SocketChoice
from device_comm import DeviceCommunicator, LoopbackComm
from device_comm.on_stream import CudaSideStream, OnStream
from device_comm.shm_comm import ShmComm
from device_comm.torch_comm import TorchComm
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from coordinator.exchange import Exchange

C = TypeVar("C", bound=DeviceCommunicator)

OPERATION_TIMEOUT = 600.0
"""Seconds that an operation may take unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the groups of one topology have in common.

    Attributes:
        backend: of the device's process groups, as for `torch.distributed.new_group`.
        device: where the tensors of the collectives are.
        local_rank: this process's number on its node.
        sockets: where gloo listens.
        timeout: seconds that an operation may take; None: for ever.
        torch_only: move tensors by torch's process groups, though there may be better.
        checked: compare what members issue, where the communicator does not by itself.
        stream: where collectives on the device run; None: on the current stream.
    """

    backend: str
    device: torch.device
    local_rank: int
    sockets: SocketChoice
    timeout: float | None
    torch_only: bool
    checked: bool
    stream: torch.cuda.Stream | None = None

    def on(self, stream: torch.cuda.Stream | None) -> Settings:
        """The same, with collectives on a stream.

        Raises:
            ValueError: the stream is of another device, or the groups are not on CUDA.
        """
        if stream is not None and stream.device != self.device:
            raise ValueError(f"a stream of {stream.device} is not for a group on {self.device}")
        return replace(self, stream=stream)

    @classmethod
    def of(
        cls,
        backend: str | None,
        local_rank: int,
        sockets: SocketChoice | None = None,
        timeout: float | None = OPERATION_TIMEOUT,
        *,
        torch_only: bool = False,
        checked: bool = False,
    ) -> Settings:
        """Settings for a backend, and the device that goes with it.

        Args:
            backend: None: NCCL where this process sees a GPU, gloo elsewhere.
            local_rank: chooses the GPU.
            sockets: where gloo listens; None: torch's choice.
            timeout: seconds that an operation may take; None: for ever.
            torch_only: move tensors by torch's process groups, though there may be better.
            checked: compare what members issue, where the communicator does not by itself.

        Raises:
            ValueError: a backend that is neither gloo nor NCCL.
        """
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cpu")
        if "nccl" in torch_groups.kinds(backend):
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        return cls(
            backend, device, local_rank, sockets or SocketChoice(), timeout, torch_only, checked
        )


@dataclass(frozen=True, slots=True)
class Link:
    """What one member holds of its group.

    Attributes:
        name: the group's, for errors and status.
        ranks: the members' global ranks, by rank in the group.
        rank_in_group: this member's.
        settings: the topology's.
        cpu_group: a torch process group for the CPU; None in a group of one.
        device_group: one for the device; the same if that is the CPU.
        cpu: moves tensors on the CPU.
        device: moves tensors on the device; the same if that is the CPU.
        nodes: which members share a host; None in a group of one without a board.
        exchange: swaps values between the members; None in a group of one.
        closing: gives everything back.
    """

    name: str
    ranks: tuple[int, ...]
    rank_in_group: int
    settings: Settings
    cpu_group: ProcessGroup | None
    device_group: ProcessGroup | None
    cpu: DeviceCommunicator
    device: DeviceCommunicator
    nodes: Nodes | None
    exchange: Exchange | None
    closing: ExitStack

    def part(self, name: str, members: Sequence[int]) -> Link:
        """The link of a group of some members, this one among them.

        Collective: yes, these members.
        """
        ranks = [self.ranks[member] for member in members]
        nodes = self.nodes and self.nodes.sub(members)
        if self.exchange is None or len(members) == 1:
            return alone(name, self.ranks[self.rank_in_group], self.settings, nodes)
        return connect(self.exchange.sub(name, members), ranks, self.settings, nodes)

    def sibling(self, name: str, timeout: float | None) -> ProcessGroup | None:
        """One more process group of the members, for the device; None in a group of one.

        Collective: yes, every member.
        """
        if self.exchange is None:
            return None
        members = range(len(self.ranks))
        exchange = self.exchange.sub(f"{self.name}.{name}", members, Deadline.after(timeout))
        exchange.all_gather("members")
        return _process_group(
            self.closing, exchange, self.ranks, self.settings.backend, self.settings
        )


def alone(name: str, rank: int, settings: Settings, nodes: Nodes | None = None) -> Link:
    """The link of a group of one. Collective: no."""
    watch, member = (None, 0) if nodes is None else (nodes.board, nodes.members[0])
    device = LoopbackComm(settings.device, name=name, watch=watch, member=member)
    cpu = device
    if settings.device.type != "cpu":
        cpu = LoopbackComm("cpu", name=name, watch=watch, member=member)
    return Link(name, (rank,), 0, settings, None, None, cpu, device, nodes, None, ExitStack())


def connect(
    exchange: Exchange,
    ranks: Sequence[int],
    settings: Settings,
    nodes: Nodes | None = None,
    given: ProcessGroup | None = None,
) -> Link:
    """Build the link of a group of two or more.

    Args:
        exchange: of its members, with keys that no other group uses; it names the group.
        ranks: their global ranks, by rank in the group.
        settings: the same on all members, but for the local rank.
        nodes: if they are known, with their boards; else they are found, and a board is made.
        given: a process group of the members, to be used for what it handles; it is not
            destroyed with the link.

    Collective: yes, every member, and nobody else.

    Raises:
        GroupTimeoutError: some members did not come in time; names them.
        ValueError: the backend is unknown.
    """
    with ExitStack() as undo:
        if nodes is None:
            nodes = find_nodes(exchange)
            undo.callback(nodes.board.close)
            undo.callback(nodes.progress.close)
        exchange.all_gather("members")
        build = _Builder(exchange, ranks, settings, nodes, given, undo)
        cpu_group = build.process_group(torch.device("cpu"), "gloo")
        over: DeviceCommunicator
        cpu: DeviceCommunicator
        if build.may_use_shm():
            over = cpu = build.shm()
        else:
            over = build.torch(cpu_group, "cpu")
            cpu = build.checked(over, over)
        device_group, device = cpu_group, cpu
        if settings.device.type != "cpu":
            device_group = build.process_group(settings.device, settings.backend)
            device = build.checked(build.cuda(device_group, over), over)
            device = build.on_stream(device)
        return Link(
            exchange.name,
            tuple(ranks),
            exchange.rank,
            settings,
            cpu_group,
            device_group,
            cpu,
            device,
            nodes,
            exchange,
            undo.pop_all(),
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds the parts of a link, each to be undone with it."""

    exchange: Exchange
    ranks: Sequence[int]
    settings: Settings
    nodes: Nodes
    given: ProcessGroup | None
    undo: ExitStack

    def process_group(self, device: torch.device, backend: str) -> ProcessGroup:
        """The given process group, if it handles ``device``, or a new one."""
        if self.given is not None and torch_groups.handles(self.given, device):
            return self.given
        return _process_group(self.undo, self.exchange, self.ranks, backend, self.settings)

    def may_use_shm(self) -> bool:
        """Whether all members share a host, and are not told to use torch."""
        return len(self.nodes.all()) == 1 and not self.settings.torch_only

    def shm(self) -> ShmComm:
        """A communicator through shared memory."""
        return self._keep(
            ShmComm.create(
                self.nodes.board,
                self.nodes.members,
                lambda handle: self.exchange.broadcast("segment", handle),
                name=self.exchange.name,
                timeout=self.settings.timeout,
                progress=self.nodes.progress,
            )
        )

    def torch(self, group: ProcessGroup, device: torch.device | str) -> TorchComm:
        """A communicator through a torch process group."""
        board, members = self.nodes.board, self.nodes.members
        return self._keep(
            TorchComm(group, device, board, members, self.exchange.name, self.settings.timeout)
        )

    def cuda(self, group: ProcessGroup, over: DeviceCommunicator) -> DeviceCommunicator:
        """The best there is on CUDA devices, or what ``group`` is, if told so."""
        device, deadline = self.settings.device, self.exchange.deadline
        if self.settings.torch_only:
            return self.torch(group, device)
        return self._keep(cuda_comm(device, self.nodes, over, group, deadline, self.undo))

    def checked(self, comm: DeviceCommunicator, over: DeviceCommunicator) -> DeviceCommunicator:
        """``comm``, in the debug mode if that is wanted."""
        return self._keep(CheckedComm(comm, over)) if self.settings.checked else comm

    def on_stream(self, comm: DeviceCommunicator) -> DeviceCommunicator:
        """``comm``, on a stream of its own if that is wanted."""
        stream = self.settings.stream
        return comm if stream is None else self._keep(OnStream(comm, CudaSideStream(stream)))

    def _keep(self, comm: C) -> C:
        self.undo.callback(comm.close)
        return comm


def _process_group(
    undo: ExitStack, exchange: Exchange, ranks: Sequence[int], backend: str, settings: Settings
) -> ProcessGroup:
    group = torch_groups.new_process_group(
        exchange.store,
        f"{exchange.name}:{backend}",
        ranks,
        exchange.rank,
        backend,
        exchange.deadline,
        settings.sockets,
    )
    undo.callback(torch_groups.destroy, group)
    return group
