"""A rank's part of a checkpoint is read; a file appears whole. `test_save` has ranks that write."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import resource
import signal
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.layout import (
    Checkpoint,
    CheckpointFormatError,
    Layout,
    MissingTensorError,
    Partial,
    Place,
    Replicate,
    Shard,
    TensorShapeError,
    load_sharded,
)
from coordinator.layout.checkpoint import Replacement, encode_header, write_checkpoint
from tests.coordinator.layout.by_hand import hold
from tests.forked import in_a_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

pytestmark = pytest.mark.quick

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ALONE = Place(0, 1)
TENSORS = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "vector": torch.arange(7, dtype=torch.int64),
    "half": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}

# --- reading -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """The same tensors in two files with an index."""
    parts = {"a.safetensors": ["matrix", "scalar"], "b.safetensors": ["vector", "half", "empty"]}
    for file, names in parts.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("name", "placements", "mesh"),
    [
        ("matrix", (R,), (2,)),
        ("half", (Shard(-1),), (2,)),
        ("scalar", (R,), (2,)),
        ("empty", (S1,), (2,)),
        ("matrix", (S0,), (3,)),
        ("matrix", (S1,), (3,)),
        ("matrix", (Shard(0, padded=True),), (4,)),
        ("matrix", (Shard(1, padded=True),), (4,)),
        ("vector", (Shard(0, sizes=(1, 5, 1)),), (3,)),
        ("matrix", (S0, S1), (2, 2)),
    ],
)
def test_every_rank_reads_its_part(
    folder: Path, name: str, placements: Any, mesh: tuple[int, ...]
) -> None:
    layout = Layout(placements)
    for ranks in itertools.product(*map(range, mesh)):
        places = [Place(rank, size) for rank, size in zip(ranks, mesh, strict=True)]
        found = load_sharded(folder, {name: layout}, places)[name]
        expected = hold(TENSORS[name], layout, places)
        assert (found.dtype, found.is_contiguous()) == (expected.dtype, True)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["matrix", "scalar", "empty"])
def test_the_default_device_of_the_caller_changes_nothing(folder: Path, name: str) -> None:
    """A model's skeleton is often made under this one, and its weights are loaded there."""
    with torch.device("meta"), Checkpoint(folder) as checkpoint:
        loaded = load_sharded(folder, {name: R}, ALONE)[name]
        read = checkpoint.read(name, [slice(size) for size in TENSORS[name].shape]).clone()
    for found in (loaded, read):
        assert found.device.type == "cpu"
        assert torch.equal(found, TENSORS[name])


def test_a_checkpoint_of_several_files_has_an_index(indexed: Path) -> None:
    for path in (indexed, indexed / "model.safetensors.index.json"):
        held = load_sharded(path, {"half": S1, "matrix": S0}, Place(1, 2))
        assert list(held) == ["half", "matrix"]
        assert torch.equal(held["half"], TENSORS["half"][:, 2:])
        assert torch.equal(held["matrix"], TENSORS["matrix"][4:])
    with Checkpoint(indexed) as checkpoint:
        assert checkpoint.names == tuple(sorted(TENSORS))
        assert {n: checkpoint.shape(n) for n in TENSORS} == {n: t.shape for n, t in TENSORS.items()}
        assert {n: checkpoint.dtype(n) for n in TENSORS} == {n: t.dtype for n, t in TENSORS.items()}
        with pytest.raises(MissingTensorError, match="no tensor named nope"):
            checkpoint.shape("nope")
        checkpoint.close()
    checkpoint.close()


def test_tensors_are_renamed_converted_and_counted(folder: Path) -> None:
    held = load_sharded(
        folder / "model.safetensors",
        {"a.mat": R, "a.vec": R},
        ALONE,
        source={"a.mat": "matrix", "a.vec": "vector"}.__getitem__,
        shapes={"a.mat": (7, 5)},
    )
    assert list(held) == ["a.mat", "a.vec"]
    assert torch.equal(held["a.vec"], TENSORS["vector"])
    wide = {"half": Shard(0, padded=True)}
    held = load_sharded(folder, wide, Place(0, 4), dtype=torch.float64, device="cpu")
    assert held["half"].dtype == torch.float64
    assert torch.equal(held["half"], TENSORS["half"][:1].double())
    seen: list[tuple[int, int, str]] = []
    load_sharded(
        folder,
        {"matrix": Shard(0, padded=True), "half": Shard(2)},
        Place(1, 2),
        report=lambda done, total, name: seen.append((done, total, name)),
    )
    assert seen == [(0, 84, ""), (60, 84, "matrix"), (84, 84, "half")]


