"""Read and write the parts of tensors that a rank holds, as safetensors files.

    CheckpointError (CoordinatorError)
    ├── CheckpointFormatError (ValueError)    not a safetensors file, or a malformed index
    ├── MissingTensorError (LookupError)      the checkpoint lacks tensors
    └── TensorShapeError (ValueError)         a tensor has another shape than expected

A path that does not exist raises `FileNotFoundError`.

A complete file replaces the old file atomically. Until then the new file is called
``.RANDOM.unfinished``, in the same folder; only a killed writer leaves it.

A checkpoint is one file, or several with an index from tensor to file. Opening a checkpoint reads
the headers only; a tensor's bytes are mapped, and read from disk when they are copied.

    0        8               8 + length
    ┌────────┬───────────────┬──────────┬──────────┬───
    │ length │ header (JSON) │ tensor 0 │ tensor 1 │ …      little-endian, no gaps
    └────────┴───────────────┴──────────┴──────────┴───

The header maps names to dtype, shape and byte range; spaces pad it to 8 bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from coordinator.group import GroupCoordinator
from coordinator.layout.placement import Axis, Extent, Layout, Place, Placement, Replicate, Shard
from coordinator.layout.plan import SubMesh
from coordinator.layout.redistribute import redistribute_between, strip, whole_shape
from device_comm.torch_backend import as_bytes
from shm_broadcast.errors import CoordinatorError, DivergenceError


class CheckpointError(CoordinatorError):
    """A checkpoint (the file or folder ``path``) cannot be read or written."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class CheckpointFormatError(CheckpointError, ValueError):
    """A file is not a safetensors file, is cut short, or an index is malformed."""


class MissingTensorError(CheckpointError, LookupError):
    """The checkpoint lacks tensors; ``names`` has their names in the checkpoint."""

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self.names = names
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        super().__init__(path, f"no tensor named {', '.join(names[:3])}{more}")


class TensorShapeError(CheckpointError, ValueError):
    """A tensor has another shape than expected.

    ``name`` is the tensor's in the checkpoint; ``expected`` and ``found`` are whole shapes.
    """

    def __init__(
        self, path: str, name: str, expected: tuple[int, ...], found: tuple[int, ...]
    ) -> None:
        self.name = name
        self.expected = expected
        self.found = found
        super().__init__(path, f"{name} has shape {list(found)}, expected {list(expected)}")


_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class Replacement:
    """A new file that replaces ``path`` (a regular file or nothing) when it is finished.

    Close it, or use it with ``with``. If ``path`` is a link, its target is replaced. Each method
    raises an OSError that names ``path``.

    Raises:
        CheckpointError: ``path`` is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors_name_the_path():
            self._target = Path(os.path.realpath(path))
            self._check_target()
            self._unfinished = self._target.with_name(f".{secrets.token_hex(8)}.unfinished")
            self._file = self._unfinished.open("xb")

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``."""
        with self._errors_name_the_path():
            self._file.write(data)

    def finish(self) -> None:
        """Write the file to disk, then replace the path with it."""
        with self._errors_name_the_path():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._unfinished.replace(self._target)

    def close(self) -> None:
        """Delete the file unless it is finished. Idempotent."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):  # it has replaced the path
            self._unfinished.unlink()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_target(self) -> None:
        try:
            mode = self._target.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            kind = _KINDS[stat.S_IFMT(mode)]
            raise CheckpointError(str(self._path), f"is a {kind}, not a regular file")

    @contextmanager
    def _errors_name_the_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            del error.filename2  # the text would show a second name of None
            raise


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a safetensors checkpoint, by name. Close it, or use it with ``with``.

    ``path`` is as for `load_sharded`. Every rank opens its own. Methods that take a tensor's name
    raise MissingTensorError if the checkpoint lacks it.

    Raises:
        FileNotFoundError: the file does not exist, or the folder has no checkpoint.
        CheckpointFormatError: a file is not a safetensors file, or the index is malformed.
        MissingTensorError: the index names a tensor that its file lacks.
        ImportError: the safetensors package is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _resolve(Path(path))
        self._files = ExitStack()
        self._where: dict[str, Any] = {}
        try:
            if self.path.suffix == ".json":
                self._open_index()
            else:
                file = self._open(self.path)
                self._where = dict.fromkeys(file.keys(), file)
        except BaseException:
            self._files.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors, sorted."""
        return tuple(sorted(self._where))

    def require(self, names: Sequence[str]) -> None:
        """Raise MissingTensorError, with the missing names, unless all ``names`` exist."""
        missing = tuple(name for name in names if name not in self._where)
        if missing:
            raise MissingTensorError(str(self.path), missing)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape."""
        self.require([name])
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype."""
        return self.read(name, [slice(0, 0) for _ in self.shape(name)]).dtype

    def read(self, name: str, region: Sequence[slice]) -> torch.Tensor:
        """Return a part of a tensor; ``region`` has a slice of step 1 for every dimension.

        The result is on the CPU and may share the memory of the mapped file: copy it before
        `close`.
        """
        self.require([name])
        file = self._where[name]
        with torch.device("cpu"):  # or the caller's `with torch.device(...)` applies
            if not region:
                scalar: torch.Tensor = file.get_tensor(name)
                return scalar
            part: torch.Tensor = file.get_slice(name)[tuple(region)]
            return part

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._where = {}
        self._files.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._where)} tensors)"

    def _open_index(self) -> None:
        try:
            index = msgspec.json.decode(self.path.read_bytes(), type=_Index)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            raise CheckpointFormatError(str(self.path), f"not an index: {exc}") from exc
        files = {
            name: self._open(self.path.parent / name)
            for name in sorted(set(index.weight_map.values()))
        }
        held = {name: set(file.keys()) for name, file in files.items()}
        missing = tuple(name for name, file in index.weight_map.items() if name not in held[file])
        if missing:
            raise MissingTensorError(str(self.path), missing)
        self._where = {name: files[file] for name, file in index.weight_map.items()}

    def _open(self, path: Path) -> Any:
        try:
            from safetensors import SafetensorError, safe_open  # noqa: PLC0415
        except ImportError as exc:
            raise ImportError("reading a checkpoint needs the package safetensors") from exc
        try:
            return self._files.enter_context(safe_open(str(path), framework="pt"))
        except SafetensorError as exc:
            raise CheckpointFormatError(str(path), f"not a safetensors file: {exc}") from exc


