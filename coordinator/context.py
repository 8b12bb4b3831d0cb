"""Build a member's `GroupContext`: board, process groups, communicators, message codec.

All members of a group build their contexts together, over a `Rendezvous`. Torch process groups are
made only if nothing else connects all members, or when a caller asks for one: torch's sockets
accept connections from any process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import msgspec
import torch
from torch.distributed import HashStore, ProcessGroup, Store

from coordinator import torch_groups
from coordinator.hosts import AbortOnError, HostTopology, find_nodes, with_liveness
from coordinator.messages.wire import MessageCodec, negotiate_codec
from coordinator.rendezvous import Rendezvous, Settings, authenticated, config_handshake
from coordinator.torch_groups import SocketChoice
from device_comm import Backend, Communicator, LoopbackBackend, ShmBackend, TorchBackend
from device_comm.divergence import FingerprintBackend, group_number
from device_comm.wrappers import CudaSideStream, OnStream
from shm_broadcast import NEVER, Deadline, GroupTimeoutError, SegmentHandle


def new_process_group(
    exchange: Rendezvous,
    ranks: Sequence[int],
    backend: str,
    settings: Settings,
    closing: ExitStack,
    deadline: Deadline | None = None,
) -> ProcessGroup:
    """Make a torch process group of the members. Collective: with a deadline, yes.

    Args:
        exchange: the members' rendezvous; its name and ``backend`` make the group's name.
        ranks: the members' global ranks, by rank in the group.
        backend: ``"gloo"``, ``"nccl"``, or both by device.
        settings: its ``sockets`` choose gloo's address.
        closing: destroys the group.
        deadline: for the connections of all members; None: two members connect at their first
            operation.

    Raises:
        GroupTimeoutError: some members did not connect before the deadline.
        PeerLostError, GroupAbortedError: a member exited, left or aborted meanwhile.
    """
    name = f"{exchange.name}:{backend}"
    try:
        group = torch_groups.connect_process_group(
            exchange.store, name, ranks, exchange.rank, backend, settings.sockets, deadline
        )
    except GroupTimeoutError:
        if exchange.watch is not None:
            exchange.watch(name, lambda: False)
        raise
    closing.callback(torch_groups.destroy, group)
    if deadline is not None:  # a member that closed now would break the others' connections
        exchange.all_gather(f"{backend} is connected")
    return group


class ProcessGroups:
    """The torch process groups of a member, each made at its first use; arguments as for `connect`.

    ``given`` serves the devices that it handles; ``closing`` destroys the other groups.
    """

    def __init__(
        self,
        exchange: Rendezvous,
        ranks: Sequence[int],
        settings: Settings,
        given: ProcessGroup | None,
        closing: ExitStack,
    ) -> None:
        self._exchange = exchange
        self._ranks = ranks
        self._settings = settings
        self._given = given
        self._closing = closing
        self._made: dict[str, ProcessGroup] = {}

    def cpu(self, deadline: Deadline | None = None) -> ProcessGroup:
        """Return the process group for the CPU; ``deadline`` as for `new_process_group`."""
        return self._group_for(torch.device("cpu"), "gloo", deadline)

    def device(self) -> ProcessGroup:
        """Return the process group for the device; `cpu` if the device is the CPU."""
        if self._settings.device.type == "cpu":
            return self.cpu()
        return self._group_for(self._settings.device, self._settings.backend, None)

    def _group_for(
        self, device: torch.device, backend: str, deadline: Deadline | None
    ) -> ProcessGroup:
        if self._given is not None and torch_groups.handles(self._given, device):
            return self._given
        if backend not in self._made:
            self._made[backend] = new_process_group(
                self._exchange, self._ranks, backend, self._settings, self._closing, deadline
            )
        return self._made[backend]


B = TypeVar("B", bound=Backend)
_SEGMENT = msgspec.msgpack.Decoder(SegmentHandle)


def _ignore_error(error: BaseException | None) -> None:
    """Do nothing: the owner of the board reports errors itself."""


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Everything that a member uses for its group.

    Attributes:
        name: the group's name, for errors and status.
        ranks: the members' global ranks, by rank in the group.
        rank_in_group: this member's rank in the group.
        settings: the group's settings.
        groups: the torch process groups.
        cpu: the communicator for CPU tensors.
        device: the communicator for the device's tensors; the same object if the device is the CPU.
        wire: encodes, seals and checks messages.
        nodes: which members share a host; None in a group of one without a board.
        exchange: the members' rendezvous, for further set-up.
        closing: closes everything.
        abort_on_error: aborts the group's board with an error; a no-op if another owner made the
            board.
    """

    name: str
    ranks: tuple[int, ...]
    rank_in_group: int
    settings: Settings
    groups: ProcessGroups
    cpu: Communicator
    device: Communicator
    wire: MessageCodec
    nodes: HostTopology | None
    exchange: Rendezvous
    closing: ExitStack
    abort_on_error: Callable[[BaseException | None], None] = _ignore_error

    def subgroup(self, name: str, members: Sequence[int]) -> GroupContext:
        """Build the context of a subgroup. Collective: yes, these members.

        ``members`` are ranks in this group, this member's among them.
        """
        ranks = [self.ranks[member] for member in members]
        nodes = self.nodes and self.nodes.sub(members)
        if len(members) == 1:
            return single(name, self.ranks[self.rank_in_group], self.settings, nodes)
        return connect(self.exchange.sub(name, members), ranks, self.settings, nodes)

    def sibling(self, name: str, timeout: float | None) -> ProcessGroup:
        """Make another torch process group of the members, for the device.
        Collective: yes, every member.

        Its name for torch is ``name`` behind this group's; ``timeout`` is in seconds, None: no
        limit.
        """
        members = range(len(self.ranks))
        exchange = self.exchange.sub(f"{self.name}.{name}", members, Deadline.after(timeout))
        above = self.exchange
        exchange = replace(exchange, watch=above.watch, seen_on=above.seen_on)
        exchange.all_gather("members")
        return new_process_group(
            exchange, self.ranks, self.settings.backend, self.settings, self.closing
        )


