# mypy: disable-error-code="override"
"""Provide SGLang's groups and functions over one default topology: change the import.

`docs/from-sglang.md` lists the differences. The getters raise `NotInitializedError` before
initialisation and after destruction.

Threads of a rank may send and receive tagged messages at once. These therefore use a second group
of the same members: in the first, a second thread is refused.

rank = pp_rank * tp + tp_rank
tp_rank = (attn_dp_rank * attn_cp + attn_cp_rank) * attn_tp + attn_tp_rank
tp_rank = (moe_dp_rank * moe_ep + moe_ep_rank) * moe_tp + moe_tp_rank
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore

from coordinator import group as native
from coordinator.compat.state import GlobalState, divide, in_the_same_node_as
from coordinator.compat.vllm import parallel_state as vllm
from coordinator.context import GroupContext
from coordinator.group import GraphCaptureContext, capture_on_side_stream
from coordinator.groups import ParallelGroups, Topology
from coordinator.messages.wire import Kind
from coordinator.rank_grid import RankGrid
from coordinator.stores import DEFAULT_TIMEOUT
from device_comm import Work
from device_comm.verbs.checks import check_out
from shm_broadcast import Deadline

__all__ = [
    "GraphCaptureContext",
    "GroupCoordinator",
    "P2PWork",
    "ParallelSizes",
    "abort_distributed_environment",
    "cleanup_dist_env_and_memory",
    "create_custom_parallel_group",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "get_attn_context_model_parallel_rank",
    "get_attn_context_model_parallel_world_size",
    "get_attn_cp_group",
    "get_attn_tensor_model_parallel_rank",
    "get_attn_tensor_model_parallel_world_size",
    "get_attn_tp_group",
    "get_dcp_group",
    "get_dcp_group_no_assert",
    "get_dcp_rank",
    "get_dcp_world_size",
    "get_default_distributed_backend",
    "get_global_tcp_store",
    "get_moe_data_parallel_rank",
    "get_moe_data_parallel_world_size",
    "get_moe_dp_group",
    "get_moe_ep_group",
    "get_moe_expert_parallel_rank",
    "get_moe_expert_parallel_world_size",
    "get_moe_tensor_parallel_rank",
    "get_moe_tensor_parallel_world_size",
    "get_moe_tp_group",
    "get_mooncake_transfer_engine",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pp_group",
    "get_self_pp_group",
    "get_shared_experts_tp_group",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "get_world_rank",
    "get_world_size",
    "graph_capture",
    "in_the_same_node_as",
    "init_distributed_environment",
    "init_model_parallel_group",
    "init_world_group",
    "initialize_model_parallel",
    "inplace_all_reduce",
    "model_parallel_is_initialized",
    "monkey_patch_vllm_parallel_state",
    "patch_pipeline_parallel_group",
    "patch_tensor_parallel_group",
    "pdmux_prefill_tp_group",
    "set_custom_all_reduce",
    "set_flashinfer_allreduce_only",
    "set_global_tcp_store",
    "set_mscclpp",
    "set_torch_symm_mem_all_reduce",
]


def _no_kernel(*_: Any, **__: Any) -> None:
    """Return None: there is no such kernel; the caller runs the steps."""


@dataclass
class P2PWork:
    """A pending send: wait for ``work``. ``payload`` is None: the work holds it."""

    work: Work[None] | None
    payload: Tensor | None


class GroupCoordinator(vllm.GroupCoordinator):
    """One member's end of a named group, with SGLang's arguments and results.

    ``pynccl_comm``, ``ca_comm`` and ``torch_symm_mem_comm`` are None: the group has its own
    backends.
    """

    pynccl_comm: None = None
    ca_comm: None = None
    torch_symm_mem_comm: None = None
    quant_all_reduce = vllm.GroupCoordinator.all_reduce  # only NPUs quantise
    fused_allreduce_rmsnorm = staticmethod(_no_kernel)
    fused_allreduce_rmsnorm_quant_per_group = staticmethod(_no_kernel)

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
        super().__init__(
            kind,
            local_rank,
            torch_distributed_backend,
            any((*hints, use_hpu_communicator, use_xpu_communicator)),
            use_message_queue_broadcaster,
            group_name,
        )

    def _init_from(self, link: GroupContext) -> None:
        super()._init_from(link)
        self._tagged = self._part("tagged", list(range(self.world_size)))
        self._sending_tagged = Lock()

    # --- tensors -------------------------------------------------------------------------

    def all_gather(
        self,
        input_: Tensor,
        dim: int = -1,
        output_tensor_list: Sequence[Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """Return every ``input_``, concatenated along ``dim``. Collective: yes, every member.

        Inputs have the same shape. ``output_tensor_list`` has one tensor like ``input_`` per
        member: fill it and return None; ``dim`` then has no effect. Raises TypeError if an output
        has another dtype, and ValueError if it has another shape, or there is not one per member.
        """
        if output_tensor_list is None:
            return super().all_gather(input_, dim, **options)
        self._check_parts("outputs", output_tensor_list)
        for output in output_tensor_list:
            check_out(output, input_.shape, input_.dtype, self.device)
        gathered = super().all_gather(input_.unsqueeze(0), 0)
        for output, part in zip(output_tensor_list, gathered, strict=True):
            output.copy_(part)
        return None

    def all_gather_into_tensor(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Fill contiguous ``output`` with every ``input``, one after the other. Collective: yes.

        All inputs have equally many elements, ``output`` as many as all of them.
        """
        super().all_gather(input.reshape(-1), 0, out=output.view(-1))

    def all_gatherv(
        self,
        input_: Tensor | Sequence[Tensor],
        sizes: Sequence[int] | None = None,
        output: Tensor | None = None,
    ) -> Any:
        """Return all rows, ``sizes[r]`` from rank r; of a list, per tensor. Collective: yes."""
        return super().all_gatherv(input_, 0, sizes, out=output)

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
        super().reduce_scatter(parts, 0, out=output.view(-1))
        return output

    def reduce_scatter_tensor(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Fill contiguous ``output`` with this member's part of the sum. Collective: yes."""
        super().reduce_scatter(input.reshape(-1), 0, out=output.view(-1))

    def reduce_scatter_along_dim(self, input_: Tensor, dim: int = -1) -> Any:
        """Return this member's part of the sum, along ``dim``. Collective: yes, every member."""
        return super().reduce_scatter(input_, dim)

    def reduce_scatterv(
        self, input_: Tensor, output: Tensor | None = None, sizes: Sequence[int] | None = None
    ) -> Any:
        """Return this member's rows of the sum, ``sizes[r]`` for rank r. Collective: yes."""
        return super().reduce_scatterv(input_, 0, sizes, out=output)

    def reduce_scatter_(self, x: Tensor, dim: int = -1, **options: Any) -> Any:
        """Reduce and scatter into the first part of ``x``. Collective: yes, every member."""
        return self.group.reduce_scatter_(x, dim, **options)

    def _rows_differ_in(self, is_sequence_parallel: bool) -> Any:
        group: Any = super()._rows_differ_in(is_sequence_parallel)
        return group.group  # has our verbs

    def all_to_all_single(self, output: Tensor, input: Tensor) -> None:  # noqa: A002
        """Send part r of ``input``'s rows to rank r's ``output``. Collective: yes."""
        self.all_to_all(input, 0, out=output)

    def _check_parts(self, label: str, parts: Sequence[Tensor]) -> None:
        if len(parts) != self.world_size:
            raise ValueError(f"{len(parts)} {label} for a group of {self.world_size}")

    # --- objects and dicts ---------------------------------------------------------------

    def send_object(
        self, obj: Any, dst: int, async_send: bool = False, tag: int = 0
    ) -> list[P2PWork]:
        """Send a picklable object to ``dst``; with ``async_send`` return handles to wait for.

        Only `recv_object` with the same ``tag`` receives it. Objects with tag 0 keep their order
        among all other messages to ``dst``.
        """
        if tag:
            make = partial(self._messenger.dump, obj)
            with self._sending_tagged:
                sent = self._tagged._messenger.isend(Kind.OBJECT, (dst,), make, None, None, tag)
        else:
            sent = self.isend_object(obj, dst)
        work = P2PWork(sent, None)
        if async_send:
            return [work]
        if work.work is not None:
            work.work.wait()
        return []

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """Receive an object with this tag."""
        if tag:
            return self._tagged._messenger.recv(Kind.OBJECT, src, None, tag=tag)
        return super().recv_object(src)

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: native.GroupCoordinator | None = None,
        async_send: bool = False,
    ) -> Mapping[str, Any] | list[P2PWork]:
        """Send tensors and values by name.

        Returns handles with ``async_send``; in a group of one, ``tensor_dict``.
        """
        if self.world_size == 1:
            return tensor_dict
        if async_send:
            works = self.isend_tensor_dict(tensor_dict, dst, all_gather_group)
            return [P2PWork(work, None) for work in works]
        super().send_tensor_dict(tensor_dict, dst, all_gather_group)
        return []

    def send_recv_tensor_dict(
        self,
        send_tensor_dict: Mapping[str, Any],
        send_dst: int | None = None,
        recv_src: int | None = None,
        send_all_gather_group: native.GroupCoordinator | None = None,
        recv_all_gather_group: native.GroupCoordinator | None = None,
    ) -> dict[str, Any] | None:
        """Send one dict and receive another at once; None in a group of one."""
        works = self.isend_tensor_dict(send_tensor_dict, send_dst, send_all_gather_group)
        received = self.recv_tensor_dict(recv_src, recv_all_gather_group)
        for work in works:
            work.wait()
        return received

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


