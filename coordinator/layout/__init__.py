"""Layouts: how tensors are divided among the ranks of a mesh, and how to change that.

`redistribute` changes a tensor's layout within one mesh, `redistribute_between` moves it to another
mesh. `plan` finds the cheapest steps, `calibrate` measures what they cost. `load_sharded` and
`save_sharded` read and write checkpoints; only these two need the package safetensors.
"""

from coordinator.layout.checkpoints.load import load_sharded
from coordinator.layout.checkpoints.safetensors_file import Checkpoint
from coordinator.layout.checkpoints.save import save_sharded
from coordinator.layout.dim_partition import convert_dim_partition_dict, merge_same_dim_mesh_list
from coordinator.layout.errors import (
    CheckpointError,
    CheckpointFormatError,
    MissingTensorError,
    TensorShapeError,
)
from coordinator.layout.hooks import ParamOpHook, use_param_hooks
from coordinator.layout.mesh import Mesh
from coordinator.layout.moving.between import redistribute_between, reshard
from coordinator.layout.moving.redistribute import redistribute
from coordinator.layout.parameters import named_parameters
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
from coordinator.layout.planning.calibrate import AlphaBeta, calibrate, calibrate_mesh
from coordinator.layout.planning.comm_spec import CommCost, CommPattern, CommSpec, ShardingSpec
from coordinator.layout.planning.costs import MeshCosts
from coordinator.layout.planning.measure import MeasuredPlan, measure
from coordinator.layout.planning.plan import Plan, Step, plan
from coordinator.layout.planning.route import SubMesh

__all__ = [
    "AlphaBeta",
    "Axis",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFormatError",
    "CommCost",
    "CommPattern",
    "CommSpec",
    "Extent",
    "Layout",
    "MeasuredPlan",
    "Mesh",
    "MeshCosts",
    "MissingTensorError",
    "ParamOpHook",
    "Partial",
    "Place",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "ShardingSpec",
    "Step",
    "SubMesh",
    "TensorShapeError",
    "calibrate",
    "calibrate_mesh",
    "convert_dim_partition_dict",
    "load_sharded",
    "measure",
    "merge_same_dim_mesh_list",
    "named_parameters",
    "plan",
    "redistribute",
    "redistribute_between",
    "reshard",
    "save_sharded",
    "use_param_hooks",
]
