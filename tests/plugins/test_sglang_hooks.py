"""Our queue in the place of SGLang's, by SGLang's own registry of hooks."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.compat.sglang.device_communicators.shm_broadcast import MessageQueue
from coordinator.plugins.sglang import hooks, register
from coordinator.plugins.switches import PARTS, UntestedVersionError
from coordinator.plugins.vllm import hooks as vllm

PEERS = os.environ.get("PEERS")
HOME = "sglang.srt.distributed.device_communicators.shm_broadcast"

needs_sglang = pytest.mark.skipif(PEERS is None, reason="PEERS names no folder with SGLang 0.5.23")


def sources() -> Path:
    assert PEERS is not None
    return Path(PEERS, "sgl")


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """SGLang's registry itself, beside the names of its queue: SGLang wants kernels to be imported.

    Returns:
        The module of the registry.
    """
    name = "sglang.srt.plugins.hook_registry"
    spec = importlib.util.spec_from_file_location(
        name, sources().joinpath(*name.split(".")).with_suffix(".py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parts = HOME.split(".")
    for length in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:length]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins", ModuleType("sglang.srt.plugins"))
    monkeypatch.setitem(sys.modules, name, module)
    sys.modules[HOME].MessageQueue = type("MessageQueue", (), {})  # type: ignore[attr-defined]
    return module


@needs_sglang
def test_sglangs_registry_puts_our_queue_in_place(
    registry: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_COORDINATOR", "queue")
    assert hooks.install(lambda: "0.5.23") == {"queue"}
    registry.HookRegistry.apply_hooks()
    assert sys.modules[HOME].MessageQueue is MessageQueue


@needs_sglang
def test_the_names_are_where_the_hooks_say() -> None:
    queue = sources().joinpath(*HOME.split(".")).with_suffix(".py")
    classes = [node.name for node in ast.parse(queue.read_text()).body if hasattr(node, "name")]
    assert "MessageQueue" in classes
    framework = (sources() / "sglang" / "srt" / "plugins" / "__init__.py").read_text()
    assert 'GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"' in framework


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_COORDINATOR", "1")
    with pytest.raises(UntestedVersionError, match=r"SGLang is 0\.6\.0"):
        hooks.install(lambda: "0.6.0")


def test_parts_that_only_vllm_has_need_no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*hooks.HOOKS} < {each.part for each in vllm.HOOKS} == {*PARTS}
    monkeypatch.setenv("GROUP_COORDINATOR", "communicator,status")
    assert hooks.install(lambda: "9.9.9") == frozenset()


def test_nothing_is_registered_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_COORDINATOR", raising=False)
    register()
    assert "sglang" not in sys.modules
