"""Provide SGLang's `GroupCoordinator` and tagged objects, and build the groups of its models.

A group's messages arrive in the order sent. Tagged messages therefore use a second group of the
same members; a receive stores messages with other tags for later receives.

rank = pp_rank * tp + tp_rank
tp_rank = (attn_dp_rank * attn_cp + attn_cp_rank) * attn_tp + attn_tp_rank
tp_rank = (moe_dp_rank * moe_ep + moe_ep_rank) * moe_tp + moe_tp_rank
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from coordinator import group as native
from coordinator.compat.shared import GroupAdapter, divide, unwrap
from coordinator.compat.vllm.device_communicators.shm_broadcast import MessageQueue
from coordinator.group import GraphCaptureContext
from coordinator.group import GroupCoordinator as NativeGroup
from coordinator.groups import Topology
from coordinator.rank_grid import RankGrid
from device_comm import Work
from device_comm.verbs.checks import check_out

if TYPE_CHECKING:
    from coordinator.compat.shared import Known


@dataclass
class P2PWork:
    """A pending send: wait for ``work``. ``payload`` is None: the work holds it."""

    work: Work[None] | None
    payload: Tensor | None


class _Sender:
    """The messages received from one member.

    ``kept`` are messages without a receive, by tag. ``arrived`` guards the attributes and is
    notified after each receive. If ``receiving``, one thread receives for all waiting threads.
    """

    def __init__(self) -> None:
        self.kept: defaultdict[int, deque[Any]] = defaultdict(deque)
        self.arrived = Condition()
        self.receiving = False


class TaggedMessages:
    """One member's messages with tags. Threads may send and receive at once."""

    def __init__(self, group: NativeGroup) -> None:
        """Use ``group`` for these messages alone."""
        self._group = group
        self._senders: dict[int, _Sender] = {}
        self._sending = Lock()

    def isend(self, obj: Any, dst: int, tag: int) -> P2PWork:
        """Begin to send an object."""
        with self._sending:
            return P2PWork(self._group.isend_object((tag, obj), dst), None)

    def recv(self, src: int, tag: int) -> Any:
        """Return the next object of ``src`` with this tag."""
        sender = self._senders.setdefault(src, _Sender())
        with sender.arrived:
            while tag not in sender.kept:
                if sender.receiving:
                    sender.arrived.wait()
                else:
                    self._receive(sender, src)
            kept = sender.kept[tag]
            obj = kept.popleft()
            if not kept:
                del sender.kept[tag]
            return obj

    def _receive(self, sender: _Sender, src: int) -> None:
        """Receive one object with the lock released: others take stored objects meanwhile."""
        sender.receiving = True
        sender.arrived.release()
        try:
            tag, obj = self._group.recv_object(src)
        finally:
            sender.arrived.acquire()
            sender.receiving = False
            sender.arrived.notify_all()
        sender.kept[tag].append(obj)


