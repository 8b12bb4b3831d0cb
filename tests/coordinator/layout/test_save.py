"""Ranks write a checkpoint from shards; the safetensors library and `load_sharded` read it."""

from __future__ import annotations

import os
import resource
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from coordinator.layout import (
    CheckpointError,
    Layout,
    Partial,
    Replicate,
    Shard,
    load_sharded,
    save_sharded,
)
from shm_broadcast.errors import DivergenceError
from tests.coordinator.layout.by_hand import hold, open_mesh
from tests.coordinator.sent import agree
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from coordinator.layout import Mesh

# Any dtype and layout by itself: `tests.fuzz`.
WHOLES = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "ids": torch.arange(9),
    "scalar": torch.tensor(3.5),
    "tiny": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, 3j]).to(torch.complex64),
}
LAYOUTS = {
    "matrix": Layout((Shard(0, padded=True),)),
    "ids": Layout((Shard(0, sizes=(4, 0, 3, 2)),)),
    "scalar": Layout((Replicate(),)),
    "tiny": Layout((Shard(0),)),
    "complex": Layout((Partial(),)),
}


def round_trip(mesh: Mesh, folder: Path) -> None:
    held = {name: hold(whole, LAYOUTS[name], mesh.axes) for name, whole in WHOLES.items()}
    file, shapes = folder / "x.safetensors", {name: x.shape for name, x in WHOLES.items()}
    save_sharded(file, held, LAYOUTS, mesh.axes, shapes=shapes, target=lambda name: f"m.{name}")
    there = load_file(file)
    agree({name: there.pop(f"m.{name}") for name in WHOLES}, WHOLES)
    assert not there
    plain = {
        name: layout
        for name, layout in LAYOUTS.items()
        if not layout.has_terms and WHOLES[name].dtype.itemsize > 1
    }
    again = load_sharded(file, plain, mesh.axes, source=lambda name: f"m.{name}")
    agree(again, {name: held[name] for name in plain})


def to_a_folder(mesh: Mesh, folder: Path) -> None:
    axis = mesh.axes[0]
    x = torch.ones(2) * axis.rank_in_group
    save_sharded(folder, {"x": x}, {"x": Shard(0)}, axis, shapes={"x": (8,)}, metadata={"by": "us"})
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"by": "us"}
        assert file.get_tensor("x").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def the_writer_fails(mesh: Mesh, folder: Path) -> None:
    axis = mesh.axes[0]
    writes = axis.rank_in_group == 0
    texts: Any = {"step": 3} if writes else None
    x, layouts = {"x": torch.ones(2), "y": torch.ones(2)}, {"x": Shard(0), "y": Replicate()}
    for file, metadata, error, match in (
        (folder / "absent" / "x.safetensors", None, OSError, r"absent|not written"),
        (folder / "a\0b", None, ValueError, "null"),
        (folder / "x.safetensors", texts, ValueError, "metadata"),
    ):
        with pytest.raises(error if writes else CheckpointError, match=match):
            save_sharded(file, x, layouts, axis, shapes={"x": (8,)}, metadata=metadata)
        assert axis.all_reduce(torch.ones(1)).item() == 4
    assert not (folder / "x.safetensors").exists()


def a_disk_that_is_full(mesh: Mesh, folder: Path) -> None:
    """Every rank raises, after all have sent everything."""
    axis = mesh.axes[0]
    writes = axis.rank_in_group == 0
    x = {"x": torch.ones(2000), "y": torch.ones(2)}
    layouts, file = {"x": Shard(0), "y": Shard(0)}, folder / "full.safetensors"
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    if writes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, allowed[1]))
    try:
        with pytest.raises(OSError if writes else CheckpointError, match="too large") as caught:
            save_sharded(file, x, layouts, axis, shapes={"x": (8000,), "y": (8,)})
        assert str(caught.value).endswith(f"File too large: '{file}'")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
    assert not file.exists()


