"""Segments: sealed, nameless, reserved, of this user and group alone, and nothing left of them."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from shm_broadcast import (
    ForeignMemoryError,
    GroupClosedError,
    ProcessId,
    Segment,
    SegmentHandle,
    SharedMemoryError,
)
from shm_broadcast import segment as module
from shm_broadcast.layout import SEGMENT_MAGIC, SEGMENT_SIZE
from shm_broadcast.process import describe_os_error
from tests.forked import in_a_child
from tests.ranks import run_ranks
from tests.refusals import refuse
from tests.shm_broadcast.leaks import no_descriptors, open_descriptors
from tests.shm_broadcast.remote_peers import get, put
from tests.unshared import run_unshared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = mmap.PAGESIZE
NOBODY = 65534

SHARE = """
from shm_broadcast import SharedMemoryError
from shm_broadcast.segment import Segment
try:
    with Segment.create(4096, "test") as segment:
        print(Segment.attach(segment.handle()).size)
except SharedMemoryError as error:
    print(error)
"""


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.create(3 * PAGE + 1, "test") as made:
        yield made


# --- the memory ------------------------------------------------------------------------------


def test_both_ends_share_zeroed_reserved_pages(segment: Segment) -> None:
    assert segment.size == len(segment.memory) == 4 * PAGE
    assert segment.words.load64(SEGMENT_SIZE) == 4 * PAGE
    assert bytes(segment.memory[64:]) == bytes(4 * PAGE - 64)
    assert os.fstat(segment.handle().fd).st_blocks * 512 == 4 * PAGE
    with Segment.attach(segment.handle()) as other:
        segment.words.store64(128, 7)
        assert other.words.load64(128) == 7
        other.memory[200:205] = b"hello"
        assert bytes(segment.memory[200:205]) == b"hello"
        assert not os.get_inheritable(segment.handle().fd)
        assert not os.get_inheritable(other.handle().fd)
        segment.close()  # the memory stays
        segment.words.store32(128, 3)
        assert other.words.load32(128) == 3


def test_pages_settle_where_they_are_reserved_anew(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed first, so that the process that reserves them touches them first."""
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


