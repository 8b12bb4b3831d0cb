"""How ranks find each other: environment, stores, deadlines."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore

import coordinator
from coordinator import rendezvous
from coordinator.launcher import Launch, own_address, resolve
from coordinator.rendezvous import meet
from coordinator.stores import connect_store, host_store
from shm_broadcast import CoordinatorError, GroupTimeoutError
from tests.patience import STALL_SECONDS
from tests.ranks import run_ranks
from tests.refusals import refuse
from tests.refused_threads import refusing_threads
from tests.shared_store import PythonStore
from tests.shm_broadcast.leaks import no_descriptors, open_descriptors

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}


@pytest.mark.quick
def test_the_environment_of_torchrun_or_none() -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert Launch.from_environment(TORCHRUN | agent) == Launch(
        3, 4, 1, "node0", 29400, hosted=True, attempt=2
    )
    assert not Launch.from_environment(TORCHRUN).hosted
    assert Launch.from_environment({}) == Launch(rank=0, world_size=1, local_rank=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "the environment names a launcher, but has no WORLD_SIZE"),
        ({"MASTER_PORT": None}, "has no MASTER_PORT"),
        ({"RANK": "three"}, "RANK must be a number; the environment has 'three'"),
        ({"RANK": "4"}, "rank 4 is not in a world of 4"),
        ({"LOCAL_RANK": "-1"}, "local_rank must be 0 or more"),
        ({"MASTER_PORT": "65536"}, "master_port must be below 65536"),
    ],
)
@pytest.mark.quick
def test_wrong_environments(change: dict[str, str | None], message: str) -> None:
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Launch.from_environment(environ)


# --- stores -------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_the_host_of_a_store_chooses_the_port(address: str) -> None:
    try:
        store = host_store(address)
    except OSError as error:
        if ":" not in address:
            raise
        pytest.skip(f"this host has no {address}: {error}")
    assert store.port > 0
    client = connect_store(address, store.port, timeout=10)
    client.set("key", "value")
    assert store.get("key") == b"value"


def test_a_store_is_bound_to_one_address() -> None:
    store = host_store("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 5)
    for address in ("0.0.0.0", "::", "0"):
        with pytest.raises(ValueError, match="at one address"):
            host_store(address)
        with pytest.raises(ValueError, match="at one address"):
            meet(Launch(0, 2, master_addr=address, master_port=29400), timeout=1)


def test_a_taken_port_is_an_error_but_our_own_store_is_shared() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(OSError, match=r"hosted at 127.0.0.1:\d+: Address already in use"),
    ):
        host_store("127.0.0.1", other.getsockname()[1])
    first = host_store()
    second = host_store("127.0.0.1", first.port)
    first.set("key", "value")
    assert second.get("key") == b"value"


def host_with(_: int, __: int, files: int) -> tuple[int | None, str, bool]:
    """Host a store where so many more files may be open."""
    before = open_descriptors()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(300)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
    for each in taken[:files]:
        os.close(each)
    with pytest.raises(OSError, match="no store") as caught:
        host_store()
    for each in taken[files:]:
        os.close(each)
    return caught.value.errno, str(caught.value), open_descriptors() == before


@pytest.mark.parametrize("files", [1, 3, 6, 9])
def test_a_process_that_may_open_too_few_files_hosts_no_store(files: int) -> None:
    ((number, told, same),) = run_ranks(1, host_with, files)
    assert number == errno.EMFILE
    assert "no store can be hosted at 127.0.0.1:0: Too many open files" in told
    assert same


def test_an_address_that_is_translated_on_the_way() -> None:
    """The address of a service leads here, but this host does not own it."""
    try:
        mine = own_address("203.0.113.7", 1)
    except OSError:
        pytest.skip("this host has no route")
    assert host_store("203.0.113.7").host == mine


def test_an_unresolvable_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(socket.gaierror) as caught:
        resolve("nowhere", 80, socket.SOCK_STREAM)
    assert caught.value.errno == socket.EAI_NONAME
    assert caught.value.strerror == "nowhere cannot be resolved: Name or service not known"


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port without a listener, which the system gives to no other process."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_no_host_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        start = time.monotonic()
        nobody = f"no process answers at 127.0.0.1:{port}: .*Connection refused"
        with pytest.raises(GroupTimeoutError, match=nobody) as caught:
            connect_store("127.0.0.1", port, timeout=0.3)
    assert [member.rank for member in caught.value.waiting_for] == [0]
    assert time.monotonic() - start < 0.3 + STALL_SECONDS

    def meet_itself(*_: object) -> socket.socket:
        """As happens where the client's own port is that to which it connects."""
        lonely = socket.socket()
        lonely.bind(("127.0.0.1", 0))
        lonely.connect(lonely.getsockname())
        return lonely

    monkeypatch.setattr(socket, "create_connection", meet_itself)
    with pytest.raises(GroupTimeoutError, match="no process answers"):
        connect_store("127.0.0.1", 1, timeout=0.1)


