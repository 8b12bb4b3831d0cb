"""Provide SGLang's function names over one default topology: change the import, keep the calls.

`docs/from-sglang.md` lists the differences. The getters raise `NotInitializedError` before
initialisation and after destruction.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore

from coordinator.compat.sglang import group as model_groups
from coordinator.compat.sglang.group import GroupCoordinator, P2PWork, ParallelSizes, refuse_elastic
from coordinator.compat.shared import Getters, GlobalState, in_the_same_node_as
from coordinator.group import GraphCaptureContext, capture_on_side_stream
from coordinator.rendezvous import DEFAULT_TIMEOUT
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
    "get_attn_cp_group",
    "get_attn_tp_group",
    "get_dcp_group",
    "get_dcp_group_no_assert",
    "get_default_distributed_backend",
    "get_global_tcp_store",
    "get_moe_dp_group",
    "get_moe_ep_group",
    "get_moe_tp_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_pp_group",
    "get_self_pp_group",
    "get_shared_experts_tp_group",
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
    "patch_pipeline_parallel_group",
    "patch_tensor_parallel_group",
    "pdmux_prefill_tp_group",
    "set_custom_all_reduce",
    "set_global_tcp_store",
]

_state = GlobalState(GroupCoordinator)
"""The instance that the functions below use."""

_getters = Getters(_state)
get_world_group = _getters.world_group
set_custom_all_reduce = _getters.set_custom_all_reduce
model_parallel_is_initialized = _getters.model_parallel_is_initialized
get_tp_group = _getters.tp_group
get_pp_group = _getters.pp_group
get_dcp_group = _getters.dcp_group
get_tensor_model_parallel_world_size = _getters.tp_world_size
get_tensor_model_parallel_rank = _getters.tp_rank
get_pipeline_model_parallel_rank = _getters.pp_rank
destroy_model_parallel = _getters.destroy_model_parallel
destroy_distributed_environment = _getters.destroy_distributed_environment
cleanup_dist_env_and_memory = _getters.cleanup_dist_env_and_memory


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
    sizes = ParallelSizes(tp=get_world_group().world_size) if widths is None else widths
    make = partial(
        model_groups.build,
        widths=sizes,
        broadcaster=use_message_queue_broadcaster,
        duplicate_tp=duplicate_tp_group,
    )
    _state.build(make, backend)


def get_self_pp_group() -> GroupCoordinator:
    """Return the group of this rank alone, as a stage."""
    return _state.group("self_pp")


def get_attn_tp_group() -> GroupCoordinator:
    """Return the group of ranks that share an attention layer."""
    return _state.group("attn_tp")


def get_attn_cp_group() -> GroupCoordinator:
    """Return the group of ranks that share a prompt in the attention."""
    return _state.group("attn_cp")


def get_shared_experts_tp_group() -> GroupCoordinator:
    """Return the group of ranks that share the experts of all tokens."""
    return _state.group("shared_experts_tp")


def get_dcp_group_no_assert() -> GroupCoordinator | None:
    """As `get_dcp_group`; None if the group does not exist."""
    return _state.groups.get("dcp")


def get_moe_dp_group() -> GroupCoordinator:
    """Return the group of ranks that hold the same part of the same experts."""
    return _state.group("moe_dp")


def get_moe_ep_group() -> GroupCoordinator:
    """Return the group of ranks that hold different experts."""
    return _state.group("moe_ep")


def get_moe_tp_group() -> GroupCoordinator:
    """Return the group of ranks that share an expert."""
    return _state.group("moe_tp")


def get_pipeline_model_parallel_world_size() -> int:
    """Return the number of stages."""
    return get_pp_group().world_size


def inplace_all_reduce(tensor: Tensor, group_name: str) -> None:
    """Sum ``tensor`` into itself over the group of this ``unique_name``; ValueError without one.

    Collective: yes, every member.
    """
    for adapter in (*_state.groups.values(), _state.world):
        if adapter is not None and adapter.unique_name == group_name:
            adapter.group.all_reduce_(tensor)
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
        _state.world.group.abort("the distributed environment was aborted")
    destroy_model_parallel()
    destroy_distributed_environment()
