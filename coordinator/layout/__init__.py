"""How tensors lie on the ranks of a group, and reading them from a checkpoint so.

Needs the package safetensors where a checkpoint is read; importing does not.
"""

from coordinator.layout.checkpoint import Checkpoint
from coordinator.layout.errors import (
    CheckpointError,
    CheckpointFormatError,
    MissingTensorError,
    TensorShapeError,
)
from coordinator.layout.load import load_sharded
from coordinator.layout.placement import Axis, Extent, Layout, Placement, Replicate, Shard

__all__ = [
    "Axis",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFormatError",
    "Extent",
    "Layout",
    "MissingTensorError",
    "Placement",
    "Replicate",
    "Shard",
    "TensorShapeError",
    "load_sharded",
]
