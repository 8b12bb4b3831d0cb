"""A mesh of groups: one group along each axis, and one of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from coordinator import torch_groups
from coordinator.group import GroupCoordinator
from coordinator.layout.plan import Axes, MeshCosts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's group along each axis of a grid: ``Mesh((groups.dp, groups.tp), groups.world)``.

    A mesh does not close its groups.

    Attributes:
        axes: the group along each axis, outermost first.
        flat: the group of all ranks, in row-major order, for collectives over several axes at once.
        costs: the costs along the axes, for `CommSpec.cost` and `plan`; None: equal on all axes.

    Raises:
        ValueError: this process has another rank in ``flat`` than on the axes, or ``costs`` belong
            to a mesh of another shape.
    """

    axes: tuple[GroupCoordinator, ...]
    flat: GroupCoordinator | None = None
    costs: MeshCosts | None = None

    def __post_init__(self) -> None:
        if self.cost_model.shape != self.shape:
            raise ValueError(f"the mesh is {self.shape}, but the costs are {self.costs}")
        rank = 0
        size = 1
        for axis in self.axes:
            rank = rank * axis.world_size + axis.rank_in_group
            size *= axis.world_size
        if self.flat is not None and (self.flat.rank_in_group, self.flat.world_size) != (
            rank,
            size,
        ):
            raise ValueError(
                f"this process is rank {self.flat.rank_in_group} of {self.flat.world_size} in "
                f"{self.flat.name}, but rank {rank} of {size} on the axes"
            )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, costs: MeshCosts | None = None) -> Self:
        """Make groups along the dimensions of a torch mesh; the caller closes them.

        The torch mesh gets no flattened dimension: torch would use it for DTensors too, wrongly if
        they are cut unevenly twice.

        Collective: yes, every rank of the mesh.

        Raises:
            ValueError: the dimensions have no names.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError("the dimensions of the mesh need names")
        axes = tuple(GroupCoordinator.from_device_mesh(mesh[name]) for name in names)
        flat = axes[0]
        if len(axes) > 1:
            flat = GroupCoordinator(
                [mesh.mesh.flatten().tolist()],
                flat.rank,
                torch_groups.backend_of(mesh.get_group(0)),
                True,
                group_name="_".join(names),
            )
        return cls(axes, flat, costs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of ranks on each axis."""
        return tuple(axis.world_size for axis in self.axes)

    @property
    def cost_model(self) -> MeshCosts:
        """Return ``costs``, or the default costs."""
        return MeshCosts.uniform(self.shape) if self.costs is None else self.costs

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Return this rank's position on each axis."""
        return tuple(axis.rank_in_group for axis in self.axes)

    def group(self, axes: Axes) -> GroupCoordinator:
        """Return the group along the axes; raise ValueError if there is none."""
        chosen = (axes,) if isinstance(axes, int) else tuple(axes)
        if not chosen or any(not 0 <= axis < len(self.axes) for axis in chosen):
            raise ValueError(f"{axes} are not axes of a mesh of {self.shape}")
        if list(chosen) != sorted(set(chosen)):
            raise ValueError(f"axes must be in ascending order, each once; got {chosen}")
        long = [axis for axis in chosen if self.shape[axis] > 1]
        if len(long) < 2:
            return self.axes[long[0] if long else chosen[0]]
        if self.flat is None or long != [a for a, size in enumerate(self.shape) if size > 1]:
            raise ValueError(f"this mesh has no group along the axes {chosen} together")
        return self.flat
