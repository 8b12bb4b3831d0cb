"""Reading a rank's part of a checkpoint, against slicing the whole tensors by hand."""

from __future__ import annotations

import json
import math
import pickle
import struct
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from coordinator.layout import (
    Checkpoint,
    CheckpointFormatError,
    Layout,
    MissingTensorError,
    Place,
    Replicate,
    Shard,
    TensorShapeError,
    load_sharded,
)
from tests.commands import run_code

if TYPE_CHECKING:
    from pathlib import Path


TENSORS = {
    "matrix": torch.arange(35.0).reshape(7, 5),
    "vector": torch.arange(7, dtype=torch.int64),
    "half": torch.arange(24, dtype=torch.bfloat16).reshape(2, 3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ["matrix", "scalar", "empty"])
def test_the_default_device_of_the_caller_changes_nothing(folder: Path, name: str) -> None:
    """A model's skeleton is often made under this one, and its weights are loaded there."""
    with torch.device("meta"), Checkpoint(folder) as checkpoint:
        loaded = load_sharded(folder, {name: Replicate()}, Place(0, 1))[name]
        read = checkpoint.read(name, [slice(size) for size in TENSORS[name].shape]).clone()
    for found in (loaded, read):
        assert found.device.type == "cpu"
        assert torch.equal(found, TENSORS[name])


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


def test_even_replicated_and_scalar(folder: Path) -> None:
    layouts = {
        "matrix": Layout(),
        "half": Shard(-1),
        "scalar": Replicate(),
        "empty": Shard(1),
    }
    for rank in range(2):
        held = load_sharded(folder, layouts, Place(rank, 2))
        assert list(held) == list(layouts)
        assert torch.equal(held["matrix"], TENSORS["matrix"])
        assert torch.equal(held["half"], TENSORS["half"][..., 2 * rank : 2 * rank + 2])
        assert held["half"].dtype == torch.bfloat16
        assert held["half"].is_contiguous()
        assert held["scalar"].item() == 3.5
        assert held["empty"].shape == (0, 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_is_cut_as_chunk_cuts(folder: Path, dim: int) -> None:
    chunks = TENSORS["matrix"].chunk(3, dim)
    for rank in range(3):
        held = load_sharded(folder, {"matrix": Shard(dim)}, Place(rank, 3))
        assert torch.equal(held["matrix"], chunks[rank])


@pytest.mark.parametrize("dim", [0, 1])
def test_padding_is_zero_and_at_the_end(folder: Path, dim: int) -> None:
    whole = TENSORS["matrix"]
    ranks = 4
    length = math.ceil(whole.shape[dim] / ranks)
    padded = torch.zeros(*(length * ranks if d == dim else n for d, n in enumerate(whole.shape)))
    padded.narrow(dim, 0, whole.shape[dim]).copy_(whole)
    for rank in range(ranks):
        held = load_sharded(folder, {"matrix": Shard(dim, padded=True)}, Place(rank, ranks))
        assert torch.equal(held["matrix"], padded.narrow(dim, rank * length, length))


def test_given_sizes(folder: Path) -> None:
    layout = {"vector": Shard(0, sizes=(1, 5, 1))}
    held = [load_sharded(folder, layout, Place(rank, 3))["vector"].tolist() for rank in range(3)]
    assert held == [[0], [1, 2, 3, 4, 5], [6]]


def test_a_mesh_of_two_axes(folder: Path) -> None:
    layout = Layout((Shard(0), Shard(1)))
    quarter = load_sharded(folder, {"matrix": layout}, [Place(1, 2), Place(0, 2)])["matrix"]
    assert torch.equal(quarter, TENSORS["matrix"][4:, :3])


def test_index_of_several_files(indexed: Path) -> None:
    layouts = {"half": Shard(1), "matrix": Shard(0)}
    for path in (indexed, indexed / "model.safetensors.index.json"):
        held = load_sharded(path, layouts, Place(1, 2))
        assert list(held) == ["half", "matrix"]
        assert torch.equal(held["half"], TENSORS["half"][:, 2:])
        assert torch.equal(held["matrix"], TENSORS["matrix"][4:])


def test_source_renames(folder: Path) -> None:
    held = load_sharded(
        folder / "model.safetensors",
        {"a.mat": Replicate(), "a.vec": Replicate()},
        Place(0, 1),
        source={"a.mat": "matrix", "a.vec": "vector"}.__getitem__,
        shapes={"a.mat": (7, 5)},
    )
    assert list(held) == ["a.mat", "a.vec"]
    assert torch.equal(held["a.vec"], TENSORS["vector"])


def test_dtype(folder: Path) -> None:
    held = load_sharded(
        folder, {"half": Shard(0, padded=True)}, Place(0, 4), dtype=torch.float64, device="cpu"
    )
    assert held["half"].dtype == torch.float64
    assert torch.equal(held["half"], TENSORS["half"][:1].double())


def test_progress_counts_the_bytes_of_this_rank(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    load_sharded(
        folder,
        {"matrix": Shard(0, padded=True), "half": Shard(2)},
        Place(1, 2),
        report=lambda done, total, name: seen.append((done, total, name)),
    )
    assert seen == [(0, 84, ""), (60, 84, "matrix"), (84, 84, "half")]


def test_result_outlives_the_file(folder: Path) -> None:
    held = load_sharded(folder, {"matrix": Replicate()}, Place(0, 1))["matrix"]
    (folder / "model.safetensors").write_bytes(b"")
    held += 1
    assert torch.equal(held, TENSORS["matrix"] + 1)


def test_checkpoint_lists_its_tensors(indexed: Path) -> None:
    with Checkpoint(indexed) as checkpoint:
        assert checkpoint.names == tuple(sorted(TENSORS))
        assert {n: checkpoint.shape(n) for n in TENSORS} == {n: t.shape for n, t in TENSORS.items()}
        assert {n: checkpoint.dtype(n) for n in TENSORS} == {n: t.dtype for n, t in TENSORS.items()}
        with pytest.raises(MissingTensorError, match="no tensor named nope"):
            checkpoint.shape("nope")
        checkpoint.close()
    checkpoint.close()


def test_missing_tensors_are_all_named(folder: Path) -> None:
    with pytest.raises(MissingTensorError, match="no tensor named x1, x2, x3 and 1 more") as info:
        load_sharded(
            folder,
            dict.fromkeys(["x1", "matrix", "x2", "x3", "x4"], Replicate()),
            Place(0, 1),
        )
    assert info.value.names == ("x1", "x2", "x3", "x4")
    again = pickle.loads(pickle.dumps(info.value))
    assert (again.names, str(again)) == (info.value.names, str(info.value))


def test_wrong_shape_names_both(folder: Path) -> None:
    with pytest.raises(
        TensorShapeError, match=r"matrix has shape \[7, 5\], expected \[7, 6\]"
    ) as e:
        load_sharded(
            folder, {"m": Shard(0)}, Place(0, 1), source=lambda _: "matrix", shapes={"m": (7, 6)}
        )
    again = pickle.loads(pickle.dumps(e.value))
    assert (again.name, again.expected, again.found) == ("matrix", (7, 6), (7, 5))


def test_layout_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(ValueError, match="needs dimension 1; the tensor has 1"):
        load_sharded(folder, {"vector": Shard(1)}, Place(0, 2))


@pytest.mark.parametrize("content", [b"", b"x" * 200, b"\xff" * 64])
def test_not_a_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="not a safetensors file") as info:
        load_sharded(path, {"a": Replicate()}, Place(0, 1))
    assert info.value.path == str(path)
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


def test_a_file_cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointFormatError, match="not a safetensors file"):
        load_sharded(path, {"matrix": Replicate()}, Place(0, 1))


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"weight_map": {"a": 1}}', b"\xff\xfe"])
def test_a_bad_index(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointFormatError, match="not an index"):
        load_sharded(tmp_path, {"a": Replicate()}, Place(0, 1))


