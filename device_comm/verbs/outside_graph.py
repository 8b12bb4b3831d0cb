"""What `torch.compile` does not look into; in a module of its own, as it loads torch's compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.compiler import disable

if TYPE_CHECKING:
    from device_comm.verbs.runner import Runner


@disable  # type: ignore[untyped-decorator] # torch has no type for it
def run_outside_graph(runner: Runner, *call: Any) -> Any:
    """`Runner.run`: a tensor that is traced has no address, and maybe no size."""
    return runner.run(*call)
