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
    """The groups of this rank along each axis of a grid of ranks.

    Example: ``Mesh((groups.dp, groups.tp), groups.world)``. It does not close its groups.

    Attributes:
        axes: the group along each axis, outermost first.
        flat: the group of all ranks, in row-major order; None: collectives over several axes at
            once are not possible.
        costs: the costs along the axes, for `CommSpec.cost` and `plan`; None: all cost the same.

    Raises:
        ValueError: this process has another rank in ``flat`` than on the axes, or ``costs`` belong
            to a mesh of another shape.
    """

    axes: tuple[GroupCoordinator, ...]
    flat: GroupCoordinator | None = None
    costs: MeshCosts | None = None

    def __post_init__(self) -> None:
        """Check the parts against each other."""
        if self.cost_model.shape != self.shape:
            raise ValueError(f"these costs are of another mesh than {self.shape}: {self.costs}")
        here = 0
        size = 1
        for axis in self.axes:
            here = here * axis.world_size + axis.rank_in_group
            size *= axis.world_size
        if self.flat is not None and (self.flat.rank_in_group, self.flat.world_size) != (
            here,
            size,
        ):
            raise ValueError(
                f"{self.flat.name} has this process as rank {self.flat.rank_in_group} of "
                f"{self.flat.world_size}; on the axes it is rank {here} of {size}"
            )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, costs: MeshCosts | None = None) -> Self:
        """Make groups along the dimensions of a torch mesh, which must have names.

        The torch mesh stays as it is, so it gets no flattened dimension: torch would use one for
        DTensors too, wrongly if they are cut unevenly twice. The caller closes ``axes`` and
        ``flat``.

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
        """The number of ranks on each axis."""
        return tuple(axis.world_size for axis in self.axes)

    @property
    def cost_model(self) -> MeshCosts:
        """The costs along the axes; the default ones if none were given."""
        return MeshCosts.uniform(self.shape) if self.costs is None else self.costs

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's position on each axis."""
        return tuple(axis.rank_in_group for axis in self.axes)

    def group(self, axes: Axes) -> GroupCoordinator:
        """The group along one axis, or along several axes together.

        Raises:
            ValueError: there is no such axis, or no group for these axes together.
        """
        wanted = (axes,) if isinstance(axes, int) else tuple(axes)
        if not wanted or any(not 0 <= axis < len(self.axes) for axis in wanted):
            raise ValueError(f"{axes} are not axes of a mesh of {self.shape}")
        if list(wanted) != sorted(set(wanted)):
            raise ValueError(f"axes are taken in their order, each once; got {wanted}")
        long = [axis for axis in wanted if self.shape[axis] > 1]
        if len(long) < 2:
            return self.axes[long[0] if long else wanted[0]]
        if self.flat is None or long != [a for a, size in enumerate(self.shape) if size > 1]:
            raise ValueError(f"no group of this mesh is along the axes {wanted} together")
        return self.flat
