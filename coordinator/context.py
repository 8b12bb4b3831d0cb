"""Build what one member needs of its group: board, process groups, communicators.

A group on one host needs none, and torch's sockets accept connections from anybody, so the fewer
the better.

All members of a group build their `GroupContext` together, over an `Rendezvous`. A group of one
has no board of its own, and its communicators do nothing. Torch process groups are made only if
nothing else connects all members, or when a caller asks for one.
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
from device_comm.divergence import CheckedBackend, FingerprintBackend, group_number
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
    """Make a torch process group of an exchange's members.

    Args:
        exchange: the members'; its name and the backend's make the group's name.
        ranks: the members' global ranks, by rank in the group.
        backend: ``"gloo"``, ``"nccl"``, or both by device.
        settings: say where gloo listens.
        closing: destroys the group.
        deadline: by when all members must be connected; None: two members connect when they first
            exchange something.

    Collective: with a deadline, yes, every member.

    Raises:
        GroupTimeoutError: not all were connected in time.
        PeerLostError, GroupAbortedError: likewise, and a member has ended, left, or given up.
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
    if deadline is not None:  # one that has connected and closes would break the others' attempts
        exchange.all_gather(f"{backend} is connected")
    return group


class ProcessGroups:
    """The torch process groups of a link, each made at the first call.

    Args:
        exchange: the members' exchange.
        ranks: the members' global ranks, by rank in the group.
        settings: the topology's settings.
        given: a process group of the members, to use for the devices that it handles.
        closing: destroys the groups that are made here.
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
        """The process group for the CPU.

        Args:
            deadline: as for `new_process_group`.

        Collective: with a deadline, yes, every member.
        """
        return self._of(torch.device("cpu"), "gloo", deadline)

    def device(self) -> ProcessGroup:
        """The process group for the device; `cpu` if the device is the CPU. Collective: no."""
        if self._settings.device.type == "cpu":
            return self.cpu()
        return self._of(self._settings.device, self._settings.backend, None)

    def _of(self, device: torch.device, backend: str, deadline: Deadline | None) -> ProcessGroup:
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
    """Leave it to who made the board."""


@dataclass(frozen=True, slots=True)
class GroupContext:
    """One member's connections to its group.

    Attributes:
        name: the group's name, for errors and status.
        ranks: the members' global ranks, by rank in the group.
        rank_in_group: this member's rank in the group.
        settings: the topology's settings.
        groups: the torch process groups; those that it makes are destroyed with the link.
        cpu: the communicator for CPU tensors.
        device: the communicator for tensors on the device; the same if the device is the CPU.
        wire: how messages are encoded and sealed, and which received ones are accepted.
        nodes: which members share a host; None in a group of one without a board.
        exchange: swaps small values between the members, for further set-up.
        closing: closes everything.
        abort_on_error: tells the others the error that it is left with; a launcher does so itself.
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
        """Build the link of a subgroup; ``members`` are ranks in this group, with this member's.

        Collective: yes, these members.
        """
        ranks = [self.ranks[member] for member in members]
        nodes = self.nodes and self.nodes.sub(members)
        if len(members) == 1:
            return single(name, self.ranks[self.rank_in_group], self.settings, nodes)
        return connect(self.exchange.sub(name, members), ranks, self.settings, nodes)

    def sibling(self, name: str, timeout: float | None) -> ProcessGroup:
        """Make one more torch process group of the members, for the device.

        Args:
            name: its name for torch, behind this group's.
            timeout: seconds for its set-up; None: for ever.

        Collective: yes, every member.
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
    """Build the link of a group whose members meet in a store.

    Args:
        store: the store; not asked for in a group of one.
        place: where in it those of these ranks meet: see `Rendezvous.all_gather_round`.
        rank: this member's global rank.
        ranks, settings, given: as for `connect`.
        name: the group's name.
        timeout: seconds for set-up; None: for ever.

    Collective: yes, every member, and nobody else.

    Raises:
        ValueError, SecretError: they were given different settings; names them.
        What `connect` raises.
    """
    if len(ranks) == 1:
        return single(name, rank, settings, given=given)
    at, n, called = ranks.index(rank), len(ranks), tuple(ranks)
    members = Rendezvous(store(), at, n, name, Deadline.after(timeout), called=called)
    exchange = config_handshake(members, place, "terms", settings.terms())
    return connect(exchange, ranks, settings, given=given)


def single(
    name: str,
    rank: int,
    settings: Settings,
    nodes: HostTopology | None = None,
    given: ProcessGroup | None = None,
) -> GroupContext:
    """The link of a group of one; the arguments are those of `connect`. Collective: no."""
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
    """Build the link of a group of two or more.

    Args:
        exchange: the members' exchange, with keys that no other group uses; has the group's name.
        ranks: the members' global ranks, by rank in the group.
        settings: the same on all members, except for the local rank and the device.
        nodes: which members share a host, and their board; None: it is found out, and a board made.
        given: a torch process group of the members, to use for the devices that it handles; it is
            not destroyed with the link.

    Collective: yes, every member, and nobody else.

    Raises:
        GroupTimeoutError: some members did not come in time; names them.
        PeerLostError: a member has ended, or left, on the way.
        GroupAbortedError: a member has given up; says why. Or it was killed, and started again.
        ValueError: the backend is unknown.
        SecretError: some members were given the launcher's secret, and some were not.
    """
    with exchange.setting_up(), ExitStack() as undo:
        closing = undo.enter_context(ExitStack())
        exchange = authenticated(exchange, settings.secret, closing, settings.sockets.address)
        tell_why: Callable[[BaseException | None], None] = _ignore_error
        if nodes is None:
            nodes = find_nodes(exchange, address=settings.sockets.address)
            closing.callback(nodes.close)
            telling_why = AbortOnError(nodes.board)
            undo.enter_context(telling_why)
            tell_why = telling_why.abort
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
            abort_on_error=tell_why,
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds the parts of a link; each is closed with ``undo``."""

    exchange: Rendezvous
    settings: Settings
    nodes: HostTopology
    groups: ProcessGroups
    undo: ExitStack

    def wire(self) -> MessageCodec:
        """Agree on how messages are sealed; returns when all members are there."""
        one_host = len(self.nodes.all()) == 1
        secret = self.nodes.board.key if one_host else self.settings.secret
        return negotiate_codec(self.exchange, secret, only_members_write=self.may_use_shm())

    def may_use_shm(self) -> bool:
        """Whether all members share a host, and the settings do not say ``torch_only``."""
        return len(self.nodes.all()) == 1 and not self.settings.torch_only

    def shm(self, wire: MessageCodec) -> ShmBackend:
        """A backend over shared memory."""
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
        """A backend over a torch process group; ``token`` as for `FingerprintBackend`."""
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
        """The backend for CUDA devices: the best there are, or with ``torch_only`` torch's."""
        device, deadline = self.settings.device, self.exchange.deadline
        group = self.groups.device
        if self.settings.torch_only:
            return self.torch(group(), device, token)
        from coordinator.cuda_candidates import cuda_comm  # noqa: PLC0415 - few have a GPU

        return self._keep(
            cuda_comm(device, self.nodes, Communicator(over), group, deadline, self.undo)
        )

    def compared(self, backend: Backend, over: Backend, token: bytes) -> Backend:
        """``backend``, with a comparison of what members call: before each collective if the
        settings say ``checked``, else later, unless it compares by itself.
        """
        if self.settings.checked:
            backend = self._keep(CheckedBackend(backend, over))
        elif backend.capabilities.detects_divergence:
            return backend
        return self._keep(FingerprintBackend(backend, self.nodes.board, token))

    def on_stream(self, backend: Backend) -> Backend:
        """``backend``, moved to the settings' stream if they name one."""
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
