"""Provide vLLM's `GroupCoordinator`, and build the groups of its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from coordinator import group as native
from coordinator.compat.shared import unwrap
from coordinator.compat.vllm.device_communicators.base_device_communicator import (
    DeviceCommunicatorBase,
    RowVerbs,
)
from coordinator.compat.vllm.device_communicators.shm_broadcast import Handle, MessageQueue
from coordinator.group import GroupCoordinator as NativeGroup
from coordinator.groups import ParallelGroups, Topology
from coordinator.rank_grid import RankGrid
from device_comm import Work

if TYPE_CHECKING:
    from coordinator.compat.shared import Known


class GroupCoordinator(RowVerbs):
    """One member's end of a named group, with vLLM's interface.

    Attributes:
        torch_distributed_backend: ``"gloo"`` or ``"nccl"``.
        use_device_communicator: more than torch's process groups may move tensors.
        device_communicator: this group's verbs over tensors, also in a group of one.
    """

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        use_all2all: bool = False,  # noqa: ARG002 - dispatch and combine always work
    ) -> None:
        """Build as `coordinator.GroupCoordinator`, over torch's default process group.

        Collective: yes, every member of this process's group.
        """
        group = native.GroupCoordinator(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            use_message_queue_broadcaster,
            group_name,
        )
        self._bind(group, lambda: [list(ranks) for ranks in group_ranks])

    def _bind(self, group: native.GroupCoordinator, kind: Callable[[], list[list[int]]]) -> None:
        super()._bind(group, kind)
        settings = group._context.settings
        self.torch_distributed_backend = settings.backend
        self.use_device_communicator = not settings.torch_only
        self.device_communicator = DeviceCommunicatorBase.wrap(group, kind)

    def cpu_all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor into itself. Collective: yes, every member."""
        return self.group.cpu_all_reduce_(tensor)

    def make_sibling_device_group(self, group_desc: str | None = None) -> ProcessGroup:
        """Make another torch process group of the members, closed with this. Collective: yes."""
        return self.group.make_sibling_device_group(group_desc)

    # --- objects and dicts ---------------------------------------------------------------

    def send_object(self, obj: Any, dst: int) -> None:
        """Send a picklable object."""
        self.group.send_object(obj, dst)

    def isend_object(self, obj: Any, dst: int) -> Work[None]:
        """As `send_object`, without blocking."""
        return self.group.isend_object(obj, dst)

    def recv_object(self, src: int) -> Any:
        """Receive an object."""
        return self.group.recv_object(src)

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Mapping[str, Any] | None:
        """Send tensors and values by name; a group of one returns ``tensor_dict``."""
        if self.world_size == 1:
            return tensor_dict
        peers = unwrap(all_gather_group)
        self.group.send_tensor_dict(tensor_dict, dst, peers, all_gather_tensors)
        return None

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[Work[None]]:
        """As `send_tensor_dict`, without blocking; the tensors must not change meanwhile.

        Returns one handle, which may be dropped; none in a group of one.
        """
        if self.world_size == 1:
            return []
        peers = unwrap(all_gather_group)
        return [self.group.isend_tensor_dict(tensor_dict, dst, peers, all_gather_tensors)]

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> dict[str, Any] | None:
        """Receive a dict; None in a group of one. Collective: yes over ``all_gather_group``."""
        if self.world_size == 1:
            return None
        return self.group.recv_tensor_dict(src, unwrap(all_gather_group), all_gather_tensors)

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> tuple[dict[str, Any] | None, list[Work[dict[str, Any]]], list[Callable[[], None]]]:
        """As `recv_tensor_dict`, without blocking.

        Returns an empty dict, handles to wait for, and functions to call then, which fill the dict:
        its keys, too, arrive with the message.
        """
        if self.world_size == 1:
            return None, [], []
        work = self.group.irecv_tensor_dict(src, unwrap(all_gather_group), all_gather_tensors)
        received: dict[str, Any] = {}
        return received, [work], [lambda: received.update(work.wait())]

    # --- queues --------------------------------------------------------------------------

    @property
    def mq_broadcaster(self) -> MessageQueue | None:
        """Return the queue of `broadcast_object` from rank 0, or None."""
        queue = self.group.mq_broadcaster
        return None if queue is None else MessageQueue.wrap(queue)

    def create_mq_broadcaster(
        self,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """Create a queue from one member, or from outside, to all. Collective: yes.

        ``writer_rank`` is the rank in the group that writes, or has the handle of an outside
        writer's queue. ``blocking``: return once all have joined.
        """
        return MessageQueue.wrap(
            self.group.create_mq_broadcaster(writer_rank, external_writer_handle, blocking)
        )

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue, list[Handle]]:
        """Create a queue from each member to one, which gets all handles. Collective: yes."""
        queue, handles = self.group.create_single_reader_mq_broadcasters(
            reader_rank_in_group, blocking
        )
        return MessageQueue.wrap(queue), [Handle.of(handle) for handle in handles]


def build(
    topology: Topology,
    world: NativeGroup,
    closing: ExitStack,
    *,
    sizes: Mapping[str, int],
    dcp: int,
    eplb: bool,
) -> dict[str, Known]:
    """Build the groups of a model; ``closing`` closes them.

    Ranks beyond the sizes form external replicas, independent of each other:
    rank = (((external * dp + dp_rank) * pp + pp_rank) * pcp + pcp_rank) * tp + tp_rank.

    ``sizes`` are of the axes dp, pp, pcp and tp; ``dcp`` ranks share contexts. ``eplb`` adds a
    second expert-parallel group, for balancing experts meanwhile. Raises ValueError if the sizes do
    not divide the world.

    Collective: yes, every rank.
    """
    model = RankGrid.of(sizes)
    external = RankGrid.of({"external": max(topology.world_size // model.size, 1)})
    grid = RankGrid((*external.axes, *model.axes))
    groups = ParallelGroups.build(topology, grid, ExitStack(), dcp=dcp, world=world)
    closing.enter_context(groups)
    groups.tp.start_broadcaster()
    inner, whole = world, partial(grid.groups, "pp", "pcp", "tp")
    replica = grid.group_of(topology.rank, "pp", "pcp", "tp")
    if len(replica) < topology.world_size:
        inner = closing.enter_context(topology.group("inner_dp_world", replica))
    experts = partial(grid.groups, "dp", "pcp", "tp")

    def sharers() -> list[list[int]]:
        runs = (grid.dcp_group_of(rank, dcp) for rank in range(grid.size))
        return [run for rank, run in enumerate(runs) if run[0] == rank]

    groups_by_name: dict[str, Known] = {
        **{name: (getattr(groups, name), partial(grid.groups, name)) for name in sizes},
        "dcp": (groups.dcp, sharers),
        "ep": (groups.ep, experts),
        "inner_dp_world": (inner, whole),
    }
    if eplb:
        second = closing.enter_context(topology.group("eplb", groups.ep.ranks))
        groups_by_name["eplb"] = (second, experts)
    return groups_by_name
