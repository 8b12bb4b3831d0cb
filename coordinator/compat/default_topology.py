"""The one topology of a process: what other engines keep in module globals."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import torch.distributed as dist

from coordinator.compat.default_group import meet_with_default_group
from coordinator.compat.errors import NotInitializedError
from coordinator.compat.group_face import GroupFace
from coordinator.setup.settings import Settings
from shm_broadcast.machine.forked_child import Closing, disown_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import ExitStack

    from torch.distributed import TCPStore

    from coordinator.group import GroupCoordinator
    from coordinator.setup.topology import Topology
    from shm_broadcast import Deadline

    Known = tuple[GroupCoordinator, Callable[[], list[list[int]]]]
    """A group, and what tells the ranks of all groups of its kind."""

    Build = Callable[[Topology, GroupCoordinator, ExitStack], Mapping[str, Known]]
    """Builds the groups of a model over all ranks; the stack closes them."""

F = TypeVar("F", bound=GroupFace)


class DefaultTopology(Generic[F]):
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
        self._environment = Closing()
        self._model = Closing()
        self._is_own = True
        disown_in_children(self)

    def disown(self) -> None:
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
        with Closing() as undo:
            if not dist.is_initialized():
                undo.callback(_leave_default_group)
            topology = meet_with_default_group(
                world_size, rank, method, local_rank, backend, deadline, undo
            )
            with topology.telling_why():
                world = topology.group("world", list(range(topology.world_size)), deadline)
            undo.enter_context(world)
            self._topology, self.world = topology, self._dialect.over(world)
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
        with Closing() as undo:
            known = make(replace(topology, settings=settings), world.group, undo)
            faces = {id(world.group): world}
            for group, kind in known.values():
                faces.setdefault(id(group), self._dialect.over(group, kind))
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
