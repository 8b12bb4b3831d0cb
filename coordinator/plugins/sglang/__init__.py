"""Install this library in SGLang if ``GROUP_COORDINATOR`` is set: see docs/inside-vllm.md."""

from __future__ import annotations

import os


def register() -> None:
    """Install the parts that ``GROUP_COORDINATOR`` names.

    Raises ValueError for an unknown part, and UntestedVersionError for an untested version.
    """
    if os.environ.get("GROUP_COORDINATOR", "") not in ("", "0"):
        from coordinator.plugins.sglang.hooks import install  # noqa: PLC0415

        install()
