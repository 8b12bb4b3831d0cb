"""vLLM's verbs over tensors: `DeviceCommunicatorBase`, and what its groups share with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from coordinator import group as native
from coordinator.compat.shared import GroupAdapter
from coordinator.torch_groups import backend_of


@runtime_checkable
class UsesCommunicationBuffers(Protocol):
    """A module that prepares buffers once it is known in which group it communicates."""

    def prepare_communication_buffers(self, group: GroupAdapter) -> None:
        """Allocate or register what communicating in ``group`` needs."""


class RowVerbs(GroupAdapter):
    """Collectives over tensors. Collective: yes, every member, all of them."""

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Every ``input_``, concatenated; of one member, ``input_`` itself."""
        if self.world_size == 1:
            return input_
        return self.group.all_gather(input_, dim)

    def all_gatherv(
        self,
        input_: Tensor | Sequence[Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
    ) -> Any:
        """As `all_gather`, with ``sizes[r]`` rows from rank r; of a list, each tensor."""
        return self.group.all_gatherv(input_, dim, sizes)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This member's part of the sum; of one member, ``input_`` itself."""
        if self.world_size == 1:
            return input_
        return self.group.reduce_scatter(input_, dim)

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """As `reduce_scatter`, with ``sizes[r]`` rows for rank r."""
        return self.group.reduce_scatterv(input_, dim, sizes)

    def reduce_scatterv_into_output(
        self,
        input_: Tensor,
        output: Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """As `reduce_scatterv`, into ``output``, which is returned."""
        return self.group.reduce_scatterv(input_, dim, sizes, out=output)

    # --- experts -------------------------------------------------------------------------

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """The rows of all members, before the experts are chosen."""
        return self._dispatch((hidden_states, router_logits), is_sequence_parallel, extra_tensors)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """The rows of all members."""
        main = (hidden_states, topk_weights, topk_ids)
        return self._dispatch(main, is_sequence_parallel, extra_tensors)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """The sum of all members' results, for this member's rows."""
        return self.group.combine(hidden_states, is_sequence_parallel)

    def allocate_combine_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        is_sequence_parallel: bool = False,
    ) -> Tensor:
        """Memory for what goes into `combine`, not initialised. Collective: no."""
        return self.group.allocate_combine_input(shape, dtype, device, is_sequence_parallel)

    def combine_into_output(
        self, hidden_states: Tensor, output: Tensor, is_sequence_parallel: bool = False
    ) -> Tensor:
        """As `combine`, into ``output``, which is returned."""
        return self.group.combine(hidden_states, is_sequence_parallel, out=output)

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Call `prepare_communication_buffers` once on each module of a model that has it.

        With models of the same structure.
        """
        for module in model.modules():
            if isinstance(module, UsesCommunicationBuffers):
                module.prepare_communication_buffers(self)

    def _dispatch(
        self, main: Sequence[Tensor], is_sequence_parallel: bool, extra: Sequence[Tensor] | None
    ) -> tuple[Any, ...]:
        rows = (*main, *(extra or ()))
        found = self.group.dispatch(*rows, is_sequence_parallel=is_sequence_parallel)
        return found if extra is None else (*found[: len(main)], list(found[len(main) :]))


class DeviceCommunicatorBase(RowVerbs):
    """The verbs over tensors alone, of a group or of a torch process group.

    Attributes:
        all2all_manager: None: rows go to experts by `all_gatherv` and `reduce_scatterv`.
    """

    all2all_manager: None = None

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        global_ranks: Sequence[int] | None = None,
        global_world_size: int | None = None,
        use_all2all: bool = False,
    ) -> None:
        """Wrap torch process groups, which stay yours to destroy, after this.

        Args:
            cpu_group: the members.
            device: where their tensors are; None: where those of ``device_group`` are.
            device_group: the same members; None: ``cpu_group``.
            unique_name: for errors and status.
            global_ranks: what torch knows of the process group's members.
            global_world_size: not needed.
            use_all2all: `dispatch` and `combine` work without.

        Collective: yes, every member.

        Raises:
            ValueError: the process group's tensors are not on such a device.
        """
        del global_ranks, global_world_size, use_all2all
        process_group = device_group or cpu_group
        backend = backend_of(process_group)
        kind = "cuda" if backend == "nccl" else "cpu"
        if device is not None and device.type != kind:
            raise ValueError(f"device is {device}; a process group of {backend} is for {kind}")
        group = native.GroupCoordinator.from_process_group(
            process_group,
            unique_name or "communicator",
            local_rank=None if device is None else device.index,
        )
        self._show(group, lambda: [group.ranks])

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Fill ``tensor`` with that of ``src``; returns it. Collective: yes, every member."""
        return super().broadcast(tensor, src)
