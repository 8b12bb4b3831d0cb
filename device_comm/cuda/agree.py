"""Swapping bytes between ranks, and doing a step of set-up on all of them or on none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

from device_comm.cuda.errors import IpcUnavailableError
from shm_broadcast.errors import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.base import DeviceCommunicator
    from shm_broadcast.deadline import Deadline

    Swap = Callable[[bytes], list[bytes]]
    """Gives bytes of this rank to all, and returns those of all, by rank. Collective."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """Why a step has failed on a rank, or what it has made there."""

    reason: str
    made: bytes


def swap_over(comm: DeviceCommunicator, timeout: float | Deadline | None = None) -> Swap:
    """Swap by a communicator on the CPU; ``timeout`` as for its calls. Collective: no."""

    def swap(payload: bytes) -> list[bytes]:
        size = torch.tensor([len(payload)])
        sizes = comm.all_gather(size, dim=0, timeout=timeout).tolist()
        own = torch.empty(len(payload), dtype=torch.uint8)
        own.numpy()[:] = memoryview(payload)
        whole = comm.all_gatherv(own, sizes=sizes, timeout=timeout)
        return [part.numpy().tobytes() for part in whole.split(sizes)]

    return swap


def agree(swap: Swap, attempt: Callable[[], bytes]) -> list[bytes]:
    """Make ``attempt``; return what it has made on each rank. Collective: yes, every member.

    Raises:
        IpcUnavailableError: it has failed on some rank; all of them raise this.
        CoordinatorError: ``swap`` has failed.
    """
    failed: Exception | None = None
    try:
        outcome = _Outcome("", attempt())
    except (CoordinatorError, ValueError) as error:
        failed, outcome = error, _Outcome(str(error), b"")
    answers = swap(msgspec.msgpack.encode(outcome))
    outcomes = [msgspec.msgpack.decode(answer, type=_Outcome) for answer in answers]
    for rank, each in enumerate(outcomes):
        if each.reason:
            raise IpcUnavailableError(rank, each.reason) from failed
    return [each.made for each in outcomes]


__all__ = ["agree", "swap_over"]
