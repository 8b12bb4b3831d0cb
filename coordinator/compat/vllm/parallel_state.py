# mypy: disable-error-code="override"
"""Provide vLLM's groups and functions over one default topology: change the import, keep the calls.

    from coordinator.compat.vllm.parallel_state import get_tp_group, initialize_model_parallel

`docs/from-vllm.md` lists the differences. This module holds one topology; new code holds one or
more `coordinator.ParallelGroups` itself. The getters raise `NotInitializedError` before
initialisation and after destruction.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, TCPStore

from coordinator import group as native
from coordinator.compat.state import GlobalState, in_the_same_node_as
from coordinator.compat.vllm.device_communicators.shm_broadcast import MessageQueue
from coordinator.context import GroupContext
from coordinator.group import GraphCaptureContext, capture_on_side_stream
from coordinator.groups import ParallelGroups, Topology
from coordinator.member import Member
from coordinator.rank_grid import RankGrid
from coordinator.stores import DEFAULT_TIMEOUT
from device_comm import Work
from shm_broadcast import Deadline, GroupTimeoutError

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
    "get_ep_group",
    "get_eplb_group",
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


class GroupCoordinator(native.GroupCoordinator):
    """One member's end of a named group, with vLLM's arguments and results.

    Attributes:
        group_ranks: the global ranks of all known groups of this kind.
        all2all_manager: None: `all_gatherv` and `reduce_scatterv` route rows to experts.
    """

    _queue_type = MessageQueue
    all2all_manager: None = None

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
        super().__init__(
            group_ranks,
            local_rank,
            torch_distributed_backend,
            use_device_communicator,
            use_message_queue_broadcaster,
            group_name,
        )
        self.group_ranks = [list(ranks) for ranks in group_ranks]

    @classmethod
    def sharing(cls, group: Member) -> Self:
        """Return ``group`` with vLLM's arguments and results; both close together."""
        other = super().sharing(group)
        other._set_names()
        return other

    def _init_from(self, link: GroupContext) -> None:
        super()._init_from(link)
        self._set_names()

    def _set_names(self) -> None:
        settings = self._context.settings
        self.group_ranks = [self.ranks]
        self.device_index = self.local_rank
        self.torch_distributed_backend = settings.backend
        self.use_device_communicator = not settings.torch_only

    @property
    def group(self) -> native.GroupCoordinator:
        """Return this group with the arguments of this library; both close together."""
        return native.GroupCoordinator.sharing(self)

    @property
    def device_communicator(self) -> Self:
        """Return the group itself: it has the verbs of vLLM's communicators."""
        return self

    # --- tensors -------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor, **options: Any) -> Any:
        """Return the sum of every ``input_``; of one member, ``input_``. Collective: yes."""
        if self.world_size == 1 and not options:
            return input_
        return super().all_reduce(input_, **options)

    def cpu_all_reduce_(self, tensor: Tensor, **options: Any) -> Any:
        """Sum a CPU tensor into itself. Collective: yes, every member.

        The text of a `GroupTimeoutError` begins with "Timed out", as that of gloo's errors.
        """
        try:
            return super().cpu_all_reduce_(tensor, **options)
        except GroupTimeoutError as error:
            error.args = (f"Timed out: {error}",)
            raise

    def all_gather(self, input_: Tensor, dim: int = -1, **options: Any) -> Any:
        """Return every ``input_``, concatenated. Collective: yes, every member."""
        if self.world_size == 1 and not options:
            return input_
        return super().all_gather(input_, dim, **options)

    def all_gatherv(
        self,
        input_: Tensor | Sequence[Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> Any:
        """As `all_gather`, with ``sizes[r]`` rows from rank r; of a list, each tensor."""
        return super().all_gatherv(input_, dim, sizes, **options)

    def reduce_scatter(self, input_: Tensor, dim: int = -1, **options: Any) -> Any:
        """Return this member's part of the sum. Collective: yes, every member."""
        if self.world_size == 1 and not options:
            return input_
        return super().reduce_scatter(input_, dim, **options)

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None, **options: Any
    ) -> Any:
        """As `reduce_scatter`, with ``sizes[r]`` rows for rank r."""
        return super().reduce_scatterv(input_, dim, sizes, **options)

    def reduce_scatterv_into_output(
        self,
        input_: Tensor,
        output: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """As `reduce_scatterv`, into ``output``; return ``output``."""
        return super().reduce_scatterv(input_, dim, sizes, out=output)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1, **options: Any) -> Any:
        """Return every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        if self.world_size == 1 and not options:
            return input_
        return super().gather(input_, dst, dim, **options)

    def broadcast(self, input_: Tensor, src: int = 0, **options: Any) -> Any:
        """Fill ``input_`` with that of ``src`` and return it. Collective: yes, every member."""
        options.setdefault("out", input_)
        return super().broadcast(input_, src, **options)

    def send(self, tensor: Tensor, dst: int | None = None, **options: Any) -> None:
        """Send a tensor to ``dst``; None: to the next rank."""
        super().send(tensor, dst, **options)

    _all_reduce_out_place = all_reduce
    _all_gather_out_place = all_gather
    _reduce_scatter_out_place = reduce_scatter

    # --- experts -------------------------------------------------------------------------

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """Return the rows of all members, before the choice of experts. Collective: yes."""
        return self._dispatch((hidden_states, router_logits), is_sequence_parallel, extra_tensors)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """Return the rows of all members. Collective: yes, every member."""
        main = (hidden_states, topk_weights, topk_ids)
        return self._dispatch(main, is_sequence_parallel, extra_tensors)

    def combine_into_output(
        self, hidden_states: Tensor, output: Tensor, is_sequence_parallel: bool = False
    ) -> Tensor:
        """As `combine`, into ``output``; return ``output``."""
        return self.combine(hidden_states, is_sequence_parallel, out=output)

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Call each module's ``prepare_communication_buffers``; models must be alike."""
        for module in model.modules():
            prepare: Any = getattr(module, "prepare_communication_buffers", None)
            if prepare is not None:
                prepare(self)

    def _dispatch(
        self, main: Sequence[Tensor], is_sequence_parallel: bool, extra: Sequence[Tensor] | None
    ) -> tuple[Any, ...]:
        rows = super().dispatch(*main, *(extra or ()), is_sequence_parallel=is_sequence_parallel)
        return rows if extra is None else (*rows[: len(main)], list(rows[len(main) :]))

    # --- objects and dicts ---------------------------------------------------------------

    def broadcast_object_list(
        self,
        obj_list: list[Any],
        src: int = 0,
        group: ProcessGroup | None = None,  # noqa: ARG002 - the original ignores it as well
        **options: Any,
    ) -> Any:
        """Fill every member's list with the objects of ``src``'s. Collective: yes."""
        return super().broadcast_object_list(obj_list, src, **options)

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any] | None = None,
        src: int = 0,
        group: ProcessGroup | None = None,  # noqa: ARG002 - the original ignores both as well
        metadata_group: ProcessGroup | None = None,  # noqa: ARG002
        **options: Any,
    ) -> Any:
        """Return the dict of ``src`` on all members. Collective: yes, every member."""
        return super().broadcast_tensor_dict(tensor_dict, src, **options)

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: native.GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[Work[None]]:
        """As `send_tensor_dict`, without blocking; the tensors must not change meanwhile.

        Returns one handle, which may be dropped; none in a group of one.
        """
        if self.world_size == 1:
            return []
        return [super().isend_tensor_dict(tensor_dict, dst, all_gather_group, all_gather_tensors)]

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: native.GroupCoordinator | None = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> tuple[dict[str, Any] | None, list[Work[dict[str, Any]]], list[Callable[[], None]]]:
        """As `recv_tensor_dict`, without blocking.

        Returns an empty dict, handles to wait for, and functions to call then, which fill the dict:
        its keys, too, arrive with the message.
        """
        if self.world_size == 1:
            return None, [], []
        work = super().irecv_tensor_dict(src, all_gather_group, all_gather_tensors)
        received: dict[str, Any] = {}
        return received, [work], [lambda: received.update(work.wait())]


