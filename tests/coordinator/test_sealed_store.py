"""A store whose values a secret seals, and what others can do about it."""

from __future__ import annotations

import gc
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore, PrefixStore, ProcessGroup, Store

import coordinator
from coordinator import host_store
from coordinator.rendezvous import Rendezvous, authenticated
from coordinator.secret import SecretError
from coordinator.stores import SealedStore, open_sealed_store
from coordinator.torch_groups import SocketChoice, connect_process_group, destroy
from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupClosedError
from tests.ranks import run_ranks
from tests.shared_store import PythonStore, SharedStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = b"known to the members only"
OTHER = b"what the attacker has"


@pytest.fixture(params=["memory", "network", "memfd"])
def sealed(request: pytest.FixtureRequest) -> Iterator[SealedStore]:
    with ExitStack() as closing:
        if request.param == "memory":
            store = SealedStore(HashStore(), SECRET)
        elif request.param == "network":
            hosted = host_store()
            store = open_sealed_store(f"127.0.0.1:{hosted.port}", SECRET, Deadline.after(30))
        else:
            fd = os.memfd_create("store")
            closing.callback(os.close, fd)
            store = open_sealed_store(f"/proc/{os.getpid()}/fd/{fd}", SECRET, NEVER)
        closing.callback(store.close)
        yield store


def test_values(sealed: SealedStore) -> None:
    sealed.set("bytes", b"\x00\xff")
    sealed.set("text", "é")
    assert sealed.multi_get(["bytes", "text"]) == [b"\x00\xff", "é".encode()]
    assert (sealed.add("n", 2), sealed.add("n", -5), sealed.get("n")) == (2, -3, b"-3")
    assert sealed.check(["bytes", "n"])
    assert not sealed.check(["bytes", "none"])
    sealed.append("text", b"!")
    assert sealed.get("text") == "é!".encode()
    assert sealed.compare_set("text", "other", "new") == "é!".encode()
    assert sealed.compare_set("fresh", "", "new") == b"new"
    sealed.multi_set(["a", "b"], [b"1", "2"])
    assert sealed.multi_get(["a", "b"]) == [b"1", b"2"]
    assert sealed.delete_key("n")
    assert not sealed.check(["n"])


def test_sums_of_many_threads_count_each_once(sealed: SealedStore) -> None:
    with ThreadPoolExecutor(4) as threads:
        sums = list(threads.map(lambda _: sealed.add("n", 1), range(40)))
    assert sorted(sums) == [*range(1, 41)]


def copied(key: str) -> bytes:
    """The sealed value of another key."""
    store = HashStore()
    SealedStore(store, SECRET).set(key, "5")
    return store.get(key)


def changed(key: str) -> bytes:
    return copied(key)[:-1] + b"6"


@pytest.mark.parametrize(
    "value",
    [
        lambda _: b"5",
        lambda _: b"",
        lambda _: copied("another"),
        changed,
        lambda _: pickle.dumps(SECRET),
    ],
    ids=["plain", "empty", "of another key", "changed", "pickle"],
)
def test_a_value_of_another_process_is_a_typed_error(value: Callable[[str], bytes]) -> None:
    store = HashStore()
    sealed = SealedStore(store, SECRET)
    store.set("key", value("key"))
    message = "value of 'key' in the store is not of a process with this job's secret"
    asks: list[Callable[[], object]] = [
        lambda: sealed.get("key"),
        lambda: sealed.multi_get(["key"]),
    ]
    if value("key"):
        asks += [
            lambda: sealed.add("key", 1),
            lambda: sealed.append("key", "x"),
            lambda: sealed.compare_set("key", "5", "6"),
        ]
    for ask in asks:
        with pytest.raises(SecretError, match=message):
            ask()


def test_the_secret_and_the_salt_are_those_of_the_reader() -> None:
    store = HashStore()
    SealedStore(store, SECRET, b"this job's").set("key", "5")
    assert SealedStore(store, SECRET, b"this job's").get("key") == b"5"
    for secret, salt in ((OTHER, b"this job's"), (SECRET, b"an earlier job's")):
        with pytest.raises(SecretError):
            SealedStore(store, secret, salt).get("key")


