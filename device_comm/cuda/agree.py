"""All-gather bytes, and run a step of set-up on all ranks or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from device_comm.cuda.driver import IpcUnavailableError
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from device_comm.communicator import Communicator

    AllGatherBytes = Callable[[bytes], list[bytes]]
    """Sends this rank's bytes to all ranks; returns all ranks' bytes, by rank. Collective."""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A step's outcome on a rank: the reason of its failure, or its bytes."""

    reason: str
    made: bytes


_DECODER = msgspec.msgpack.Decoder(_Outcome)


def all_gather_bytes_over(
    comm: Communicator, timeout: float | Deadline | None = None
) -> AllGatherBytes:
    """Return an `AllGatherBytes` over a CPU communicator, with its ``timeout``."""

    def swap(payload: bytes) -> list[bytes]:
        size = torch.tensor([len(payload)], device="cpu")
        sizes = comm.all_gather(size, dim=0, timeout=timeout).tolist()
        own = torch.empty(len(payload), dtype=torch.uint8, device="cpu")
        own.numpy()[:] = memoryview(payload)
        whole = comm.all_gatherv(own, sizes=sizes, timeout=timeout)
        return [part.numpy().tobytes() for part in whole.split(sizes)]  # type: ignore[no-untyped-call]

    return swap


def unanimous(swap: AllGatherBytes, attempt: Callable[[], bytes]) -> list[bytes]:
    """Return ``attempt()`` of every rank, by rank. Collective: yes, every member.

    Raises:
        IpcUnavailableError: it failed on a rank; all ranks raise this.
        CoordinatorError: ``swap`` failed.
    """
    failed: Exception | None = None
    try:
        outcome = _Outcome("", attempt())
    except Exception as error:  # noqa: BLE001 - raised below, on all ranks
        failed, outcome = error, _Outcome(str(error) or type(error).__name__, b"")
    answers = swap(msgspec.msgpack.encode(outcome))
    outcomes = [_DECODER.decode(answer) for answer in answers]
    for rank, each in enumerate(outcomes):
        if each.reason:
            raise IpcUnavailableError(rank, each.reason) from failed
    return [each.made for each in outcomes]
