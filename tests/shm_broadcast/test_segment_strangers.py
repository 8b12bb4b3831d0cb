"""Handles that lead to another user, or to a process outside the group, are not followed."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from shm_broadcast.errors import ForeignMemoryError
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")

NOBODY = 65534
SIZE = 4096


def another_user() -> Segment:
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return Segment.create(SIZE, "another user's")


def set_user_id_program() -> Segment:
    """What ``su`` is while it asks for a password: root's by effect, started by another."""
    made = Segment.create(SIZE, "of a program with the set-user-ID bit")
    os.setresuid(NOBODY, 0, 0)
    return made


def memory_handed_to_us() -> Segment:
    """A process of ours that was started with a stranger's descriptor open."""
    os.seteuid(NOBODY)
    made = Segment.create(SIZE, "another user's, open in a process of ours")
    os.seteuid(0)
    return made


@contextmanager
def segment_of(make: Callable[[], Segment]) -> Iterator[SegmentHandle]:
    """The handle of what a process of its own makes, while that lives."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        made = make()
        os.write(writing, msgspec.msgpack.encode(made.handle()))
        signal.pause()
    try:
        os.close(writing)
        yield msgspec.msgpack.decode(os.read(reading, 4096), type=SegmentHandle)
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("make", [another_user, set_user_id_program, memory_handed_to_us])
def test_what_is_not_this_user_s_alone_is_not_opened(make: Callable[[], Segment]) -> None:
    with segment_of(make) as handle, pytest.raises(ForeignMemoryError, match=f"pid {handle.pid}"):
        Segment.attach(handle)


def test_a_process_outside_the_group_is_not_opened() -> None:
    with segment_of(lambda: Segment.create(SIZE, "ours")) as handle:
        Segment.attach(handle, lambda pid: pid == handle.pid).close()
        with pytest.raises(ForeignMemoryError, match=f"pid {handle.pid} is no member"):
            Segment.attach(handle, lambda pid: pid == os.getpid())