def test_a_key_that_does_not_come_is_named(sealed: SealedStore) -> None:
    sealed.set("there", b"")
    with pytest.raises(DistStoreError, match=r"after 0.01 s, keys: none"):
        sealed.wait(["there", "none"], timedelta(seconds=0.01))


def test_nothing_is_asked_after_the_end(sealed: SealedStore) -> None:
    sealed.close()
    sealed.close()
    with pytest.raises(GroupClosedError):
        sealed.set("key", b"")


def open_files() -> set[str]:
    return {each.name for each in Path("/proc/self/fd").iterdir()}


def test_a_store_in_memory_without_a_name_keeps_one_descriptor_while_it_lives() -> None:
    fd = os.memfd_create("store")
    path = f"/proc/{os.getpid()}/fd/{fd}"
    before = open_files()
    store = open_sealed_store(path, SECRET, NEVER)
    prefixed = PrefixStore("p", store)
    prefixed.set("key", "5")
    assert len(open_files() - before) == 1
    store.close()
    assert open_files() == before
    with pytest.raises(GroupClosedError):
        prefixed.get("key")
    os.close(fd)


def test_torch_meets_in_it() -> None:
    """Also where nothing in Python refers to more than a prefix of the store."""
    store = HashStore()

    def meet(rank: int) -> ProcessGroup:
        prefixed = PrefixStore("p", SealedStore(store, SECRET))
        gc.collect()
        exchange = Rendezvous(prefixed, rank, 2, "pair", Deadline.after(10)).begin_round("here")
        assert exchange.all_gather("ranks", b"%d" % rank) == [b"0", b"1"]
        loopback = SocketChoice(address="127.0.0.1")
        return connect_process_group(exchange.store, "pair", [0, 1], rank, "gloo", loopback, None)

    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(meet, range(2)))
        sums = [torch.ones(2), torch.ones(2)]
        list(threads.map(lambda group, x: group.allreduce([x]).wait(), groups, sums))
    assert [float(x[0]) for x in sums] == [2.0, 2.0]
    for group in groups:
        destroy(group)


# --- groups -------------------------------------------------------------------------------


def use_groups(rank: int, n: int, store: Store) -> tuple[float, set[str]]:
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
        keys = {key.removeprefix("/") for key in store.list_keys()}
        assert not any(SECRET in store.get(key) for key in keys)
        return float(x[0]), plain(store, keys)


ROUND = "group-coordinator/world/0/1"


def plain(store: Store, keys: set[str]) -> set[str]:
    """The keys whose values the secret does not open, with the salt that the members agreed on."""
    met = PrefixStore(ROUND, store)
    salt = b"".join(met.get(f"nonces/{rank}").partition(b" ")[2] for rank in range(4))
    sealed = SealedStore(met, SECRET, salt)
    inside = {key for key in keys if key.startswith(f"{ROUND}/")}
    unopened = set()
    for key in inside:
        try:
            sealed.get(key.removeprefix(f"{ROUND}/"))
        except SecretError:
            unopened.add(key)
    sealed.close()
    return keys - inside | unopened


def test_the_first_values_are_open_and_all_others_sealed() -> None:
    first = ("0/rounds/", "0/1/rendezvous/", "0/1/nonces/", "0/1/proofs/")
    for total, keys in run_ranks(4, use_groups, SharedStore()):
        assert total == 8.0
        assert {key for key in keys if not key.startswith(f"{ROUND}/")}
        assert all(
            key.startswith(tuple(f"group-coordinator/world/{x}" for x in first)) for key in keys
        )


def meet_with(rank: int, n: int, store: Store) -> tuple[str, str]:
    try:
        coordinator.init(n, rank=rank, store=store, secret=OTHER if rank == 2 else SECRET)
    except CoordinatorError as error:
        return type(error).__name__, str(error)
    return "met", ""