def rendezvous_in(
    store: Callable[[], Store],
    place: str,
    rank: int,
    ranks: Sequence[int],
    name: str,
    settings: Settings,
    timeout: float | None,
    given: ProcessGroup | None = None,
) -> GroupContext:
    """Build the context of a group whose members meet in a store.
    Collective: yes, only the members.

    Args:
        store: returns the store; not called in a group of one.
        place: the key prefix of the rendezvous: see `Rendezvous.begin_round`.
        rank: this member's global rank.
        ranks, settings, given: as for `connect`.
        name: the group's name.
        timeout: seconds for set-up; None: no limit.

    Raises:
        ValueError, SecretError: members have different settings; names them.
        What `connect` raises.
    """
    if len(ranks) == 1:
        return single(name, rank, settings, given=given)
    index, size, called = ranks.index(rank), len(ranks), tuple(ranks)
    members = Rendezvous(store(), index, size, name, Deadline.after(timeout), called=called)
    exchange = config_handshake(members, place, "terms", settings.terms())
    return connect(exchange, ranks, settings, given=given)


def single(
    name: str,
    rank: int,
    settings: Settings,
    nodes: HostTopology | None = None,
    given: ProcessGroup | None = None,
) -> GroupContext:
    """Build the context of a group of one; arguments as for `connect`."""
    settings = replace(settings, sockets=SocketChoice(address="127.0.0.1"))
    exchange = Rendezvous(HashStore(), 0, 1, name, NEVER)
    closing = ExitStack()
    groups = ProcessGroups(exchange, (rank,), settings, given, closing)
    watch, member = (None, 0) if nodes is None else (nodes.board, nodes.members[0])
    device = Communicator(LoopbackBackend(settings.device, name=name, watch=watch, member=member))
    closing.callback(device.close)
    cpu = device
    if settings.device.type != "cpu":
        cpu = Communicator(LoopbackBackend("cpu", name=name, watch=watch, member=member))
        closing.callback(cpu.close)
    return GroupContext(
        name=name,
        ranks=(rank,),
        rank_in_group=0,
        settings=settings,
        groups=groups,
        cpu=cpu,
        device=device,
        wire=MessageCodec(),
        nodes=nodes,
        exchange=exchange,
        closing=closing,
    )


