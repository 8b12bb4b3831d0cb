"""Segments: sealed, nameless, reserved, and nothing left of them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from shm_broadcast import segment as module
from shm_broadcast.errors import GroupClosedError, SharedMemoryError
from shm_broadcast.layout import SEGMENT_MAGIC, SEGMENT_SIZE
from shm_broadcast.process import ProcessId
from shm_broadcast.segment import Segment, SegmentHandle
from tests.forked import in_a_child
from tests.ranks import run_ranks
from tests.shm_broadcast.leaks import no_descriptors, open_descriptors
from tests.shm_broadcast.remote_peers import get, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE = mmap.PAGESIZE


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(3 * PAGE + 1, "test") as made:
        yield made


def test_size_is_rounded_up_to_pages(segment: Segment) -> None:
    assert segment.size == 4 * PAGE
    assert len(segment.memory) == 4 * PAGE
    assert segment.words.load64(SEGMENT_SIZE) == 4 * PAGE


def test_it_is_zeroed_after_its_header(segment: Segment) -> None:
    assert bytes(segment.memory[64:]) == bytes(4 * PAGE - 64)


def test_both_views_show_the_same_memory(segment: Segment) -> None:
    with Segment.attach(segment.handle()) as other:
        segment.words.store64(128, 7)
        assert other.words.load64(128) == 7
        other.memory[200:205] = b"hello"
        assert bytes(segment.memory[200:205]) == b"hello"


def test_its_pages_are_reserved(segment: Segment) -> None:
    assert os.fstat(segment.handle().fd).st_blocks * 512 == 4 * PAGE


def test_pages_settle_where_they_are_reserved_anew(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed first, so that whoever reserves them touches them first; by one node it cannot show."""
    reserve, freed = os.posix_fallocate, []

    def spy(fd: int, offset: int, size: int) -> None:
        freed.append((offset, size, os.fstat(fd).st_blocks * 512))
        reserve(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", spy)
    with Segment.attach(segment.handle()) as other:
        segment.memory[64:] = b"x" * (4 * PAGE - 64)
        other.first_touch(PAGE - 1, 3 * PAGE + 1)
        assert freed == [(PAGE, 2 * PAGE, 2 * PAGE)]
        assert os.fstat(segment.handle().fd).st_blocks * 512 == 4 * PAGE
        assert bytes(segment.memory[64:PAGE]) == b"x" * (PAGE - 64)
        assert bytes(segment.memory[PAGE : 3 * PAGE]) == bytes(2 * PAGE)
        assert bytes(segment.memory[3 * PAGE :]) == b"x" * PAGE
        segment.memory[PAGE : PAGE + 5] = b"hello"
        segment.prefault()
        assert bytes(other.memory[PAGE : PAGE + 5]) == b"hello"


def test_less_than_a_page_does_not_settle(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", None)
    segment.memory[64:] = b"x" * (4 * PAGE - 64)
    segment.first_touch(PAGE + 1, 3 * PAGE - 1)
    segment.first_touch(PAGE, PAGE)
    assert bytes(segment.memory[64:]) == b"x" * (4 * PAGE - 64)


def test_no_memory_to_settle_in_is_an_error(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    says = "cannot reserve 4096 bytes: fallocate: No space left"
    with pytest.raises(SharedMemoryError, match=says):
        segment.first_touch(PAGE, 2 * PAGE)


def test_it_cannot_shrink_grow_or_be_unsealed(segment: Segment) -> None:
    fd = segment.handle().fd
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == (
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    for size in (0, PAGE, 5 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_it_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    with Segment.create(PAGE, "nameless") as segment:
        assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208
        target = os.readlink(f"/proc/self/fd/{segment.handle().fd}")  # noqa: PTH115
        assert target == "/memfd:nameless (deleted)"


def test_children_do_not_inherit_it(segment: Segment) -> None:
    assert not os.get_inheritable(segment.handle().fd)
    with Segment.attach(segment.handle()) as other:
        assert not os.get_inheritable(other.handle().fd)


def test_a_handle_is_plain_data(segment: Segment) -> None:
    handle = segment.handle()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=SegmentHandle)
    assert decoded == handle
    with Segment.attach(decoded) as other:
        assert other.nonce == segment.nonce


def test_two_segments_differ() -> None:
    with Segment.create(PAGE, "test") as first, Segment.create(PAGE, "test") as second:
        assert first.nonce != second.nonce


def test_no_descriptor_is_left() -> None:
    before = open_descriptors()
    for _ in range(10):
        with Segment.create(PAGE, "test") as segment, Segment.attach(segment.handle()) as other:
            assert not other.closed
    # Python's mmap keeps a descriptor of its own as long as the memory is mapped.
    assert open_descriptors() == before + 2
    del segment, other
    assert open_descriptors() == before


def test_a_segment_that_was_forgotten_leaves_no_descriptor() -> None:
    before = open_descriptors()
    segment = Segment.create(PAGE, "test")
    other = Segment.attach(segment.handle())
    assert open_descriptors() == before + 4
    del segment, other
    assert open_descriptors() == before


def test_close_is_idempotent_and_closes_nothing_else(segment: Segment) -> None:
    fd = segment.handle().fd
    segment.close()
    taken = os.open("/dev/null", os.O_RDONLY)
    assert taken == fd  # the number is somebody else's now
    try:
        segment.close()
        os.fstat(taken)
        assert segment.closed
    finally:
        os.close(taken)


def test_memory_stays_after_close(segment: Segment) -> None:
    with Segment.attach(segment.handle()) as other:
        segment.close()
        segment.words.store32(128, 3)
        assert other.words.load32(128) == 3


def test_a_closed_segment_is_not_handed_on(segment: Segment) -> None:
    segment.close()
    with pytest.raises(GroupClosedError):
        segment.handle()
    left, right = socket.socketpair()
    with left, right, pytest.raises(GroupClosedError):
        segment.send(left)
    assert "closed" in repr(segment)


def test_attach_after_the_owner_closed_it(segment: Segment) -> None:
    handle = segment.handle()
    segment.close()
    before = open_descriptors()
    with pytest.raises(SharedMemoryError, match=f"pid {handle.pid}"):
        Segment.attach(handle)
    assert open_descriptors() == before


@pytest.mark.parametrize("kind", ["file", "segment", "device"])
def test_a_number_that_is_another_file_by_now(kind: str, tmp_path: Path) -> None:
    stale = Segment.create(PAGE, "stale")
    handle = stale.handle()
    stale.close()
    before = open_descriptors()
    if kind == "segment":
        taker = Segment.create(PAGE, "taker")
        assert taker.handle().fd == handle.fd
    else:
        other = tmp_path / "other"
        other.write_bytes(bytes(PAGE))
        taken = os.open(other if kind == "file" else "/dev/zero", os.O_RDWR)
        assert taken == handle.fd
    with pytest.raises(SharedMemoryError, match=f"pid {handle.pid}"):
        Segment.attach(handle)
    if kind == "segment":
        taker.close()
        del taker
    else:
        os.close(taken)
    assert open_descriptors() == before


def test_handles_that_are_not_true_are_refused(segment: Segment) -> None:
    handle = segment.handle()
    wrong = {
        "pid": 2**22 + 1,
        "start_time": handle.start_time + 1,
        "fd": 10_000,
        "nonce": bytes(16),
        "size": handle.size + PAGE,
    }
    before = open_descriptors()
    for field, value in wrong.items():
        with pytest.raises(SharedMemoryError):
            Segment.attach(msgspec.structs.replace(handle, **{field: value}))
    assert open_descriptors() == before


def test_another_version_is_refused(segment: Segment) -> None:
    segment.words.store32(SEGMENT_MAGIC, 0x12345678)
    with pytest.raises(SharedMemoryError, match="another segment"):
        Segment.attach(segment.handle())


@pytest.mark.parametrize("size", [0, 1])
def test_memory_that_is_too_small_to_be_a_segment_is_refused(size: int) -> None:
    fd = os.memfd_create("small", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, module.SEALS)
    me = ProcessId.current()
    before = open_descriptors()
    with pytest.raises(SharedMemoryError, match=f"descriptor {fd} of pid {me.pid} is no segment"):
        Segment.attach(SegmentHandle(me.pid, me.start_time, fd, bytes(16), size))
    assert open_descriptors() == before
    os.close(fd)


def test_the_error_of_a_stale_handle_says_why(segment: Segment) -> None:
    handle = segment.handle()
    with pytest.raises(SharedMemoryError, match=r"\(no process has pid 4194305\)"):
        Segment.attach(msgspec.structs.replace(handle, pid=2**22 + 1))
    with pytest.raises(SharedMemoryError, match=r"\(the pid has been used again\)"):
        Segment.attach(msgspec.structs.replace(handle, start_time=handle.start_time + 1))


def test_send_and_receive(segment: Segment) -> None:
    left, right = socket.socketpair()
    before = open_descriptors()
    with left, right:
        segment.send(left)
        with Segment.receive(right, segment.handle()) as other:
            segment.words.store32(128, 5)
            assert other.words.load32(128) == 5
            assert not os.get_inheritable(other.handle().fd)
    del other
    assert open_descriptors() == before - 2


def test_receive_refuses_what_is_not_the_segment(segment: Segment) -> None:
    left, right = socket.socketpair()
    with left, right, Segment.create(segment.size, "other") as other:
        before = open_descriptors()
        other.send(left)
        with pytest.raises(SharedMemoryError, match="another segment"):
            Segment.receive(right, segment.handle())
        left.send(b"s")
        with pytest.raises(SharedMemoryError, match="no descriptor"):
            Segment.receive(right, segment.handle())
        assert open_descriptors() == before


def test_receive_when_the_other_end_has_gone(segment: Segment) -> None:
    left, right = socket.socketpair()
    left.close()
    with right, pytest.raises(SharedMemoryError, match="no descriptor"):
        Segment.receive(right, segment.handle())


def test_too_little_memory_is_an_error_with_both_numbers(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(module, "_free_bytes", lambda: 5000)
    with pytest.raises(SharedMemoryError, match=r"8192 bytes .* required, 5000 are free"):
        Segment.create(2 * PAGE, "test")
    assert open_descriptors() == before


def test_no_descriptor_for_it_is_an_error_too() -> None:
    in_a_child(create_without_descriptors)


def create_without_descriptors() -> None:
    says = r"cannot reserve 4096 bytes: Too many open files \(RLIMIT_NOFILE"
    refused = pytest.raises(SharedMemoryError, match=says)
    with no_descriptors(), refused:
        Segment.create(PAGE, "test")


def test_more_than_the_machine_has() -> None:
    with pytest.raises(SharedMemoryError, match=rf"{1 << 50} bytes .* required, \d+ are free"):
        Segment.create(1 << 50, "test")


def test_the_system_s_refusal_is_an_error_too() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE, hard))
    try:
        says = r"cannot reserve 8192 bytes: fallocate: File too large \(RLIMIT_FSIZE"
        with pytest.raises(SharedMemoryError, match=says):
            Segment.create(2 * PAGE, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_descriptors() == before


def test_free_memory_is_the_least_of_machine_and_cgroup(tmp_path: Path) -> None:
    machine = module._free_bytes(tmp_path / "none")
    assert 0 < machine < 1 << 50
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("4096\n")
    assert module._free_bytes(tmp_path) == pytest.approx(machine, rel=0.2)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 4096\ninactive_file 0\nactive_file 0\n")
    assert module._free_bytes(tmp_path) == 1_000_000 - 4096


def test_files_in_a_cgroup_s_cache_count_as_free(tmp_path: Path) -> None:
    """A container that has read its weights has filled its limit with cache, and is not full."""
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("990000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 40000\nfile 900000\nshmem 50000\ninactive_file 800000\nactive_file 50000\n"
    )
    assert module._free_bytes(tmp_path) == 10_000 + 850_000


def own_and_die(rank: int, n: int, folder: str) -> None:
    put(folder, "handle", Segment.create(PAGE, "test").handle())
    os._exit(0)


def test_a_segment_goes_with_its_owner(tmp_path: Path) -> None:
    run_ranks(1, own_and_die, str(tmp_path), may_die=[0])
    with pytest.raises(SharedMemoryError, match="owner has ended"):
        Segment.attach(get(str(tmp_path), "handle"))


def own_and_wait(rank: int, n: int, folder: str) -> bytes:
    if rank == 0:
        with Segment.create(PAGE, "test") as segment:
            put(folder, "handle", segment.handle())
            get(folder, "attached")
        put(folder, "closed", True)
        get(folder, "written")
        return bytes(segment.memory[100:104])
    segment = Segment.attach(get(folder, "handle"))
    put(folder, "attached", True)
    get(folder, "closed")
    segment.memory[100:104] = b"late"
    put(folder, "written", True)
    return b"late"


def test_who_has_attached_keeps_the_memory(tmp_path: Path) -> None:
    assert run_ranks(2, own_and_wait, str(tmp_path)) == [b"late", b"late"]
