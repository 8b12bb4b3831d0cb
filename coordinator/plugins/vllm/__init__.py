"""Install this library in vLLM if ``GROUP_COORDINATOR`` is set: see docs/inside-vllm.md.

vLLM calls `register` in each of its processes. Without the variable the plug-in imports nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    """Install the parts that ``GROUP_COORDINATOR`` names; a second call has no effect.

    Raises ValueError for an unknown part, and UntestedVersionError for an untested version.
    """
    if os.environ.get("GROUP_COORDINATOR", "") not in ("", "0"):
        from coordinator.plugins.vllm.hooks import install  # noqa: PLC0415

        install()
