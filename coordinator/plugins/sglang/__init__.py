"""This layer inside stock SGLang, once ``GROUP_COORDINATOR`` is set: see docs/inside-vllm.md."""

from __future__ import annotations

import os


def register() -> None:
    """Put in place what the variable asks for. Collective: no.

    Raises:
        ValueError: it names a part that does not exist.
        UntestedVersionError: SGLang is of another version than was tested.
    """
    if os.environ.get("GROUP_COORDINATOR", "") not in ("", "0"):
        from coordinator.plugins.sglang.hooks import install  # noqa: PLC0415

        install()
