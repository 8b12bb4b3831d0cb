"""Shared memory without a name: a sealed memfd of fixed size, its pages reserved and mapped.

It is in no file system: nothing remains when processes are killed, nothing can remove it early, and
the size of /dev/shm does not matter. Another process of the same user attaches through
``/proc/PID/fd/N`` of the owner while the owner lives. The random nonce in the header proves that
the opened memory is the handle's segment, on this host.

A handle may be forged. So memory is opened only if the process and the memory belong to this user
and, where the members are known, the process is a member.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec

from shm_broadcast._native import Words
from shm_broadcast.errors import ForeignMemoryError, GroupClosedError, SharedMemoryError
from shm_broadcast.layout import (
    MAGIC,
    SEGMENT_MAGIC,
    SEGMENT_NONCE,
    SEGMENT_NONCE_BYTES,
    SEGMENT_SIZE,
    SEGMENT_VERSION,
    VERSION,
    align,
)
from shm_broadcast.process import (
    NO_DESCRIPTOR,
    ProcessId,
    describe_os_error,
    is_ending,
    system_call,
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23
_CHANGED = "a member that changes its user (setuid) can share no new memory with the others"


class SegmentHandle(msgspec.Struct, frozen=True):
    """Names a segment to processes of the same user on its host, while its owner lives."""

    pid: int  # of the owner
    start_time: int  # of the owner; see ProcessId
    fd: int  # the segment's descriptor number in the owner
    nonce: bytes  # random, in the segment's header
    size: int  # bytes


class Segment:
    """A mapped segment, with its atomic ``words`` and its ``memory`` as bytes."""

    def __init__(self, fd: int, mapping: mmap.mmap, *, touch: bool = True) -> None:
        """Own ``fd`` and its mapping. Use `create` and `attach`."""
        self._fd = fd
        self._release = weakref.finalize(self, os.close, fd)
        self._release.atexit = False
        self._map = mapping
        if touch:
            self.prefault()
        self.size = len(mapping)
        self.words = Words(mapping)
        self.memory = memoryview(mapping)
        self.nonce = bytes(self.memory[SEGMENT_NONCE : SEGMENT_NONCE + SEGMENT_NONCE_BYTES])

    @classmethod
    def create(cls, size: int, label: str) -> Segment:
        """Return a new zeroed segment that this process owns.

        ``size`` is rounded up to whole pages; the kernel shows ``label`` in ``/proc/PID/maps``.

        Raises:
            SharedMemoryError: the system lacks ``size`` bytes or a descriptor, or refuses them; or
                /proc is not mounted, through which others would attach.
        """
        size = align(size, mmap.PAGESIZE)
        try:
            ProcessId.current()
            _require_free(size)
            fd, mapping = _reserve(size, label)
        except OSError as error:
            raise SharedMemoryError(
                f"cannot reserve {size} bytes: {describe_os_error(error)}"
            ) from error
        segment = cls(fd, mapping)
        segment._write_header(os.urandom(SEGMENT_NONCE_BYTES))
        return segment

    @classmethod
    def attach(
        cls,
        handle: SegmentHandle,
        is_member: Callable[[int], bool] | None = None,
        *,
        touch: bool = True,
    ) -> Segment:
        """Map the segment of ``handle``, which may be untrusted.

        Args:
            is_member: whether the process with a pid may own it; None: any process of this user.
            touch: whether to map every page now; else call `prefault` after `first_touch` of the
                others.

        Raises:
            SharedMemoryError: it is on another host, its owner has ended, the handle is stale, or
                no descriptor is free (see `is_transient`).
            ForeignMemoryError: it belongs to another user, or its owner is not a member.
        """
        if is_member is not None and not is_member(handle.pid):
            raise ForeignMemoryError(f"pid {handle.pid} is no member: its memory is not opened")
        try:
            fd = _open_descriptor(handle)
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise SharedMemoryError(
                    f"segment of pid {handle.pid} cannot be opened: {describe_os_error(error)}"
                ) from error
            if isinstance(error, PermissionError):
                raise SharedMemoryError(
                    f"segment of pid {handle.pid} cannot be opened: this process may not open "
                    f"descriptors of that one; {_CHANGED} ({error})"
                ) from error
            raise SharedMemoryError(
                f"segment of pid {handle.pid} cannot be opened: its owner has ended, runs on "
                f"another host, or belongs to another user ({error})"
            ) from error
        return cls._adopt(fd, handle, touch=touch)

    def handle(self) -> SegmentHandle:
        """Return the handle for `attach`; valid while this process keeps the segment open."""
        me = ProcessId.current()
        return SegmentHandle(me.pid, me.start_time, self._open_fd(), self.nonce, self.size)

    def prefault(self) -> None:
        """Map every page now: the first pass over unmapped pages costs four times a later one."""
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:  # before Linux 5.14; reading maps the reserved pages as well
            for offset in range(0, len(self._map), mmap.PAGESIZE):
                self._map[offset]

    def first_touch(self, begin: int, end: int) -> None:
        """Move the whole pages from ``begin`` to ``end`` to this thread's NUMA node, zeroed.

        A page is on the node of its first user, so far the creator of the segment. No process may
        use these pages meanwhile; others map them again by `prefault`. Raises SharedMemoryError if
        no memory is free.
        """
        begin, size = align(begin, mmap.PAGESIZE), end - align(begin, mmap.PAGESIZE)
        size -= size % mmap.PAGESIZE
        if size <= 0:
            return
        try:
            self._map.madvise(mmap.MADV_REMOVE, begin, size)
        except OSError:  # this kernel frees no pages of a segment: they keep their node
            return
        try:
            with system_call("fallocate"):
                os.posix_fallocate(self._open_fd(), begin, size)
        except OSError as error:
            raise SharedMemoryError(f"cannot reserve {size} bytes: {error.strerror}") from error

    @property
    def closed(self) -> bool:
        """Return whether `close` was called here."""
        return not self._release.alive

    def close(self) -> None:
        """Close the descriptor. The memory is freed with its last mapping in any process."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Segment({self.size} bytes, nonce={self.nonce.hex()[:8]}{state})"

    @classmethod
    def _adopt(cls, fd: int, handle: SegmentHandle, *, touch: bool = True) -> Segment:
        try:
            fits = mmap.PAGESIZE <= handle.size == os.fstat(fd).st_size
            if not fits or not _is_sealed(fd):
                raise SharedMemoryError(f"descriptor {handle.fd} of pid {handle.pid} is no segment")
            mapping = mmap.mmap(fd, handle.size)
        except (OSError, SharedMemoryError) as error:
            os.close(fd)
            if isinstance(error, SharedMemoryError):
                raise
            raise SharedMemoryError(f"cannot map {handle.size} bytes: {error}") from error
        segment = cls(fd, mapping, touch=touch)
        words = segment.words
        valid = (words.load32(SEGMENT_MAGIC), words.load32(SEGMENT_VERSION)) == (MAGIC, VERSION)
        if not valid or segment.nonce != handle.nonce:
            segment.close()
            raise SharedMemoryError(
                f"descriptor {handle.fd} of pid {handle.pid} is another segment than the handle's"
            )
        return segment

    def _write_header(self, nonce: bytes) -> None:
        self.words.store32(SEGMENT_MAGIC, MAGIC)
        self.words.store32(SEGMENT_VERSION, VERSION)
        self.words.store64(SEGMENT_SIZE, self.size)
        self.words.write(SEGMENT_NONCE, nonce)
        self.nonce = nonce

    def _open_fd(self) -> int:
        if self.closed:
            raise GroupClosedError("the segment has been closed in this process")
        return self._fd


