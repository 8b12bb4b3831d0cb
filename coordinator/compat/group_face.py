"""What the group coordinators of all engines have in common, over one of ours.

A face holds a group and speaks of it in another dialect; the group itself is `GroupFace.group`,
for what the dialect has no word for. Ranks in arguments are ranks in the group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from coordinator.graph_capture import GraphCaptureContext
    from coordinator.group import GroupCoordinator


class GroupFace:
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
    def over(
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


def native_of(face: GroupFace | None) -> GroupCoordinator | None:
    """The group that a face shows; None of none."""
    return None if face is None else face.group
