"""The verbs over tensors, as a group offers them: those of its device communicator."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from coordinator.compiling.compile_ops import OpsOfGraph
from coordinator.verbs.member import Member
from device_comm import Work
from device_comm.verbs.all_to_all import AllToAllVerbs
from device_comm.verbs.rooted import RootedVerbs
from device_comm.verbs.rooted_parts import RootedPartVerbs
from device_comm.verbs.symmetric import SymmetricVerbs
from device_comm.verbs.uneven import UnevenVerbs

if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.hierarchy import Hierarchy
    from coordinator.setup.link import Link
    from device_comm import ReduceOp
    from device_comm.verbs.arguments import Out, Timeout


class TensorVerbs(Member, SymmetricVerbs, UnevenVerbs, AllToAllVerbs, RootedVerbs, RootedPartVerbs):
    """Collectives over tensors on the group's device.

    ``async_op=True`` returns a `device_comm.Work`; ``await`` it, or call its ``wait()``, for
    what the call would have returned. A group of one returns its input itself, from every verb:
    whoever changes the result in place there changes the input. `device_comm.communicator` says
    what is raised, and that a deadline that passes ends the group.
    """

    @property
    @abstractmethod
    def hierarchy(self) -> Hierarchy[TensorVerbs]:
        """The group seen as its nodes. Collective: no."""

    def _adopt(self, link: Link) -> None:
        super()._adopt(link)
        self.runner = link.device.runner
        self._traced = OpsOfGraph(self.unique_name, self.world_size)

    def _reduce_by_nodes(
        self, x: Tensor, op: ReduceOp, out: Out, async_op: bool, timeout: Timeout
    ) -> Tensor | Work[Tensor]:
        result = self.hierarchy.all_reduce(x, op=op, out=out, timeout=timeout)
        return Work(result) if async_op else result
