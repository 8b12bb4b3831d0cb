"""Reads safetensors files; the only module that uses the safetensors library.

A checkpoint is one file, or several with an index that says which tensor is in which file. Opening
it reads the headers only; a tensor's bytes are mapped, and read from disk when they are copied.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from coordinator.layout.errors import CheckpointFormatError, MissingTensorError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """The tensors of a safetensors checkpoint, by name. Close it, or use it with ``with``.

    Args:
        path: a ``.safetensors`` file, a ``.safetensors.index.json`` file, or a folder that
            holds ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        FileNotFoundError: there is no such file, or the folder holds neither.
        CheckpointFormatError: a file is not a safetensors file, or the index is malformed.
        MissingTensorError: the index names a tensor that its file does not hold.
        ImportError: the safetensors package is not installed.

    Collective: no; every rank opens its own.
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
        """The names of all tensors, sorted."""
        return tuple(sorted(self._where))

    def require(self, names: Sequence[str]) -> None:
        """Check that the checkpoint holds all of ``names``.

        Raises:
            MissingTensorError: it does not; names those that are missing.
        """
        missing = tuple(name for name in names if name not in self._where)
        if missing:
            raise MissingTensorError(str(self.path), missing)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        self.require([name])
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        return self.read(name, [slice(0, 0) for _ in self.shape(name)]).dtype

    def read(self, name: str, region: Sequence[slice]) -> torch.Tensor:
        """A part of a tensor: ``region`` has a slice of step 1 for every dimension.

        The result is on the CPU and may share the memory of the mapped file: copy it before
        `close`.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        self.require([name])
        file = self._where[name]
        with torch.device("cpu"):  # safetensors heeds the caller's `with torch.device(...)`
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
