"""The variables that CUDA reads once, when it starts; nothing here imports torch.

Programs and tests that use a GPU set them first of all, before anything asks for a device: the
processes that they start have them, too.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
LOADING = "CUDA_MODULE_LOADING"
SIDE_BY_SIDE = {CONNECTIONS: "32", LOADING: "EAGER"}
"""As many streams as that without a queue shared; no kernel is loaded while others wait."""

MPS_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"


def run_side_by_side() -> None:
    """Let the kernels of ranks that are threads wait for each other.

    To load a kernel, CUDA may wait for all that run. What is set already stays.
    """
    for name, value in SIDE_BY_SIDE.items():
        os.environ.setdefault(name, value)


def keep_out_of_mps() -> None:
    """Use no MPS server, though one may run: a client that is killed takes the others along."""
    os.environ[MPS_FOLDER] = os.devnull  # where no server can be reached, programs run without


@contextmanager
def variables(wanted: Mapping[str, str]) -> Iterator[None]:
    """Give these to the processes that are started inside."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
