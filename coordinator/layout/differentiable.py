"""Differentiable collectives along one group. Each has its inverse as backward.

A term is one rank's summand of a reduction (`Partial`); a shard is one rank's slice (`Shard`).

    forward           backward              gradients
    gather            split                 a replicated tensor's gradient is replicated
    split             gather                a shard's gradient is its shard of the gradient
    all_to_all        all_to_all            likewise
    recut             recut                 likewise
    reduce            identity              a term's gradient is that of the sum; AVG: / ranks
    reduce_scatter    gather                likewise
    as_term           identity              AVG: * ranks
    copy              all-reduce            replicated input, whose gradient comes as terms

The backward of gather takes this rank's slice of the gradient and sums nothing: every rank has the
whole gradient already. If the ranks have terms of the gradient instead, `copy` sums them.

No function changes its input. In a group of one they return it. For every function: Collective:
yes, every member (`split`, `as_term` and `copy` communicate in backward only, or not at all).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.layout.moving import moves
from coordinator.layout.placement import Shard
from device_comm import ReduceOp
from device_comm.verbs.checks import check_dim, check_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.group import GroupCoordinator


def gather(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """All ranks' shards, concatenated along ``dim`` in rank order.

    Args:
        x: this rank's shard, (..., sizes[rank], ...).
        dim: the dimension that is sharded.
        group: the group of the ranks.
        sizes: the size of each rank's shard along ``dim``; None: all are equal.
    """
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    known = _shards(x.shape[dim], group, sizes)
    return moves.Gather(dim, group, known)(x)


def split(
    x: Tensor, dim: int, group: GroupCoordinator, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard of ``x`` along ``dim``, as a copy.

    Args:
        x: the whole tensor, the same on all ranks.
        dim: the dimension to shard.
        group: the group of the ranks.
        sizes: the size of each rank's shard; None: as `Shard` divides, unevenly if need be.
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
    """Turn shards along ``gather_dim`` into shards along ``shard_dim``, another dimension.

    Args:
        x: this rank's shard along ``gather_dim``; whole along ``shard_dim``.
        gather_dim: the dimension along which ``x`` is sharded.
        shard_dim: the dimension along which the result is sharded.
        group: the group of the ranks.
        gather_sizes: the size of each rank's shard before; None: all are equal.
        shard_sizes: the size of each rank's shard after; None: as `Shard` divides.
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
    """Turn shards of sizes ``before`` along ``dim`` into shards of sizes ``after``, by rank."""
    if group.world_size == 1:
        return x
    dim = check_dim(dim, x)
    held = _shards(x.shape[dim], group, before)
    return moves.Recut(dim, group, held, _cut(sum(held), group, after))(x)


def reduce(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """The reduction of all ranks' terms; ``x`` is this rank's term.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    return moves.Reduce(group, op)(x)


def reduce_scatter(
    x: Tensor,
    dim: int,
    group: GroupCoordinator,
    op: ReduceOp = ReduceOp.SUM,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """This rank's shard, along ``dim``, of the reduction of all ranks' terms.

    ``sizes`` has the size of each rank's shard; None: as `Shard` divides.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    dim = check_dim(dim, x)
    return moves.ReduceScatter(dim, group, op, _cut(x.shape[dim], group, sizes))(x)


def as_term(x: Tensor, group: GroupCoordinator, op: ReduceOp = ReduceOp.SUM) -> Tensor:
    """Terms whose reduction is ``x``, which is the same on all ranks; returns this rank's term.

    Rank 0 keeps the values and the others get the operation's neutral element (0 for SUM). For AVG,
    MIN, MAX and BAND all ranks keep the values. Exact for every dtype.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if group.world_size == 1:
        return x
    require_linear(x, op)
    return moves.AsTerm(group, op)(x)


def copy(x: Tensor, group: GroupCoordinator) -> Tensor:
    """A view of ``x``, which is the same on all ranks; backward sums all ranks' gradients."""
    if group.world_size == 1:
        return x
    return moves.Copy(group)(x)


def require_linear(x: Tensor, op: ReduceOp) -> None:
    """Accept a reduction of ``x`` that autograd need not know, or that has a gradient here.

    Raises:
        NotImplementedError: ``x`` requires a gradient, and ``op`` is neither SUM nor AVG.
    """
    if x.requires_grad and op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise NotImplementedError(f"{op.name} has no gradient here: detach the tensor")


def _shards(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of all ranks' shards; this rank's shard has ``rows`` rows."""
    if sizes is None:
        return (rows,) * group.world_size
    known = check_sizes("sizes", sizes, group.world_size)
    if known[group.rank_in_group] != rows:
        raise ValueError(f"sizes are {list(known)}; rank {group.rank_in_group} has {rows}")
    return known


def _cut(rows: int, group: GroupCoordinator, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of all ranks' shards of ``rows`` rows."""
    if sizes is None:
        return Shard().cut(rows, group.world_size)
    known = check_sizes("sizes", sizes, group.world_size)
    if sum(known) != rows:
        raise ValueError(f"sizes {list(known)} do not add up to {rows}")
    return known