def test_ranks_with_another_secret_are_named_at_once() -> None:
    errors = run_ranks(3, meet_with, SharedStore())
    assert [kind for kind, _ in errors] == ["SecretError"] * 3
    assert ["ranks [2] do not have the secret of rank 0" in text for _, text in errors[:1]] == [
        True
    ]
    assert "ranks [2] do not have the secret of rank 1" in errors[1][1]
    assert "ranks [0, 1] do not have the secret of rank 2" in errors[2][1]


class Bomb:
    """An object that leaves a file behind where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return Path.touch, (Path(self.path),)  # type: ignore[return-value]


class Tampered(PythonStore):
    """A store in which another process has replaced the values of some keys."""

    def __init__(self, store: Store, part: str, told: bytes) -> None:
        super().__init__(store)
        self.part = part
        self.told = told
        self.replaced = 0

    def get(self, key: str) -> bytes:
        if self.part in key:
            self.replaced += 1
            return self.told
        return super().get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.store.compare_set(key, expected, desired)


def meet_in_tampered(rank: int, n: int, store: Store, part: str, path: str) -> tuple[str, int]:
    tampered = Tampered(store, part, b"2 " + pickle.dumps(Bomb(path)))
    try:
        with coordinator.init(
            2,
            rank=rank,
            store=tampered if rank == 1 else store,
            secret=SECRET,
            timeout=3.0,
            backend="gloo",
            torch_only=True,
        ) as groups:
            groups.world.broadcast_object("x" if rank == 0 else None)
    except (CoordinatorError, ValueError) as error:
        return type(error).__name__, tampered.replaced
    return "met", tampered.replaced


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("rendezvous/0", "PeerProtocolError"),
        ("nonces/0", "SecretError"),
        ("proofs/0", "SecretError"),
        ("host/0", "SecretError"),
        ("boards/0", "SecretError"),
        ("board/0", "SecretError"),
        ("members/0", "SecretError"),
        ("gloo/", "SecretError"),
        ("count", "SecretError"),
    ],
)
def test_what_another_process_writes_is_never_unpickled(
    part: str, error: str, tmp_path: Path
) -> None:
    bomb = tmp_path / "bomb"
    found = run_ranks(2, meet_in_tampered, SharedStore(), part, str(bomb))
    assert found[1][0] == error
    assert found[1][1] > 0
    assert found[0][0] != "met"
    assert not bomb.exists()


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


def test_groups_over_torch_s_own_meet_with_the_secret(tmp_path: Path) -> None:
    assert run_ranks(2, wrap_default_group, f"{tmp_path}/store") == [2.0, 2.0]


def test_what_is_sealed_already_stays() -> None:
    store: Store = HashStore()
    with ExitStack() as closing:
        exchange = Rendezvous(store, 0, 1, "one", Deadline.after(30))
        assert authenticated(exchange, None, closing) is exchange
        inner = authenticated(exchange, SECRET, closing)
        assert inner.all_gather("names", b"me") == [b"me"]
        sub = inner.sub("sub", [0])
        assert authenticated(sub, SECRET, closing) is sub
    assert b"me" in store.get("names/0") != b"1 me"


def test_a_value_of_an_earlier_job_is_refused() -> None:
    """Where the store, or who alters it, presents what the same members have written before."""

    def meet(rank: int, place: str) -> Store:
        exchange = Rendezvous(store, rank, 2, "world", Deadline.after(10)).begin_round(place)
        inside = authenticated(exchange, SECRET, closing)
        inside.broadcast("word", b"attack" if rank == 0 else None)
        return inside.store

    store = HashStore()
    with ExitStack() as closing, ThreadPoolExecutor(2) as threads:
        earlier, _ = threads.map(meet, range(2), ["job 1"] * 2)
        later, _ = threads.map(meet, range(2), ["job 2"] * 2)
        assert isinstance(earlier, SealedStore)
        assert isinstance(later, SealedStore)
        later.inner.set("word/0", earlier.inner.get("word/0"))
        with pytest.raises(SecretError):
            later.get("word/0")
