"""The model's worker in a module that loads nothing else."""

from __future__ import annotations

import sys

from server.workers.minilm import MiniLMWorker


class Lean(MiniLMWorker):
    """Tells which modules its process has loaded."""

    def has(self, module: str) -> bool:
        return module in sys.modules
