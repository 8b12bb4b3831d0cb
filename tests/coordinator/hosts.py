"""Ranks on hosts: network namespaces, each with a boot id and a host name of its own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import FileStore

import coordinator
import coordinator.hosts
from coordinator.groups import ParallelGroups
from tests.netns import Host

NAMES = ("host-a", "host-b", "host-c", "host-d")
_CLONE_NEWUTS = 0x04000000
_PORT = 29400


def move_to(folder: str, hosts: Sequence[Host], place: int) -> None:
    """Make this process one of host ``place``, which shares no board with others."""
    hosts[place].enter()
    libc = ctypes.CDLL(None, use_errno=True)
    name = NAMES[place].encode()
    if libc.unshare(_CLONE_NEWUTS) or libc.sethostname(name, len(name)):
        raise OSError(ctypes.get_errno(), "cannot take a host name")
    boot = Path(folder) / NAMES[place]
    boot.write_text(NAMES[place])
    coordinator.hosts._BOOT_ID = boot


@contextmanager
def groups_over(
    rank: int, n: int, folder: str, hosts: tuple[Host, Host] | None, **options: Any
) -> Iterator[ParallelGroups]:
    """The groups of ``n`` ranks, of which the second half is on the second host; without ``hosts``
    all are on this one.
    """
    options.setdefault("tp", n)
    if hosts is None:
        options["store"] = FileStore(f"{folder}/meet", n)
    else:
        move_to(folder, hosts, int(2 * rank >= n))
        options["local_rank"] = rank % max(n // 2, 1)
        options["master_addr"], options["master_port"] = hosts[0].address, _PORT
    with coordinator.init(rank=rank, world_size=n, **options) as groups:
        yield groups


def beside(folder: str, n: int) -> FileStore:
    """A store that no cable leads to, for what a test has to tell its ranks."""
    return FileStore(f"{folder}/beside", n)


def note(store: FileStore, what: str) -> None:
    """Note the moment of something."""
    store.set(what, repr(time.monotonic()))


def since(store: FileStore, what: str, moment: float) -> float:
    """The seconds between what was noted and a moment."""
    return moment - float(store.get(what))