def test_less_than_a_page_does_not_settle_and_no_memory_is_an_error(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    segment.memory[64:] = b"x" * (4 * PAGE - 64)
    segment.first_touch(PAGE + 1, 3 * PAGE - 1)
    segment.first_touch(PAGE, PAGE)
    assert bytes(segment.memory[64:]) == b"x" * (4 * PAGE - 64)
    says = "cannot reserve 4096 bytes: fallocate: No space left"
    with pytest.raises(SharedMemoryError, match=says):
        segment.first_touch(PAGE, 2 * PAGE)


def test_a_segment_cannot_shrink_grow_or_be_unsealed(segment: Segment) -> None:
    fd = segment.handle().fd
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == (
        fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    )
    for size in (0, PAGE, 5 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_a_segment_has_no_name() -> None:
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    with Segment.create(PAGE, "nameless") as segment:
        assert set(os.listdir("/dev/shm")) <= before  # noqa: PTH208
        target = os.readlink(f"/proc/self/fd/{segment.handle().fd}")  # noqa: PTH115
        assert target == "/memfd:nameless (deleted)"


# --- nothing is left -------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "dropped"])
def test_no_descriptor_is_left(closes: bool) -> None:
    before = open_descriptors()
    for _ in range(3):
        segment = Segment.create(PAGE, "test")
        other = Segment.attach(segment.handle())
        # Python's mmap keeps a descriptor of its own as long as the memory is mapped.
        assert open_descriptors() == before + 4
        if closes:
            segment.close()
            other.close()
            assert open_descriptors() == before + 2
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


def test_a_closed_segment_is_not_handed_on(segment: Segment) -> None:
    segment.close()
    with pytest.raises(GroupClosedError):
        segment.handle()
    assert "closed" in repr(segment)


def own_and_die(rank: int, n: int, folder: str) -> None:
    put(folder, "handle", Segment.create(PAGE, "test").handle())
    os._exit(0)


def test_a_segment_ends_with_its_owner(tmp_path: Path) -> None:
    run_ranks(1, own_and_die, str(tmp_path), may_die=[0])
    with pytest.raises(SharedMemoryError, match="owner has ended"):
        Segment.attach(get(str(tmp_path), "handle"))


# --- handles that are refused ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "segment", "device"])
def test_a_descriptor_that_is_another_file_by_now_is_refused(kind: str, tmp_path: Path) -> None:
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


def test_wrong_handles_are_refused_with_the_reason(segment: Segment) -> None:
    handle = segment.handle()
    before = open_descriptors()
    for wrong, says in [
        ({"pid": 2**22 + 1}, r"\(no process has pid 4194305\)"),
        ({"start_time": handle.start_time + 1}, r"\(the pid has been used again\)"),
        ({"fd": 10_000}, f"pid {handle.pid}"),
        ({"nonce": bytes(16)}, "another segment"),
        ({"size": handle.size + PAGE}, "segment"),
    ]:
        with pytest.raises(SharedMemoryError, match=says):
            Segment.attach(msgspec.structs.replace(handle, **wrong))
    segment.words.store32(SEGMENT_MAGIC, 0x12345678)  # of another version
    with pytest.raises(SharedMemoryError, match="another segment"):
        Segment.attach(handle)
    assert open_descriptors() == before


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


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
SIZE = 4096


def another_user() -> Segment:
    os.setresuid(NOBODY, NOBODY, NOBODY)
    return Segment.create(SIZE, "another user's")


def set_user_id_program() -> Segment:
    """As ``su`` while it asks for a password: root's by effect, started by another user."""
    made = Segment.create(SIZE, "of a program with the set-user-ID bit")
    os.setresuid(NOBODY, 0, 0)
    return made


def memory_handed_to_us() -> Segment:
    """A process of ours that was started with another user's descriptor open."""
    os.seteuid(NOBODY)
    made = Segment.create(SIZE, "another user's, open in a process of ours")
    os.seteuid(0)
    return made


@contextmanager
def segment_of(make: Callable[[], Segment]) -> Iterator[SegmentHandle]:
    """The handle of a segment that a process makes; inside, it lives."""
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


@ROOT
@pytest.mark.parametrize("make", [another_user, set_user_id_program, memory_handed_to_us])
def test_another_users_segment_is_not_opened(make: Callable[[], Segment]) -> None:
    with segment_of(make) as handle, pytest.raises(ForeignMemoryError, match=f"pid {handle.pid}"):
        Segment.attach(handle)


def test_a_segment_outside_the_group_is_not_opened() -> None:
    with segment_of(lambda: Segment.create(PAGE, "ours")) as handle:
        Segment.attach(handle, lambda pid: pid == handle.pid).close()
        with pytest.raises(ForeignMemoryError, match=f"pid {handle.pid} is no member"):
            Segment.attach(handle, lambda pid: pid == os.getpid())


# --- too few resources -----------------------------------------------------------------------


def test_too_little_memory_is_an_error_with_both_numbers(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(module, "_free_bytes", lambda: 5000)
    with pytest.raises(SharedMemoryError, match=r"8192 bytes .* required, 5000 are free"):
        Segment.create(2 * PAGE, "test")
    assert open_descriptors() == before


def create_without_descriptors() -> None:
    says = r"cannot reserve 4096 bytes: Too many open files \(RLIMIT_NOFILE"
    refused = pytest.raises(SharedMemoryError, match=says)
    with no_descriptors(), refused:
        Segment.create(PAGE, "test")


def test_too_few_resources_of_the_system_are_errors() -> None:
    in_a_child(create_without_descriptors)
    with pytest.raises(SharedMemoryError, match=rf"{1 << 50} bytes .* required, \d+ are free"):
        Segment.create(1 << 50, "test")
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
    (tmp_path / "memory.current").write_text("990000\n")
    (tmp_path / "memory.stat").write_text(  # the cache of files that were read is free
        "anon 40000\nfile 900000\nshmem 50000\ninactive_file 800000\nactive_file 50000\n"
    )
    assert module._free_bytes(tmp_path) == 10_000 + 850_000


def shared_within(*namespace: str, mount: str = "true") -> str:
    """Return what `SHARE` prints in a namespace, after the command ``mount``."""
    command = f'{mount} && exec "$0" -c "$1"'
    done = run_unshared([*namespace], "sh", "-c", command, sys.executable, SHARE, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("namespace", "mount", "said"),
    [
        (["--mount"], "mount -t tmpfs none /proc", "no memory can be shared: /proc is not mounted"),
        (["--pid", "--fork"], "true", "is that of another pid namespace"),
        (["--mount"], "mount -t proc -o subset=pid proc /proc", "4096"),
    ],
    ids=["no proc", "another namespace's", "processes only"],
)
def test_memory_is_shared_by_the_proc_of_this_pid_namespace(
    namespace: list[str], mount: str, said: str
) -> None:
    assert said in shared_within(*namespace, mount=mount)


def create(_: int, __: int, name: str, number: int) -> str:
    before = len([*Path("/proc/self/fd").iterdir()])
    refuse(number, name)
    with pytest.raises(SharedMemoryError) as caught:
        Segment.create(4096, "test")
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    return str(caught.value)


@pytest.mark.parametrize("name", ["memfd_create", "fallocate"])
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_refused_system_call_is_named(name: str, number: int) -> None:
    (told,) = run_ranks(1, create, name, number)
    assert told == f"cannot reserve 4096 bytes: {name} is refused here: {os.strerror(number)}"
    assert describe_os_error(OSError("no route")) == "no route"
    assert describe_os_error(OSError(errno.EMFILE, "full")) == "full (RLIMIT_NOFILE, ulimit -n)"