def names_of(groups: ParallelGroups) -> dict[str, native.GroupCoordinator]:
    """Return vLLM's names of the groups that `coordinator.init` built."""
    names = {name: getattr(groups, name) for name in ("tp", "pp", "dp", "pcp", "dcp", "ep")}
    if groups.tp.world_size * groups.pp.world_size * groups.pcp.world_size == groups.grid.size:
        names["inner_dp_world"] = groups.world
    return names


_state = GlobalState(GroupCoordinator, names_of)
"""The instance that the functions below use."""

get_world_group = _state.world_group
get_tp_group = _state.getter("tp")  # the ranks that share this rank's layers
get_pp_group = _state.getter("pp")  # the stages of this rank's model
get_dp_group = _state.getter("dp")  # this rank's counterparts in the replicas that work together
get_pcp_group = _state.getter("pcp")  # the ranks that share this rank's prompts
get_dcp_group = _state.getter("dcp")  # the ranks that share this rank's contexts
get_ep_group = _state.getter("ep")  # the ranks of this stage in all replicas that work together
get_eplb_group = _state.getter("eplb")  # the same ranks again, for balancing experts meanwhile
get_inner_dp_world_group = _state.getter("inner_dp_world")  # all ranks of this rank's replica
get_tensor_model_parallel_world_size = _state.size("tp")
get_tensor_model_parallel_rank = _state.rank("tp")
get_pipeline_model_parallel_rank = _state.rank("pp")
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
    timeout: timedelta | None = None,
) -> None:
    """Meet all ranks; make the world group, and torch's default process group if it is missing.

    With data parallelism or several nodes in vLLM's current config, as `set_current_vllm_config`
    sets it, the world is that of all engines: ``rank`` and ``world_size`` are this engine's.

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
        ValueError: the world has another size, the method is unknown, or the config has elastic
            expert parallelism.
    """
    deadline = Deadline.after(DEFAULT_TIMEOUT if timeout is None else timeout.total_seconds())
    store, config = None, _parallel_config()
    if config is not None and config.enable_elastic_ep:
        raise ValueError(
            "enable_elastic_ep: these groups cannot add ranks later; build a "
            "coordinator.StatelessGroupCoordinator and call resized()"
        )
    if config is not None and _spans_engines(config):
        rank += config.data_parallel_rank * world_size
        world_size = config.world_size_across_dp
        if config.nnodes > 1:
            address, port = config.master_addr, config.master_port
        elif config._coord_store_port and not dist.is_initialized():
            address = config.data_parallel_master_ip
            store = _published_store(address, config._coord_store_port, rank, world_size, deadline)
            port = store.port
        else:
            address, port = config.data_parallel_master_ip, config.get_next_dp_init_port()
        host = f"[{address}]" if ":" in address else address
        distributed_init_method = f"tcp://{host}:{port}"
    _state.meet(world_size, rank, distributed_init_method, local_rank, backend, deadline, store)