def _runs(ranks: int, within: int, size: int) -> list[list[int]]:
    divide(within, size)
    return [list(range(start, start + size)) for start in range(0, ranks, size)]


def names_of(groups: ParallelGroups) -> dict[str, native.GroupCoordinator]:
    """Return SGLang's names of the groups that `coordinator.init` built.

    Attention and experts are divided as other layers; ``pcp`` divides the prompts.
    """
    names = dict.fromkeys(("tp", "attn_tp", "moe_tp"), groups.tp)
    names |= {"pp": groups.pp, "attn_cp": groups.pcp}
    return names if groups.dcp.world_size == 1 else names | {"dcp": groups.dcp}


_state = GlobalState(GroupCoordinator, names_of)
"""The instance that the functions below use."""

get_world_group = _state.world_group
get_tp_group = _state.getter("tp")  # the ranks that share this rank's layers
get_pp_group = _state.getter("pp")  # the stages of this rank's model
get_self_pp_group = _state.getter("self_pp")  # this rank alone, as a stage
get_dcp_group = _state.getter("dcp")  # the ranks that share this rank's contexts
get_attn_tp_group = _state.getter("attn_tp")  # the ranks that share an attention layer
get_attn_cp_group = _state.getter("attn_cp")  # the ranks that share a prompt in the attention
get_moe_dp_group = _state.getter("moe_dp")  # the ranks with the same part of the same experts
get_moe_ep_group = _state.getter("moe_ep")  # the ranks with different experts
get_moe_tp_group = _state.getter("moe_tp")  # the ranks that share an expert
get_shared_experts_tp_group = _state.getter("shared_experts_tp")  # those of all tokens' experts
get_tensor_model_parallel_group = get_tp_group
get_pipeline_model_parallel_group = get_pp_group
get_tensor_model_parallel_world_size = _state.size("tp")
get_tensor_model_parallel_rank = _state.rank("tp")
get_pipeline_model_parallel_world_size = _state.size("pp")
get_pipeline_model_parallel_rank = _state.rank("pp")
get_attn_tensor_model_parallel_world_size = _state.size("attn_tp")
get_attn_tensor_model_parallel_rank = _state.rank("attn_tp")
get_attn_context_model_parallel_world_size = _state.size("attn_cp")
get_attn_context_model_parallel_rank = _state.rank("attn_cp")
get_moe_data_parallel_world_size = _state.size("moe_dp")
get_moe_data_parallel_rank = _state.rank("moe_dp")
get_moe_expert_parallel_world_size = _state.size("moe_ep")
get_moe_expert_parallel_rank = _state.rank("moe_ep")
get_moe_tensor_parallel_world_size = _state.size("moe_tp")
get_moe_tensor_parallel_rank = _state.rank("moe_tp")
get_dcp_world_size = _state.size("dcp")
get_dcp_rank = _state.rank("dcp")
model_parallel_is_initialized = _state.model_parallel_is_initialized
set_custom_all_reduce = _state.set_custom_all_reduce
destroy_model_parallel = _state.close_model
destroy_distributed_environment = _state.close_environment
cleanup_dist_env_and_memory = _state.clean_up


