"""Keep one default topology for an engine's module functions, and share its arithmetic."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, HashStore, PrefixStore, ProcessGroup, Store, TCPStore

from coordinator import torch_groups
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups, Topology, current
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


def layers_of_stage(
    partition: str, num_hidden_layers: int, pp_rank: int, pp_size: int
) -> tuple[int, int]:
    """Return the first layer of a stage and the first of the next, from the stages' sizes.

    ``partition`` has one number per stage, separated by commas, with the sum ``num_hidden_layers``.
    Raises ValueError if they are not numbers, too few or many, or have another sum.
    """
    try:
        layers = [int(each) for each in partition.split(",")]
    except ValueError as error:
        raise ValueError(f"layers of each stage must be numbers; got {partition!r}") from error
    if len(layers) != pp_size or sum(layers) != num_hidden_layers:
        raise ValueError(
            f"{partition!r} puts {sum(layers)} layers on {len(layers)} stages; "
            f"there are {num_hidden_layers} layers and {pp_size} stages"
        )
    start = sum(layers[:pp_rank])
    return start, start + layers[pp_rank]


def in_the_same_node_as(pg: ProcessGroup | ObjectGroup, source_rank: int = 0) -> list[bool]:
    """Return for each rank if it can attach ``source_rank``'s shared memory. Collective: yes."""
    group = as_object_group(pg)
    beside = (source_rank, *ranks_beside(group, source_rank))
    return [rank in beside for rank in range(group.world_size)]


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
    store: Store | None = None,
) -> Topology:
    """Meet all ranks, and make torch's default process group if it does not exist.

    Arguments as for `init_distributed_environment`. ``deadline`` is for the arrival of all ranks;
    ``closing`` closes everything that is made for the topology. ``store`` None: by ``method``.

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
    if store is None and method.startswith("file://"):
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


G = TypeVar("G", bound=GroupCoordinator)


class GlobalState(Generic[G]):
    """All ranks, and the groups of a model on them; either may be missing.

    Methods that need a group raise `NotInitializedError` if it does not exist.

    Attributes:
        device_communicators: groups may use more than torch's process groups.
        store: stores the argument of SGLang's ``set_global_tcp_store``.
    """

    def __init__(
        self, group_type: type[G], names: Callable[[ParallelGroups], Mapping[str, GroupCoordinator]]
    ) -> None:
        """``names`` returns the engine's names of groups that `coordinator.init` built."""
        self._group_type = group_type
        self._names = names
        self._topology: Topology | None = None
        self._world: G | None = None
        self._groups: Mapping[str, G] = {}
        self._shared: WeakKeyDictionary[GroupCoordinator, G] = WeakKeyDictionary()
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
    def world(self) -> G | None:
        """Return all ranks: of `meet`, or else of `coordinator.current`; None before both."""
        groups = self._worker_groups() if self._world is None else None
        return self._world if groups is None else self._share(groups.world)

    @property
    def groups(self) -> Mapping[str, G]:
        """Return the model's groups by name: of `build`, or else of `coordinator.current`."""
        if self._groups or (groups := self._worker_groups()) is None:
            return self._groups
        return {name: self._share(group) for name, group in self._names(groups).items()}

    def _worker_groups(self) -> ParallelGroups | None:
        """Return the groups of this process that this library built, as in a pool's worker."""
        if self._topology is not None:
            return None
        try:
            return current()
        except RuntimeError:
            return None

    def _share(self, group: GroupCoordinator) -> G:
        if group not in self._shared:
            self._shared[group] = self._group_type.sharing(group)
        return self._shared[group]

    @property
    def topology(self) -> Topology:
        """Return all ranks; raise NotInitializedError before they met."""
        if self._topology is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return self._topology

    def meet(
        self,
        world_size: int,
        rank: int,
        method: str,
        local_rank: int,
        backend: str,
        deadline: Deadline,
        store: Store | None = None,
    ) -> None:
        """Meet all ranks and build the world group. Collective: yes, every rank.

        ``store``: a store that all ranks reach; None: by ``method``.

        A second call only checks the size. Raises ValueError if the world has another size, or the
        method is unknown.
        """
        existing = self.world
        if existing is not None:
            if world_size not in (-1, existing.world_size):
                raise ValueError(f"the world has {existing.world_size} ranks, not {world_size}")
            return
        with ForkSafeExitStack() as undo:
            if not dist.is_initialized():
                undo.callback(_destroy_default_group)
            topology = meet_with_default_group(
                world_size, rank, method, local_rank, backend, deadline, undo, store
            )
            topology = replace(topology, group_type=self._group_type)
            with topology.abort_on_error():
                world = topology.group("world", list(range(topology.world_size)), deadline)
            undo.enter_context(world)
            self._topology, self._world = topology, cast("G", world)
            self._environment = undo.pop_all()

    def build(
        self, make: Callable[[Topology, ExitStack], Mapping[str, G]], backend: str | None
    ) -> None:
        """Build the groups of a model by ``make``. Collective: yes, every rank.

        The stack closes the groups. ``backend`` None: the world's. Raises NotInitializedError
        before the ranks met, and RuntimeError if the groups exist.
        """
        if self.groups:
            raise RuntimeError("the model-parallel groups are initialised already")
        topology = self.topology
        world_settings = topology.settings
        settings = Settings.of(
            backend or world_settings.backend,
            world_settings.local_rank,
            world_settings.sockets,
            torch_only=not self.device_communicators,
            secret=world_settings.secret,
        )
        with ForkSafeExitStack() as undo:
            self._groups = make(replace(topology, settings=settings), undo)
            self._model = undo.pop_all()

    @contextmanager
    def replaced(self, others: Mapping[str, G]) -> Iterator[None]:
        """Replace groups by ``others`` inside this context.

        Groups that are closed or built inside stay so.
        """
        before = self._groups
        self._groups = replaced = {**self.groups, **others}
        try:
            yield
        finally:
            if self._groups is replaced:
                self._groups = before

    def keep(self, group: GroupCoordinator) -> None:
        """Close ``group`` with the environment."""
        self._environment.enter_context(group)

    # --- functions of the engines ----------------------------------------------------------

    def group(self, name: str) -> G:
        """Return one of the model's groups."""
        group = self.groups.get(name)
        if group is None:
            missing = f"the group {name!r}" if self.groups else "model parallelism"
            raise NotInitializedError(f"{missing} is not initialised")
        return group

    def getter(self, name: str) -> Callable[[], G]:
        """Return a function that returns the group ``name``."""
        return lambda: self.group(name)

    def world_group(self) -> G:
        """Return the group of all ranks."""
        world = self.world
        if world is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return world

    def set_custom_all_reduce(self, enable: bool) -> None:
        """Allow later groups to use more than torch's process groups, or forbid it."""
        self.device_communicators = enable

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups of a model exist."""
        return bool(self.groups)

    def size(self, name: str) -> Callable[[], int]:
        """Return a function that returns the number of members of the group ``name``."""
        return lambda: self.group(name).world_size

    def rank(self, name: str) -> Callable[[], int]:
        """Return a function that returns this process's rank in the group ``name``."""
        return lambda: self.group(name).rank_in_group

    def close_model(self) -> None:
        """Close the groups of the model. Idempotent."""
        self._groups = {}
        self._model.close()

    def close_environment(self) -> None:
        """Close the world group and torch's default group; a forked child only drops them."""
        self._topology = self._world = self.store = None
        self._environment.close()
        if self._is_own:
            _destroy_default_group()

    def clean_up(self, shutdown_ray: bool = False) -> None:
        """Destroy all groups and free memory; with ``shutdown_ray`` shut down Ray too."""
        self.close_model()
        self.close_environment()
        if shutdown_ray:
            import ray  # noqa: PLC0415 - an optional dependency

            ray.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum of every ``input_``. Collective: yes, every member."""
        return self.group("tp").all_reduce(input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return every ``input_``, concatenated along ``dim``. Collective: yes, every member."""
        return self.group("tp").all_gather(input_, dim)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Return every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        return self.group("tp").gather(input_, dst, dim)

    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[str, Any] | None = None, src: int = 0
    ) -> Any:
        """Return the dict of ``src``; ``tensor_dict`` without a default group. Collective: yes."""
        if not self.groups and not dist.is_initialized():
            return tensor_dict
        return self.group("tp").broadcast_tensor_dict(tensor_dict, src)


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
