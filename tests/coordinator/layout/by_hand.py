"""Meshes of real groups; the parts of ranks, by cutting and padding, not by what is under test."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from hypothesis import strategies as st

import coordinator
from coordinator import ReduceOp
from coordinator.layout import Layout, Mesh, Partial, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from torch import Tensor

    from coordinator.layout import Axis

_NEUTRAL = {ReduceOp.PRODUCT: 1, ReduceOp.BOR: 0, ReduceOp.BXOR: 0, ReduceOp.BAND: -1}


def open_mesh(stack: ExitStack, rank: int, shape: Sequence[int], path: str) -> Mesh:
    """Groups along one to three axes, closed with ``stack``.

    ``path`` is a file that does not exist yet, used for this mesh only.
    """
    n = math.prod(shape)
    dp, pp, tp = (1,) * (3 - len(shape)) + tuple(shape)
    groups = stack.enter_context(
        coordinator.init(
            tp=tp, pp=pp, dp=dp, rank=rank, world_size=n, store=dist.FileStore(path, n), timeout=30
        )
    )
    return Mesh((groups.dp, groups.pp, groups.tp)[3 - len(shape) :], groups.world)


def hold(x: Tensor, layout: Layout, axes: Sequence[Axis]) -> Tensor:
    """What a rank holds of ``x``: its shard with padding, its term of terms that differ."""
    for placement, axis in zip(layout.placements, axes, strict=True):
        r, n = axis.rank_in_group, axis.world_size
        if isinstance(placement, Shard):
            parts = (
                list(torch.split(x, placement.sizes, placement.dim))
                if placement.sizes is not None
                else list(torch.chunk(x, n, placement.dim))
            )
            longest = max(part.shape[placement.dim] for part in parts)
            while len(parts) < n:
                parts.append(x.narrow(placement.dim, 0, 0))
            x = parts[r]
            if placement.padded:
                missing = longest - x.shape[placement.dim]
                margin = x.new_zeros(
                    [missing if d == placement.dim % x.dim() else s for d, s in enumerate(x.shape)]
                )
                x = torch.cat([x, margin], placement.dim)
        elif isinstance(placement, Partial):
            x = term(x, placement.op, r, n)
    return x.contiguous().clone()


def term(x: Tensor, op: ReduceOp, r: int, n: int) -> Tensor:
    """Rank r's of n terms that differ and make up ``x``, exactly where ``x`` is small integers."""
    if n == 1:
        return x
    if op is ReduceOp.SUM:
        return x * (r + 2) if r < n - 1 else x - sum(x * (each + 2) for each in range(n - 1))
    if op is ReduceOp.AVG:
        return term(x, ReduceOp.SUM, r, n) * n
    if op is ReduceOp.MAX:
        return x - (r + 1) % n
    if op is ReduceOp.MIN:
        return x + (r + 1) % n
    return x if r == n - 1 else torch.full_like(x, _NEUTRAL[op])


def of_gradient(layout: Layout) -> Layout:
    """How a gradient lies: that of a term is whole."""
    return Layout(tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def share(layout: Layout, mesh: Sequence[int]) -> float:
    """What a term counts for in the whole."""
    factor = 1.0
    for placement, size in zip(layout.placements, mesh, strict=True):
        if isinstance(placement, Partial) and placement.op is ReduceOp.AVG:
            factor /= size
    return factor


@st.composite
def layouts(
    draw: st.DrawFn,
    shape: Sequence[int],
    mesh: Sequence[int],
    ops: Sequence[ReduceOp] = (ReduceOp.SUM,),
    as_torch: bool = False,
) -> Layout:
    """Any layout that fits: nested, padded, of given sizes, negative dimensions, one reduction.

    ``as_torch``: without what DTensor does not have.
    """
    op = draw(st.sampled_from(ops)) if ops else None
    kinds = ["replicate", *(["shard"] * 2 if shape else []), *(["partial"] if ops else [])]
    lengths: list[set[int]] = [{size} for size in shape]
    placements = []
    for n in mesh:
        kind = draw(st.sampled_from(kinds))
        if kind == "replicate":
            placements.append(Replicate())
        elif op is not None and kind == "partial":
            placements.append(Partial(op))
        else:
            dim = draw(st.integers(0, len(shape) - 1))
            shard = Shard(dim, padded=not as_torch and draw(st.booleans()))
            if not as_torch and len(lengths[dim]) == 1 and draw(st.booleans()):
                shard = Shard(dim, shard.padded, draw(_sizes(next(iter(lengths[dim])), n)))
            cuts = [shard.cut(length, n) for length in lengths[dim]]
            lengths[dim] = {s for cut in cuts for s in ([max(cut)] if shard.padded else cut)}
            negative = draw(st.booleans())
            dim_given = dim - len(shape) if negative else dim
            placements.append(Shard(dim_given, shard.padded, shard.sizes))
    return Layout(tuple(placements))


@st.composite
def _sizes(draw: st.DrawFn, total: int, parts: int) -> tuple[int, ...]:
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=parts - 1, max_size=parts - 1)))
    bounds = [0, *ends, total]
    return tuple(b - a for a, b in itertools.pairwise(bounds))