# --- the environment ----------------------------------------------------------------------


def init_distributed_environment(
    world_size: int = -1,
    rank: int = -1,
    distributed_init_method: str = "env://",
    local_rank: int = -1,
    backend: str = "nccl",
    timeout: int | None = None,
    moe_a2a_backend: str | None = None,
    recovered_rank: bool = False,
    max_world_size: int | None = None,
) -> None:
    """Meet all ranks; make the world group, and torch's default process group if it is missing.

    Args:
        world_size: the number of processes; -1: from the environment or torch's group.
        rank: this process's global rank; -1: likewise.
        distributed_init_method: ``"env://"``, ``"tcp://host:port"`` or ``"file://path"``.
        local_rank: this process's number on its node; -1: the environment's, or the rank.
        backend: ``"nccl"`` means gloo without a GPU.
        timeout: seconds until all ranks arrive; None: 60.
        moe_a2a_backend: no effect: this library's verbs route rows to experts.
        recovered_rank: must be False.
        max_world_size: must be None.

    Collective: yes, every rank. A second call only checks the size.

    Raises:
        GroupTimeoutError: ranks did not arrive in time; names them.
        ValueError: the world has another size, the method is unknown, or elastic groups are
            requested.
    """
    del moe_a2a_backend
    refuse_elastic(recovered_rank=recovered_rank, max_world_size=max_world_size)
    deadline = Deadline.after(DEFAULT_TIMEOUT if timeout is None else timeout)
    _state.meet(world_size, rank, distributed_init_method, local_rank, backend, deadline)


