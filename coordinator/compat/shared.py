"""Share the parts of all engines' interfaces, over one default topology.

A `GroupAdapter` wraps a `GroupCoordinator` (`GroupAdapter.group`) in the interface of another
engine. Ranks in arguments are ranks in the group.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, HashStore, PrefixStore, ProcessGroup, TCPStore

from coordinator import torch_groups
from coordinator.group import GraphCaptureContext, GroupCoordinator
from coordinator.groups import Topology
from coordinator.launcher import Launch
from coordinator.rendezvous import Settings
from coordinator.secret import launcher_secret
from shm_broadcast import Deadline
from shm_broadcast.process import ForkSafeExitStack, call_in_forked_children
from shm_broadcast.queue.rendezvous import ObjectGroup, as_object_group, ranks_beside


class NotInitializedError(RuntimeError, AssertionError):
    """The groups are not initialised, or are destroyed."""


class NotDivisibleError(ValueError, AssertionError):
    """A size does not divide another."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise NotDivisibleError unless ``numerator`` is a multiple of ``denominator``."""
    if numerator % denominator:
        raise NotDivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the whole quotient; raise NotDivisibleError if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """Return the equal parts of ``tensor`` (..., n), each (..., n / num_partitions).

    The parts are views of ``tensor``; contiguous copies with ``contiguous_split_chunks``. Raises
    NotDivisibleError if ``num_partitions`` does not divide n.
    """
    parts = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def layers_as_told(
    told: str, num_hidden_layers: int, pp_rank: int, pp_size: int
) -> tuple[int, int]:
    """Return the first layer of a stage and the first of the next, from the stages' sizes.

    ``told`` has one number per stage, separated by commas, with the sum ``num_hidden_layers``.
    Raises ValueError if they are not numbers, too few or many, or have another sum.
    """
    try:
        layers = [int(each) for each in told.split(",")]
    except ValueError as error:
        raise ValueError(f"layers of each stage must be numbers; got {told!r}") from error
    if len(layers) != pp_size or sum(layers) != num_hidden_layers:
        raise ValueError(
            f"{told!r} puts {sum(layers)} layers on {len(layers)} stages; "
            f"there are {num_hidden_layers} layers and {pp_size} stages"
        )
    start = sum(layers[:pp_rank])
    return start, start + layers[pp_rank]


def in_the_same_node_as(pg: ProcessGroup | ObjectGroup, source_rank: int = 0) -> list[bool]:
    """Return for each rank if it can attach ``source_rank``'s shared memory. Collective: yes."""
    group = as_object_group(pg)
    beside = (source_rank, *ranks_beside(group, source_rank))
    return [rank in beside for rank in range(group.world_size)]


