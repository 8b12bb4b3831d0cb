"""A meeting that the launcher's secret protects, and what others can do about it."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
import torch.distributed as dist
import zmq
from torch.distributed import HashStore, PrefixStore, Store

import coordinator
from coordinator import curve_store
from coordinator.curve_store import StoreGuestClient, StoreServer
from coordinator.key_values import Add, CompareSet, StoreAddress
from coordinator.rendezvous import Rendezvous, authenticated
from shm_broadcast import (
    CoordinatorError,
    Deadline,
    GroupClosedError,
    GroupTimeoutError,
    PeerProtocolError,
    TransportError,
)
from tests.patience import STALL_SECONDS, until
from tests.ranks import run_ranks
from tests.refused_threads import refusing_threads
from tests.shared_store import PythonStore, SharedStore

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"known to the members only"
KEY = "group-coordinator/world/0/1/address of the authenticated store/0"


@pytest.fixture
def host() -> Iterator[StoreServer]:
    host = StoreServer(range(2), "127.0.0.1", SECRET)
    yield host
    host.close()
    host.close()


def ask(guest: StoreGuestClient, number: int, seconds: float = STALL_SECONDS) -> int:
    return guest.ask(Add(number, "n", 1), Deadline.after(seconds)).count


def hosts() -> int:
    return sum(thread.name == "store-host" for thread in threading.enumerate())


def test_the_host_stays_until_all_members_have_left() -> None:
    before = hosts()
    host = StoreServer(range(2), "127.0.0.1", SECRET)
    first, second = (StoreGuestClient(host.at, rank, SECRET) for rank in range(2))
    assert ask(first, 1) == 1
    first.close()
    host.close()
    assert [ask(second, number) for number in (1, 2, 3)] == [2, 3, 4]
    second.close()
    until(lambda: hosts() == before)
    host.close()


def test_the_host_ends_at_once_when_the_last_member_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_store, "_POLL_SECONDS", 1000.0)
    before = hosts()
    host = StoreServer([0], "127.0.0.1", SECRET)
    guest = StoreGuestClient(host.at, 0, SECRET)
    ask(guest, 1)
    host.close(stay=1000.0)
    ask(guest, 2)  # by then the host sleeps again
    guest.close()
    until(lambda: hosts() == before)


def test_a_guest_that_was_answered_says_that_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if zmq's own event about the connection has not come yet."""
    before = hosts()
    host = StoreServer(range(1), "127.0.0.1", SECRET)
    guest = StoreGuestClient(host.at, 0, SECRET)
    monkeypatch.setattr(guest._connection, "poll", lambda: None)
    assert ask(guest, 1) == 1
    guest.close()
    host.close()
    until(lambda: hosts() == before)


def test_a_closed_guest_asks_nothing(host: StoreServer) -> None:
    with StoreGuestClient(host.at, 0, SECRET) as guest:
        assert ask(guest, 1) == 1
    with pytest.raises(GroupClosedError):
        ask(guest, 2)


def test_without_the_secret_nothing_is_answered(host: StoreServer) -> None:
    with (
        StoreGuestClient(host.at, 0, b"not what the members know") as guest,
        pytest.raises(GroupTimeoutError, match="handshakes failed: is the secret the same"),
    ):
        ask(guest, 1, 2.0)
    with StoreGuestClient(host.at, 0, SECRET) as guest:
        assert ask(guest, 1) == 1


def test_a_rank_that_is_no_member_is_not_admitted(host: StoreServer) -> None:
    with StoreGuestClient(host.at, 2, SECRET) as guest, pytest.raises(PeerProtocolError):
        ask(guest, 1)


def test_bytes_of_strangers_do_no_harm(host: StoreServer) -> None:
    context = zmq.Context()
    for kind in (zmq.DEALER, zmq.STREAM):
        socket = context.socket(kind)
        socket.linger = 0
        socket.connect(host.at.address)
        for _ in range(10):
            if kind == zmq.DEALER:
                with suppress(zmq.Again):  # the host has refused it by then
                    socket.send(msgspec.msgpack.encode(Add(1, "n", 1)), zmq.NOBLOCK)
        socket.close()
    with StoreGuestClient(host.at, 0, SECRET) as guest:
        assert ask(guest, 1) == 1
    context.term()


def test_what_no_frame_holds_is_refused_and_the_store_goes_on(host: StoreServer) -> None:
    with ExitStack() as closing:
        guest = StoreGuestClient(host.at, 0, SECRET)
        closing.callback(guest.close)
        assert ask(guest, 1) == 1
        with pytest.raises(ValueError, match=r"limited to 131072 bytes; got 200\d{3}$"):
            guest.ask(CompareSet(2, "n", b"x" * 100_000, b"y" * 100_000), Deadline.after(60))
        refused = guest.ask(Add(3, "n", (1 << 64) - 1), Deadline.after(60))
        assert "it would be 18446744073709551616" in refused.error
        assert ask(guest, 4) == 2