def get_default_distributed_backend(device: str) -> str:
    """Return ``"nccl"`` for CUDA, otherwise ``"gloo"``."""
    return "nccl" if device == "cuda" else "gloo"


def get_world_size() -> int:
    """Return the number of ranks."""
    return get_world_group().world_size


def get_world_rank() -> int:
    """Return this process's rank."""
    return get_world_group().rank_in_group


def init_world_group(
    ranks: list[int],
    local_rank: int,
    backend: str,
    recovered_rank: bool = False,
    max_world_size: int | None = None,
) -> GroupCoordinator:
    """Return a group over torch's default group; the caller closes it. Collective: yes."""
    return init_model_parallel_group(
        [ranks],
        local_rank,
        backend,
        group_name="world",
        recovered_rank=recovered_rank,
        max_world_size=max_world_size,
    )


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_pynccl: bool | None = None,
    use_custom_allreduce: bool | None = None,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_mscclpp: bool | None = None,
    use_torch_symm_mem_allreduce: bool | None = None,
    recovered_rank: bool = False,
    rank_offset: int = 0,
    max_world_size: int | None = None,
) -> GroupCoordinator:
    """Return this process's group among ``group_ranks``, over torch's default group.

    The caller closes it. Collective: yes, every member of the group.
    """
    del use_pynccl, use_mscclpp, use_torch_symm_mem_allreduce
    fast = _state.device_communicators if use_custom_allreduce is None else use_custom_allreduce
    return GroupCoordinator(
        group_ranks,
        local_rank,
        backend,
        *(fast, fast, fast, fast, fast, fast),
        use_message_queue_broadcaster,
        group_name,
        recovered_rank=recovered_rank,
        rank_offset=rank_offset,
        max_world_size=max_world_size,
    )


