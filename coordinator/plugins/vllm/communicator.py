"""Run the verbs of vLLM's CPU groups over a `GroupCoordinator`.

vLLM reduces through shared memory in its C++ extension, or through gloo without the extension, and
has no verbs for tensors of uneven sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from coordinator import GroupCoordinator


class CpuCommunicator(DeviceCommunicatorBase):  # type: ignore[misc]  # vLLM may be absent
    """A replacement of vLLM's ``CpuCommunicator``. Ranks in arguments are ranks in the group.

    Collective: yes, every member, all verbs except point-to-point messages.

    Attributes:
        group: the group that runs the verbs.
        supports_tensor_dict: vLLM's stages exchange their dicts through this class.
    """

    supports_tensor_dict = True

    def __init__(
        self,
        cpu_group: ProcessGroup,
        device: torch.device | None = None,
        device_group: ProcessGroup | None = None,
        unique_name: str = "",
        global_ranks: list[int] | None = None,
        global_world_size: int | None = None,
        use_all2all: bool = False,
    ) -> None:
        """Wrap process groups, which vLLM still owns. Collective: yes, every member."""
        super().__init__(
            cpu_group,
            device,
            device_group,
            unique_name,
            global_ranks,
            global_world_size,
            use_all2all=use_all2all,
        )
        name = unique_name.partition(":")[0] or "group"
        self.group = GroupCoordinator.from_process_group(device_group or cpu_group, name)
        if self.use_all2all:
            from vllm.distributed.device_communicators.all2all import (  # noqa: PLC0415
                AgRsAll2AllManager,
            )

            self.all2all_manager = AgRsAll2AllManager(self.cpu_group)

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Sum in place, as vLLM on CPUs; a compiled model gets a new tensor."""
        if torch.compiler.is_compiling():
            return self.group.all_reduce(input_)
        return self.group.all_reduce_(input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return every ``input_``, concatenated."""
        return self.group.all_gather(input_, dim)

    def all_gatherv(
        self,
        input_: Tensor | list[Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> Any:
        """As `all_gather`, with ``sizes[r]`` rows from rank r; of a list, each tensor."""
        return self.group.all_gatherv(input_, dim, sizes)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this member's part of the sum."""
        return self.group.reduce_scatter(input_, dim)

    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> Tensor:
        """As `reduce_scatter`, with ``sizes[r]`` rows for rank r."""
        return self.group.reduce_scatterv(input_, dim, sizes)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Return every ``input_``, concatenated, on ``dst``; None elsewhere."""
        return self.group.gather(input_, dst, dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Fill ``tensor`` with that of ``src`` and return it."""
        return self.group.broadcast_(tensor, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """Send a tensor to ``dst``; None: to the next rank."""
        self.group.send(tensor, dst)

    def recv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> Tensor:
        """Receive a tensor from ``src``; None: from the previous rank."""
        return self.group.recv(size, dtype, src)

    def send_tensor_dict(self, tensor_dict: dict[str, Tensor | Any], dst: int) -> None:
        """Send tensors and values by name."""
        self.group.send_tensor_dict(tensor_dict, dst)

    def recv_tensor_dict(self, src: int) -> dict[str, Tensor | Any]:
        """Receive a dict of `send_tensor_dict`."""
        return self.group.recv_tensor_dict(src)

    def dispatch_router_logits(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch by vLLM's manager, through `all_gatherv`."""
        return self._all2all().dispatch_router_logits(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Dispatch by vLLM's manager, through `all_gatherv`."""
        return self._all2all().dispatch(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        """Combine by vLLM's manager, through `reduce_scatterv`."""
        return self._all2all().combine(*args, **kwargs)

    def destroy(self) -> None:
        """Close ``group``; vLLM then destroys its process groups."""
        self.group.close()

    def _all2all(self) -> Any:
        if self.all2all_manager is None:
            raise RuntimeError(
                f"{self.unique_name} has no all2all manager: it was built without use_all2all"
            )
        return self.all2all_manager
