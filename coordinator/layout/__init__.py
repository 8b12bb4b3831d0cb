"""How tensors lie on the ranks of a group, and changing it.

`redistribute` changes the layout within one mesh, `redistribute_between` from one mesh to
another; `plan` says how, and `calibrate` what it costs. `load_sharded` and `save_sharded` read
and write checkpoints, for which they need the package safetensors; importing does not.
"""

from coordinator.layout.checkpoint import Checkpoint
from coordinator.layout.costs import MeshCosts
from coordinator.layout.errors import (
    CheckpointError,
    CheckpointFormatError,
    MissingTensorError,
    TensorShapeError,
)
from coordinator.layout.load import load_sharded
from coordinator.layout.placement import (
    Axis,
    Extent,
    Layout,
    Partial,
    Place,
    Placement,
    Replicate,
    Shard,
)
from coordinator.layout.plan import Plan, Step, plan
from coordinator.layout.redistribute import redistribute

__all__ = [
    "Axis",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFormatError",
    "Extent",
    "Layout",
    "MeshCosts",
    "MissingTensorError",
    "Partial",
    "Place",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "Step",
    "TensorShapeError",
    "load_sharded",
    "plan",
    "redistribute",
]