class GroupCoordinator(GroupAdapter):
    """One member's end of a named group, with SGLang's interface.

    ``pynccl_comm``, ``ca_comm`` and ``torch_symm_mem_comm`` are None: the group has its own
    backends.
    """

    pynccl_comm: None = None
    ca_comm: None = None
    torch_symm_mem_comm: None = None

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str,
        use_pynccl: bool,
        use_mscclpp: bool,
        use_custom_allreduce: bool,
        use_torch_symm_mem_all_reduce: bool,
        use_hpu_communicator: bool,
        use_xpu_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        gloo_timeout: timedelta | None = None,
        recovered_rank: bool = False,
        rank_offset: int = 0,
        max_world_size: int | None = None,
    ) -> None:
        """Build as `coordinator.GroupCoordinator`, over torch's default process group.

        ``group_ranks`` are global ranks of all groups of this kind; ``rank_offset`` is added to
        them. The flags from ``use_pynccl`` to ``use_xpu_communicator`` are hints: if all are False,
        torch's process groups move all tensors, otherwise the backends that fit this machine.
        ``gloo_timeout`` has no effect: an operation has the group's own deadline.
        ``use_message_queue_broadcaster`` adds a queue for the objects that rank 0 broadcasts.
        ``recovered_rank`` must be False and ``max_world_size`` None, or ValueError is raised:
        groups are not elastic.

        Collective: yes, every member of this process's group.
        """
        del gloo_timeout
        refuse_elastic(recovered_rank=recovered_rank, max_world_size=max_world_size)
        kind = [[rank + rank_offset for rank in ranks] for ranks in group_ranks]
        hints = (use_pynccl, use_mscclpp, use_custom_allreduce, use_torch_symm_mem_all_reduce)
        group = native.GroupCoordinator(
            kind,
            local_rank,
            torch_distributed_backend,
            any((*hints, use_hpu_communicator, use_xpu_communicator)),
            use_message_queue_broadcaster,
            group_name,
        )
        self._bind(group, lambda: kind)

    def _bind(self, group: native.GroupCoordinator, kind: Callable[[], list[list[int]]]) -> None:
        """Bind a group, and a second for its tagged messages. Collective: yes, every member."""
        super()._bind(group, kind)
        self._tagged = TaggedMessages(group._part("tagged", list(range(group.world_size))))

    # --- tensors -------------------------------------------------------------------------

    def quant_all_reduce(self, input_: Tensor) -> Tensor:
        """`all_reduce` in full precision: only NPUs quantise. Collective: yes, every member."""
        return self.all_reduce(input_)

    def fused_allreduce_rmsnorm(
        self, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> None:
        """Return None: there is no such kernel; the caller runs the steps."""

    def fused_allreduce_rmsnorm_quant_per_group(
        self,
        input_: Tensor,
        residual_inp_: Tensor,
        weight_: Tensor,
        eps: float,
        group_size: int = 128,
        emit_bf16: bool = False,
        transpose_scale: bool = False,
    ) -> None:
        """Return None: there is no such kernel; the caller runs the steps."""

    def all_gather(
        self, input_: Tensor, dim: int = -1, output_tensor_list: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        """Return every ``input_``, concatenated along ``dim``. Collective: yes, every member.

        Inputs have the same shape. ``output_tensor_list`` has one tensor like ``input_`` per
        member: fill it and return None; ``dim`` then has no effect. Raises TypeError if an output
        has another dtype, and ValueError if it has another shape, or there is not one per member.
        """
        if output_tensor_list is not None:
            self._check_parts("outputs", output_tensor_list)
            for output in output_tensor_list:
                check_out(output, input_.shape, input_.dtype, self.device)
            gathered: Tensor = self.group.all_gather(input_.unsqueeze(0), 0)
            for output, part in zip(output_tensor_list, gathered, strict=True):
                output.copy_(part)
            return None
        if self.world_size == 1:
            return input_
        return self.group.all_gather(input_, dim)

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Fill contiguous ``output`` with every ``input``, one after the other. Collective: yes.

        All inputs have equally many elements, ``output`` as many as all of them.
        """
        self.group.all_gather(input.reshape(-1), 0, out=output.view(-1))

    def all_gatherv(
        self,
        input_: Tensor | Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Any:
        """Return all rows, ``sizes[r]`` from rank r; of a list, per tensor. Collective: yes."""
        gatherv: Any = self.group.all_gatherv
        return gatherv(input_, 0, sizes, out=output)

    def reduce_scatter(self, output: Tensor, input_list: Sequence[Tensor]) -> Tensor:
        """Fill contiguous ``output`` with the sum of the parts for this member and return it.

        ``input_list`` has one part per member, of as many elements as ``output``; otherwise
        ValueError.

        Collective: yes, every member.
        """
        self._check_parts("inputs", input_list)
        for part in input_list:
            if part.numel() != output.numel():
                raise ValueError(f"a part has {part.numel()} elements; output has {output.numel()}")
        parts = torch.cat([part.reshape(-1) for part in input_list])
        self.group.reduce_scatter(parts, 0, out=output.view(-1))
        return output

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Fill contiguous ``output`` with this member's part of the sum. Collective: yes."""
        self.group.reduce_scatter(input.reshape(-1), 0, out=output.view(-1))

    def reduce_scatter_along_dim(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this member's part of the sum, along ``dim``. Collective: yes, every member."""
        if self.world_size == 1:
            return input_
        return self.group.reduce_scatter(input_, dim)

    def reduce_scatterv(
        self, input_: Tensor, output: Tensor | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this member's rows of the sum, ``sizes[r]`` for rank r. Collective: yes."""
        return self.group.reduce_scatterv(input_, 0, sizes, out=output)

    def all_to_all_single(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Send part r of ``input``'s rows to rank r's ``output``. Collective: yes."""
        self.group.all_to_all(input, 0, out=output)

    def _check_parts(self, label: str, parts: Sequence[Tensor]) -> None:
        if len(parts) != self.world_size:
            raise ValueError(f"{len(parts)} {label} for a group of {self.world_size}")

    # --- objects and dicts ---------------------------------------------------------------

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every member's object, by rank in the group. Collective: yes, every member."""
        return self.group.all_gather_object(obj)

    def send_object(
        self, obj: Any, dst: int, async_send: bool = False, tag: int = 0
    ) -> list[P2PWork]:
        """Send a picklable object to ``dst``; with ``async_send`` return handles to wait for.

        Only `recv_object` with the same ``tag`` receives it. Objects with tag 0 keep their order
        among all other messages to ``dst``.
        """
        if tag:
            work = self._tagged.isend(obj, dst, tag)
        else:
            work = P2PWork(self.group.isend_object(obj, dst), None)
        if async_send:
            return [work]
        if work.work is not None:
            work.work.wait()
        return []

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """Receive an object with this tag."""
        if tag:
            return self._tagged.recv(src, tag)
        return self.group.recv_object(src)

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        async_send: bool = False,
    ) -> Mapping[str, Any] | list[P2PWork]:
        """Send tensors and values by name.

        Returns handles with ``async_send``; in a group of one, ``tensor_dict``.
        """
        if self.world_size == 1:
            return tensor_dict
        peers = unwrap(all_gather_group)
        if async_send:
            return [P2PWork(self.group.isend_tensor_dict(tensor_dict, dst, peers), None)]
        self.group.send_tensor_dict(tensor_dict, dst, peers)
        return []

    def recv_tensor_dict(
        self, src: int | None = None, all_gather_group: GroupCoordinator | None = None
    ) -> dict[str, Any] | None:
        """Receive a dict; None in a group of one. Collective: yes over ``all_gather_group``."""
        if self.world_size == 1:
            return None
        return self.group.recv_tensor_dict(src, unwrap(all_gather_group))

    def send_recv_tensor_dict(
        self,
        send_tensor_dict: Mapping[str, Any],
        send_dst: int | None = None,
        recv_src: int | None = None,
        send_all_gather_group: GroupCoordinator | None = None,
        recv_all_gather_group: GroupCoordinator | None = None,
    ) -> dict[str, Any] | None:
        """Send one dict and receive another at once; None in a group of one."""
        if self.world_size == 1:
            return None
        peers = unwrap(send_all_gather_group)
        sent = self.group.isend_tensor_dict(send_tensor_dict, send_dst, peers)
        received = self.recv_tensor_dict(recv_src, recv_all_gather_group)
        sent.wait()
        return received

    # --- the rest ------------------------------------------------------------------------

    @property
    def mq_broadcaster(self) -> MessageQueue | None:
        """Return the queue of `broadcast_object` from rank 0, or None."""
        queue = self.group.mq_broadcaster
        return None if queue is None else MessageQueue.wrap(queue)

    def graph_capture(
        self,
        graph_capture_context: GraphCaptureContext | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Capture a CUDA graph with collectives; no effect on CPUs. Collective: yes."""
        if graph_capture_context is None and stream is not None:
            graph_capture_context = GraphCaptureContext(stream)
        return super().graph_capture(graph_capture_context)


def refuse_elastic(*, recovered_rank: bool, max_world_size: int | None) -> None:
    """Raise ValueError if a group is to add ranks later."""
    if recovered_rank or max_world_size is not None:
        raise ValueError(
            "groups cannot add ranks later (recovered_rank, max_world_size): "
            "build a coordinator.StatelessGroupCoordinator and call resized()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """The division of a model, which SGLang has in its runtime context.

    Attributes:
        tp: ranks that share a layer.
        pp: stages.
        attn_dp: replicas of the attention within ``tp``.
        attn_cp: ranks that share a prompt within ``tp``.
        moe_ep: groups of ranks with different experts within ``tp``.
        moe_dp: replicas of the experts within ``tp``.
        dcp: neighbours within ``tp`` that share contexts; 1: no such groups.
        shared_experts_tp: ranks that share the experts of all tokens; None: no such groups.

    Raises:
        NotDivisibleError: the sizes do not divide each other.
    """

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    moe_ep: int = 1
    moe_dp: int = 1
    dcp: int = 1
    shared_experts_tp: int | None = None

    @property
    def attention(self) -> RankGrid:
        """Return the grid of all ranks, divided for attention."""
        attn_tp = divide(self.tp, self.attn_dp * self.attn_cp)
        return RankGrid.of(
            {"pp": self.pp, "attn_dp": self.attn_dp, "attn_cp": self.attn_cp, "attn_tp": attn_tp}
        )

    @property
    def experts(self) -> RankGrid:
        """Return the grid of all ranks, divided for experts."""
        moe_tp = divide(self.tp, self.moe_dp * self.moe_ep)
        return RankGrid.of(
            {"pp": self.pp, "moe_dp": self.moe_dp, "moe_ep": self.moe_ep, "moe_tp": moe_tp}
        )

    def kinds(self) -> dict[str, list[list[int]]]:
        """Return the ranks of all groups, by kind."""
        stages = RankGrid.of({"pp": self.pp, "tp": self.tp})
        attention, experts = self.attention, self.experts
        kinds = {
            "tp": stages.groups("tp"),
            "pp": stages.groups("pp"),
            "self_pp": [[rank] for rank in range(stages.size)],
            "attn_tp": attention.groups("attn_tp"),
            "attn_cp": attention.groups("attn_cp"),
            "moe_tp": experts.groups("moe_tp"),
            "moe_ep": experts.groups("moe_ep"),
            # Ranks that share a prompt share its tokens before the experts get them.
            "moe_dp": (
                attention.groups("attn_cp")
                if self.attn_cp > self.moe_dp
                else experts.groups("moe_dp")
            ),
        }
        if self.dcp > 1:
            kinds["dcp"] = _runs(stages.size, self.tp, self.dcp)
        if self.shared_experts_tp is not None and self.shared_experts_tp > 1:
            attn_tp = dict(attention.axes)["attn_tp"]
            kinds["shared_experts_tp"] = _runs(stages.size, attn_tp, self.shared_experts_tp)
        return kinds


def build(
    topology: Topology,
    world: NativeGroup,
    closing: ExitStack,
    *,
    widths: ParallelSizes,
    broadcaster: bool,
    duplicate_tp: bool,
) -> dict[str, Known]:
    """Build the groups of a model; one group for equal ranks. ``closing`` closes them.

    ``broadcaster`` adds queues for the objects that rank 0 of a group broadcasts; ``duplicate_tp``
    adds a second group of the ranks of ``tp``. Raises ValueError unless the sizes multiply to the
    world size.

    Collective: yes, every rank.
    """
    if widths.tp * widths.pp != world.world_size:
        needed = f"tp={widths.tp} x pp={widths.pp} takes {widths.tp * widths.pp} ranks"
        raise ValueError(f"{needed}, not {world.world_size}")
    built: dict[tuple[int, ...], NativeGroup] = {}
    groups: dict[str, Known] = {}
    for name, kind in widths.kinds().items():
        ranks = next(ranks for ranks in kind if topology.rank in ranks)
        group = built.get(tuple(ranks))
        if group is None:
            group = closing.enter_context(topology.group(name, ranks))
            built[tuple(ranks)] = group
            if broadcaster:
                group.start_broadcaster()
        groups[name] = (group, lambda kind=kind: kind)  # type: ignore[misc]
    if duplicate_tp:
        group, kind_of = groups["tp"]
        second = closing.enter_context(topology.group("pdmux_prefill_tp", group.ranks))
        groups["pdmux_prefill_tp"] = (second, kind_of)
    return groups


def _runs(ranks: int, within: int, size: int) -> list[list[int]]:
    divide(within, size)
    return [list(range(start, start + size)) for start in range(0, ranks, size)]
