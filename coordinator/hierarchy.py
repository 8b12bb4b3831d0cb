"""A group divided by nodes: a group within each node, and one between them.

    nodes {0, 1}, {2, 3}:    intra [0 1] [2 3]    inter [0 2]

``inter`` has the first member of each node. If the network between nodes is the bottleneck, an
all-reduce in three steps sends each tensor over it only once per node: reduce within the node,
all-reduce between nodes, broadcast within the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from device_comm import ReduceOp, check_reduction
from device_comm.verbs.checks import check_out

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.verbs.member import Member
    from device_comm.verbs.arguments import Timeout

G_co = TypeVar("G_co", bound="Member", covariant=True)


@dataclass(frozen=True, slots=True)
class Hierarchy(Generic[G_co]):
    """The groups that one member of ``world`` is in.

    Attributes:
        world: the whole group.
        intra: its members on this node; ``world`` itself where there is one node.
        inter: the first member of each node; None on the others.
    """

    world: G_co
    intra: G_co
    inter: G_co | None

    def all_reduce(
        self,
        x: Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Tensor | None = None,
        timeout: Timeout = None,
    ) -> Tensor:
        """Reduce ``x`` over the world, in three steps. Collective: yes, every member.

        An average is a sum, divided once: right for nodes of different sizes too. That of half
        types is summed in float32 and rounded once. The result is bitwise identical on all members.

        Returns:
            ``out``, or a tensor like ``x``; ``x`` itself in a group of one.

        Raises:
            TypeError: ``op`` is not for this dtype, or ``out`` has another one.
            ValueError: ``out`` has another shape or device.
        """
        world, intra = self.world.device_communicator, self.intra.device_communicator
        if self.intra is self.world:
            return world.all_reduce(x, op=op, out=out, timeout=timeout)
        check_reduction(op, x.dtype)
        if out is not None:
            check_out(out, x.shape, x.dtype, world.device)
        inner, wide = op, x
        if op is ReduceOp.AVG:
            inner = ReduceOp.SUM
            wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        total = intra.reduce(wide, op=inner, timeout=timeout)
        if self.inter is not None and total is not None:
            between = self.inter.device_communicator
            total = between.all_reduce(total, op=inner, timeout=timeout)
            if op is ReduceOp.AVG:
                total = (total / self.world.world_size).to(x.dtype)
        result = intra.broadcast(x if total is None else total, timeout=timeout)
        if out is None:
            return result
        out.detach().copy_(result)
        return out
