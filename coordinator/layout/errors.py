"""The errors about checkpoints.

    CheckpointError (CoordinatorError)
    ├── CheckpointFormatError (ValueError)    not a safetensors file, or its index is bad
    ├── MissingTensorError (LookupError)      it lacks tensors that were asked for
    └── TensorShapeError (ValueError)         a tensor of another shape than was expected

A path that does not exist raises `FileNotFoundError`.
"""

from __future__ import annotations

from shm_broadcast.errors import CoordinatorError


class CheckpointError(CoordinatorError):
    """A checkpoint cannot be read or written.

    Attributes:
        path: the file or folder.
        problem: what is wrong.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class CheckpointFormatError(CheckpointError, ValueError):
    """A file is not a safetensors file, is cut short, or an index is malformed."""


class MissingTensorError(CheckpointError, LookupError):
    """The checkpoint lacks tensors that were asked for.

    Attributes:
        names: their names in the checkpoint.
    """

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self.names = names
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        super().__init__(path, f"no tensor named {', '.join(names[:3])}{more}")


class TensorShapeError(CheckpointError, ValueError):
    """A tensor has another shape than was expected.

    Attributes:
        name: the tensor's name in the checkpoint.
        expected: the shape that was expected, of the whole tensor.
        found: the shape it has.
    """

    def __init__(
        self, path: str, name: str, expected: tuple[int, ...], found: tuple[int, ...]
    ) -> None:
        self.name = name
        self.expected = expected
        self.found = found
        super().__init__(path, f"{name} has shape {list(found)}, expected {list(expected)}")
