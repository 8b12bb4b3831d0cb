"""Writing checkpoints from shards, read back by the safetensors library and by load_sharded."""

from __future__ import annotations

import os
import resource
import signal
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
    Place,
    Replicate,
    Shard,
    load_sharded,
    save_sharded,
)
from coordinator.layout.checkpoint import Replacement, encode_header, write_checkpoint
from shm_broadcast.errors import DivergenceError
from tests.coordinator.layout.by_hand import hold
from tests.coordinator.layout.meshes import open_mesh
from tests.forked import in_a_child
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from coordinator.layout import Mesh

WHOLES = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "ids": torch.arange(9),
    "half": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "tiny": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j, 3j]).to(torch.complex64),
}
SHAPES = {name: whole.shape for name, whole in WHOLES.items()}


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """torch compares no float8."""
    return x.contiguous().view(-1).view(torch.uint8)


def write(file: Path, header: bytes, tensors: Iterable[torch.Tensor]) -> None:
    with Replacement(file) as new:
        write_checkpoint(new, header, tensors)


def round_trip(mesh: Mesh, folder: Path, layouts: dict[str, Layout]) -> None:
    names = [name for name in WHOLES if name in layouts]
    held = {name: hold(WHOLES[name], layouts[name], mesh.axes) for name in names}
    file = folder / f"{len(mesh.shape)}.safetensors"
    save_sharded(file, held, layouts, mesh.axes, shapes=SHAPES, target=lambda name: f"m.{name}")
    there = load_file(file)
    assert set(there) == {f"m.{name}" for name in names}
    for name in names:
        whole = WHOLES[name]
        assert there[f"m.{name}"].dtype == whole.dtype
        assert torch.equal(as_bytes(there[f"m.{name}"]), as_bytes(whole))
    plain = {
        name: layout
        for name, layout in layouts.items()
        if not layout.has_terms and WHOLES[name].dtype.itemsize > 1
    }
    again = load_sharded(file, plain, mesh.axes, source=lambda name: f"m.{name}")
    for name in plain:
        assert torch.equal(again[name], held[name]), name


def one_axis(mesh: Mesh, folder: Path) -> None:
    layouts = {
        "matrix": Layout((Shard(0, padded=True),)),
        "ids": Layout((Shard(0, sizes=(4, 0, 3, 2)),)),
        "half": Layout((Shard(-1),)),
        "scalar": Layout((Replicate(),)),
        "empty": Layout((Shard(1),)),
        "flags": Layout((Shard(0),)),
        "tiny": Layout((Shard(0),)),
        "complex": Layout((Partial(),)),
    }
    round_trip(mesh, folder, layouts)


def two_axes(mesh: Mesh, folder: Path) -> None:
    layouts = {
        "matrix": Layout((Shard(0), Shard(0, padded=True))),
        "ids": Layout((Replicate(), Shard(0, padded=True))),
        "half": Layout((Shard(2), Shard(1))),
        "scalar": Layout((Partial(), Replicate())),
    }
    round_trip(mesh, folder, layouts)


def to_a_folder(mesh: Mesh, folder: Path) -> None:
    axis = mesh.axes[0]
    x = torch.ones(2) * axis.rank_in_group
    save_sharded(folder, {"x": x}, {"x": Shard(0)}, axis, shapes={"x": (8,)}, metadata={"by": "us"})
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"by": "us"}
        assert file.get_tensor("x").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def a_disk_that_fails(mesh: Mesh, folder: Path) -> None:
    """Every rank hears of it, and the group goes on."""
    axis = mesh.axes[0]
    x = {"x": torch.ones(2), "y": torch.ones(2)}
    layouts = {"x": Shard(0), "y": Replicate()}
    expected = OSError if axis.rank_in_group == 0 else CheckpointError
    with pytest.raises(expected, match=r"absent|not written"):
        save_sharded(folder / "absent" / "x.safetensors", x, layouts, axis, shapes={"x": (8,)})
    assert axis.all_reduce(torch.ones(1)).item() == 4