def connect(
    exchange: Rendezvous,
    ranks: Sequence[int],
    settings: Settings,
    nodes: HostTopology | None = None,
    given: ProcessGroup | None = None,
) -> GroupContext:
    """Build the context of a group of two or more. Collective: yes, only the members.

    Args:
        exchange: the members' rendezvous, with the group's name and keys that no other group uses.
        ranks: the members' global ranks, by rank in the group.
        settings: the same on all members, except the local rank and the device.
        nodes: which members share a host; None: the members determine it and make a board.
        given: the caller's process group of the members, used for the devices that it handles; the
            context does not destroy it.

    Raises:
        GroupTimeoutError: some members did not arrive in time; names them.
        PeerLostError: a member exited or left during set-up.
        GroupAbortedError: a member aborted; carries the reason.
        ValueError: the backend is unknown.
        SecretError: only some members have the launcher's secret.
    """
    with exchange.setting_up(), ExitStack() as undo:
        closing = undo.enter_context(ExitStack())
        exchange = authenticated(exchange, settings.secret, closing)
        abort_on_error: Callable[[BaseException | None], None] = _ignore_error
        if nodes is None:
            nodes = find_nodes(exchange, address=settings.sockets.address)
            closing.callback(nodes.close)
            aborting = AbortOnError(nodes.board)
            undo.enter_context(aborting)
            abort_on_error = aborting.abort
        exchange = with_liveness(exchange, nodes.board, nodes.members)
        groups = ProcessGroups(exchange, ranks, settings, given, closing)
        build = _Builder(exchange, settings, nodes, groups, closing)
        wire = build.wire()
        over: Backend
        below: Backend
        if build.may_use_shm():
            over = below = build.shm(wire)
        else:
            token = wire.token + b"cpu"
            over = build.torch(groups.cpu(exchange.deadline), "cpu", token)
            below = build.compared(over, over, token)
        device = cpu = Communicator(below)
        if settings.device.type != "cpu":
            token = wire.token + b"device"
            on_device = build.compared(build.cuda(over, token), over, token)
            device = Communicator(build.on_stream(on_device))
        undo.pop_all()
        return GroupContext(
            name=exchange.name,
            ranks=tuple(ranks),
            rank_in_group=exchange.rank,
            settings=settings,
            groups=groups,
            cpu=cpu,
            device=device,
            wire=wire,
            nodes=nodes,
            exchange=exchange,
            closing=closing,
            abort_on_error=abort_on_error,
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    exchange: Rendezvous
    settings: Settings
    nodes: HostTopology
    groups: ProcessGroups
    undo: ExitStack

    def wire(self) -> MessageCodec:
        one_host = len(self.nodes.all()) == 1
        secret = self.nodes.board.key if one_host else self.settings.secret
        return negotiate_codec(self.exchange, secret, only_members_write=self.may_use_shm())

    def may_use_shm(self) -> bool:
        return len(self.nodes.all()) == 1 and not self.settings.torch_only

    def shm(self, wire: MessageCodec) -> ShmBackend:
        return self._keep(
            ShmBackend.create(
                self.nodes.board,
                self.nodes.members,
                self._share_segment,
                name=self.exchange.name,
                timeout=self.settings.timeout,
                progress=self.nodes.progress,
                in_calls=wire.in_calls,
            )
        )

    def torch(self, group: ProcessGroup, device: torch.device | str, token: bytes) -> TorchBackend:
        board = self.nodes.board
        return self._keep(
            TorchBackend(
                group,
                device,
                board,
                self.nodes.members,
                self.exchange.name,
                self.settings.timeout,
                partial(board.fingerprints.closed, group_number(token)),
            )
        )

    def cuda(self, over: Backend, token: bytes) -> Backend:
        """Return the best backend for CUDA devices; with ``torch_only`` torch's."""
        device, deadline = self.settings.device, self.exchange.deadline
        group = self.groups.device
        if self.settings.torch_only:
            return self.torch(group(), device, token)
        from coordinator.cuda_candidates import cuda_comm  # noqa: PLC0415 - only for GPUs

        return self._keep(
            cuda_comm(device, self.nodes, Communicator(over), group, deadline, self.undo)
        )

    def compared(self, backend: Backend, over: Backend, token: bytes) -> Backend:
        """Compare operations before each collective if ``checked``; else later, if needed."""
        checked = self.settings.checked
        if backend.capabilities.detects_divergence and not checked:
            return backend
        board = self.nodes.board
        return self._keep(FingerprintBackend(backend, board, token, over if checked else None))

    def on_stream(self, backend: Backend) -> Backend:
        stream = self.settings.stream
        if stream is None:
            return backend
        return self._keep(OnStream(backend, CudaSideStream(stream)))

    def _share_segment(self, handle: bytes | None) -> bytes:
        shared = self.exchange.broadcast("segment", handle)
        self.exchange.decoded(_SEGMENT, "segment", shared, 0)  # its error names the store's key
        return shared

    def _keep(self, backend: B) -> B:
        self.undo.callback(backend.close)
        return backend
