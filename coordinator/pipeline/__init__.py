"""Pipeline stages, and what they send each other."""

from coordinator.pipeline.pipeline_end import Exchanged
from coordinator.pipeline.stage import Stage

__all__ = ["Exchanged", "Stage"]
