"""Collectives along one group that autograd sees through, each with the inverse as backward.

    forward           backward              gradients
    gather            split                 of a replicated tensor are replicated
    split             gather                of a shard are its shard of the gradient
    all_to_all        all_to_all            likewise
    recut             recut                 likewise
    reduce            identity              of a term are those of the sum; AVG: / ranks
    reduce_scatter    gather                likewise
    as_term           identity              AVG: * ranks
    copy              all-reduce            replicated input, terms of the gradient

Gather takes its own slice of the gradient and sums nothing: every rank has the whole
gradient already. Where ranks have terms of it instead, `copy` sums them.

Nothing changes its input. A group of one returns it. Every function: Collective: yes, every
member (`split`, `as_term` and `copy` communicate backward only, or not at all).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.layout import moves
from coordinator.layout.placement import Shard
from device_comm import ReduceOp
from device_comm.checks import check_dim, check_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.group import GroupCoordinator


def gather(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """The shards ``x`` of all ranks, concatenated along ``dim``.

    Args:
        x: (..., sizes[rank], ...).
        dim: along which ``x`` is cut.
        group: the ranks.
        sizes: of each rank's shard; None: all are as large.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    known = _shards(x.shape[dim], group, sizes)
    return moves.Gather(dim, group, known)(x)


def split(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard of ``x`` along ``dim``, a copy.

    Args:
        x: the same on all ranks.
        dim: along which to cut.
        group: the ranks.
        sizes: of each rank's shard; None: as `Shard` cuts, nothing is dropped.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    return moves.Split(dim, group, _cut(x.shape[dim], group, sizes))(x)


def all_to_all(
    x: Tensor,
    gather_dim: int,
    shard_dim: int,
    group: GroupCoordinator,
    gather_sizes: Sequence[int] | None = None,
    shard_sizes: Sequence[int] | None = None,
) -> Tensor:
    """From shards along ``gather_dim`` to shards along ``shard_dim``, another dimension.

    Args:
        x: whole along ``shard_dim``.
        gather_dim: along which ``x`` is cut.
        shard_dim: along which the result is cut.
        group: the ranks.
        gather_sizes: of each rank's shard before; None: all are as large.
        shard_sizes: of each rank's shard after; None: as `Shard` cuts.
    """
    if group.world_size == 1:
        return x
    given, taken = check_dim(gather_dim, x), check_dim(shard_dim, x)
    if given == taken:
        raise ValueError(f"dimension {taken} cannot be gathered and cut at once: use recut")
    before = _shards(x.shape[given], group, gather_sizes)
    after = _cut(x.shape[taken], group, shard_sizes)
    return moves.AllToAll(given, taken, group, before, after)(x)


def recut(
    x: Tensor, dim: int, group: GroupCoordinator, before: Sequence[int], after: Sequence[int]
) -> Tensor:
    """From shards of sizes ``before`` along ``dim`` to shards of sizes ``after``."""
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    held = _shards(x.shape[dim], group, before)
    return moves.Recut(dim, group, held, _cut(sum(held), group, after))(x)


def reduce(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """The reduction of the terms ``x`` of all ranks.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    _require_linear(x, op)
    return moves.Reduce(group, op)(x)


def reduce_scatter(
    x: Tensor,
    dim: int,
    group: GroupCoordinator,
    op: ReduceOp = ReduceOp.SUM,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """This rank's shard, along ``dim``, of the reduction of the terms ``x`` of all ranks.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    _require_linear(x, op)
    dim = check_dim(dim, x)
    return moves.ReduceScatter(dim, group, op, _cut(x.shape[dim], group, sizes))(x)


def as_term(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """This rank's term of ``x``, which is the same on all ranks: their reduction is ``x``.

    Rank 0 keeps the values and the others get what changes nothing; where there is no such
    value (AVG, MIN, MAX, BAND) all keep them. Exact for every dtype.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    _require_linear(x, op)
    return moves.AsTerm(group, op)(x)


def copy(x: Tensor, group: GroupCoordinator) -> Tensor:
    """``x`` itself, the same on all ranks; backward sums the gradients of all ranks."""
    if group.world_size == 1:
        return x
    return moves.Copy(group)(x)


def _require_linear(x: Tensor, op: ReduceOp) -> None:
    if x.requires_grad and op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise NotImplementedError(f"{op.name} has no gradient here: detach the tensor")


def _shards(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of all ranks' shards, of which this rank's has ``rows``."""
    if sizes is None:
        return (rows,) * group.world_size
    known = check_sizes("sizes", sizes, group.world_size)
    if known[group.rank_in_group] != rows:
        raise ValueError(f"sizes are {list(known)}; rank {group.rank_in_group} has {rows}")
    return known


def _cut(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of the shards that ``rows`` are cut into."""
    if sizes is None:
        return Shard().cut(rows, group.world_size)
    known = check_sizes("sizes", sizes, group.world_size)
    if sum(known) != rows:
        raise ValueError(f"sizes {list(known)} do not add up to {rows}")
    return known
