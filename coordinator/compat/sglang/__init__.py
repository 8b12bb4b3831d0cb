"""Provide `sglang.srt.distributed` over `coordinator`: the names in these modules' ``__all__``."""

from coordinator.compat.sglang.communication_op import *  # noqa: F403
from coordinator.compat.sglang.parallel_state import *  # noqa: F403
from coordinator.compat.sglang.utils import *  # noqa: F403
