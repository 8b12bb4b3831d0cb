"""SGLang's `GroupCoordinator`, tagged objects, and the groups that its models have, over ours.

A group's messages arrive in the order sent. Tagged ones therefore go through a group of their own,
of the same members; what comes before the tag that is asked for is kept until it is.

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
    """A send under way.

    Attributes:
        work: wait for it.
        payload: None: the work keeps what it sends.
    """

    work: Work[None] | None
    payload: Tensor | None


class _Sender:
    """What has come of one member.

    Attributes:
        kept: what no receive has taken, by tag.
        arrived: held to use these; notified when the thread that receives has done so.
        receiving: whether a thread receives, for all that wait.
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
        """Begin to send an object. Collective: no, the two members."""
        with self._sending:
            return P2PWork(self._group.isend_object((tag, obj), dst), None)

    def recv(self, src: int, tag: int) -> Any:
        """The next object of ``src`` with this tag. Collective: no, the two members."""
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
        """Take one object in, while others look for theirs among those that have come."""
        sender.receiving = True
        sender.arrived.release()
        try:
            found, obj = self._group.recv_object(src)
        finally:
            sender.arrived.acquire()
            sender.receiving = False
            sender.arrived.notify_all()
        sender.kept[found].append(obj)


class GroupCoordinator(GroupAdapter):
    """One member's end of a named group, in SGLang's words.

    Attributes:
        pynccl_comm: None, like the others: what moves tensors is the group's own affair.
        ca_comm: None.
        torch_symm_mem_comm: None.
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
        """As `coordinator.GroupCoordinator`, over torch's default process group.

        Args:
            group_ranks: global ranks of all groups of this kind.
            local_rank: this process's number on its node.
            torch_distributed_backend: ``"gloo"`` or ``"nccl"``.
            use_pynccl: a hint, like the five that follow: what fits this machine is taken, unless
                all of them are False: then torch's process groups move all tensors.
            use_mscclpp: a hint.
            use_custom_allreduce: a hint.
            use_torch_symm_mem_all_reduce: a hint.
            use_hpu_communicator: a hint.
            use_xpu_communicator: a hint.
            use_message_queue_broadcaster: have a queue for the objects that rank 0 broadcasts.
            group_name: for errors and status.
            gloo_timeout: no effect: an operation has the group's own deadline.
            recovered_rank: must be False.
            rank_offset: added to all ranks.
            max_world_size: must be None.

        Collective: yes, every member of this process's group.

        Raises:
            ValueError: elastic groups are asked for.
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
        self._show(group, lambda: kind)

    def _show(self, group: native.GroupCoordinator, kind: Callable[[], list[list[int]]]) -> None:
        """Show a group, with one more for its tagged messages. Collective: yes, every member."""
        super()._show(group, kind)
        self._tagged = TaggedMessages(group._part("tagged", list(range(group.world_size))))

    # --- tensors -------------------------------------------------------------------------

    def quant_all_reduce(self, input_: Tensor) -> Tensor:
        """`all_reduce` in full precision: only NPUs quantise. Collective: yes, every member."""
        return self.all_reduce(input_)

    def fused_allreduce_rmsnorm(
        self, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> None:
        """None: there is no such kernel, and the caller does both steps. Collective: no."""

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
        """None: there is no such kernel, and the caller does the steps. Collective: no."""

    def all_gather(
        self, input_: Tensor, dim: int = -1, output_tensor_list: Sequence[Tensor] | None = None
    ) -> Tensor | None:
        """Every ``input_``, concatenated along ``dim``. Collective: yes, every member.

        Args:
            input_: the same shape on all members.
            dim: without effect where there is a list.
            output_tensor_list: one tensor like ``input_`` for each member's; then None is returned.

        Raises:
            TypeError: an output has another dtype than ``input_``.
            ValueError: an output has another shape, or there is not one for each member.
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
        """Fill ``output`` with every ``input``, one after the other. Collective: yes.

        Args:
            output: contiguous, as many elements as all inputs.
            input: as many elements on all members.
        """
        self.group.all_gather(input.reshape(-1), 0, out=output.view(-1))

    def all_gatherv(
        self,
        input_: Tensor | Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Any:
        """The rows of all members, ``sizes[r]`` from rank r; of a list, each tensor's.

        Collective: yes, every member.
        """
        every: Any = self.group.all_gatherv
        return every(input_, 0, sizes, out=output)

    def reduce_scatter(self, output: Tensor, input_list: Sequence[Tensor]) -> Tensor:
        """Fill ``output`` with the sum of the parts that are for this member; returns it.

        Args:
            output: contiguous.
            input_list: a part for each member, of as many elements as ``output``.

        Collective: yes, every member.

        Raises:
            ValueError: a part has more or fewer, or there is not one for each member.
        """
        self._check_parts("inputs", input_list)
        for part in input_list:
            if part.numel() != output.numel():
                raise ValueError(f"a part has {part.numel()} elements; output has {output.numel()}")
        parts = torch.cat([part.reshape(-1) for part in input_list])
        self.group.reduce_scatter(parts, 0, out=output.view(-1))
        return output

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Fill ``output`` with this member's part of the sum. Collective: yes, every member.

        Args:
            output: contiguous, as many elements as a part.
            input: the parts one after the other.
        """
        self.group.reduce_scatter(input.reshape(-1), 0, out=output.view(-1))

    def reduce_scatter_along_dim(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This member's part of the sum, along ``dim``. Collective: yes, every member."""
        if self.world_size == 1:
            return input_
        return self.group.reduce_scatter(input_, dim)

    def reduce_scatterv(
        self, input_: Tensor, output: Tensor | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """This member's rows of the sum, ``sizes[r]`` for rank r. Collective: yes."""
        return self.group.reduce_scatterv(input_, 0, sizes, out=output)

    def all_to_all_single(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Part r of ``input``'s rows goes to rank r's ``output``. Collective: yes."""
        self.group.all_to_all(input, 0, out=output)

    def _check_parts(self, label: str, parts: Sequence[Tensor]) -> None:
        if len(parts) != self.world_size:
            raise ValueError(f"{len(parts)} {label} for a group of {self.world_size}")

    # --- objects and dicts ---------------------------------------------------------------

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every member's object, by rank in the group. Collective: yes, every member."""
        return self.group.all_gather_object(obj)

    def send_object(
        self, obj: Any, dst: int, async_send: bool = False, tag: int = 0
    ) -> list[P2PWork]:
        """Send a picklable object. Collective: no, the two members.

        Args:
            obj: the object.
            dst: to whom.
            async_send: return at once.
            tag: only `recv_object` with the same gets it. Those with 0 are in order with all
                other messages to ``dst``.

        Returns:
            With ``async_send``, what to wait for.
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
        """Receive an object with this tag. Collective: no, the two members."""
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
        """Send tensors and values by name. Collective: no, the two members.

        Returns:
            With ``async_send``, what to wait for; in a group of one, ``tensor_dict``.
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
        """Receive a dict of tensors; None in a group of one.

        Collective: no, the two members; yes over ``all_gather_group``.
        """
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
        """Send one dict and receive another at once; None in a group of one. Collective: no."""
        if self.world_size == 1:
            return None
        peers = unwrap(send_all_gather_group)
        sent = self.group.isend_tensor_dict(send_tensor_dict, send_dst, peers)
        found = self.recv_tensor_dict(recv_src, recv_all_gather_group)
        sent.wait()
        return found

    # --- the rest ------------------------------------------------------------------------

    @property
    def mq_broadcaster(self) -> MessageQueue | None:
        """The queue of `broadcast_object` from rank 0, if there is one."""
        queue = self.group.mq_broadcaster
        return None if queue is None else MessageQueue.wrap(queue)

    def graph_capture(
        self,
        graph_capture_context: GraphCaptureContext | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Capture a CUDA graph with this group's collectives; nothing on the CPU.

        Collective: yes, every member.
        """
        if graph_capture_context is None and stream is not None:
            graph_capture_context = GraphCaptureContext(stream)
        return super().graph_capture(graph_capture_context)


def refuse_elastic(*, recovered_rank: bool, max_world_size: int | None) -> None:
    """Accept only what a group that does not grow takes.

    Raises:
        ValueError: it is to take ranks in later.
    """
    if recovered_rank or max_world_size is not None:
        raise ValueError(
            "groups take no ranks in later (recovered_rank, max_world_size): "
            "build a coordinator.StatelessGroupCoordinator and call resized()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """How a model is cut: what SGLang has in its runtime context.

    Attributes:
        tp: ranks that share a layer.
        pp: stages.
        attn_dp: replicas of the attention within ``tp``.
        attn_cp: ranks that share a prompt there.
        moe_ep: groups of ranks with different experts within ``tp``.
        moe_dp: replicas of the experts there.
        dcp: neighbours within ``tp`` that share contexts; no such groups if 1.
        shared_experts_tp: ranks that share the experts that all tokens take; None: no such groups.

    Raises:
        NotDivisibleError: they do not fit into each other.
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
        """All ranks, a stage's cut for attention."""
        attn_tp = divide(self.tp, self.attn_dp * self.attn_cp)
        return RankGrid.of(
            {"pp": self.pp, "attn_dp": self.attn_dp, "attn_cp": self.attn_cp, "attn_tp": attn_tp}
        )

    @property
    def experts(self) -> RankGrid:
        """All ranks, a stage's cut for experts."""
        moe_tp = divide(self.tp, self.moe_dp * self.moe_ep)
        return RankGrid.of(
            {"pp": self.pp, "moe_dp": self.moe_dp, "moe_ep": self.moe_ep, "moe_tp": moe_tp}
        )

    def kinds(self) -> dict[str, list[list[int]]]:
        """The ranks of all groups, by what kind they are."""
        stages = RankGrid.of({"pp": self.pp, "tp": self.tp})
        attention, experts = self.attention, self.experts
        found = {
            "tp": stages.groups("tp"),
            "pp": stages.groups("pp"),
            "self_pp": [[rank] for rank in range(stages.size)],
            "attn_tp": attention.groups("attn_tp"),
            "attn_cp": attention.groups("attn_cp"),
            "moe_tp": experts.groups("moe_tp"),
            "moe_ep": experts.groups("moe_ep"),
            # Ranks that share a prompt share its tokens before these go to the experts.
            "moe_dp": (
                attention.groups("attn_cp")
                if self.attn_cp > self.moe_dp
                else experts.groups("moe_dp")
            ),
        }
        if self.dcp > 1:
            found["dcp"] = _runs(stages.size, self.tp, self.dcp)
        if self.shared_experts_tp is not None and self.shared_experts_tp > 1:
            attn_tp = dict(attention.axes)["attn_tp"]
            found["shared_experts_tp"] = _runs(stages.size, attn_tp, self.shared_experts_tp)
        return found


def build(
    topology: Topology,
    world: NativeGroup,
    closing: ExitStack,
    *,
    widths: ParallelSizes,
    broadcaster: bool,
    duplicate_tp: bool,
) -> dict[str, Known]:
    """Build the groups of a model; those of the same ranks are one group.

    Args:
        topology: all ranks.
        world: their group.
        closing: closes the others.
        widths: how the model is cut.
        broadcaster: have queues for the objects that rank 0 of a group broadcasts.
        duplicate_tp: have a second group of the ranks of ``tp``, for use beside it.

    Collective: yes, every rank.

    Raises:
        ValueError: the sizes do not make up the world.
    """
    if widths.tp * widths.pp != world.world_size:
        needed = f"tp={widths.tp} x pp={widths.pp} takes {widths.tp * widths.pp} ranks"
        raise ValueError(f"{needed}, not {world.world_size}")
    built: dict[tuple[int, ...], NativeGroup] = {}
    known: dict[str, Known] = {}
    for name, kind in widths.kinds().items():
        ranks = next(ranks for ranks in kind if topology.rank in ranks)
        group = built.get(tuple(ranks))
        if group is None:
            group = closing.enter_context(topology.group(name, ranks))
            built[tuple(ranks)] = group
            if broadcaster:
                group.start_broadcaster()
        known[name] = (group, lambda kind=kind: kind)  # type: ignore[misc]
    if duplicate_tp:
        group, kind_of = known["tp"]
        second = closing.enter_context(topology.group("pdmux_prefill_tp", group.ranks))
        known["pdmux_prefill_tp"] = (second, kind_of)
    return known


def _runs(ranks: int, within: int, size: int) -> list[list[int]]:
    divide(within, size)
    return [list(range(start, start + size)) for start in range(0, ranks, size)]
