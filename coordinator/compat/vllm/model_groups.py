"""Which groups vLLM's models have, built over ours."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from coordinator.groups import ParallelGroups
from coordinator.rank_grid import RankGrid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.compat.default_topology import Known
    from coordinator.group import GroupCoordinator
    from coordinator.setup.topology import Topology


def build(
    topology: Topology,
    world: GroupCoordinator,
    closing: ExitStack,
    *,
    sizes: Mapping[str, int],
    dcp: int,
    eplb: bool,
) -> dict[str, Known]:
    """Build the groups of a model.

    The ranks that the sizes leave over form external replicas, which know nothing of each
    other: rank = (((external * dp + dp_rank) * pp + pp_rank) * pcp + pcp_rank) * tp + tp_rank.

    Args:
        topology: all ranks.
        world: their group.
        closing: closes the others.
        sizes: of the axes dp, pp, pcp and tp.
        dcp: how many ranks share contexts.
        eplb: have a second expert-parallel group, for balancing experts meanwhile.

    Collective: yes, every rank.

    Raises:
        ValueError: the sizes do not divide the world.
    """
    model = RankGrid.of(sizes)
    external = RankGrid.of({"external": max(topology.world_size // model.size, 1)})
    grid = RankGrid((*external.axes, *model.axes))
    groups = ParallelGroups.build(topology, grid, ExitStack(), dcp=dcp, world=world)
    closing.enter_context(groups)
    groups.tp.start_broadcaster()
    inner, whole = world, partial(grid.groups, "pp", "pcp", "tp")
    replica = grid.group_of(topology.rank, "pp", "pcp", "tp")
    if len(replica) < topology.world_size:
        inner = closing.enter_context(topology.group("inner_dp_world", replica))
    experts = partial(grid.groups, "dp", "pcp", "tp")

    def sharers() -> list[list[int]]:
        runs = (grid.dcp_group_of(rank, dcp) for rank in range(grid.size))
        return [run for rank, run in enumerate(runs) if run[0] == rank]

    found: dict[str, Known] = {
        **{name: (getattr(groups, name), partial(grid.groups, name)) for name in sizes},
        "dcp": (groups.dcp, sharers),
        "ep": (groups.ep, experts),
        "inner_dp_world": (inner, whole),
    }
    if eplb:
        second = closing.enter_context(topology.group("eplb", groups.ep.ranks))
        found["eplb"] = (second, experts)
    return found