def test_the_end_of_the_host_is_noticed(host: StoreServer) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        other = StoreServer(range(2), "127.0.0.1", SECRET)
        os.write(writing, msgspec.msgpack.encode(other.at))
        signal.pause()
    at = msgspec.msgpack.decode(os.read(reading, 4096), type=StoreAddress)
    os.close(reading)
    os.close(writing)
    with StoreGuestClient(at, 1, SECRET) as guest:
        assert ask(guest, 1) == 1
        os.kill(pid, signal.SIGSTOP)
        os.waitpid(pid, os.WUNTRACED)  # it has stopped
        with pytest.raises(GroupTimeoutError, match="does not answer"):
            ask(guest, 2, 0.2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with pytest.raises(TransportError, match="rank 0 broke"):
            ask(guest, 3)


@pytest.mark.parametrize("address", ["ipc:///tmp/x", "inproc://x", "tcp://", "nonsense"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is no address of a store"):
        StoreGuestClient(StoreAddress(address, bytes(32)), 0, SECRET)


@pytest.mark.parametrize("told", [b"", b"\xff", msgspec.msgpack.encode({"address": 1})])
def test_nonsense_in_the_first_store_is_a_typed_error(told: bytes) -> None:
    store = HashStore()
    exchange = Rendezvous(PrefixStore("x", store), 1, 2, "world", Deadline.after(5))
    exchange._put("address of the authenticated store/0", told)
    named = r"'address of the authenticated store/0' .* of type StoreAddress: "
    with ExitStack() as closing, pytest.raises(PeerProtocolError, match=named):
        authenticated(exchange, SECRET, closing)


# --- groups -------------------------------------------------------------------------------


def use_groups(rank: int, n: int, store: Store) -> tuple[float, list[str]]:
    with coordinator.init(
        tp=2, pp=2, rank=rank, store=store, torch_only=True, backend="gloo", secret=SECRET
    ) as groups:
        x = groups.world.all_reduce(torch.ones(2))
        dist.all_reduce(x, group=groups.tp.cpu_group)
        with groups.pp.create_mq_broadcaster() as queue:
            if groups.pp.is_first_rank:
                queue.enqueue(rank)
            else:
                assert queue.dequeue(timeout=60) == rank - 2
        groups.world.barrier()
        terms = [key for key in store.list_keys() if "/rendezvous/" in key]
        assert terms
        assert not any(SECRET in store.get(key.removeprefix("/")) for key in terms)
        return float(x[0]), store.list_keys()


def test_the_first_store_holds_one_address_and_nothing_else() -> None:
    for total, keys in run_ranks(4, use_groups, SharedStore()):
        assert total == 8.0
        known = {key.removeprefix("/") for key in keys}
        of_a_visit = ("/visits/", "/rendezvous/", "/set up/")
        told = {key for key in known if not any(part in key for part in of_a_visit)}
        assert told == {KEY}, told


class Tampered(PythonStore):
    """A store in which somebody has changed where to meet, after rank 0 has told it."""

    def __init__(self, store: Store, told: bytes) -> None:
        super().__init__(store)
        self.told = told

    def get(self, key: str) -> bytes:
        return self.told if key == KEY else super().get(key)


def meet_elsewhere(rank: int, n: int, store: Store) -> str:
    if rank == 1:
        impostor = StoreServer(range(2), "127.0.0.1", b"what the attacker has")
        store = Tampered(store, msgspec.msgpack.encode(impostor.at))
    try:
        coordinator.init(tp=2, rank=rank, store=store, secret=SECRET, timeout=3.0, backend="gloo")
    except CoordinatorError as error:
        return f"{type(error).__name__}: {error}"
    return "met"


def test_an_impostor_can_only_keep_members_from_meeting() -> None:
    errors = run_ranks(2, meet_elsewhere, SharedStore())
    assert "GroupTimeoutError" in errors[0]
    assert "is the secret the same?" in errors[1], errors


def wrap_default_group(rank: int, n: int, path: str) -> float:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=n)
    with coordinator.GroupCoordinator(
        [[0, 1]], rank, "gloo", True, True, "all", secret=SECRET
    ) as g:
        assert g.broadcast_object("x" if rank == 0 else None) == "x"
        wrapped = coordinator.GroupCoordinator.from_process_group(g.cpu_group, secret=SECRET)
        with wrapped:
            total = float(wrapped.all_reduce(torch.ones(1)))
    dist.destroy_process_group()
    return total


def test_groups_over_torch_s_own_meet_with_the_secret(tmp_path: object) -> None:
    assert run_ranks(2, wrap_default_group, f"{tmp_path}/store") == [2.0, 2.0]


def test_what_is_authenticated_already_stays(host: StoreServer) -> None:
    store: Store = HashStore()
    with ExitStack() as closing:
        exchange = Rendezvous(store, 0, 1, "one", Deadline.after(30))
        assert authenticated(exchange, None, closing) is exchange
        inner = authenticated(exchange, SECRET, closing)
        assert inner.all_gather("names", b"me") == [b"me"]
        sub = inner.sub("sub", [0])
        assert authenticated(sub, SECRET, closing) is sub
    assert not store.check(["names/0"])


def test_a_host_that_has_no_thread_leaves_nothing() -> None:
    before = {*threading.enumerate()}
    with refusing_threads("store-host"), pytest.raises(RuntimeError, match="new thread"):
        StoreServer(range(2), "127.0.0.1", SECRET)
    until(lambda: {*threading.enumerate()} <= before)
