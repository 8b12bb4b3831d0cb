"""Which groups SGLang's models have: the ranks of a stage, cut for attention and for experts.

rank = pp_rank * tp + tp_rank
tp_rank = (attn_dp_rank * attn_cp + attn_cp_rank) * attn_tp + attn_tp_rank
tp_rank = (moe_dp_rank * moe_ep + moe_ep_rank) * moe_tp + moe_tp_rank
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.compat.arithmetic import divide
from coordinator.rank_grid import RankGrid

if TYPE_CHECKING:
    from contextlib import ExitStack

    from coordinator.compat.default_topology import Known
    from coordinator.group import GroupCoordinator
    from coordinator.setup.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """How a model is cut: what SGLang has in its runtime context.

    Attributes:
        tp: ranks that share a layer.
        pp: stages.
        attn_dp: replicas of the attention within ``tp``.
        attn_cp: ranks that share a prompt there.
        moe_ep: groups of ranks with different experts within ``tp``.
        moe_dp: replicas of the experts there.
        dcp: neighbours within ``tp`` that share contexts; no such groups if 1.
        shared_experts_tp: ranks that share the experts that all tokens take; None: no such groups.

    Raises:
        NotDivisibleError: they do not fit into each other.
    """

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    attn_cp: int = 1
    moe_ep: int = 1
    moe_dp: int = 1
    dcp: int = 1
    shared_experts_tp: int | None = None

    @property
    def attention(self) -> RankGrid:
        """All ranks, a stage's cut for attention."""
        attn_tp = divide(self.tp, self.attn_dp * self.attn_cp)
        return RankGrid.of(
            {"pp": self.pp, "attn_dp": self.attn_dp, "attn_cp": self.attn_cp, "attn_tp": attn_tp}
        )

    @property
    def experts(self) -> RankGrid:
        """All ranks, a stage's cut for experts."""
        moe_tp = divide(self.tp, self.moe_dp * self.moe_ep)
        return RankGrid.of(
            {"pp": self.pp, "moe_dp": self.moe_dp, "moe_ep": self.moe_ep, "moe_tp": moe_tp}
        )

    def kinds(self) -> dict[str, list[list[int]]]:
        """The ranks of all groups, by what kind they are."""
        stages = RankGrid.of({"pp": self.pp, "tp": self.tp})
        attention, experts = self.attention, self.experts
        found = {
            "tp": stages.groups("tp"),
            "pp": stages.groups("pp"),
            "self_pp": [[rank] for rank in range(stages.size)],
            "attn_tp": attention.groups("attn_tp"),
            "attn_cp": attention.groups("attn_cp"),
            "moe_tp": experts.groups("moe_tp"),
            "moe_ep": experts.groups("moe_ep"),
            # Ranks that share a prompt share its tokens before these go to the experts.
            "moe_dp": (
                attention.groups("attn_cp")
                if self.attn_cp > self.moe_dp
                else experts.groups("moe_dp")
            ),
        }
        if self.dcp > 1:
            found["dcp"] = _runs(stages.size, self.tp, self.dcp)
        if self.shared_experts_tp is not None and self.shared_experts_tp > 1:
            attn_tp = dict(attention.axes)["attn_tp"]
            found["shared_experts_tp"] = _runs(stages.size, attn_tp, self.shared_experts_tp)
        return found


def build(
    topology: Topology,
    world: GroupCoordinator,
    closing: ExitStack,
    *,
    widths: Widths,
    broadcaster: bool,
    duplicate_tp: bool,
) -> dict[str, Known]:
    """Build the groups of a model; those of the same ranks are one group.

    Args:
        topology: all ranks.
        world: their group.
        closing: closes the others.
        widths: how the model is cut.
        broadcaster: have queues for the objects that rank 0 of a group broadcasts.
        duplicate_tp: have a second group of the ranks of ``tp``, for use beside it.

    Collective: yes, every rank.

    Raises:
        ValueError: the sizes do not make up the world.
    """
    if widths.tp * widths.pp != world.world_size:
        needed = f"tp={widths.tp} x pp={widths.pp} takes {widths.tp * widths.pp} ranks"
        raise ValueError(f"{needed}, not {world.world_size}")
    built: dict[tuple[int, ...], GroupCoordinator] = {}
    known: dict[str, Known] = {}
    for name, kind in widths.kinds().items():
        ranks = next(ranks for ranks in kind if topology.rank in ranks)
        group = built.get(tuple(ranks))
        if group is None:
            group = closing.enter_context(topology.group(name, ranks))
            built[tuple(ranks)] = group
            if broadcaster:
                group.start_broadcaster()
        known[name] = (group, lambda kind=kind: kind)  # type: ignore[misc]
    if duplicate_tp:
        group, kind_of = known["tp"]
        second = closing.enter_context(topology.group("pdmux_prefill_tp", group.ranks))
        known["pdmux_prefill_tp"] = (second, kind_of)
    return known


def _runs(ranks: int, within: int, size: int) -> list[list[int]]:
    divide(within, size)
    return [list(range(start, start + size)) for start in range(0, ranks, size)]
