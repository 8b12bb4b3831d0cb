"""The launcher's secret: where it is read, and how the values of a store are sealed with it."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore, PrefixStore, ProcessGroup, Store

import coordinator
from coordinator import Launch, host_store
from coordinator.compat.vllm import parallel_state
from coordinator.rendezvous import Rendezvous, authenticated
from coordinator.secret import SECRET_FILE, SecretError, launcher_secret
from coordinator.stores import SealedStore, open_sealed_store
from coordinator.torch_groups import SocketChoice, connect_process_group, destroy
from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupClosedError
from shm_broadcast.queue import rendezvous
from tests.coordinator.hosts import move_to
from tests.netns import Host, two_hosts
from tests.patience import all_here
from tests.ranks import run_ranks
from tests.shared_store import PythonStore, SharedStore

SECRET = b"known to the members only"
OTHER = b"what the attacker has"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    path.write_bytes(SECRET + b"\n")
    return path


@pytest.mark.quick
def test_the_secret_is_given_or_in_a_file_and_not_shown(file: Path) -> None:
    assert launcher_secret(environ={}) is None
    assert launcher_secret(environ={SECRET_FILE: ""}) is None
    environ = {SECRET_FILE: str(file)}
    assert launcher_secret(environ=environ) == SECRET
    assert launcher_secret(b"x" * 16, environ) == b"x" * 16
    for ranks in ({}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}):
        launch = Launch.from_environment(ranks | environ)
        assert launch.secret == SECRET
        assert "members" not in repr(launch)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
@pytest.mark.quick
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(SecretError, match=rf"mode {mode:04o}, wanted 0600.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(file)})


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
@pytest.mark.quick
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 65534, -1)
    with pytest.raises(SecretError, match=r"belongs to user 65534.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(file)})


@pytest.mark.quick
def test_a_short_secret_is_refused(file: Path) -> None:
    file.write_bytes(b"fifteen bytes..\r\n")
    with pytest.raises(SecretError, match=r"16 or more bytes; got 15.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(file)})
    with pytest.raises(SecretError, match="got 5"):
        Launch(secret=b"short")
    with pytest.raises(SecretError, match="got 5"):
        coordinator.init(rank=0, secret=b"short")


@pytest.mark.quick
def test_anything_but_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match=r"cannot be read: No such file.*make one with"):
        launcher_secret(environ={SECRET_FILE: str(tmp_path / "none")})
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(SecretError, match="not a regular file"):
            launcher_secret(environ={SECRET_FILE: str(path)})


def test_groups_take_the_secret_given_or_of_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator.init(rank=0, secret=SECRET) as groups:
        assert groups.world._context.settings.secret == SECRET
    monkeypatch.setenv(SECRET_FILE, str(file))
    for rank in (0, None):
        with coordinator.init(rank=rank) as groups:
            assert groups.world._context.settings.secret == SECRET


# --- a sealed store -----------------------------------------------------------------------


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


@pytest.mark.quick
def test_a_sealed_store_holds_values(sealed: SealedStore) -> None:
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


def of_another_key(_: str) -> bytes:
    store = HashStore()
    SealedStore(store, SECRET).set("another", "5")
    return store.get("another")


def changed(key: str) -> bytes:
    store = HashStore()
    SealedStore(store, SECRET).set(key, "5")
    return store.get(key)[:-1] + b"6"


@pytest.mark.parametrize(
    "value",
    [lambda _: b"5", lambda _: b"", of_another_key, changed, lambda _: pickle.dumps(SECRET)],
    ids=["plain", "empty", "of another key", "changed", "pickle"],
)
@pytest.mark.quick
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


def test_an_absent_key_is_named_and_a_closed_store_refuses(sealed: SealedStore) -> None:
    sealed.set("there", b"")
    with pytest.raises(DistStoreError, match=r"after 0.01 s, keys: none"):
        sealed.wait(["there", "none"], timedelta(seconds=0.01))
    sealed.close()
    sealed.close()
    with pytest.raises(GroupClosedError):
        sealed.set("key", b"")


def test_a_store_in_a_memfd_keeps_one_descriptor_open_until_it_is_closed() -> None:
    def open_files() -> set[str]:
        return {each.name for each in Path("/proc/self/fd").iterdir()}

    fd = os.memfd_create("store")
    before = open_files()
    store = open_sealed_store(f"/proc/{os.getpid()}/fd/{fd}", SECRET, NEVER)
    prefixed = PrefixStore("p", store)
    prefixed.set("key", "5")
    assert len(open_files() - before) == 1
    store.close()
    assert open_files() == before
    with pytest.raises(GroupClosedError):
        prefixed.get("key")
    os.close(fd)


def test_torch_connects_over_a_sealed_store() -> None:
    """Also where Python refers to nothing but a prefix of the store."""
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
    """The keys whose values the secret, with the members' salt, does not open."""
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


