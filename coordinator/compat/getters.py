"""The functions that the engines' modules have in common, over one default topology each."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from coordinator.compat.errors import NotInitializedError
from coordinator.compat.group_face import GroupFace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from coordinator.compat.default_topology import DefaultTopology

F = TypeVar("F", bound=GroupFace)


class Getters(Generic[F]):
    """Each method is a function of a module, under the name that the engine gives it.

    Those that tell of groups raise `NotInitializedError` where there are none.
    """

    def __init__(self, state: DefaultTopology[F]) -> None:
        """Speak of ``state``."""
        self._state = state

    def world_group(self) -> F:
        """The group of all ranks."""
        if self._state.world is None:
            raise NotInitializedError("the distributed environment is not initialised")
        return self._state.world

    def set_custom_all_reduce(self, enable: bool) -> None:
        """Whether groups made from now on may use more than torch's process groups."""
        self._state.device_communicators = enable

    def model_parallel_is_initialized(self) -> bool:
        """Whether the groups of a model have been built."""
        return bool(self._state.groups)

    def tp_group(self) -> F:
        """The ranks that share this one's layers."""
        return self._state.group("tp")

    def pp_group(self) -> F:
        """The stages of this rank's model."""
        return self._state.group("pp")

    def dcp_group(self) -> F:
        """The ranks that share this one's contexts."""
        return self._state.group("dcp")

    def tp_world_size(self) -> int:
        """How many ranks share a layer."""
        return self.tp_group().world_size

    def tp_rank(self) -> int:
        """This rank's position among those that share its layers."""
        return self.tp_group().rank_in_group

    def pp_rank(self) -> int:
        """This rank's stage."""
        return self.pp_group().rank_in_group

    def destroy_model_parallel(self) -> None:
        """Close the groups of the model; the second time does nothing. Collective: no."""
        self._state.close_model()

    def destroy_distributed_environment(self) -> None:
        """Close the world group, and torch's default group. Collective: no."""
        self._state.close_environment()

    def cleanup_dist_env_and_memory(self, shutdown_ray: bool = False) -> None:
        """Destroy everything and give memory back.

        Args:
            shutdown_ray: shut Ray down as well, if this process uses it.
        """
        self.destroy_model_parallel()
        self.destroy_distributed_environment()
        if shutdown_ray:
            import ray  # noqa: PLC0415 - an optional dependency

            ray.shutdown()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum of every ``input_``. Collective: yes, every member."""
        return self.tp_group().all_reduce(input_)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """Every ``input_``, concatenated, on ``dst``; None elsewhere. Collective: yes."""
        return self.tp_group().gather(input_, dst, dim)

    def broadcast_tensor_dict(
        self, tensor_dict: Mapping[str, Any] | None = None, src: int = 0
    ) -> Any:
        """The dict of ``src``, on all; one's own without torch's default group.

        Collective: yes, every member.
        """
        if not dist.is_initialized():
            return tensor_dict
        return self.tp_group().broadcast_tensor_dict(tensor_dict, src)
