"""What the stages of every model share: reading weights, torch's settings, sending results on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coordinator.layout import Layout, load_sharded

from ..defaults import TOLERANCES
from .parallel import ShardedModule, WholeParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from coordinator import GroupCoordinator, ParallelGroups


def whole_parameters(model: nn.Module) -> dict[str, WholeParameter]:
    """Every parameter of ``model`` as the checkpoint has it, by its name in ``model``.

    Parameters of modules that are not `ShardedModule` are replicated.
    """
    found: dict[str, WholeParameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, ShardedModule):
                found[full] = module.whole[name]
            else:
                found[full] = WholeParameter(tuple(parameter.shape), Layout())
    return found


def read_parameters(
    path: Path,
    whole: Mapping[str, WholeParameter],
    names: Mapping[str, str],
    tp: GroupCoordinator,
    *,
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[int, int, str], None],
) -> dict[str, torch.Tensor]:
    """Read this rank's part of a stage's parameters, as ``dtype``.

    Args:
        path: the checkpoint.
        whole: the stage's parameters, of `whole_parameters`.
        names: what the checkpoint calls them.
        tp: the group that they are cut over.
        device: where they shall lie.
        dtype: what they shall be.
        report: called with ``(done, total, what)`` meanwhile.

    Raises:
        CheckpointError: the weights are not those of this stage.

    Collective: no.
    """
    return load_sharded(
        path,
        {name: parameter.layout for name, parameter in whole.items()},
        tp,
        source=names.__getitem__,
        shapes={name: parameter.shape for name, parameter in whole.items()},
        dtype=dtype,
        device=device,
        report=report,
    )


def checkpoint_name(name: str, layers: str, modules: Mapping[str, str]) -> str:
    """The checkpoint's name of a stage's parameter.

    Args:
        name: the stage's name of it: ``"layers.3.query.weight"``.
        layers: what the checkpoint calls its layers: ``"encoder.layer"``.
        modules: what it calls the modules: ``"query"`` gives ``"attention.self.query"``.
    """
    module, _, parameter = name.rpartition(".")
    if module.startswith("layers."):
        _, index, part = module.split(".")
        return f"{layers}.{index}.{modules[part]}.{parameter}"
    return f"{modules[module]}.{parameter}"


def hand_on(groups: ParallelGroups, hidden: torch.Tensor) -> None:
    """Send what this stage has computed to the next. Collective: yes, every rank of the stage."""
    groups.pp.send_tensor_dict({"hidden": hidden}, all_gather_group=groups.tp)


def handed_on(groups: ParallelGroups) -> torch.Tensor:
    """What the stage before has sent. Collective: yes, every rank of this stage."""
    hidden: torch.Tensor = groups.pp.recv_tensor_dict(all_gather_group=groups.tp)["hidden"]
    return hidden


def compute_with(threads: int | None, dtype: str) -> torch.dtype:
    """Have torch use ``threads`` in this process, if they are given, and attention that takes any
    length at once; return the dtype.

    Raises:
        ValueError: ``threads`` is less than 1, or ``dtype`` none of `TOLERANCES`.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(TOLERANCES)}; got {dtype!r}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be 1 or more; got {threads}")
        torch.set_num_threads(threads)
    # cuDNN makes a plan for each new length of a sequence: 2.4 ms in every layer.
    torch.backends.cuda.enable_cudnn_sdp(False)
    found: torch.dtype = getattr(torch, dtype)
    return found