def test_a_process_without_files_or_threads_does_not_blame_the_host() -> None:
    with no_descriptors(), pytest.raises(OSError, match="Too many open files") as caught:
        connect_store("127.0.0.1", 1, timeout=STALL_SECONDS)
    assert caught.value.errno == errno.EMFILE
    store = host_store()
    with refusing_threads("store-connect"), pytest.raises(RuntimeError, match="new thread"):
        connect_store("127.0.0.1", store.port, timeout=STALL_SECONDS)


# --- meeting ------------------------------------------------------------------------------


def test_absent_ranks_are_listed() -> None:
    store = host_store()
    with pytest.raises(GroupTimeoutError, match="world rendezvous: timed out") as caught:
        coordinator.init(tp=4, rank=1, store=store, timeout=0.3)  # N4
    assert [member.rank for member in caught.value.waiting_for] == [0, 2, 3]
    assert f"127.0.0.1:{store.port}" in str(caught.value)
    exchange, address = meet(Launch(0, 1), PrefixStore("1 rank", store), timeout=10)
    assert exchange.host == f"127.0.0.1:{store.port}"
    assert address == "127.0.0.1"


def lack_memory_and_end(rank: int, n: int, port: int) -> str:
    """Rank 0, which hosts the store, gets no shared memory, and its process ends at once."""
    if rank == 0:
        refuse(errno.ENOSPC, "fallocate")
    try:
        coordinator.init(tp=n, rank=rank, master_addr="127.0.0.1", master_port=port)
    except CoordinatorError as error:
        if rank == 0:
            os._exit(1)
        return str(error)
    raise AssertionError


def test_why_the_one_that_hosts_the_store_gives_up_is_told_to_the_others() -> None:
    with reserved_port() as port:
        told = run_ranks(2, lack_memory_and_end, port, may_die=[0])[1]
    assert "rank 0 reported: SharedMemoryError: cannot reserve" in told


def say_who_hosts(rank: int, n: int, port: int) -> str:
    """Rank 0 hosts the store, and the others read it late."""
    if rank != 0:
        vars(rendezvous)["backoff"] = lambda: itertools.repeat(0.3)
    with pytest.raises(ValueError, match="world: host is yes on ranks") as caught:
        meet(Launch(rank, n, rank, "127.0.0.1", port), terms={"host": "no" if rank else "yes"})
    return str(caught.value)


def test_the_host_of_the_store_ends_when_all_have_read_why() -> None:
    said = "world: host is yes on ranks [0], no on ranks [1, 2]: give all ranks the same"
    with reserved_port() as port:
        assert run_ranks(3, say_who_hosts, port) == [said] * 3


def meet_on_one_port(rank: int, n: int, port: int) -> list[list[bytes]]:
    if rank == 0:
        time.sleep(0.2)
    launch = Launch(rank, n, rank, "127.0.0.1", port)
    met = [meet(launch, timeout=20), meet(launch, timeout=20)]
    assert [address for _, address in met] == ["127.0.0.1"] * 2
    found = [
        exchange.all_gather("who", f"{visit} {rank}".encode())
        for visit, (exchange, _) in enumerate(met)
    ]
    store = met[0][0].store
    if rank:
        store.set("left", "")
    else:
        store.wait(["left"])  # the store ends with its host
    return found


def test_ranks_meet_twice_on_one_port() -> None:
    with reserved_port() as port:
        for found in run_ranks(2, meet_on_one_port, port):
            assert found == [[b"0 0", b"0 1"], [b"1 0", b"1 1"]]


def test_any_store_will_do(store_path: str) -> None:
    for stores in (
        [FileStore(store_path, 2) for _ in range(2)],
        [HashStore()] * 2,
        [PythonStore(HashStore())] * 2,
    ):
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(meet, Launch(rank, 2), stores[rank], 10) for rank in range(2)]
            met = [call.result(20) for call in calls]
        assert [(exchange.rank, address) for exchange, address in met] == [(0, ""), (1, "")]


@contextmanager
def impostor(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    kept: list[socket.socket] = []
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while not ended.is_set():
                try:
                    connection, _ = listener.accept()
                    kept.append(connection)
                    behave(connection)
                except OSError:
                    continue

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in kept:
        connection.close()


@pytest.mark.parametrize(
    "behave",
    [
        lambda _: None,
        lambda connection: connection.sendall(b"\xff" * 4096),
        lambda connection: connection.close(),
    ],
    ids=["silent", "rubbish", "closing"],
)
def test_what_is_no_store_ends_in_time(behave: Callable[[socket.socket], None]) -> None:
    with impostor(behave) as port:
        began = time.monotonic()
        with pytest.raises(GroupTimeoutError, match=f"at 127.0.0.1:{port} is no store"):
            coordinator.init(tp=2, rank=1, master_port=port, timeout=2.0, backend="gloo")
        assert time.monotonic() - began < 2.0 + STALL_SECONDS
