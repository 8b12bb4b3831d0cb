"""Writes a checkpoint from the parts that the ranks of a mesh hold."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from coordinator.layout.checkpoints.replacement import Replacement
from coordinator.layout.checkpoints.safetensors_file import SINGLE
from coordinator.layout.checkpoints.safetensors_writer import encode_header, write_checkpoint
from coordinator.layout.errors import CheckpointError
from coordinator.layout.moving.between import redistribute_between
from coordinator.layout.moving.redistribute import strip, whole_shape
from coordinator.layout.placement import Layout, Place, Replicate, Shard
from coordinator.layout.planning.route import SubMesh
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import Tensor

    from coordinator.group import GroupCoordinator
    from coordinator.layout.placement import Extent, Placement

T = TypeVar("T")


def save_sharded(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, Layout | Placement],
    group: GroupCoordinator | Sequence[GroupCoordinator],
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    target: Callable[[str], str] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write whole tensors to one safetensors file, from the parts that the ranks hold.

    The inverse of `load_sharded`. The rank that is first on every axis writes, and has one whole
    tensor at a time in memory. Returns, on every rank, when the file is complete; it appears only
    then, and replaces what was there. A link stays; the file that it leads to is replaced.

    Args:
        path: the file, or a folder, which then gets ``model.safetensors``.
        tensors: this rank's parts, padding included, by name; a tensor has the same dtype on all
            ranks.
        layouts: the layout of each tensor on the ranks of ``group``. The tensors that it names are
            written, in its order.
        group: the group that the tensors are divided among. Several groups, outermost first, if
            the layouts have several placements.
        shapes: the shapes of whole tensors, by name; needed for those that are sharded.
        target: maps the caller's name of a tensor to the checkpoint's; ``None``: they are equal.
        metadata: texts by name to keep in the file; only those of the rank that writes count.

    Raises:
        KeyError: a name is not in ``tensors``.
        ValueError: a layout does not fit its tensor or the group, a shape is missing, two
            tensors get one name, or the format does not support a dtype or a name. Nothing was
            sent. On the rank that writes also: ``path`` or ``metadata`` is none.
        DivergenceError: the ranks' tensors differ in a name, their order, a dtype, a shape or a
            layout; names the first that does. Nothing was written, and the groups go on.
        CheckpointError: at ``path`` is what is neither a file nor a folder, as a device. Nothing
            was written. On the ranks that do not write also: the file could not be written.
        OSError: on the rank that writes: the file cannot be written.

    Collective: yes, every member of every group.
    """
    axes = tuple(group) if isinstance(group, Sequence) else (group,)
    names = {name: target(name) if target else name for name in layouts}
    parts = {
        name: _Part.of(tensors[name], layout, (shapes or {}).get(name), axes)
        for name, layout in layouts.items()
    }
    announced = {names[name]: (part.x.dtype, part.shape) for name, part in parts.items()}
    if len(announced) != len(names):
        raise ValueError(f"several tensors get one name: {names}")
    encode_header(announced)
    file = Path(path)
    _compare([f"{names[name]!r}: {part}" for name, part in parts.items()], axes)
    _write_together(file, announced, metadata, list(parts.values()), axes)


def _write_together(
    file: Path,
    announced: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    metadata: Mapping[str, str] | None,
    parts: Sequence[_Part],
    axes: Sequence[GroupCoordinator],
) -> None:
    """Collect one tensor after the other; the rank that is first on every axis writes them.

    Collective: yes, every member of every group.
    """
    torn = False

    def collected() -> Iterator[Tensor | None]:
        nonlocal torn
        for part in parts:
            torn = True
            whole = part.collect()
            torn = False
            yield whole

    wholes = collected()
    writes = not any(axis.rank_in_group for axis in axes)
    error: Exception | None = None
    with ExitStack() as stack:
        if writes:
            try:
                header = encode_header(announced, metadata)
                new = Replacement(file / SINGLE if file.is_dir() else file)
                stack.enter_context(new)
            except Exception as found:  # noqa: BLE001 - raised on all ranks
                error = found
        _raise_on_all(file, error, axes)
        if writes:
            try:
                write_checkpoint(new, header, (whole for whole in wholes if whole is not None))
            except Exception as found:
                if torn:
                    raise
                error = found
        # The wholes are collected together: ranks that do not write, or cannot, must take part.
        for _ in wholes:
            pass
        _raise_on_all(file, error, axes)


