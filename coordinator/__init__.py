"""Groups of ranks: who I am, collectives, messages, tensor dicts."""

from coordinator.bootstrap import Launch, connect_store, host_store
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups, init
from coordinator.rank_grid import RankGrid
from coordinator.stateless import StatelessGroupCoordinator, StatelessProcessGroup
from device_comm import ReduceOp, Work

__all__ = [
    "GroupCoordinator",
    "Launch",
    "ParallelGroups",
    "RankGrid",
    "ReduceOp",
    "StatelessGroupCoordinator",
    "StatelessProcessGroup",
    "Work",
    "connect_store",
    "host_store",
    "init",
]
