"""Provide an executor: ``LLM(distributed_executor_backend=GroupCoordinatorExecutor)``."""

from __future__ import annotations

import os

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from coordinator.plugins.switches import SWITCH_VARIABLE
from coordinator.plugins.vllm.hooks import install


class GroupCoordinatorExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM may be absent
    """vLLM's multiprocess executor with all parts installed, also in its workers.

    For programs that choose an executor; a set ``GROUP_COORDINATOR`` takes precedence.
    """

    def _init_executor(self) -> None:
        os.environ.setdefault(SWITCH_VARIABLE, "1")
        install()
        super()._init_executor()
