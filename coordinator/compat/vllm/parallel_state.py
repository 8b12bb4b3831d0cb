"""Provide vLLM's function names over one default topology: change the import, keep the calls.

    from coordinator.compat.vllm.parallel_state import get_tp_group, initialize_model_parallel

`docs/from-vllm.md` lists the differences. This module holds one `coordinator.ParallelGroups`; new
code holds one or more itself. The getters raise `NotInitializedError` before initialisation and
after destruction.
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
"""The handle of a pending send or receive: ``is_completed()`` and ``wait()``."""

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
    timeout: timedelta | None = None,
) -> None:
    """Meet all ranks; make the world group, and torch's default process group if it is missing.

    Args:
        world_size: the number of processes; -1: from the environment or torch's group.
        rank: this process's global rank; -1: likewise.
        distributed_init_method: ``"env://"``, ``"tcp://host:port"`` or ``"file://path"``.
        local_rank: this process's number on its node; -1: the environment's, or the rank.
        backend: ``"nccl"`` means gloo without a GPU.
        timeout: until all ranks arrive; None: 60 s.

    Collective: yes, every rank. A second call only checks the size.

    Raises:
        GroupTimeoutError: ranks did not arrive in time; names them.
        ValueError: the world has another size, or the method is unknown.
    """
    deadline = Deadline.after(DEFAULT_TIMEOUT if timeout is None else timeout.total_seconds())
    _state.meet(world_size, rank, distributed_init_method, local_rank, backend, deadline)


def is_initialized() -> bool:
    """Return whether the world group exists."""
    return _state.world is not None


def get_node_count() -> int:
    """Return the number of nodes, found by attaching shared memory."""
    return len(get_world_group().group.nodes)


def init_world_group(ranks: list[int], local_rank: int, backend: str) -> GroupCoordinator:
    """Return a group over torch's default group; the caller closes it. Collective: yes."""
    return GroupCoordinator([ranks], local_rank, backend, False, group_name="world")


def init_model_parallel_group(
    group_ranks: list[list[int]],
    local_rank: int,
    backend: str,
    use_message_queue_broadcaster: bool = False,
    group_name: str | None = None,
    use_device_communicator: bool = True,
) -> GroupCoordinator:
    """Return this process's group among ``group_ranks``, over torch's default group.

    The caller closes it. Collective: yes, every member of the group.
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
    """Return a group of ``ranks``, in ascending order, which the caller closes; None elsewhere.

    Collective: yes, every one of ``ranks``; the others may call it.
    """
    topology, members = _state.topology, sorted(ranks)
    if topology.rank not in members:
        return None
    return GroupCoordinator.wrap(topology.group(group_name, members))


def is_global_first_rank() -> bool:
    """Return whether this is global rank 0, or a single process."""
    if _state.world is not None:
        return _state.world.is_first_rank
    return not dist.is_initialized() or dist.get_rank() == 0


def is_local_first_rank() -> bool:
    """Return whether this is the first process of its node, or a single process.

    If this module did not make torch's default group, the launcher's ``LOCAL_RANK`` decides;
    without it only global rank 0 is first.
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

    Ranks beyond the sizes form external replicas, independent of each other:
    rank = (((external * dp + dp_rank) * pp + pp_rank) * pcp + pcp_rank) * tp + tp_rank.

    Args:
        tensor_model_parallel_size: ranks that share a layer.
        pipeline_model_parallel_size: stages.
        prefill_context_model_parallel_size: ranks that share a prompt.
        decode_context_model_parallel_size: ranks of the prefill-context- and tensor-parallel
            groups that share contexts; None: 1.
        backend: of the groups; None: the world's.
        data_parallel_size: replicas that work together.
        enable_eplb: add a second expert-parallel group, for balancing experts meanwhile.

    Collective: yes, every rank.

    Raises:
        RuntimeError: the environment is missing, or the groups exist.
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
    """Build the groups of a model, or raise ValueError if existing groups have other sizes.

    Arguments as for `initialize_model_parallel`. ``enable_eplb``, and ``data_parallel_size=None``,
    are not checked.

    Collective: yes, every rank, if there are no groups.
    """
    expected = {
        "tp": tensor_model_parallel_size,
        "pp": pipeline_model_parallel_size,
        "pcp": prefill_context_model_parallel_size,
        "dcp": decode_context_model_parallel_size or 1,
    }
    if data_parallel_size is not None:
        expected["dp"] = data_parallel_size
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
    actual = {name: _state.group(name).world_size for name in expected}
    if actual != expected:
        raise ValueError(f"the groups have the sizes {actual}, not {expected}")


def get_etp_group() -> GroupCoordinator:
    """Return the group of ranks that share an embedding table: `get_tp_group`."""
    return get_tp_group()


def get_engram_dp_group() -> GroupCoordinator | None:
    """Return None: every replica has an embedding table of its own."""
    return None


def get_engram_dp_size() -> int:
    """Return 1: replicas do not share an embedding table."""
    return 1


def get_dp_group() -> GroupCoordinator:
    """Return the group of this rank's counterparts in the replicas that work together."""
    return _state.group("dp")


def get_ep_group() -> GroupCoordinator:
    """Return the group of all ranks of this rank's stage, in all replicas that work together."""
    return _state.group("ep")


def get_eplb_group() -> GroupCoordinator:
    """Return a second group of the ranks of `get_ep_group`."""
    return _state.group("eplb")


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    """Return the size of `get_dcp_group` and this rank; (1, 0) without, or if not ``enabled``."""
    if not enabled or not model_parallel_is_initialized():
        return 1, 0
    group = get_dcp_group()
    return group.world_size, group.rank_in_group


def get_pcp_group() -> GroupCoordinator:
    """Return the group of ranks that share this rank's prompts."""
    return _state.group("pcp")


def get_inner_dp_world_group() -> GroupCoordinator:
    """Return the group of all ranks of this rank's replica."""
    return _state.group("inner_dp_world")


@contextmanager
def graph_capture(device: torch.device) -> Iterator[GraphCaptureContext]:
    """Capture a CUDA graph with collectives of the tp, pp and dp groups; no effect on CPUs.

    Collective: yes, every member of these groups.
    """
    with (
        capture_on_side_stream(device) as context,
        get_tp_group().graph_capture(context),
        get_pp_group().graph_capture(context),
        get_dp_group().graph_capture(context),
    ):
        yield context