class GroupAdapter:
    """A group (``group``) with the interface of other engines.

    ``rank`` and ``ranks`` are global. ``local_rank``, also ``device_index``, is this process's
    number on its node. ``unique_name`` is unique among the groups of this process.
    """

    @classmethod
    def wrap(
        cls, group: GroupCoordinator, kind: Callable[[], list[list[int]]] | None = None
    ) -> Self:
        """Return an adapter of a group, which its owner closes. Collective: yes, every member.

        ``kind`` returns the ranks of all groups of its kind; None: of this one.
        """
        adapter = cls.__new__(cls)
        adapter._bind(group, kind or (lambda: [group.ranks]))
        return adapter

    def _bind(self, group: GroupCoordinator, kind: Callable[[], list[list[int]]]) -> None:
        self.group = group
        self._kind = kind
        self.rank = group.rank
        self.ranks = group.ranks
        self.rank_in_group = group.rank_in_group
        self.world_size = group.world_size
        self.local_rank = self.device_index = group.local_rank
        self.device: torch.device = group.device
        self.unique_name = group.unique_name
        self.first_rank, self.last_rank = group.first_rank, group.last_rank
        self.next_rank, self.prev_rank = group.next_rank, group.prev_rank
        self.is_first_rank, self.is_last_rank = group.is_first_rank, group.is_last_rank

    @property
    def group_ranks(self) -> list[list[int]]:
        """Return the global ranks of all known groups of this kind."""
        return self._kind()

    @property
    def cpu_group(self) -> ProcessGroup:
        """Return the members' torch process group on the CPU."""
        return self.group.cpu_group

    @property
    def device_group(self) -> ProcessGroup:
        """Return the members' torch process group for `device`."""
        return self.group.device_group

    # --- tensors -------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum of every ``input_``; of one member, ``input_``. Collective: yes."""
        if self.world_size == 1:
            return input_
        return self.group.all_reduce(input_)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Return every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        if self.world_size == 1:
            return input_
        return self.group.gather(input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """Fill ``input_`` with that of ``src`` and return it. Collective: yes, every member."""
        return self.group.broadcast_(input_, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send a tensor to ``dst``; None: to the next rank."""
        self.group.send(tensor, dst)

    def recv(self, size: int | Sequence[int], dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor from ``src``; None: from the previous rank."""
        return self.group.recv(size, dtype, src)

    def barrier(self) -> None:
        """Return once every member has called this. Collective: yes, every member."""
        self.group.barrier()

    # --- objects and dicts ---------------------------------------------------------------

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """Return the object of ``src``. Collective: yes, every member."""
        return self.group.broadcast_object(obj, src)

    def broadcast_object_list(
        self,
        obj_list: list[Any],
        src: int = 0,
        group: ProcessGroup | None = None,  # noqa: ARG002 - the original ignores it as well
    ) -> list[Any]:
        """Fill every member's list with the objects of ``src``'s. Collective: yes."""
        return self.group.broadcast_object_list(obj_list, src)

    def broadcast_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any] | None = None,
        src: int = 0,
        group: ProcessGroup | None = None,  # noqa: ARG002 - the original ignores both as well
        metadata_group: ProcessGroup | None = None,  # noqa: ARG002
    ) -> Any:
        """Return the dict of ``src`` on all members. Collective: yes, every member."""
        if self.world_size == 1:
            return tensor_dict
        return self.group.broadcast_tensor_dict(tensor_dict, src)

    # --- life ----------------------------------------------------------------------------

    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Capture a CUDA graph with collectives; no effect on CPUs. Collective: yes."""
        return self.group.graph_capture(graph_capture_context)

    def destroy(self) -> None:
        """Close the group. Idempotent."""
        self.group.close()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} over {self.group!r}>"


def unwrap(adapter: GroupAdapter | None) -> GroupCoordinator | None:
    """Return the group of an adapter; None for None."""
    return None if adapter is None else adapter.group


_OPERATION_TIMEOUT = timedelta(minutes=30)
"""The operation timeout of torch's default group, as torch sets it."""


def meet_with_default_group(
    world_size: int,
    rank: int,
    method: str,
    local_rank: int,
    backend: str,
    deadline: Deadline,
    closing: ExitStack,
) -> Topology:
    """Meet all ranks, and make torch's default process group if it does not exist.

    Arguments as for `init_distributed_environment`. ``deadline`` is for the arrival of all ranks;
    ``closing`` closes everything that is made for the topology.

    Collective: yes, every rank.

    Raises:
        GroupTimeoutError: ranks did not arrive in time; names them.
        GroupAbortedError: a rank failed meanwhile; has its reason.
        ValueError: the method is unknown, or lacks an argument.
    """
    if not torch.cuda.is_available():
        backend = "gloo"
    if dist.is_initialized():
        launch = _launch_of_default_group(local_rank)
        existing = (launch.world_size, launch.rank)
        if world_size not in (-1, existing[0]) or rank not in (-1, existing[1]):
            raise ValueError(
                f"torch's default group exists: it has {existing[0]} ranks, and this is rank "
                f"{existing[1]}; the call specifies {world_size} and {rank}"
            )
        settings = Settings.of(backend, launch.local_rank, secret=launch.secret)
        return Topology.meet(
            launch, settings, closing, store=torch_groups.default_store(), timeout=deadline
        )
    launch = _launch(world_size, rank, method, local_rank)
    store = None
    if method.startswith("file://"):
        store = FileStore(method.removeprefix("file://"), launch.world_size)
    settings = Settings.of(backend, launch.local_rank, secret=launch.secret)
    topology = Topology.meet(launch, settings, closing, store=store, timeout=deadline)
    job_store = HashStore() if topology.exchange is None else topology.exchange.store
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("default", job_store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_OPERATION_TIMEOUT,
        )
    except RuntimeError:
        if topology.nodes is not None:  # the board has the reason if a rank failed after connecting
            topology.nodes.board.check("connecting torch's default group")
        raise
    return topology