def _resolve(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(f"{path}: holds neither {SINGLE} nor {INDEX}")


_METADATA = "__metadata__"

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the encoded header of a file.

    Args:
        tensors: each tensor's dtype and shape, by name, in the order of the file.
        metadata: texts by name.

    Raises:
        ValueError: the format does not support a dtype or reserves a tensor's name, or ``metadata``
            has a key or value that is not a str.
    """
    texts = dict(metadata or {})
    if not all(isinstance(text, str) for pair in texts.items() for text in pair):
        raise ValueError(f"metadata must be texts by name; got {texts}")
    if _METADATA in tensors:
        raise ValueError(f"safetensors reserves the name {_METADATA}")
    entries: dict[str, object] = {_METADATA: texts} if texts else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise ValueError(f"{name}: safetensors does not support {dtype}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        place = [start, end]
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": place}
    encoded = msgspec.json.encode(entries)
    return encoded + b" " * (-len(encoded) % 8)


def write_checkpoint(file: Replacement, header: bytes, tensors: Iterable[Tensor]) -> None:
    """Write and finish a file: ``header`` and its ``tensors``, in its order, from any device.

    Of concurrent writers of one path, each writes a whole file, and the last one stays. Raises
    OSError as `Replacement`.
    """
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for tensor in tensors:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        file.write(as_bytes(plain).numpy().data)
    file.finish()


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

    Each rank reads for itself, and only its slices of the tensors in ``layouts``.

    Args:
        path: a ``.safetensors`` file, an index ``.safetensors.index.json``, or a folder with
            ``model.safetensors`` or ``model.safetensors.index.json``.
        layouts: the layout of each tensor on the ranks of ``group``, by the caller's name for the
            tensor. A `Placement` stands for the `Layout` with that one placement.
        group: the group that divides the tensors; several groups, outermost first, if the
            layouts have several placements.
        source: maps the caller's name of a tensor to the checkpoint's; None: they are equal.
        shapes: the required shapes of whole tensors, by the caller's names.
        dtype: the dtype to convert to; None: the checkpoint's.
        device: the device of the returned tensors.
        report: called with (bytes read, bytes in all, name of the last tensor read): once before
            the first tensor, with an empty name, and after each tensor. Bytes are counted in the
            checkpoint's dtype, without padding.

    Returns:
        Contiguous tensors by the caller's names, in the order of ``layouts``; they share no memory.
        Padding is zero.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        CheckpointFormatError: a file is not a safetensors file, or an index is malformed.
        MissingTensorError: the checkpoint lacks a tensor. Nothing was read.
        TensorShapeError: a tensor has another shape than in ``shapes``. Nothing was read.
        ValueError: a layout does not fit its tensor or the group.
    """
    axes = group if isinstance(group, Sequence) else (group,)
    names = {name: source(name) if source else name for name in layouts}
    with Checkpoint(path) as checkpoint:
        checkpoint.require(tuple(names.values()))
        parts: dict[str, tuple[Extent, ...]] = {}
        for name, layout in layouts.items():
            actual = checkpoint.shape(names[name])
            expected = tuple(shapes[name]) if shapes and name in shapes else actual
            if actual != expected:
                raise TensorShapeError(str(checkpoint.path), names[name], expected, actual)
            whole = Layout.of(layout)
            if whole.has_terms:
                raise ValueError(f"{name}: a checkpoint cannot hold terms ({whole})")
            parts[name] = whole.extents(actual, axes)
        sizes = {
            name: math.prod(extent.size for extent in extents)
            * checkpoint.dtype(names[name]).itemsize
            for name, extents in parts.items()
        }
        progress = (lambda *_: None) if report is None else report
        done, total = 0, sum(sizes.values())
        progress(done, total, "")
        tensors: dict[str, torch.Tensor] = {}
        for name, extents in parts.items():
            tensors[name] = _read(checkpoint, names[name], extents, dtype, device)
            done += sizes[name]
            progress(done, total, name)
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
    tensor at a time in memory. Returns, on every rank, when the complete file has replaced the old
    one. If ``path`` is a link, its target is replaced.

    Args:
        path: the file, or a folder, where ``model.safetensors`` is written.
        tensors: this rank's parts, padding included, by name; a tensor has the same dtype on all
            ranks.
        layouts: the layout on the ranks of ``group`` of each tensor to write, in this order.
        group: the group that divides the tensors; several groups, outermost first, if the
            layouts have several placements.
        shapes: the shapes of whole tensors, by name; required for sharded tensors.
        target: maps the caller's name of a tensor to the checkpoint's; None: they are equal.
        metadata: texts by name to store in the file; the writing rank's count.

    Raises:
        KeyError: a name is not in ``tensors``.
        ValueError: a layout does not fit its tensor or the group, a shape is missing, two
            tensors get one name, or the format does not support a dtype or a name. Nothing was
            sent. On the rank that writes also: ``path`` or ``metadata`` is invalid.
        DivergenceError: the ranks' tensors differ in a name, their order, a dtype, a shape or a
            layout; names the first difference. Nothing was written, and the groups stay usable.
        CheckpointError: ``path`` is neither a regular file nor a folder. Nothing was written. On
            the ranks that do not write also: the file could not be written.
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
        raise ValueError(f"target maps several tensors to one name: {names}")
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
    """Collect one tensor after the other; write them on the rank that is first on every axis.

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
            except Exception as failure:  # noqa: BLE001 - raised on all ranks
                error = failure
        _raise_on_all(file, error, axes)
        if writes:
            try:
                write_checkpoint(new, header, (whole for whole in wholes if whole is not None))
            except Exception as failure:
                if torn:
                    raise
                error = failure
        # Collecting is collective: ranks that do not write, or fail to, must take part.
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
            raise ValueError(f"this rank has {tuple(x.shape)}; {layout} of {whole} needs {held}")
        return cls(strip(x.detach(), held), layout, whole, axes)

    def __str__(self) -> str:
        placements = ", ".join(map(str, self.layout.placements))
        return f"{self.x.dtype} {list(self.shape)} as {placements}"

    def collect(self) -> Tensor | None:
        """Return the whole tensor on the rank that is first on every axis; None on the others.

        Collective: yes, every member of every group.
        """
        x = self.x
        for number in reversed(range(len(self.axes))):
            axis, placement = self.axes[number], self.layout.placements[number]
            outer = Layout(self.layout.placements[:number])
            divided = outer.extents(self.shape, self.axes[:number])
            if axis.world_size > 1 and not isinstance(placement, Replicate):
                x = redistribute_between(
                    x,
                    _without_padding(placement, divided, axis.world_size),
                    Replicate(),
                    axis,
                    source_mesh=SubMesh(tuple(range(axis.world_size))),
                    target_mesh=SubMesh((0,)),
                    shape=[extent.size for extent in divided],
                )
            if axis.rank_in_group != 0:
                return None
        return x


def _without_padding(placement: Placement, divided: Sequence[Extent], ranks: int) -> Placement:
    """Return ``placement`` with the sizes of the parts of ``divided`` without padding."""
    if not isinstance(placement, Shard):
        return placement
    places = [Place(rank, ranks) for rank in range(ranks)]
    sizes = tuple(placement.split(divided, place)[placement.dim].size for place in places)
    return Shard(placement.dim, sizes=sizes)


def _compare(tensors: Sequence[str], axes: Sequence[GroupCoordinator]) -> None:
    """Raise the same DivergenceError on all ranks unless all have the same ``tensors``.

    Collective: yes, every member. The groups stay usable.
    """
    digest = hashlib.sha256("\n".join(tensors).encode()).hexdigest()
    if len(set(_of_all(digest, axes))) <= 1:
        return
    me = axes[0].ranks[axes[0].rank_in_group]
    for rank, others in _of_all((me, tensors), axes):
        for number, (own, other) in enumerate(zip_longest(tensors, others, fillvalue="none")):
            if own != other:
                what = f"save_sharded whose tensor {number} is"
                raise DivergenceError(rank, f"{what} {own}", f"{what} {other}")


def _of_all(own: T, axes: Sequence[GroupCoordinator]) -> list[T]:
    """Return the object of every rank, the outermost axis first. Collective: yes, every member."""
    objects = [own]
    for axis in reversed(axes):
        objects = [each for part in axis.all_gather_object(objects) for each in part]
    return objects


def _raise_on_all(path: Path, error: Exception | None, axes: Sequence[GroupCoordinator]) -> None:
    """Raise on all ranks if the rank that is first on every axis has an ``error``.

    Collective: yes, every member. That rank raises ``error`` itself.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    for number, axis in enumerate(axes):
        if not any(inner.rank_in_group for inner in axes[number + 1 :]):
            text = axis.broadcast_object(text, 0)
    if error is not None:
        raise error
    if text is not None:
        raise CheckpointError(str(path), f"not written: {text}")