@dataclass(frozen=True, slots=True)
class _Part:
    """This rank's part of one tensor, without padding, and its layout."""

    x: Tensor
    layout: Layout
    shape: tuple[int, ...]
    axes: tuple[GroupCoordinator, ...]

    @classmethod
    def of(
        cls,
        x: Tensor,
        layout: Layout | Placement,
        shape: Sequence[int] | None,
        axes: tuple[GroupCoordinator, ...],
    ) -> _Part:
        layout = Layout.of(layout)
        whole = whole_shape(x, layout, axes) if shape is None else tuple(shape)
        layout = layout.normalized(len(whole))
        held = layout.extents(whole, axes)
        if tuple(x.shape) != tuple(extent.length for extent in held):
            raise ValueError(f"this rank has {tuple(x.shape)}; {layout} of {whole} is {held} here")
        return cls(strip(x.detach(), held), layout, whole, axes)

    def __str__(self) -> str:
        placements = ", ".join(map(str, self.layout.placements))
        return f"{self.x.dtype} {list(self.shape)} as {placements}"

    def collect(self) -> Tensor | None:
        """The whole tensor on the rank that is first on every axis; None on the others.

        Collective: yes, every member of every group.
        """
        x = self.x
        for number in reversed(range(len(self.axes))):
            axis, placement = self.axes[number], self.layout.placements[number]
            outer = Layout(self.layout.placements[:number])
            around = outer.extents(self.shape, self.axes[:number])
            if axis.world_size > 1 and not isinstance(placement, Replicate):
                x = redistribute_between(
                    x,
                    _without_padding(placement, around, axis.world_size),
                    Replicate(),
                    axis,
                    source_mesh=SubMesh(tuple(range(axis.world_size))),
                    target_mesh=SubMesh((0,)),
                    shape=[extent.size for extent in around],
                )
            if axis.rank_in_group != 0:
                return None
        return x


def _without_padding(placement: Placement, around: Sequence[Extent], ranks: int) -> Placement:
    """``placement`` with the sizes of the parts without padding; ``around`` is what it divides."""
    if not isinstance(placement, Shard):
        return placement
    places = [Place(rank, ranks) for rank in range(ranks)]
    sizes = tuple(placement.split(around, place)[placement.dim].size for place in places)
    return Shard(placement.dim, sizes=sizes)


def _compare(tensors: Sequence[str], axes: Sequence[GroupCoordinator]) -> None:
    """Check that all ranks are about to write the same ``tensors``.

    Raises:
        DivergenceError: they are not; the same on all ranks, which may go on.

    Collective: yes, every member.
    """
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    if len(set(_of_all(digest, axes))) <= 1:
        return
    me = axes[0].ranks[axes[0].rank_in_group]
    for rank, others in _of_all((me, tensors), axes):
        for number, (ours, theirs) in enumerate(zip_longest(tensors, others, fillvalue="none")):
            if ours != theirs:
                what = f"save_sharded whose tensor {number} is"
                raise DivergenceError(rank, f"{what} {ours}", f"{what} {theirs}")


def _of_all(mine: T, axes: Sequence[GroupCoordinator]) -> list[T]:
    """The object of every rank, the outermost axis first. Collective: yes, every member."""
    found = [mine]
    for axis in reversed(axes):
        found = [each for part in axis.all_gather_object(found) for each in part]
    return found


def _raise_on_all(path: Path, error: Exception | None, axes: Sequence[GroupCoordinator]) -> None:
    """Raise, if the rank that is first on every axis has an ``error``: itself there.

    Collective: yes, every member.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    for number, axis in enumerate(axes):
        if not any(inner.rank_in_group for inner in axes[number + 1 :]):
            text = axis.broadcast_object(text, 0)
    if error is not None:
        raise error
    if text is not None:
        raise CheckpointError(str(path), f"not written: {text}")