def _launch(world_size: int, rank: int, method: str, local_rank: int) -> Launch:
    if method == "env://":
        default = Launch.from_environment()
        return replace(
            default,
            rank=default.rank if rank < 0 else rank,
            world_size=default.world_size if world_size < 0 else world_size,
            local_rank=default.local_rank if local_rank < 0 else local_rank,
        )
    if rank < 0 or world_size < 0:
        raise ValueError(f"{method!r} needs rank and world_size")
    local_rank = rank if local_rank < 0 else local_rank
    launch = Launch(rank, world_size, local_rank, secret=launcher_secret())
    parts = urlsplit(method)
    if parts.scheme == "tcp":
        return replace(launch, master_addr=parts.hostname or "", master_port=parts.port or 0)
    if parts.scheme == "file":
        return launch
    raise ValueError(f"distributed_init_method must be env://, tcp:// or file://; got {method!r}")


def _launch_of_default_group(local_rank: int) -> Launch:
    rank = dist.get_rank()
    local_rank = rank if local_rank < 0 else local_rank
    return Launch(rank, dist.get_world_size(), local_rank, secret=launcher_secret())


if TYPE_CHECKING:
    Known = tuple[GroupCoordinator, Callable[[], list[list[int]]]]
    """A group, and a function that returns the ranks of all groups of its kind."""

    Build = Callable[[Topology, GroupCoordinator, ExitStack], Mapping[str, Known]]
    """A function that builds the groups of a model over all ranks; the stack closes them."""

F = TypeVar("F", bound=GroupAdapter)


