"""Provide `vllm.distributed` over `coordinator`: the names in these modules' ``__all__``."""

from coordinator.compat.vllm.communication_op import *  # noqa: F403
from coordinator.compat.vllm.parallel_state import *  # noqa: F403
from coordinator.compat.vllm.utils import *  # noqa: F403
