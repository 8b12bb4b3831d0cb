"""Replace parts of SGLang by its registry of hooks."""

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
"""By part: SGLang's name, and its replacement."""


def install(version: Callable[[], str] = lambda: installed("sglang")) -> frozenset[str]:
    """Register the enabled parts and return them; SGLang applies them after all plug-ins ran.

    ``version`` returns SGLang's version. Parts that only other engines have are ignored. Raises
    ValueError for an unknown part, and UntestedVersionError for an untested version.
    """
    switches = Switches.from_environment()
    parts = switches.parts & {*HOOKS}
    if not parts:
        return parts
    switches.check_version("SGLang", version(), TESTED)
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    for part in parts:
        for target, replacement in HOOKS[part].items():
            registry.HookRegistry.register(target, replacement, registry.HookType.REPLACE)
    return parts