class GlobalState(Generic[F]):
    """All ranks, and the groups of a model on them; either may be missing.

    Attributes:
        world: the group of all ranks.
        groups: the model's groups, by name; a group with several names has one adapter.
        device_communicators: groups may use more than torch's process groups.
        store: stores the argument of SGLang's ``set_global_tcp_store``.
    """

    def __init__(self, adapter_type: type[F]) -> None:
        self._adapter_type = adapter_type
        self._topology: Topology | None = None
        self.world: F | None = None
        self.groups: dict[str, F] = {}
        self.device_communicators = True
        self.store: TCPStore | None = None
        self._environment = ForkSafeExitStack()
        self._model = ForkSafeExitStack()
        self._is_own = True
        call_in_forked_children(self)

    def after_fork_in_child(self) -> None:
        """Disown torch's default group, which the parent still uses."""
        self._is_own = False

    @property
    def topology(self) -> Topology:
        """Return all ranks; raise NotInitializedError before they met."""
        if self._topology is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return self._topology

    def group(self, name: str) -> F:
        """Return one of the model's groups; raise NotInitializedError if it does not exist."""
        group = self.groups.get(name)
        if group is None:
            missing = f"the group {name!r}" if self.groups else "model parallelism"
            raise NotInitializedError(f"{missing} is not initialised")
        return group

    def meet(
        self,
        world_size: int,
        rank: int,
        method: str,
        local_rank: int,
        backend: str,
        deadline: Deadline,
    ) -> None:
        """Meet all ranks and build the world group. Collective: yes, every rank.

        A second call only checks the size. Raises ValueError if the world has another size, or the
        method is unknown.
        """
        if self.world is not None:
            if world_size not in (-1, self.world.world_size):
                raise ValueError(f"the world has {self.world.world_size} ranks, not {world_size}")
            return
        with ForkSafeExitStack() as undo:
            if not dist.is_initialized():
                undo.callback(_destroy_default_group)
            topology = meet_with_default_group(
                world_size, rank, method, local_rank, backend, deadline, undo
            )
            with topology.abort_on_error():
                world = topology.group("world", list(range(topology.world_size)), deadline)
            undo.enter_context(world)
            self._topology, self.world = topology, self._adapter_type.wrap(world)
            self._environment = undo.pop_all()

    def build(self, make: Build, backend: str | None) -> None:
        """Build the groups of a model by ``make``. Collective: yes, every rank.

        ``backend`` is of the groups; None: the world's. Raises NotInitializedError before the ranks
        met, and RuntimeError if the groups exist.
        """
        topology = self.topology
        if self.groups:
            raise RuntimeError("the model-parallel groups are initialised already")
        world_settings = topology.settings
        settings = Settings.of(
            backend or world_settings.backend,
            world_settings.local_rank,
            world_settings.sockets,
            torch_only=not self.device_communicators,
            secret=world_settings.secret,
        )
        world = self.world
        if world is None:
            raise NotInitializedError("the world group is not initialised")
        with ForkSafeExitStack() as undo:
            built = make(replace(topology, settings=settings), world.group, undo)
            adapters = {id(world.group): world}
            for group, kind in built.values():
                adapters.setdefault(id(group), self._adapter_type.wrap(group, kind))
            self.groups = {name: adapters[id(group)] for name, (group, _) in built.items()}
            self._model = undo.pop_all()

    @contextmanager
    def replaced(self, others: Mapping[str, F]) -> Iterator[None]:
        """Replace groups by ``others`` inside this context.

        Groups that are closed or built inside stay so.
        """
        before = self.groups
        self.groups = replaced = {**before, **others}
        try:
            yield
        finally:
            if self.groups is replaced:
                self.groups = before

    def keep(self, group: GroupCoordinator) -> None:
        """Close ``group`` with the environment."""
        self._environment.enter_context(group)

    def close_model(self) -> None:
        """Close the groups of the model. Idempotent."""
        self.groups = {}
        self._model.close()

    def close_environment(self) -> None:
        """Close the world group and torch's default group; a forked child only drops them."""
        self._topology = self.world = self.store = None
        self._environment.close()
        if self._is_own:
            _destroy_default_group()


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Getters(Generic[F]):
    """Functions for the modules of engines, which name them.

    Functions of a group raise `NotInitializedError` if it does not exist.
    """

    def __init__(self, state: GlobalState[F]) -> None:
        self._state = state

    def world_group(self) -> F:
        """Return the group of all ranks."""
        if self._state.world is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return self._state.world

    def set_custom_all_reduce(self, enable: bool) -> None:
        """Allow later groups to use more than torch's process groups, or forbid it."""
        self._state.device_communicators = enable

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups of a model exist."""
        return bool(self._state.groups)

    def tp_group(self) -> F:
        """Return the group of ranks that share this rank's layers."""
        return self._state.group("tp")

    def pp_group(self) -> F:
        """Return the group of the stages of this rank's model."""
        return self._state.group("pp")

    def dcp_group(self) -> F:
        """Return the group of ranks that share this rank's contexts."""
        return self._state.group("dcp")

    def tp_world_size(self) -> int:
        """Return the number of ranks that share a layer."""
        return self.tp_group().world_size

    def tp_rank(self) -> int:
        """Return this rank's position in `tp_group`."""
        return self.tp_group().rank_in_group

    def pp_rank(self) -> int:
        """Return this rank's stage."""
        return self.pp_group().rank_in_group

    def destroy_model_parallel(self) -> None:
        """Close the groups of the model. Idempotent."""
        self._state.close_model()

    def destroy_distributed_environment(self) -> None:
        """Close the world group and torch's default group."""
        self._state.close_environment()

    def cleanup_dist_env_and_memory(self, shutdown_ray: bool = False) -> None:
        """Destroy all groups and free memory; with ``shutdown_ray`` shut down Ray too."""
        self.destroy_model_parallel()
        self.destroy_distributed_environment()
        if shutdown_ray:
            import ray  # noqa: PLC0415 - an optional dependency

            ray.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum of every ``input_``. Collective: yes, every member."""
        return self.tp_group().all_reduce(input_)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Return every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        return self.tp_group().gather(input_, dst, dim)

    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[str, Any] | None = None, src: int = 0
    ) -> Any:
        """Return the dict of ``src``; ``tensor_dict`` without a default group. Collective: yes."""
        if not dist.is_initialized():
            return tensor_dict
        return self.tp_group().broadcast_tensor_dict(tensor_dict, src)
