"""A group seen as its nodes: within each, and between them.

    nodes {0, 1}, {2, 3}:    intra [0 1] [2 3]    inter [0 2]

``inter`` holds the first member of each node. Where traffic between nodes is the narrow
part, a reduction crosses it once per node: reduce within, all-reduce between, broadcast
within.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from device_comm import ReduceOp, check_reduction

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.verbs import TensorVerbs, Timeout


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The groups that one member of ``world`` is in.

    Attributes:
        world: the whole group.
        intra: its members on this node; ``world`` itself where there is one node.
        inter: the first member of each node; None on the others.
    """

    world: TensorVerbs
    intra: TensorVerbs
    inter: TensorVerbs | None

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Reduce ``x`` over the world, in three steps. Collective: yes, every member.

        An average is a sum, divided once: right for nodes of different sizes too. The result
        is bitwise identical on all members.

        Returns:
            ``out``, or a tensor like ``x``; ``x`` itself in a group of one.
        """
        if self.intra is self.world:
            return self.world.all_reduce(x, op=op, out=out, timeout=timeout)  # type: ignore[no-any-return]
        check_reduction(op, x.dtype)
        inner = ReduceOp.SUM if op is ReduceOp.AVG else op
        total = self.intra.reduce(x, op=inner, timeout=timeout)
        if self.inter is not None:
            total = self.inter.all_reduce(total, op=inner, timeout=timeout)
            if op is ReduceOp.AVG:
                total = total / self.world.world_size
        result = self.intra.broadcast(x if total is None else total, timeout=timeout)
        return result if out is None else out.copy_(result)
