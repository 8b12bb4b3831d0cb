# ruff: noqa: ARG001 - an op and its fake implementation take the same arguments
"""Define collectives that `torch.compile` keeps in its graph: custom ops without gradients.

An op cannot hold a group. Its argument is a group's name in the registry below, the only mutable
state of this package. torch forbids an op to return its input: a group of one calls no op.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from device_comm import ReduceOp
from device_comm.operation import AnyOp

if TYPE_CHECKING:
    from device_comm import Communicator


_groups: WeakValueDictionary[str, Communicator] = WeakValueDictionary()
"""The communicators of this process's live groups by the groups' unique names."""


def register_ops(group: str, communicator: Communicator) -> str:
    """Register a group's communicator and return the group's unique name, as ``"tp:0"``."""
    names = (f"{group}:{count}" for count in itertools.count())
    name = next(name for name in names if name not in _groups)
    _groups[name] = communicator
    return name


def unregister(name: str) -> None:
    """Remove a group."""
    _groups.pop(name, None)


def has_norms(name: str, dtype: torch.dtype) -> bool:
    """Return whether the named group reduces and normalises ``dtype`` in one kernel."""
    comm = _groups.get(name)
    return comm is not None and dtype in comm.backend.capabilities.normed


def norms_by_group() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return for each group the dtypes for which `has_norms` is true."""
    kinds = {name: comm.backend.capabilities.normed for name, comm in _groups.items()}
    return tuple((name, tuple(sorted(map(str, kinds[name])))) for name in sorted(kinds))


def find(name: str) -> Communicator:
    """Return the communicator of the group with this unique name.

    Raises ValueError if there is none, or it was closed.
    """
    try:
        return _groups[name]
    except KeyError:
        raise ValueError(
            f"no group {name!r} in this process; its groups are {list(_groups)}"
        ) from None


@torch.library.custom_op("group_coordinator::all_reduce", mutates_args=())
def all_reduce(x: Tensor, op: int, group: str) -> Tensor:
    """Call `Communicator.all_reduce` of the named group."""
    return find(group).all_reduce(x, op=ReduceOp(op))


@all_reduce.register_fake
def _(x: Tensor, op: int, group: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("group_coordinator::all_reduce_norm", mutates_args=())
def all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """Call `Communicator.all_reduce_norm` of the named group."""
    output, kept = find(group).all_reduce_norm(x, residual, weight, epsilon)
    return output.contiguous(), kept.contiguous()


@all_reduce_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("group_coordinator::all_gather", mutates_args=())
def all_gather(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:
    """Call `Communicator.all_gather` of the named group."""
    return find(group).all_gather(x, dim=dim)


@all_gather.register_fake
def _(x: Tensor, dim: int, world_size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= world_size
    return x.new_empty(shape)


@torch.library.custom_op("group_coordinator::reduce_scatter", mutates_args=())
def reduce_scatter(x: Tensor, dim: int, op: int, world_size: int, group: str) -> Tensor:
    """Call `Communicator.reduce_scatter` of the named group."""
    return find(group).reduce_scatter(x, dim=dim, op=ReduceOp(op))


@reduce_scatter.register_fake
def _(x: Tensor, dim: int, op: int, world_size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] //= world_size
    return x.new_empty(shape)


class OpsOfGraph:
    """The verbs of one group through these ops; a `device_comm.verbs.runner.Traced`.

    The verbs are those of `GroupCoordinator`. Autograd does not record them, as outside a graph.
    """

    def __init__(self, name: str, world_size: int) -> None:
        self._name = name
        self._n = world_size

    def all_reduce(self, x: Tensor, op: AnyOp) -> Tensor:
        """Reduce by the op; a group of one returns ``x``."""
        return x if self._n == 1 else all_reduce(x.detach(), int(ReduceOp.of(op)), self._name)

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Reduce, add and normalise by the op. The group must have a kernel for it."""
        output, kept = all_reduce_norm(x, residual, weight, epsilon, self._name)
        return output, kept

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Gather by the op; a group of one returns ``x``."""
        return x if self._n == 1 else all_gather(x.detach(), dim, self._n, self._name)

    def reduce_scatter(self, x: Tensor, dim: int, op: AnyOp) -> Tensor:
        """Reduce and scatter by the op; a group of one returns ``x``."""
        if self._n == 1:
            return x
        part: Tensor = reduce_scatter(x.detach(), dim, int(ReduceOp.of(op)), self._n, self._name)
        return part