def test_what_is_read_outlives_the_file(folder: Path) -> None:
    held = load_sharded(folder, {"matrix": R}, ALONE)["matrix"]
    (folder / "model.safetensors").write_bytes(b"")
    held += 1
    assert torch.equal(held, TENSORS["matrix"] + 1)


def test_missing_tensors_are_all_named(folder: Path) -> None:
    with pytest.raises(MissingTensorError, match="no tensor named x1, x2, x3 and 1 more") as info:
        load_sharded(folder, dict.fromkeys(["x1", "matrix", "x2", "x3", "x4"], R), ALONE)
    assert info.value.names == ("x1", "x2", "x3", "x4")
    again = pickle.loads(pickle.dumps(info.value))
    assert (again.names, str(again)) == (info.value.names, str(info.value))


def test_a_tensor_that_does_not_fit_is_refused(folder: Path) -> None:
    wrong = r"matrix has shape \[7, 5\], expected \[7, 6\]"
    with pytest.raises(TensorShapeError, match=wrong) as info:
        load_sharded(folder, {"m": S0}, ALONE, source=lambda _: "matrix", shapes={"m": (7, 6)})
    again = pickle.loads(pickle.dumps(info.value))
    assert (again.name, again.expected, again.found) == ("matrix", (7, 6), (7, 5))
    with pytest.raises(ValueError, match="needs dimension 1; the tensor has 1"):
        load_sharded(folder, {"vector": S1}, Place(0, 2))
    with pytest.raises(ValueError, match="terms"):
        load_sharded(folder, {"vector": Partial()}, Place(0, 2))