def a_disk_that_is_full(mesh: Mesh, folder: Path) -> None:
    """Every rank hears of it when all have sent everything, and the group goes on."""
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
    assert axis.all_reduce(torch.ones(1)).item() == 4


def what_only_the_writer_finds(mesh: Mesh, folder: Path) -> None:
    """It is no error of the disk; every rank hears of it, and the group goes on."""
    axis = mesh.axes[0]
    writes = axis.rank_in_group == 0
    x, layouts = {"x": torch.ones(2)}, {"x": Shard(0)}
    texts: Any = {"step": 3} if writes else None
    for file, metadata, match in (
        (folder / "a\0b", None, "null"),
        (folder / "x.safetensors", texts, "metadata"),
    ):
        with pytest.raises(ValueError if writes else CheckpointError, match=match):
            save_sharded(file, x, layouts, axis, shapes={"x": (8,)}, metadata=metadata)
    assert not (folder / "x.safetensors").exists()
    assert axis.all_reduce(torch.ones(1)).item() == 4


def what_is_no_file(mesh: Mesh, folder: Path) -> None:
    """It stays, every rank hears of it, and the group goes on."""
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
    assert axis.all_reduce(torch.ones(1)).item() == 4


def what_differs(mesh: Mesh, folder: Path) -> None:
    """Nothing is written, every rank hears which rank and tensor, and the group goes on."""
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
    assert axis.all_reduce(torch.ones(1)).item() == 4


def refused(mesh: Mesh, folder: Path) -> None:
    if mesh.axes[0].rank_in_group:
        return
    axis = mesh.axes[0]
    x = {"x": torch.ones(2), "y": torch.ones(2)}
    with pytest.raises(ValueError, match="shape= is required"):
        save_sharded(folder / "f", x, {"x": Shard(0)}, axis)
    with pytest.raises(ValueError, match="this rank has"):
        save_sharded(folder / "f", x, {"x": Shard(0)}, axis, shapes={"x": (99,)})
    with pytest.raises(ValueError, match="one name"):
        save_sharded(folder / "f", x, dict.fromkeys(x, Replicate()), axis, target=lambda _: "z")
    with pytest.raises(KeyError):
        save_sharded(folder / "f", x, {"z": Replicate()}, axis)
    wide = {"x": torch.ones(1, dtype=torch.complex128)}
    with pytest.raises(ValueError, match="complex128"):
        save_sharded(folder / "f", wide, {"x": Replicate()}, axis)
    kept = "__metadata__"
    with pytest.raises(ValueError, match=kept):
        save_sharded(folder / "f", {kept: torch.ones(1)}, {kept: Replicate()}, axis)
    assert not (folder / "f").exists()


def saving(rank: int, n: int, path: str, folder: str) -> None:
    with ExitStack() as stack:
        line = open_mesh(stack, rank, (4,), path)
        one_axis(line, Path(folder))
        to_a_folder(line, Path(folder))
    with ExitStack() as stack:
        two_axes(open_mesh(stack, rank, (2, 2), path + "grid"), Path(folder))


def not_saving(rank: int, n: int, path: str, folder: str) -> None:
    with ExitStack() as stack:
        line = open_mesh(stack, rank, (4,), path)
        for case in (
            *(a_disk_that_fails, a_disk_that_is_full, what_only_the_writer_finds),
            *(what_is_no_file, what_differs, refused),
        ):
            case(line, Path(folder))


