"""Capturing CUDA graphs that contain collectives; on the CPU there is nothing to do."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class GraphCaptureContext:
    """The stream of a capture.

    Attributes:
        stream: the CUDA stream to capture on; None on the CPU.
    """

    stream: torch.cuda.Stream | None


@contextmanager
def capture_on_side_stream(
    device: torch.device, context: GraphCaptureContext | None = None
) -> Iterator[GraphCaptureContext]:
    """Make a side stream current, which first waits for all work on the current stream.

    Args:
        device: the device on which the graph will run; on the CPU nothing is done.
        context: the context of a capture that has begun, to use its stream; None: a new stream.
    """
    if device.type != "cuda":
        yield context or GraphCaptureContext(None)
        return
    stream = context.stream if context is not None else None
    if stream is None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)
    if current != stream:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield GraphCaptureContext(stream)
