"""What takes the place of something of SGLang's, by SGLang's own registry of hooks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import version as installed
from typing import Any, Final

from coordinator.compat.sglang.device_communicators.shm_broadcast import MessageQueue
from coordinator.plugins.switches import Switches

TESTED: Final = ("0.5.23",)

HOOKS: Final[dict[str, dict[str, Any]]] = {
    "queue": {
        "sglang.srt.distributed.device_communicators.shm_broadcast.MessageQueue": MessageQueue
    }
}
"""By part: SGLang's name, and ours."""


def install(version: Callable[[], str] = lambda: installed("sglang")) -> frozenset[str]:
    """Register what the environment asks for; SGLang applies it after all plug-ins were called.

    Args:
        version: tells SGLang's version.

    Returns:
        The parts that are registered; parts of another engine's plug-in are none of ours.

    Raises:
        ValueError: the variable names a part that does not exist.
        UntestedVersionError: one of them is to be, and SGLang is of another version than was
            tested.
    """
    switches = Switches.from_environment()
    parts = switches.parts & {*HOOKS}
    if not parts:
        return parts
    switches.check_version("SGLang", version(), TESTED)
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    for part in parts:
        for target, ours in HOOKS[part].items():
            registry.HookRegistry.register(target, ours, registry.HookType.REPLACE)
    return parts