_LONGEST_SECONDS = 3600.0
"""The time-out of the world's store where the caller sets none."""


def _parallel_config() -> Any | None:
    """Return the ``parallel_config`` of vLLM's current config; None without one."""
    module = sys.modules.get("vllm.config")
    config = None if module is None else module.get_current_vllm_config_or_none()
    return None if config is None else config.parallel_config


def _spans_engines(config: Any) -> bool:
    """Return whether the world has more ranks than those of one engine on one node."""
    if config.distributed_executor_backend == "external_launcher":
        return False
    return bool(config.nnodes > 1 or config.data_parallel_size > 1)


def _published_store(
    address: str, port: int, rank: int, world_size: int, deadline: Deadline
) -> TCPStore:
    """Host the world's store on rank 0, which publishes its port in the store at ``port``."""
    timeout = timedelta(seconds=deadline.remaining(_LONGEST_SECONDS))
    make = partial(TCPStore, address, timeout=timeout, wait_for_workers=False)
    published = make(port=port, is_master=False)
    if rank == 0:
        store = make(port=0, world_size=world_size, is_master=True, multi_tenant=True)
        published.set("world_pg_port", str(store.port))
        return store
    return make(port=int(published.get("world_pg_port")), world_size=world_size, is_master=False)


def is_initialized() -> bool:
    """Return whether the world group exists."""
    return _state.world is not None


