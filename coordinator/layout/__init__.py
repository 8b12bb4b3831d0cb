"""How tensors lie on the ranks of a group, and changing it.

`redistribute` changes the layout within one mesh, `redistribute_between` from one mesh to
another; `plan` says how, and `calibrate` what it costs. `load_sharded` and `save_sharded` read
and write checkpoints, for which they need the package safetensors; importing does not.
"""

from coordinator.layout.between import redistribute_between, reshard
from coordinator.layout.calibrate import AlphaBeta, calibrate, calibrate_mesh
from coordinator.layout.checkpoint import Checkpoint
from coordinator.layout.comm_spec import CommCost, CommPattern, CommSpec, ShardingSpec
from coordinator.layout.costs import MeshCosts
from coordinator.layout.dim_partition import convert_dim_partition_dict, merge_same_dim_mesh_list
from coordinator.layout.errors import (
    CheckpointError,
    CheckpointFormatError,
    MissingTensorError,
    TensorShapeError,
)
from coordinator.layout.hooks import ParamOpHook, use_param_hooks
from coordinator.layout.load import load_sharded
from coordinator.layout.measure import MeasuredPlan, measure
from coordinator.layout.mesh import Mesh
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
from coordinator.layout.plan import Plan, Step, plan
from coordinator.layout.process_grid import ProcessGrid
from coordinator.layout.redistribute import redistribute
from coordinator.layout.route import SubMesh
from coordinator.layout.save import save_sharded

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
    "ProcessGrid",
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