def meet_with(rank: int, n: int, store: Store) -> str:
    with pytest.raises(SecretError) as caught:
        coordinator.init(n, rank=rank, store=store, secret=OTHER if rank == 2 else SECRET)
    return str(caught.value)


def test_ranks_with_another_secret_are_named_at_once() -> None:
    first, second, third = run_ranks(3, meet_with, SharedStore())
    assert "ranks [2] do not have the secret of rank 0" in first
    assert "ranks [2] do not have the secret of rank 1" in second
    assert "ranks [0, 1] do not have the secret of rank 2" in third


class Bomb:
    """An object that makes a file where it is unpickled."""

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


PARTS = (
    *("rendezvous/0", "nonces/0", "proofs/0", "host/0", "boards/0", "board/0", "members/0"),
    *("gloo/", "count"),
)


def meet_in_tampered(rank: int, n: int, store: Store, path: str) -> list[tuple[str, int]]:
    """Of each tampered part: the error, and how many values were replaced."""
    told = []
    for part in PARTS:
        meeting: Store = PrefixStore(part, store)
        tampered = Tampered(meeting, part, b"2 " + pickle.dumps(Bomb(path)))
        try:
            with coordinator.init(
                2,
                rank=rank,
                store=tampered if rank == 1 else meeting,
                secret=SECRET,
                timeout=3.0,
                backend="gloo",
                torch_only=True,
            ) as groups:
                groups.world.broadcast_object("x" if rank == 0 else None)
            told.append(("met", tampered.replaced))
        except (CoordinatorError, ValueError) as error:
            told.append((type(error).__name__, tampered.replaced))
        all_here(meeting, n)
    return told


def test_a_value_of_another_process_is_never_unpickled(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    ours, theirs = run_ranks(2, meet_in_tampered, SharedStore(), str(bomb))
    for part, (told, _), (error, replaced) in zip(PARTS, ours, theirs, strict=True):
        assert error == ("PeerProtocolError" if part == "rendezvous/0" else "SecretError"), part
        assert replaced > 0, part
        assert told != "met", part
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


def test_groups_over_torchs_groups_meet_with_the_secret(tmp_path: Path) -> None:
    assert run_ranks(2, wrap_default_group, f"{tmp_path}/store") == [2.0, 2.0]


@pytest.mark.quick
def test_a_value_of_an_earlier_job_is_refused() -> None:

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


# --- over hosts ---------------------------------------------------------------------------


def engine(
    rank: int, n: int, folder: str, hosts: tuple[Host, Host], secret: str
) -> tuple[bool, object, float]:
    """As an engine written for vLLM, one rank on each host."""
    if secret:
        os.environ[SECRET_FILE] = secret
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    move_to(folder, hosts, rank)
    rendezvous._attaches = lambda _: False  # as it is where hosts do not share a kernel
    ps = parallel_state
    ps.init_distributed_environment(n, rank, f"tcp://{hosts[0].address}:29401", 0, "gloo")
    ps.initialize_model_parallel(tensor_model_parallel_size=n)
    tp = ps.get_tp_group()
    total = tp.all_reduce(torch.ones(2))
    told = tp.broadcast_object({"step": 1, "ids": [1, 2]} if rank == 0 else None)
    has_queue = tp.mq_broadcaster is not None
    tp.barrier()
    ps.cleanup_dist_env_and_memory()
    return has_queue, told, float(total[0])


@pytest.mark.namespaces
@pytest.mark.parametrize("with_secret", [True, False])
def test_the_groups_of_a_model_start_across_hosts(
    with_secret: bool, tmp_path: Path, file: Path
) -> None:
    with two_hosts("IPv4") as hosts:
        results = run_ranks(2, engine, str(tmp_path), hosts, str(file) if with_secret else "")
    assert results == [(with_secret, {"step": 1, "ids": [1, 2]}, 2.0)] * 2
