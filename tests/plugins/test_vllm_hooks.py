"""Each name that is replaced stands in vLLM where `hooks` says, in all versions that are here."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest

from coordinator.plugins.vllm.hooks import HOOKS, TESTED, Hook

PEERS = os.environ.get("PEERS")
MISSING = importlib.util.find_spec("vllm") is None

NAMES = {hook.module: hook.name for hook in HOOKS}

USED = {
    "vllm.v1.executor.multiproc_executor": [
        "MultiprocExecutor._init_executor",
        "MultiprocExecutor.shutdown",
        "MultiprocExecutor.register_failure_callback",
        "WorkerProcHandle",
    ],
    "vllm.distributed.device_communicators.base_device_communicator": [
        f"DeviceCommunicatorBase.{verb}"
        for verb in (
            *("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv"),
            *("gather", "broadcast", "send", "recv", "destroy", "dispatch", "combine"),
            "dispatch_router_logits",
        )
    ],
    "vllm.distributed.device_communicators.all2all": ["AgRsAll2AllManager"],
    "vllm.plugins": ["load_general_plugins"],
}
"""What our parts call or override of vLLM's."""


def names_in(path: Path) -> set[str]:
    """What a file defines or imports at its top and in its classes, with dots between."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef():
                found.add(node.name)
                inside = (ast.FunctionDef, ast.AsyncFunctionDef)
                found |= {f"{node.name}.{e.name}" for e in node.body if isinstance(e, inside)}
            case ast.FunctionDef():
                found.add(node.name)
            case ast.ImportFrom():
                found |= {alias.asname or alias.name for alias in node.names}
    return found


def file_of(module: str, root: Path) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.skipif(PEERS is None, reason="PEERS names no folder with vLLM 0.33.0")
@pytest.mark.parametrize("module", sorted({*NAMES, *USED}))
def test_the_next_version_has_every_name(module: str) -> None:
    assert PEERS is not None
    there = names_in(file_of(module, Path(PEERS, "vllm")))
    wanted = {*USED.get(module, ()), *([NAMES[module]] if module in NAMES else [])}
    assert wanted <= there


@pytest.mark.skipif(MISSING, reason="vLLM is not installed: make vllm-test")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.module}.{hook.name}")
def test_the_line_that_is_replaced_is_in_the_installed_version(hook: Hook) -> None:
    import vllm

    assert vllm.__version__ in TESTED
    name, number, text = hook.line.split(":", 2)
    lines = Path(vllm.__file__).parent.joinpath(name).read_text().splitlines()
    assert lines[int(number) - 1].strip().startswith(text.strip())