def what_is_no_file(mesh: Mesh, folder: Path) -> None:
    axis = mesh.axes[0]
    there = folder / "no files"
    if axis.rank_in_group == 0:
        (there / "model.safetensors").mkdir(parents=True)
        os.mkfifo(there / "fifo")
        (there / "link").symlink_to("fifo")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(there / "socket"))
        with suppress(PermissionError):  # a device is for root to make
            os.mknod(there / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    axis.barrier()
    found = {file.name: file.lstat().st_ino for file in there.iterdir()}
    kinds = {"model.safetensors": "folder", "link": "fifo"}
    for name in found:
        file = there if name == "model.safetensors" else there / name
        match = f"{name}: is a {kinds.get(name, name)}, not a regular file"
        with pytest.raises(CheckpointError, match=match):
            save_sharded(file, {"x": torch.ones(2)}, {"x": Shard(0)}, axis, shapes={"x": (8,)})
    assert {file.name: file.lstat().st_ino for file in there.iterdir()} == found


def what_differs(mesh: Mesh, folder: Path) -> None:
    axis = mesh.axes[0]
    differs = axis.rank_in_group == 2
    layouts: dict[str, Any] = {"x": Shard(0), "y": Replicate()}
    shapes = {"x": (8,), "y": (2,)}
    held = {name: torch.ones(2) for name in layouts}
    x, y = "'x': torch.float32 [8] as Shard(0)", "'y': torch.float32 [2] as Replicate"
    in_other_order = dict(reversed(layouts.items()))
    other: list[tuple[dict[str, Any], int, str, str]] = [
        ({"layouts": in_other_order}, 0, x, y),
        ({"layouts": {"x": Shard(0)}}, 1, y, "none"),
        ({"layouts": {**layouts, "y": Partial()}}, 1, y, y.replace("Replicate", "Partial(SUM)")),
        ({"target": {"x": "z", "y": "y"}.get}, 0, x, x.replace("x", "z")),
        ({"tensors": {"x": held["x"], "y": held["y"].double()}}, 1, y, y.replace("32", "64")),
        ({"layouts": {**layouts, "x": Shard(0, sizes=(2, 2, 2, 2))}}, 0, x, ""),
        ({"tensors": {"x": held["x"], "y": torch.ones(3)}, "shapes": {"x": (8,)}}, 1, y, ""),
    ]
    for change, number, usual, unusual in other:
        given = {"tensors": held, "layouts": layouts, "shapes": shapes}
        with pytest.raises(DivergenceError) as caught:
            save_sharded(folder / "f", group=axis, **(given | change if differs else given))
        ours, theirs = (unusual, usual) if differs else (usual, unusual)
        assert caught.value.rank == (0 if differs else 2)
        assert caught.value.ours.startswith(f"save_sharded whose tensor {number} is {ours}")
        assert caught.value.theirs.startswith(f"save_sharded whose tensor {number} is {theirs}")
    assert not (folder / "f").exists()


def a_wrong_call_is_refused(mesh: Mesh, folder: Path) -> None:
    axis = mesh.axes[0]
    x = {"x": torch.ones(2), "y": torch.ones(2)}
    wide = {"x": torch.ones(1, dtype=torch.complex128)}
    kept, replicated = "__metadata__", dict.fromkeys(x, Replicate())
    wrong: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], type[Exception], str]] = [
        (x, {"x": Shard(0)}, {}, ValueError, "shape= is required"),
        (x, {"x": Shard(0)}, {"shapes": {"x": (99,)}}, ValueError, "this rank has"),
        (x, replicated, {"target": lambda _: "z"}, ValueError, "one name"),
        (x, {"z": Replicate()}, {}, KeyError, "z"),
        (wide, {"x": Replicate()}, {}, ValueError, "complex128"),
        ({kept: torch.ones(1)}, {kept: Replicate()}, {}, ValueError, kept),
    ]
    for held, layouts, options, error, match in wrong if axis.rank_in_group == 0 else ():
        with pytest.raises(error, match=match):
            save_sharded(folder / "f", held, layouts, axis, **options)
    assert not (folder / "f").exists()


def saving(rank: int, n: int, path: str, folder: str) -> None:
    with ExitStack() as stack:
        line = open_mesh(stack, rank, (4,), path)
        round_trip(line, Path(folder))
        to_a_folder(line, Path(folder))


def not_saving(rank: int, n: int, path: str, folder: str) -> None:
    """Nothing is written, every rank raises, and the group goes on."""
    with ExitStack() as stack:
        line = open_mesh(stack, rank, (4,), path)
        for case in (
            *(the_writer_fails, a_disk_that_is_full, what_is_no_file),
            *(what_differs, a_wrong_call_is_refused),
        ):
            case(line, Path(folder))
            assert line.axes[0].all_reduce(torch.ones(1)).item() == 4


@pytest.mark.parametrize("body", [saving, not_saving])
def test_saving(body: Any, store_path: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run_ranks(4, body, store_path, str(folder), timeout=120)
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]