def test_an_index_that_promises_too_much(indexed: Path) -> None:
    path = indexed / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"ghost": "a.safetensors"}}))
    with pytest.raises(MissingTensorError, match="ghost"):
        load_sharded(indexed, {"ghost": Replicate()}, Place(0, 1))
    path.write_text(json.dumps({"weight_map": {"ghost": "c.safetensors"}}))
    with pytest.raises(FileNotFoundError):
        load_sharded(indexed, {"ghost": Replicate()}, Place(0, 1))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds neither model.safetensors nor"):
        load_sharded(tmp_path, {"a": Replicate()}, Place(0, 1))
    with pytest.raises(FileNotFoundError):
        load_sharded(tmp_path / "none.safetensors", {"a": Replicate()}, Place(0, 1))


MEASURE = """
import sys
from coordinator.layout import Place, Shard, load_sharded
import torch

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

load_sharded(sys.argv[1], {"small": Shard(0)}, Place(0, 1))
before = peak()
held = load_sharded(sys.argv[1], {"big": Shard(int(sys.argv[2]))}, Place(3, 4096))["big"]
assert held.any(), "the marked element is not there"
print(held.numel() * 4 // 1024, peak() - before)
"""


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
    done = run_code(MEASURE, str(path), str(dim))  # fmt: skip
    held_kib, grown_kib = map(int, done.stdout.split())
    assert held_kib == 2048
    assert grown_kib < 32 * 1024
