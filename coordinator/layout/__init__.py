"""Divide tensors among the ranks of a mesh, and change how they are divided.

`redistribute` changes a tensor's layout within one mesh, `redistribute_between` moves it to another
mesh. `plan` finds the cheapest steps, `calibrate` measures their costs. `load_sharded` and
`save_sharded` read and write checkpoints; only these two need the package safetensors.
"""

from coordinator.layout.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointFormatError,
    MissingTensorError,
    TensorShapeError,
    load_sharded,
    save_sharded,
)
from coordinator.layout.comm_spec import CommCost, CommPattern, CommSpec, ShardingSpec
from coordinator.layout.hooks import ParamOpHook, named_parameters, use_param_hooks
from coordinator.layout.measure import AlphaBeta, MeasuredPlan, calibrate, calibrate_mesh, measure
from coordinator.layout.mesh import Mesh
from coordinator.layout.placement import (
    Axis,
    Extent,
    Layout,
    Partial,
    Place,
    Placement,
    Replicate,
    Shard,
    convert_dim_partition_dict,
    merge_same_dim_mesh_list,
)
from coordinator.layout.plan import MeshCosts, Plan, Step, SubMesh, plan
from coordinator.layout.redistribute import redistribute, redistribute_between, reshard

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
