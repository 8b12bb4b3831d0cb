"""This layer inside stock vLLM, once ``GROUP_COORDINATOR`` is set: see docs/inside-vllm.md.

vLLM calls `register` in every process of its own, as it does for all its plug-ins. Nothing is
imported here before the variable is set: without it vLLM is what it was.
"""

from __future__ import annotations

import os


def register() -> None:
    """Put in place what the variable asks for; the second time does nothing. Collective: no.

    Raises:
        ValueError: it names a part that does not exist.
        UntestedVersionError: vLLM is of another version than was tested.
    """
    if os.environ.get("GROUP_COORDINATOR", "") not in ("", "0"):
        from coordinator.plugins.vllm.hooks import install  # noqa: PLC0415

        install()
