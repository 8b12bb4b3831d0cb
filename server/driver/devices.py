"""Assigns a device to each worker, before any worker starts.

The driver only counts the GPUs: it creates no CUDA context, so it takes none of their memory. If
all workers use the CPU, it does not even load torch.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shm_broadcast.checked_arguments import texts
from shm_broadcast.errors import counted

if TYPE_CHECKING:
    from collections.abc import Sequence


CPU: Final = "cpu"
_CUDA: Final = re.compile(r"cuda(?::(\d{1,4}))?", re.ASCII)


def assign(device: str | Sequence[str], ranks: int, gpus: int, share_gpu: bool) -> tuple[str, ...]:
    """The device of each rank, by rank.

    Args:
        device: ``"cpu"``, ``"cuda"`` (the GPUs in turn), one GPU for all, as ``"cuda:0"``, or a
            device for each rank.
        ranks: how many ranks there are.
        gpus: how many GPUs this host has.
        share_gpu: whether several ranks may be on one GPU.

    Raises:
        ValueError: there is no such device, or ranks would have to share a GPU and must not.
    """
    if not isinstance(device, str):
        if len(device) != ranks:
            raise ValueError(f"device: {len(device)} devices for {ranks} ranks")
        return tuple(one for each in device for one in assign(each, 1, gpus, share_gpu))
    if device == CPU:
        if share_gpu:
            raise ValueError(f"sharing a GPU is for device 'cuda'; got {device!r}")
        return (CPU,) * ranks
    wanted = _CUDA.fullmatch(device)
    if wanted is None:
        raise ValueError(f"device must be 'cpu', 'cuda' or one GPU as 'cuda:0'; got {device!r}")
    index = None if wanted[1] is None else int(wanted[1])
    if not gpus:
        raise ValueError(f"device {device!r}: torch sees no CUDA device")
    if index is not None and index >= gpus:
        raise ValueError(f"device {device!r}: there are {counted(gpus, 'GPU')}, numbered from 0")
    usable = 1 if index is not None else gpus
    if ranks > usable and not share_gpu:
        raise ValueError(
            f"device {device!r}: {ranks} ranks for {counted(usable, 'GPU')}: several on one have "
            "to be asked for, by share_gpu=True or --share-gpu"
        )
    first = index or 0
    return tuple(f"cuda:{first + rank % usable}" for rank in range(ranks))


def share_of_a_host(n_workers: int, nnodes: int) -> int:
    """How many workers each of the hosts has.

    Raises:
        ValueError: they would have to have different numbers.
    """
    if n_workers % nnodes:
        raise ValueError(f"{nnodes} hosts cannot share {n_workers} workers evenly")
    return n_workers // nnodes


def checked_device(device: str | Sequence[str]) -> str | tuple[str, ...]:
    """The argument ``device`` of a pool.

    Raises:
        TypeError: it is neither a text nor a sequence of them.
    """
    return device if isinstance(device, str) else texts("device", device)


def count_gpus(device: str | Sequence[str]) -> int:
    """How many GPUs this host has; 0, without a look, if only the CPU is asked for."""
    if all(each == CPU for each in ([device] if isinstance(device, str) else device)):
        return 0
    import torch  # noqa: PLC0415

    return torch.cuda.device_count()
