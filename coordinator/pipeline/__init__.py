"""Pipeline stages and their messages."""

from coordinator.pipeline.pipeline_end import Exchanged
from coordinator.pipeline.stage import Stage

__all__ = ["Exchanged", "Stage"]
