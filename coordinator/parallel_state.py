"""vLLM's function names over one default topology: change the import, keep the calls.

    from coordinator.parallel_state import get_tp_group, initialize_model_parallel, ...

`docs/from-vllm.md` says what differs. New code holds a `coordinator.ParallelGroups` instead,
of which there may be several; here there is one, which this module keeps. Until it is
initialised, and after it is destroyed, the getters raise `RuntimeError`.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from coordinator.bootstrap import DEFAULT_TIMEOUT, Launch
from coordinator.default_topology import DefaultTopology, require
from coordinator.graph_capture import GraphCaptureContext, capture_on_side_stream
from coordinator.group import GroupCoordinator
from shm_broadcast import Deadline
from shm_broadcast.rendezvous import as_object_group, ranks_beside

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    from coordinator.groups import ParallelGroups
    from shm_broadcast.rendezvous import ObjectGroup

_state = DefaultTopology()
"""The one instance that the functions below speak of."""


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
    if _state.world is not None:
        if world_size not in (-1, _state.world.world_size):
            raise ValueError(f"the world has {_state.world.world_size} ranks, not {world_size}")
        return
    deadline = Deadline.after(DEFAULT_TIMEOUT if timeout is None else timeout.total_seconds())
    _state.meet(world_size, rank, distributed_init_method, local_rank, backend, deadline)


def is_initialized() -> bool:
    """Whether there is a world group."""
    return _state.world is not None


def get_world_group() -> GroupCoordinator:
    """The group of all ranks."""
    return require(_state.world, "the distributed environment")


def get_node_count() -> int:
    """How many nodes the ranks run on, found by attaching shared memory."""
    return len(get_world_group().nodes)


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
    topology = require(_state.topology, "the distributed environment")
    members = sorted(ranks)
    return topology.group(group_name, members) if topology.rank in members else None


def is_global_first_rank() -> bool:
    """Whether this is rank 0 of all, or alone."""
    if _state.world is not None:
        return _state.world.is_first_rank
    return not dist.is_initialized() or dist.get_rank() == 0


def is_local_first_rank() -> bool:
    """Whether this is the first process of its node, or alone."""
    if _state.world is not None:
        return _state.world.local_rank == 0
    launch = Launch.from_environment()
    return launch.local_rank == 0


def in_the_same_node_as(pg: dist.ProcessGroup | ObjectGroup, source_rank: int = 0) -> list[bool]:
    """For each rank of ``pg``, whether it can attach shared memory of ``source_rank``.

    Collective: yes, every rank of ``pg``.
    """
    group = as_object_group(pg)
    beside = (source_rank, *ranks_beside(group, source_rank))
    return [rank in beside for rank in range(group.world_size)]


def set_custom_all_reduce(enable: bool) -> None:
    """Whether groups made from now on may use more than torch's process groups."""
    _state.device_communicators = enable


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
        decode_context_model_parallel_size: how many neighbours within the tensor-parallel
            group share contexts; None: 1.
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
    _state.build(sizes, decode_context_model_parallel_size or 1, backend, enable_eplb)


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
) -> None:
    """Build the groups of a model, or check the sizes of those there are.

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
    if _state.groups is None:
        initialize_model_parallel(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            prefill_context_model_parallel_size,
            decode_context_model_parallel_size,
            backend,
        )
        return
    there = {name: getattr(_state.groups, name).world_size for name in wanted}
    if there != wanted:
        raise ValueError(f"the groups have the sizes {there}, not {wanted}")


def model_parallel_is_initialized() -> bool:
    """Whether the groups of a model have been built."""
    return _state.groups is not None


def get_tp_group() -> GroupCoordinator:
    """The ranks that share this one's layers."""
    return _groups().tp


def get_pp_group() -> GroupCoordinator:
    """The stages of this rank's model."""
    return _groups().pp


def get_dp_group() -> GroupCoordinator:
    """The ranks that do what this one does, in the replicas that work together."""
    return _groups().dp


def get_ep_group() -> GroupCoordinator:
    """All ranks of this one's stage, in the replicas that work together."""
    return _groups().ep


def get_eplb_group() -> GroupCoordinator:
    """The ranks of `get_ep_group`, in a group of their own."""
    return require(_state.eplb, "the expert-balancing group")


def get_dcp_group() -> GroupCoordinator:
    """The neighbours within `get_tp_group` that share contexts."""
    return _groups().dcp


def get_pcp_group() -> GroupCoordinator:
    """The ranks that share this one's prompts."""
    return _groups().pcp


def get_inner_dp_world_group() -> GroupCoordinator:
    """All ranks of this one's replica."""
    return require(_state.inner_dp_world, "model parallelism")


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share a layer."""
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    """This rank's position among those that share its layers."""
    return get_tp_group().rank_in_group


def get_pipeline_model_parallel_rank() -> int:
    """This rank's stage."""
    return get_pp_group().rank_in_group


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


# --- the end ------------------------------------------------------------------------------


def destroy_model_parallel() -> None:
    """Close the groups of the model; the second time does nothing. Collective: no."""
    _state.close_model()


def destroy_distributed_environment() -> None:
    """Close the world group, and torch's default group. Collective: no."""
    _state.close_environment()


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Destroy everything and give memory back.

    Args:
        shutdown_ray: shut Ray down as well, if this process uses it.
    """
    destroy_model_parallel()
    destroy_distributed_environment()
    if shutdown_ray:
        import ray  # noqa: PLC0415 - an optional dependency

        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _groups() -> ParallelGroups:
    return require(_state.groups, "model parallelism")
