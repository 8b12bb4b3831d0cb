"""Reads this rank's part of a checkpoint, and nothing else of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from coordinator.layout.checkpoints.safetensors_file import Checkpoint
from coordinator.layout.errors import TensorShapeError
from coordinator.layout.placement import Axis, Layout, Placement

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from coordinator.layout.placement import Extent


def load_sharded(
    path: str | os.PathLike[str],
    layouts: Mapping[str, Layout | Placement],
    group: Axis | Sequence[Axis],
    *,
    source: Callable[[str], str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    report: Callable[[int, int, str], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Read this rank's parts of some tensors of a safetensors checkpoint.

    Only the tensors in ``layouts`` are looked at (a pipeline stage names its own layers), and of
    those only the slices that this rank holds are read.

    Args:
        path: a ``.safetensors`` file, an ``.index.json`` file, or a folder with one of them.
        layouts: the layout of each tensor on the ranks of ``group``, by the caller's name for the
            tensor. A single `Placement` stands for the `Layout` with that one placement.
        group: the group that the tensors are divided among. Several groups, outermost first, if
            the layouts have several placements.
        source: maps the caller's name of a tensor to the checkpoint's; ``None``: they are equal.
        shapes: the required shapes of whole tensors, by the caller's names; a tensor that is not
            named may have any shape.
        dtype: the dtype to convert to; ``None`` keeps the checkpoint's.
        device: the device of the returned tensors.
        report: called with (bytes read, bytes in all, name of the tensor read last): once before
            the first tensor, with an empty name, and after each tensor. Bytes are counted in the
            checkpoint's dtype, without padding.

    Returns:
        Contiguous tensors by the caller's names, in the order of ``layouts``; they share memory
        with nothing. Padding is zero.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointFormatError: a file is not a safetensors file, or an index is malformed.
        MissingTensorError: the checkpoint lacks a tensor. Nothing was read.
        TensorShapeError: a tensor has another shape than ``shapes`` says. Nothing was read.
        ValueError: a layout does not fit its tensor or the group.

    Collective: no; each rank reads for itself.
    """
    axes = group if isinstance(group, Sequence) else (group,)
    names = {name: source(name) if source else name for name in layouts}
    with Checkpoint(path) as checkpoint:
        checkpoint.require(tuple(names.values()))
        parts: dict[str, tuple[Extent, ...]] = {}
        for name, layout in layouts.items():
            found = checkpoint.shape(names[name])
            expected = tuple(shapes[name]) if shapes and name in shapes else found
            if found != expected:
                raise TensorShapeError(str(checkpoint.path), names[name], expected, found)
            whole = Layout.of(layout)
            if whole.has_terms:
                raise ValueError(f"{name}: a checkpoint holds whole values, not terms as {whole}")
            parts[name] = whole.extents(found, axes)
        sizes = {
            name: math.prod(extent.size for extent in extents)
            * checkpoint.dtype(names[name]).itemsize
            for name, extents in parts.items()
        }
        tell = (lambda *_: None) if report is None else report
        done, total = 0, sum(sizes.values())
        tell(done, total, "")
        tensors: dict[str, torch.Tensor] = {}
        for name, extents in parts.items():
            tensors[name] = _read(checkpoint, names[name], extents, dtype, device)
            done += sizes[name]
            tell(done, total, name)
    return tensors


def _read(
    checkpoint: Checkpoint,
    name: str,
    extents: Sequence[Extent],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> torch.Tensor:
    part = checkpoint.read(name, [slice(extent.start, extent.stop) for extent in extents])
    local = torch.empty(
        [extent.length for extent in extents], dtype=dtype or part.dtype, device=device
    )
    if any(extent.padding for extent in extents):
        local.zero_()
    held = tuple(slice(extent.size) for extent in extents)
    local[held].copy_(part)
    return local