def create_custom_parallel_group(
    group_ranks: list[int], backend: str = "gloo"
) -> ProcessGroup | None:
    """Return a torch process group of these ranks; None if this rank is not among them.

    Collective: yes, every one of ``group_ranks``. It is destroyed with the environment.
    """
    topology = _state.topology
    if topology.rank not in group_ranks:
        return None
    group = topology.group("custom", sorted(group_ranks))
    _state.keep(group)
    return group.cpu_group if backend == "gloo" else group.device_group


def get_global_tcp_store() -> TCPStore | None:
    """Return the store of `set_global_tcp_store`, or None."""
    return _state.store


def set_global_tcp_store(store: TCPStore) -> None:
    """Set the store that `get_global_tcp_store` returns."""
    _state.store = store


# --- the model ----------------------------------------------------------------------------


def initialize_model_parallel(
    backend: str | None = None,
    duplicate_tp_group: bool = False,
    enable_symm_mem: bool = False,
    recovered_rank: bool = False,
    rank_offset: int = 0,
    max_world_size: int | None = None,
    *,
    widths: ParallelSizes | None = None,
    use_message_queue_broadcaster: bool = False,
) -> None:
    """Build the groups of a model.

    Args:
        backend: of the groups; None: the world's.
        duplicate_tp_group: add a second tensor-parallel group, for `pdmux_prefill_tp_group`.
        enable_symm_mem: no effect: measurements choose the backend of tensors.
        recovered_rank: must be False; likewise ``rank_offset`` 0 and ``max_world_size`` None.
        widths: the model's division; None: tensor-parallel over all ranks.
        use_message_queue_broadcaster: add queues for the broadcasts of a group's rank 0.

    Collective: yes, every rank.

    Raises:
        RuntimeError: the environment is missing, or the groups exist.
        ValueError: the sizes do not multiply to the world size, or elastic groups are requested.
    """
    del enable_symm_mem
    refuse_elastic(recovered_rank=recovered_rank or rank_offset > 0, max_world_size=max_world_size)
    world_size = get_world_group().world_size
    sizes = ParallelSizes(tp=world_size) if widths is None else widths
    if sizes.tp * sizes.pp != world_size:
        needed = f"tp={sizes.tp} x pp={sizes.pp} takes {sizes.tp * sizes.pp} ranks"
        raise ValueError(f"{needed}, not {world_size}")
    make = partial(
        _build,
        kinds=sizes.kinds(),
        broadcaster=use_message_queue_broadcaster,
        duplicate_tp=duplicate_tp_group,
    )
    _state.build(make, backend)


def _build(
    topology: Topology,
    closing: ExitStack,
    *,
    kinds: Mapping[str, list[list[int]]],
    broadcaster: bool,
    duplicate_tp: bool,
) -> dict[str, GroupCoordinator]:
    """Build one group for equal ranks."""
    built: dict[tuple[int, ...], Any] = {}
    groups: dict[str, GroupCoordinator] = {}
    for name, kind in kinds.items():
        ranks = tuple(next(ranks for ranks in kind if topology.rank in ranks))
        if ranks not in built:
            built[ranks] = closing.enter_context(topology.group(name, ranks))
            built[ranks].group_ranks = kind
            if broadcaster:
                built[ranks].start_broadcaster()
        groups[name] = built[ranks]
    if duplicate_tp:
        second: Any = closing.enter_context(topology.group("pdmux_prefill_tp", groups["tp"].ranks))
        second.group_ranks = kinds["tp"]
        groups["pdmux_prefill_tp"] = second
    return groups