def get_node_count() -> int:
    """Return the number of nodes, found by attaching shared memory."""
    return len(get_world_group().nodes)


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
    use_all2all: bool = False,
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
        use_all2all,
    )


def new_group(ranks: Sequence[int], group_name: str = "group") -> GroupCoordinator | None:
    """Return a group of ``ranks``, in ascending order, which the caller closes; None elsewhere.

    Collective: yes, every one of ``ranks``; the others may call it.
    """
    topology, members = _state.topology, sorted(ranks)
    if topology.rank not in members:
        return None
    return cast("GroupCoordinator", topology.group(group_name, members))


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
    data_parallel_size: int | None = None,
    enable_eplb: bool | None = None,
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
        data_parallel_size: replicas that work together; None: as vLLM's current config, or 1.
        enable_eplb: add a second expert-parallel group, for balancing experts meanwhile; None: as
            vLLM's current config, or False.

    Collective: yes, every rank.

    Raises:
        RuntimeError: the environment is missing, or the groups exist.
        ValueError: the sizes do not divide the world.
    """
    config = _parallel_config()
    if data_parallel_size is None:
        data_parallel_size = 1 if config is None else config.data_parallel_size
    if enable_eplb is None:
        enable_eplb = False if config is None else config.enable_eplb
    sizes = {
        "dp": data_parallel_size,
        "pp": pipeline_model_parallel_size,
        "pcp": prefill_context_model_parallel_size,
        "tp": tensor_model_parallel_size,
    }
    make = partial(
        _build, sizes=sizes, dcp=decode_context_model_parallel_size or 1, eplb=enable_eplb
    )
    _state.build(make, backend)


def _build(
    topology: Topology,
    closing: ExitStack,
    *,
    sizes: Mapping[str, int],
    dcp: int,
    eplb: bool,
) -> dict[str, GroupCoordinator]:
    model = RankGrid.of(sizes)
    external = RankGrid.of({"external": max(topology.world_size // model.size, 1)})
    grid, world = RankGrid((*external.axes, *model.axes)), get_world_group()
    built = ParallelGroups.build(topology, grid, ExitStack(), dcp=dcp, world=world)
    closing.enter_context(built)
    built.tp.start_broadcaster()
    named: dict[str, Any] = {name: getattr(built, name) for name in (*sizes, "dcp", "ep")}
    replica = grid.group_of(topology.rank, "pp", "pcp", "tp")
    named["inner_dp_world"] = world
    if len(replica) < topology.world_size:
        named["inner_dp_world"] = closing.enter_context(topology.group("inner_dp_world", replica))
    if eplb:
        named["eplb"] = closing.enter_context(topology.group("eplb", built.ep.ranks))
    sharers = [grid.dcp_group_of(rank, dcp) for rank in range(grid.size)]
    experts = grid.groups("dp", "pcp", "tp")
    kinds = {name: grid.groups(name) for name in sizes} | {
        "dcp": [ranks for rank, ranks in enumerate(sharers) if ranks[0] == rank],
        "ep": experts,
        "eplb": experts,
        "inner_dp_world": grid.groups("pp", "pcp", "tp"),
    }
    for name, group in named.items():
        group.group_ranks = kinds[name]
    return named


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    prefill_context_model_parallel_size: int = 1,
    decode_context_model_parallel_size: int | None = 1,
    backend: str | None = None,
    *,
    data_parallel_size: int | None = None,
    enable_eplb: bool | None = None,
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
            data_parallel_size=data_parallel_size,
            enable_eplb=enable_eplb,
        )
        return
    actual = {name: _state.group(name).world_size for name in expected}
    if actual != expected:
        raise ValueError(f"the groups have the sizes {actual}, not {expected}")


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    """Return the size of `get_dcp_group` and this rank; (1, 0) without, or if not ``enabled``."""
    if not enabled or not model_parallel_is_initialized():
        return 1, 0
    group = get_dcp_group()
    return group.world_size, group.rank_in_group


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
