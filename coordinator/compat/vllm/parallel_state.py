"""vLLM's function names over one default topology: change the import, keep the calls.

    from coordinator.compat.vllm.parallel_state import get_tp_group, initialize_model_parallel

`docs/from-vllm.md` says what differs. New code holds a `coordinator.ParallelGroups` instead,
of which there may be several; here there is one, which this module keeps. Until it is
initialised, and after it is destroyed, the getters raise `NotInitializedError`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from coordinator.compat.shared import Getters, GlobalState, in_the_same_node_as
from coordinator.compat.vllm import group as model_groups
from coordinator.compat.vllm.group import GroupCoordinator
from coordinator.group import GraphCaptureContext, capture_on_side_stream
from coordinator.rendezvous import DEFAULT_TIMEOUT
from device_comm import Work
from shm_broadcast import Deadline

__all__ = [
    "GraphCaptureContext",
    "GroupCoordinator",
    "Handle",
    "cleanup_dist_env_and_memory",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "ensure_model_parallel_initialized",
    "get_dcp_group",
    "get_dcp_world_size_and_rank",
    "get_dp_group",
    "get_engram_dp_group",
    "get_engram_dp_size",
    "get_ep_group",
    "get_eplb_group",
    "get_etp_group",
    "get_inner_dp_world_group",
    "get_node_count",
    "get_pcp_group",
    "get_pipeline_model_parallel_rank",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "get_world_group",
    "graph_capture",
    "in_the_same_node_as",
    "init_distributed_environment",
    "init_model_parallel_group",
    "init_world_group",
    "initialize_model_parallel",
    "is_global_first_rank",
    "is_initialized",
    "is_local_first_rank",
    "model_parallel_is_initialized",
    "new_group",
    "set_custom_all_reduce",
]

Handle = Work
"""What sends and receives under way are: ``is_completed()`` and ``wait()``."""

_state = GlobalState(GroupCoordinator)
"""The one instance that the functions below speak of."""

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
    timeout: timedelta | None = None,
) -> None:
    """Meet all ranks, make torch's default process group if there is none, and the world group.

    Args:
        world_size: how many processes; -1: what the environment or torch's group says.
        rank: this process's global rank; -1: likewise.
        distributed_init_method: ``"env://"``, ``"tcp://host:port"`` or ``"file://path"``.
        local_rank: this process's number on its node; -1: the environment's, or the rank.
        backend: ``"nccl"`` stands for gloo where there is no GPU.
        timeout: for all ranks to come; None: 60 s.

    Collective: yes, every rank. The second call only checks the size.

    Raises:
        GroupTimeoutError: some ranks did not come in time; names them.
        ValueError: the world has another size, or the method is unknown.
    """
    deadline = Deadline.after(DEFAULT_TIMEOUT if timeout is None else timeout.total_seconds())
    _state.meet(world_size, rank, distributed_init_method, local_rank, backend, deadline)


def is_initialized() -> bool:
    """Whether there is a world group."""
    return _state.world is not None


def get_node_count() -> int:
    """How many nodes the ranks run on, found by attaching shared memory."""
    return len(get_world_group().group.nodes)


def init_world_group(ranks: list[int], local_rank: int, backend: str) -> GroupCoordinator:
    """A group of ``ranks`` over torch's default group; it is the caller's.

    Collective: yes, every one of ``ranks``.
    """
    return GroupCoordinator([ranks], local_rank, backend, False, group_name="world")


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_device_communicator: bool = True,
) -> GroupCoordinator:
    """This process's group among ``group_ranks``, over torch's default group; the caller's.

    Collective: yes, every member of the group.
    """
    return GroupCoordinator(
        group_ranks,
        local_rank,
        backend,
        use_device_communicator and _state.device_communicators,
        use_message_queue_broadcaster,
        group_name,
    )


def new_group(ranks: Sequence[int], group_name: str = "group") -> GroupCoordinator | None:
    """A group of some ranks, in ascending order; the caller's. None on the other ranks.

    Collective: yes, every one of ``ranks``; the others may call it.
    """
    topology, members = _state.topology, sorted(ranks)
    if topology.rank not in members:
        return None
    return GroupCoordinator.wrap(topology.group(group_name, members))


def is_global_first_rank() -> bool:
    """Whether this is rank 0 of all, or alone."""
    if _state.world is not None:
        return _state.world.is_first_rank
    return not dist.is_initialized() or dist.get_rank() == 0


def is_local_first_rank() -> bool:
    """Whether this is the first process of its node, or alone.

    Where torch's default group is not of our making, the launcher's ``LOCAL_RANK`` tells; without
    it only rank 0 of all is.
    """
    if _state.world is not None:
        return _state.world.local_rank == 0
    local_rank = os.environ.get("LOCAL_RANK")
    return local_rank == "0" if local_rank and dist.is_initialized() else is_global_first_rank()


# --- the model ----------------------------------------------------------------------------


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    *,
    data_parallel_size: int = 1,
    enable_eplb: bool = False,
) -> None:
    """Build the groups of a model.

    The ranks that the sizes leave over form external replicas, which know nothing of each
    other: rank = (((external * dp + dp_rank) * pp + pp_rank) * pcp + pcp_rank) * tp + tp_rank.

    Args:
        tensor_model_parallel_size: how many ranks share a layer.
        pipeline_model_parallel_size: how many stages.
        prefill_context_model_parallel_size: how many ranks share a prompt.
        decode_context_model_parallel_size: how many ranks of the prefill-context- and
            tensor-parallel groups share contexts; None: 1.
        backend: of the groups; None: the world's.
        data_parallel_size: how many replicas work together.
        enable_eplb: have a second expert-parallel group, for balancing experts meanwhile.

    Collective: yes, every rank.

    Raises:
        RuntimeError: there is no environment, or the groups exist already.
        ValueError: the sizes do not divide the world.
    """
    sizes = {
        "dp": data_parallel_size,
        "pp": pipeline_model_parallel_size,
        "pcp": prefill_context_model_parallel_size,
        "tp": tensor_model_parallel_size,
    }
    dcp = decode_context_model_parallel_size or 1
    _state.build(partial(model_groups.build, sizes=sizes, dcp=dcp, eplb=enable_eplb), backend)


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    *,
    data_parallel_size: int | None = None,
    enable_eplb: bool = False,
) -> None:
    """Build the groups of a model, or check the sizes of those there are.

    Args:
        tensor_model_parallel_size: as for `initialize_model_parallel`, like the others.
        pipeline_model_parallel_size: how many stages.
        prefill_context_model_parallel_size: how many ranks share a prompt.
        decode_context_model_parallel_size: how many ranks share contexts; None: 1.
        backend: of the groups; None: the world's.
        data_parallel_size: None: 1, and not checked.
        enable_eplb: not checked.

    Collective: yes, every rank, if there are none.

    Raises:
        ValueError: there are groups, of other sizes.
    """
    wanted = {
        "tp": tensor_model_parallel_size,
        "pp": pipeline_model_parallel_size,
        "pcp": prefill_context_model_parallel_size,
        "dcp": decode_context_model_parallel_size or 1,
    }
    if data_parallel_size is not None:
        wanted["dp"] = data_parallel_size
    if not model_parallel_is_initialized():
        initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            prefill_context_model_parallel_size,
            decode_context_model_parallel_size,
            backend,
            data_parallel_size=data_parallel_size or 1,
            enable_eplb=enable_eplb,
        )
        return
    there = {name: _state.group(name).world_size for name in wanted}
    if there != wanted:
        raise ValueError(f"the groups have the sizes {there}, not {wanted}")


def get_etp_group() -> GroupCoordinator:
    """The ranks that share an embedding table: those of `get_tp_group`."""
    return get_tp_group()


def get_engram_dp_group() -> GroupCoordinator | None:
    """None: every replica has an embedding table of its own."""
    return None


def get_engram_dp_size() -> int:
    """How many replicas share an embedding table: each has its own."""
    return 1


def get_dp_group() -> GroupCoordinator:
    """The ranks that do what this one does, in the replicas that work together."""
    return _state.group("dp")


def get_ep_group() -> GroupCoordinator:
    """All ranks of this one's stage, in the replicas that work together."""
    return _state.group("ep")


def get_eplb_group() -> GroupCoordinator:
    """The ranks of `get_ep_group`, in a group of their own."""
    return _state.group("eplb")


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    """The size of `get_dcp_group` and this rank in it.

    Args:
        enabled: False: contexts are not shared whatever the groups are, as one of one does.
    """
    if not enabled or not model_parallel_is_initialized():
        return 1, 0
    group = get_dcp_group()
    return group.world_size, group.rank_in_group


def get_pcp_group() -> GroupCoordinator:
    """The ranks that share this one's prompts."""
    return _state.group("pcp")


def get_inner_dp_world_group() -> GroupCoordinator:
    """All ranks of this one's replica."""
    return _state.group("inner_dp_world")


@contextmanager
def graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    """Capture a CUDA graph with collectives of the tp, pp and dp groups; nothing on the CPU.

    Collective: yes, every member of these groups.
    """
    with (
        capture_on_side_stream(device) as context,
        get_tp_group().graph_capture(context),
        get_pp_group().graph_capture(context),
        get_dp_group().graph_capture(context),
    ):
        yield context