def get_dcp_group_no_assert() -> GroupCoordinator | None:
    """As `get_dcp_group`; None if the group does not exist."""
    return _state.groups.get("dcp")


def get_mooncake_transfer_engine() -> None:
    """Return None: this layer moves no KV caches."""


def ignore_transport(enable: bool) -> None:
    """Do nothing: measured times choose each group's transport; see `GroupCoordinator.explain`."""


set_mscclpp = set_torch_symm_mem_all_reduce = set_flashinfer_allreduce_only = ignore_transport


def _tag_groups_for_flashinfer_allreduce_only() -> None:
    """Do nothing, as `ignore_transport`."""


_vllm_getters: dict[str, Callable[[], Any]] = {}


def monkey_patch_vllm_parallel_state(reverse: bool = False) -> None:
    """Let vLLM's getters return this module's groups; ``reverse`` restores vLLM's own.

    No effect without vLLM.
    """
    try:
        vllm_state = importlib.import_module("vllm.distributed.parallel_state")
    except ImportError:
        return
    ours = {
        "get_world_group": get_world_group,
        "get_tp_group": get_tp_group,
        "get_pp_group": get_pp_group,
    }
    for name, getter in ours.items():
        original = _vllm_getters.setdefault(name, getattr(vllm_state, name))
        setattr(vllm_state, name, original if reverse else getter)


def inplace_all_reduce(tensor: Tensor, group_name: str) -> None:
    """Sum ``tensor`` into itself over the group of this ``unique_name``; ValueError without one.

    Collective: yes, every member.
    """
    for group in (*_state.groups.values(), _state.world):
        if group is not None and group.unique_name == group_name:
            group.all_reduce_(tensor)
            return
    raise ValueError(f"no group {group_name!r} in this process")


@contextmanager
def patch_tensor_parallel_group(
    tp_group: GroupCoordinator, *, owns_attention: bool
) -> Iterator[None]:
    """Use another tensor-parallel group inside this context, such as a draft model's.

    With ``owns_attention`` it is also the attention's group; otherwise attention keeps its groups.
    """
    names = ("tp", "attn_tp") if owns_attention else ("tp",)
    with _state.replaced(dict.fromkeys(names, tp_group)):
        yield


@contextmanager
def patch_pipeline_parallel_group(pp_group: GroupCoordinator) -> Iterator[None]:
    """Use other stages inside this context."""
    with _state.replaced({"pp": pp_group}):
        yield


@contextmanager
def pdmux_prefill_tp_group() -> Iterator[None]:
    """Use the second tensor-parallel group, which must exist, inside this context."""
    with _state.replaced({"tp": _state.group("pdmux_prefill_tp")}):
        yield


@contextmanager
def graph_capture(stream: torch.cuda.Stream | None = None) -> Iterator[GraphCaptureContext]:
    """Capture a CUDA graph with collectives of all the model's groups; no effect on CPUs.

    Collective: yes, every member of these groups.
    """
    tp = get_tp_group()
    context = None if stream is None else GraphCaptureContext(stream)
    with ExitStack() as captures:
        context = captures.enter_context(capture_on_side_stream(tp.device, context))
        for group in dict.fromkeys(_state.groups.values()):
            captures.enter_context(group.graph_capture(context))
        yield context


# --- the end ------------------------------------------------------------------------------


def abort_distributed_environment() -> None:
    """Abort all groups for all members: their waiting calls raise."""
    if _state.world is not None:
        _state.world.abort("the distributed environment was aborted")
    destroy_model_parallel()
    destroy_distributed_environment()
