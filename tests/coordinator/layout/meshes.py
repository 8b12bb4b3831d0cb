"""Meshes of real groups, for tests that run on ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.distributed as dist

import coordinator
from coordinator.layout import Mesh

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack


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
