"""Provide vLLM's verbs over tensors: `DeviceCommunicatorBase`, and its base `RowVerbs`."""

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
    """A module that prepares buffers for a group."""

    def prepare_communication_buffers(self, group: GroupAdapter) -> None:
        """Allocate or register buffers for communication in ``group``."""


class RowVerbs(GroupAdapter):
    """Collectives over tensors. Collective: yes, every member, all of them."""

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return every ``input_``, concatenated; of one member, ``input_``."""
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
        """Return this member's part of the sum; of one member, ``input_``."""
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
        """As `reduce_scatterv`, into ``output``; return ``output``."""
        return self.group.reduce_scatterv(input_, dim, sizes, out=output)

    # --- experts -------------------------------------------------------------------------

    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """Return the rows of all members, before the choice of experts."""
        return self._dispatch((hidden_states, router_logits), is_sequence_parallel, extra_tensors)

    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
    ) -> Any:
        """Return the rows of all members."""
        main = (hidden_states, topk_weights, topk_ids)
        return self._dispatch(main, is_sequence_parallel, extra_tensors)

    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor:
        """Return the sum of all members' results, for this member's rows."""
        return self.group.combine(hidden_states, is_sequence_parallel)

    def allocate_combine_input(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        is_sequence_parallel: bool = False,
    ) -> Tensor:
        """Return uninitialised memory for the input of `combine`."""
        return self.group.allocate_combine_input(shape, dtype, device, is_sequence_parallel)

    def combine_into_output(
        self, hidden_states: Tensor, output: Tensor, is_sequence_parallel: bool = False
    ) -> Tensor:
        """As `combine`, into ``output``; return ``output``."""
        return self.group.combine(hidden_states, is_sequence_parallel, out=output)

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Call `prepare_communication_buffers` once on each module; models must be alike."""
        for module in model.modules():
            if isinstance(module, UsesCommunicationBuffers):
                module.prepare_communication_buffers(self)

    def _dispatch(
        self, main: Sequence[Tensor], is_sequence_parallel: bool, extra: Sequence[Tensor] | None
    ) -> tuple[Any, ...]:
        rows = (*main, *(extra or ()))
        dispatched = self.group.dispatch(*rows, is_sequence_parallel=is_sequence_parallel)
        return (
            dispatched
            if extra is None
            else (*dispatched[: len(main)], list(dispatched[len(main) :]))
        )


class DeviceCommunicatorBase(RowVerbs):
    """The verbs over tensors of a group or of a torch process group.

    ``all2all_manager`` is None: `all_gatherv` and `reduce_scatterv` route rows to experts.
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
        """Wrap torch process groups; the caller destroys them later than this communicator.

        Args:
            cpu_group: the members.
            device: the tensors' device; None: that of ``device_group``.
            device_group: the same members; None: ``cpu_group``.
            unique_name: for errors and status.
            global_ranks: no effect.
            global_world_size: no effect.
            use_all2all: no effect: `dispatch` and `combine` always work.

        Collective: yes, every member.

        Raises:
            ValueError: the process group is for another kind of device.
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
        self._bind(group, lambda: [group.ranks])

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Fill ``tensor`` with that of ``src`` and return it. Collective: yes, every member."""
        return super().broadcast(tensor, src)