@pytest.mark.parametrize("content", [b"", b"x" * 200, b"\xff" * 64, None])
def test_a_file_that_is_no_checkpoint_is_refused(folder: Path, content: bytes | None) -> None:
    """The last is cut short."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(CheckpointFormatError, match="not a safetensors file") as info:
        load_sharded(path, {"matrix": R}, ALONE)
    assert info.value.path == str(path)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@pytest.mark.parametrize(
    ("index", "error", "match"),
    [
        (b"{", CheckpointFormatError, "not an index"),
        (b"[]", CheckpointFormatError, "not an index"),
        (b'{"weight_map": {"a": 1}}', CheckpointFormatError, "not an index"),
        (b"\xff\xfe", CheckpointFormatError, "not an index"),
        (b'{"weight_map": {"a": "a.safetensors"}}', MissingTensorError, "named a"),
        (b'{"weight_map": {"a": "c.safetensors"}}', FileNotFoundError, "c.safetensors"),
        (None, FileNotFoundError, "holds neither model.safetensors nor"),
    ],
)
def test_an_index_that_is_wrong_is_refused(
    indexed: Path, index: bytes | None, error: type[Exception], match: str
) -> None:
    path = indexed / "model.safetensors.index.json"
    path.unlink() if index is None else path.write_bytes(index)
    with pytest.raises(error, match=match):
        load_sharded(indexed, {"a": R}, ALONE)
    with pytest.raises(FileNotFoundError):
        load_sharded(indexed / "none.safetensors", {"a": R}, ALONE)


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_touches_only_its_slices(tmp_path: Path, dim: int) -> None:
    """An 8 GiB tensor: reading all of it would show in the process's peak memory."""
    shape = (1 << 20, 1 << 11) if dim == 0 else (8, 1 << 28)
    size = math.prod(shape) * 4
    header = json.dumps(
        {
            "small": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "big": {"dtype": "F32", "shape": shape, "data_offsets": [4, 4 + size]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "model.safetensors"
    first = 3 * shape[dim] // 4096 * (shape[1] if dim == 0 else 1)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 + size)
        file.seek(8 + len(header) + 4 + first * 4)
        file.write(struct.pack("<f", 1.0))

    def read_a_slice() -> None:
        load_sharded(path, {"small": S0}, ALONE)
        before = peak_kib()
        held = load_sharded(path, {"big": Shard(dim)}, Place(3, 4096))["big"]
        assert held.any()  # the marked element
        assert held.numel() * 4 == 2 << 20
        assert peak_kib() - before < 32 * 1024

    in_a_child(read_a_slice)


# --- writing one file ----------------------------------------------------------------------

TWO = encode_header({"x": (torch.float32, (2,))})


def write(file: Path, header: bytes, tensors: Iterable[torch.Tensor]) -> None:
    with Replacement(file) as new:
        write_checkpoint(new, header, tensors)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file, TWO, [torch.ones(2)])

    def fails() -> Iterator[torch.Tensor]:
        yield torch.zeros(2)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(file, TWO, fails())
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]
    assert load_file(file)["x"].tolist() == [1, 1]


def test_a_writer_of_the_same_file_writes_another_one_meanwhile(tmp_path: Path) -> None:
    """Their process has the same number: a thread's, or that of another container."""
    file = tmp_path / "x.safetensors"

    def another_saves() -> Iterator[torch.Tensor]:
        write(file, TWO, [torch.zeros(2)])
        assert load_file(file)["x"].tolist() == [0, 0]
        yield torch.ones(2)

    write(file, TWO, another_saves())
    assert load_file(file)["x"].tolist() == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_killed_writer_leaves_an_unfinished_file(tmp_path: Path) -> None:
    def killed() -> Iterator[torch.Tensor]:
        yield torch.ones(30_000)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError):
        in_a_child(
            lambda: write(
                tmp_path / "x", encode_header({"x": (torch.float32, (30_000,))}), killed()
            )
        )
    assert [file.suffix for file in tmp_path.iterdir()] == [".unfinished"]


def test_a_link_stays_and_points_to_the_new_file(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    there.mkdir()
    (tmp_path / "relative").symlink_to("elsewhere/x")
    (tmp_path / "link").symlink_to(tmp_path / "relative")
    for value in (1, 2):  # at first it points nowhere
        write(tmp_path / "link", encode_header({"x": (torch.int64, ())}), [torch.tensor(value)])
        assert load_file(tmp_path / "link")["x"].item() == value
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "relative").is_symlink()
    assert [file.name for file in there.iterdir()] == ["x"]


def test_a_file_has_the_usual_mode_and_any_name(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    file = tmp_path / "x".zfill(os.pathconf(tmp_path, "PC_NAME_MAX"))
    # one element of a column: it is contiguous, and its stride is not 1
    x = torch.arange(4, dtype=torch.bfloat16).reshape(2, 2)[:1, 1]
    write(file, encode_header({"x": (x.dtype, x.shape)}), [x])
    assert load_file(file)["x"].tolist() == [1]
    assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("folder", ["absent", "file"])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / folder / "x.safetensors"
    with pytest.raises(OSError, match="directory") as caught:
        write(file, encode_header({}), [])
    assert str(caught.value).endswith(f"directory: '{file}'")


def test_an_error_while_a_file_is_written_names_it(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"

    def write_more_than_is_allowed() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        header = encode_header({"x": (torch.float32, (1000,))})
        with pytest.raises(OSError, match="File too large") as caught:
            write(file, header, [torch.zeros(1000)])
        assert str(caught.value).endswith(f"File too large: '{file}'")
        assert not list(tmp_path.iterdir())

    in_a_child(write_more_than_is_allowed)


@pytest.mark.parametrize(
    "metadata", [{"step": 3}, {3: "x"}, {"a": None}, {"a": ["b"]}, {"a": "b", "c": b"d"}]
)
def test_metadata_are_texts(metadata: Any) -> None:
    with pytest.raises(ValueError, match="metadata must be texts"):
        encode_header({"x": (torch.float32, (2,))}, metadata)
