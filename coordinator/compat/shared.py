"""What the copies of all engines' interfaces have in common, over one default topology.

A face holds a group and speaks of it in another dialect; the group itself is `GroupAdapter.group`,
for what the dialect has no word for. Ranks in arguments are ranks in the group.
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
    """There are no such groups, or not yet."""


class NotDivisibleError(ValueError, AssertionError):
    """A size does not divide another."""


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Accept only a multiple of ``denominator``.

    Raises:
        NotDivisibleError: it is none.
    """
    if numerator % denominator:
        raise NotDivisibleError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient, which is whole.

    Raises:
        NotDivisibleError: it is not.
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[Tensor]:
    """The equal parts of ``tensor`` (..., n), each (..., n / num_partitions).

    Args:
        tensor: of one dimension or more.
        num_partitions: divides n.
        contiguous_split_chunks: copies, in one piece each; otherwise views of ``tensor``.

    Raises:
        NotDivisibleError: it does not divide n.
    """
    parts = torch.split(tensor, divide(tensor.size(-1), num_partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def layers_as_told(
    told: str, num_hidden_layers: int, pp_rank: int, pp_size: int
) -> tuple[int, int]:
    """The first layer of a stage and the first of the next, where a list says how many each has.

    Args:
        told: one number for each stage, with commas between.
        num_hidden_layers: what they add up to.
        pp_rank: the stage.
        pp_size: how many stages.

    Raises:
        ValueError: they are not numbers, or too few or many, or do not add up.
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
    """For each rank of ``pg``, whether it can attach shared memory of ``source_rank``.

    Collective: yes, every rank of ``pg``.
    """
    group = as_object_group(pg)
    beside = (source_rank, *ranks_beside(group, source_rank))
    return [rank in beside for rank in range(group.world_size)]


class GroupAdapter:
    """A group as other engines' code knows it.

    Attributes:
        group: the group.
        rank: this process's global rank.
        ranks: the members' global ranks.
        rank_in_group: this member's rank.
        world_size: how many members.
        local_rank: this process's number on its node.
        device: where the tensors of the collectives are.
        device_index: the number of the device on its node: ``local_rank``.
        unique_name: as no other group of this process has it.
    """

    @classmethod
    def wrap(
        cls, group: GroupCoordinator, kind: Callable[[], list[list[int]]] | None = None
    ) -> Self:
        """The face of a group, which stays its owner's. Collective: yes, every member.

        Args:
            group: the group.
            kind: tells the ranks of all groups of its kind; None: of this one.
        """
        face = cls.__new__(cls)
        face._show(group, kind or (lambda: [group.ranks]))
        return face

    def _show(self, group: GroupCoordinator, kind: Callable[[], list[list[int]]]) -> None:
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
        """The global ranks of all groups of this kind, as far as they are known."""
        return self._kind()

    @property
    def cpu_group(self) -> ProcessGroup:
        """The members' torch process group on the CPU."""
        return self.group.cpu_group

    @property
    def device_group(self) -> ProcessGroup:
        """The members' torch process group for `device`."""
        return self.group.device_group

    # --- tensors -------------------------------------------------------------------------

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of every ``input_``; of one member, ``input_`` itself. Collective: yes."""
        if self.world_size == 1:
            return input_
        return self.group.all_reduce(input_)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        if self.world_size == 1:
            return input_
        return self.group.gather(input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """Fill ``input_`` with that of ``src``; returns it. Collective: yes, every member."""
        return self.group.broadcast_(input_, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send a tensor; None: to the next rank. Collective: no, the two members."""
        self.group.send(tensor, dst)

    def recv(self, size: int | Sequence[int], dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor; None: from the previous rank. Collective: no, the two members."""
        return self.group.recv(size, dtype, src)

    def barrier(self) -> None:
        """Return once every member has come here. Collective: yes, every member."""
        self.group.barrier()

    # --- objects and dicts ---------------------------------------------------------------

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The object of ``src``. Collective: yes, every member."""
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
        """The dict of ``src``, on all members. Collective: yes, every member."""
        if self.world_size == 1:
            return tensor_dict
        return self.group.broadcast_tensor_dict(tensor_dict, src)

    # --- life ----------------------------------------------------------------------------

    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> AbstractContextManager[GraphCaptureContext]:
        """Capture a CUDA graph with this group's collectives; nothing on the CPU.

        Collective: yes, every member.
        """
        return self.group.graph_capture(graph_capture_context)

    def destroy(self) -> None:
        """Give everything back; the second time does nothing. Collective: no."""
        self.group.close()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} over {self.group!r}>"


def unwrap(face: GroupAdapter | None) -> GroupCoordinator | None:
    """The group that a face shows; None of none."""
    return None if face is None else face.group


_OPERATION_TIMEOUT = timedelta(minutes=30)
"""What torch's own default group allows each operation."""


def meet_with_default_group(
    world_size: int,
    rank: int,
    method: str,
    local_rank: int,
    backend: str,
    deadline: Deadline,
    closing: ExitStack,
) -> Topology:
    """Meet all ranks, and make torch's default process group if there is none.

    Args:
        world_size: how many ranks; -1: what the environment or torch's group says.
        rank: this process's; -1: likewise.
        method: ``"env://"``, ``"tcp://host:port"`` or ``"file://path"``.
        local_rank: this process's number on its node; -1: the environment's, or the rank.
        backend: ``"nccl"`` stands for gloo where there is no GPU.
        deadline: when all have to have come.
        closing: what is made for the topology is closed with it.

    Collective: yes, every rank.

    Raises:
        GroupTimeoutError: some ranks did not come in time; names them.
        GroupAbortedError: a rank has given up meanwhile; says why.
        ValueError: the method is unknown, or wants what was not given.
    """
    if not torch.cuda.is_available():
        backend = "gloo"
    if dist.is_initialized():
        launch = _launch_of_default_group(local_rank)
        there = (launch.world_size, launch.rank)
        if world_size not in (-1, there[0]) or rank not in (-1, there[1]):
            raise ValueError(
                f"torch's default group, which is there already, has {there[0]} ranks, and this is "
                f"rank {there[1]}; asked for were {world_size} and {rank}"
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
    where = HashStore() if topology.exchange is None else topology.exchange.store
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("default", where),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=_OPERATION_TIMEOUT,
        )
    except RuntimeError:
        if topology.nodes is not None:  # one that has connected and then given up says why
            topology.nodes.board.check("connecting torch's default group")
        raise
    return topology


def _launch(world_size: int, rank: int, method: str, local_rank: int) -> Launch:
    if method == "env://":
        found = Launch.from_environment()
        return replace(
            found,
            rank=found.rank if rank < 0 else rank,
            world_size=found.world_size if world_size < 0 else world_size,
            local_rank=found.local_rank if local_rank < 0 else local_rank,
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
    """A group, and what tells the ranks of all groups of its kind."""

    Build = Callable[[Topology, GroupCoordinator, ExitStack], Mapping[str, Known]]
    """Builds the groups of a model over all ranks; the stack closes them."""

F = TypeVar("F", bound=GroupAdapter)


class GlobalState(Generic[F]):
    """All ranks, and the groups of a model on them, in one dialect; either may not be there.

    Attributes:
        world: the group of all ranks.
        groups: those of the model, by name; a group of several names has one face.
        device_communicators: whether groups may use more than torch's process groups.
        store: one that the caller wants to find again.
    """

    def __init__(self, dialect: type[F]) -> None:
        """Begin with nothing."""
        self._dialect = dialect
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
        """In a forked child: torch's default group is its parent's, too."""
        self._is_own = False

    @property
    def topology(self) -> Topology:
        """All ranks.

        Raises:
            NotInitializedError: they have not met.
        """
        if self._topology is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return self._topology

    def group(self, name: str) -> F:
        """One of the model's groups.

        Raises:
            NotInitializedError: there is none of this name.
        """
        found = self.groups.get(name)
        if found is None:
            what = f"the group {name!r}" if self.groups else "model parallelism"
            raise NotInitializedError(f"{what} is not initialised")
        return found

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

        The second call only checks the size.

        Raises:
            ValueError: the world has another size, or the method is unknown.
        """
        if self.world is not None:
            if world_size not in (-1, self.world.world_size):
                raise ValueError(f"the world has {self.world.world_size} ranks, not {world_size}")
            return
        with ForkSafeExitStack() as undo:
            if not dist.is_initialized():
                undo.callback(_leave_default_group)
            topology = meet_with_default_group(
                world_size, rank, method, local_rank, backend, deadline, undo
            )
            with topology.abort_on_error():
                world = topology.group("world", list(range(topology.world_size)), deadline)
            undo.enter_context(world)
            self._topology, self.world = topology, self._dialect.wrap(world)
            self._environment = undo.pop_all()

    def build(self, make: Build, backend: str | None) -> None:
        """Build the groups of a model. Collective: yes, every rank.

        Args:
            make: builds them.
            backend: of the groups; None: the world's.

        Raises:
            NotInitializedError: the ranks have not met.
            RuntimeError: the groups exist already.
        """
        topology = self.topology
        if self.groups:
            raise RuntimeError("the model-parallel groups are initialised already")
        old = topology.settings
        settings = Settings.of(
            backend or old.backend,
            old.local_rank,
            old.sockets,
            torch_only=not self.device_communicators,
            secret=old.secret,
        )
        world = self.world
        if world is None:
            raise NotInitializedError("the world group is not initialised")
        with ForkSafeExitStack() as undo:
            known = make(replace(topology, settings=settings), world.group, undo)
            faces = {id(world.group): world}
            for group, kind in known.values():
                faces.setdefault(id(group), self._dialect.wrap(group, kind))
            self.groups = {name: faces[id(group)] for name, (group, _) in known.items()}
            self._model = undo.pop_all()

    @contextmanager
    def replaced(self, others: Mapping[str, F]) -> Iterator[None]:
        """Have other groups of these names inside this context. Collective: no.

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
        """Close a group with the environment. Collective: no."""
        self._environment.enter_context(group)

    def close_model(self) -> None:
        """Close the groups of the model; again does nothing. Collective: no."""
        self.groups = {}
        self._model.close()

    def close_environment(self) -> None:
        """Close the world group and torch's default group. Collective: no.

        In a forked child it only forgets them.
        """
        self._topology = self.world = self.store = None
        self._environment.close()
        if self._is_own:
            _leave_default_group()


def _leave_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Getters(Generic[F]):
    """Each method is a function of a module, under the name that the engine gives it.

    Those that tell of groups raise `NotInitializedError` where there are none.
    """

    def __init__(self, state: GlobalState[F]) -> None:
        """Speak of ``state``."""
        self._state = state

    def world_group(self) -> F:
        """The group of all ranks."""
        if self._state.world is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return self._state.world

    def set_custom_all_reduce(self, enable: bool) -> None:
        """Whether groups made from now on may use more than torch's process groups."""
        self._state.device_communicators = enable

    def model_parallel_is_initialized(self) -> bool:
        """Whether the groups of a model have been built."""
        return bool(self._state.groups)

    def tp_group(self) -> F:
        """The ranks that share this one's layers."""
        return self._state.group("tp")

    def pp_group(self) -> F:
        """The stages of this rank's model."""
        return self._state.group("pp")

    def dcp_group(self) -> F:
        """The ranks that share this one's contexts."""
        return self._state.group("dcp")

    def tp_world_size(self) -> int:
        """How many ranks share a layer."""
        return self.tp_group().world_size

    def tp_rank(self) -> int:
        """This rank's position among those that share its layers."""
        return self.tp_group().rank_in_group

    def pp_rank(self) -> int:
        """This rank's stage."""
        return self.pp_group().rank_in_group

    def destroy_model_parallel(self) -> None:
        """Close the groups of the model; the second time does nothing. Collective: no."""
        self._state.close_model()

    def destroy_distributed_environment(self) -> None:
        """Close the world group, and torch's default group. Collective: no."""
        self._state.close_environment()

    def cleanup_dist_env_and_memory(self, shutdown_ray: bool = False) -> None:
        """Destroy everything and give memory back.

        Args:
            shutdown_ray: shut Ray down as well, if this process uses it.
        """
        self.destroy_model_parallel()
        self.destroy_distributed_environment()
        if shutdown_ray:
            import ray  # noqa: PLC0415 - an optional dependency

            ray.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of every ``input_``. Collective: yes, every member."""
        return self.tp_group().all_reduce(input_)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        return self.tp_group().gather(input_, dst, dim)

    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[str, Any] | None = None, src: int = 0
    ) -> Any:
        """The dict of ``src``, on all; one's own without torch's default group.

        Collective: yes, every member.
        """
        if not dist.is_initialized():
            return tensor_dict
        return self.tp_group().broadcast_tensor_dict(tensor_dict, src)