def _open_descriptor(handle: SegmentHandle) -> int:
    """Open the descriptor of ``handle``, if it and its process belong to this user."""
    if ProcessId.of(handle.pid).start_time != handle.start_time:
        raise ProcessLookupError("the pid has been used again")
    # Everything is opened through this descriptor: one process, even if its pid is reused.
    process = os.open(f"/proc/{handle.pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        me = os.geteuid()
        # All four ids: a set-user-ID program of this user may have been started by another user.
        if set(_user_ids(process)) != {me}:
            raise ForeignMemoryError(
                f"pid {handle.pid} is not a process of user {me} alone; {_CHANGED}"
            )
        name = f"fd/{handle.fd}"
        if os.stat(name, dir_fd=process).st_uid != me:
            raise ForeignMemoryError(f"{name} of pid {handle.pid} does not belong to user {me}")
        return os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=process)
    except PermissionError:
        if is_ending(handle.pid):  # its files in /proc then belong to root
            raise ProcessLookupError("it is ending") from None
        raise
    finally:
        os.close(process)


def _user_ids(process: int) -> list[int]:
    """Return the real, effective, saved and file-system user id, given a process's /proc folder."""
    fd = os.open("status", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
    with os.fdopen(fd, "rb") as status:
        line = next(line for line in status if line.startswith(b"Uid:"))
    return [int(each) for each in line.split()[1:]]


def is_permission_denied(error: SharedMemoryError) -> bool:
    """Return whether the owner lives, and its descriptors may not be opened by this process."""
    return isinstance(error, ForeignMemoryError) or isinstance(error.__cause__, PermissionError)


def is_transient(error: SharedMemoryError) -> bool:
    """Return whether only a free descriptor is missing, so that a later try may succeed."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in NO_DESCRIPTOR


def _is_sealed(fd: int) -> bool:
    """Return whether this is a memfd whose size is sealed, so that access never raises SIGBUS."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # no memfd
        return False


def _reserve(size: int, label: str) -> tuple[int, mmap.mmap]:
    with system_call("memfd_create"):
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        with system_call("fallocate"):
            os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        with system_call("mmap"):
            return fd, mmap.mmap(fd, size)
    except BaseException:
        os.close(fd)
        raise


def _require_free(size: int) -> None:
    """Raise unless ``size`` bytes are free: otherwise the kernel may kill a process for them."""
    free = _free_bytes()
    if size > free:
        raise SharedMemoryError(f"{size} bytes of shared memory are required, {free} are free")


def _free_bytes(
    cgroup: Path = Path("/sys/fs/cgroup"), machine: Path = Path("/proc/meminfo")
) -> int:
    """Return the free bytes within the memory cgroup's limit; unlimited if /proc hides them."""
    try:
        free = _numbers(machine)["MemAvailable:"] * 1024
    except OSError:
        free = sys.maxsize
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cached = _numbers(cgroup / "memory.stat")
    except (OSError, ValueError):  # no memory cgroup, or no limit in it ("max")
        return free
    # The kernel drops cached files rather than refuse memory; it does not drop shared memory.
    return min(free, limit - used + cached["inactive_file"] + cached["active_file"])


def _numbers(table: Path) -> dict[str, int]:
    return {line.split()[0]: int(line.split()[1]) for line in table.read_text().splitlines()}