@pytest.mark.parametrize("body", [saving, not_saving])
def test_saving(body: Any, store_path: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    run_ranks(4, body, store_path, str(folder), timeout=120)
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = encode_header({"x": (torch.float32, (2,))})
    write(file, header, [torch.ones(2)])

    def fails() -> object:
        yield torch.zeros(2)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(file, header, fails())
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    assert load_file(file)["x"].tolist() == [1, 1]


def test_a_link_stays_and_leads_to_the_new_file(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    there.mkdir()
    (tmp_path / "relative").symlink_to("elsewhere/x")
    (tmp_path / "link").symlink_to(tmp_path / "relative")
    for value in (1, 2):  # at first it leads nowhere
        write(tmp_path / "link", encode_header({"x": (torch.int64, ())}), [torch.tensor(value)])
        assert load_file(tmp_path / "link")["x"].item() == value
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "relative").is_symlink()
    assert [file.name for file in there.iterdir()] == ["x"]


def test_others_may_read_a_file_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write(tmp_path / "x", encode_header({}), [])
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_who_saves_the_same_file_meanwhile_writes_another_one(tmp_path: Path) -> None:
    """Their process has the same number: a thread's, or that of another container."""
    file = tmp_path / "x.safetensors"
    header = encode_header({"x": (torch.float32, (2,))})

    def another_saves() -> Iterator[torch.Tensor]:
        write(file, header, [torch.zeros(2)])
        assert load_file(file)["x"].tolist() == [0, 0]
        yield torch.ones(2)

    write(file, header, another_saves())
    assert load_file(file)["x"].tolist() == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_name_may_be_as_long_as_a_file_s_may(tmp_path: Path) -> None:
    file = tmp_path / "x".zfill(os.pathconf(tmp_path, "PC_NAME_MAX"))
    write(file, encode_header({"x": (torch.float32, (2,))}), [torch.ones(2)])
    assert load_file(file)["x"].tolist() == [1, 1]


def test_what_a_killed_writer_leaves(tmp_path: Path) -> None:
    def killed() -> Iterator[torch.Tensor]:
        yield torch.ones(30_000)
        os.kill(os.getpid(), signal.SIGKILL)

    def write_and_die() -> None:
        write(tmp_path / "x", encode_header({"x": (torch.float32, (30_000,))}), killed())

    with pytest.raises(AssertionError):
        in_a_child(write_and_die)
    left = [file.name for file in tmp_path.iterdir()]
    assert [Path(name).suffix for name in left] == [".unfinished"]


@pytest.mark.parametrize("folder", ["absent", "file"])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / folder / "x.safetensors"
    with pytest.raises(OSError, match="directory") as caught:
        write(file, encode_header({}), [])
    assert str(caught.value).endswith(f"directory: '{file}'")


def write_more_than_is_allowed(file: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    header = encode_header({"x": (torch.float32, (1000,))})
    with pytest.raises(OSError, match="File too large") as caught:
        write(file, header, [torch.zeros(1000)])
    assert str(caught.value).endswith(f"File too large: '{file}'")
    assert not list(file.parent.iterdir())


def test_an_error_while_a_file_is_written_names_it(tmp_path: Path) -> None:
    in_a_child(lambda: write_more_than_is_allowed(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    "metadata", [{"step": 3}, {3: "x"}, {"a": None}, {"a": ["b"]}, {"a": "b", "c": b"d"}]
)
def test_metadata_are_texts(metadata: Any) -> None:
    with pytest.raises(ValueError, match="metadata must be texts"):
        encode_header({"x": (torch.float32, (2,))}, metadata)


def test_one_element_of_a_column(tmp_path: Path) -> None:
    """It is contiguous, and its stride is not 1."""
    x = torch.arange(4, dtype=torch.bfloat16).reshape(2, 2)[:1, 1]
    file = tmp_path / "x.safetensors"
    write(file, encode_header({"x": (x.dtype, x.shape)}), [x])
    assert load_file(file)["x"].tolist() == [1]


def test_a_checkpoint_holds_no_terms(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file, encode_header({"x": (torch.float32, (2,))}), [torch.ones(2)])

    with pytest.raises(ValueError, match="terms"):
        load_sharded(file, {"x": Partial()}, Place(0, 2))
