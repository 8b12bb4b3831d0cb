"""Pipeline stages: what they send each other, and in which order they work."""

from coordinator.pipeline.exchange import Exchanged
from coordinator.pipeline.order import Action, Order, forward_only, gpipe, one_f_one_b
from coordinator.pipeline.schedule import Schedule
from coordinator.pipeline.stage import Stage

__all__ = [
    "Action",
    "Exchanged",
    "Order",
    "Schedule",
    "Stage",
    "forward_only",
    "gpipe",
    "one_f_one_b",
]
