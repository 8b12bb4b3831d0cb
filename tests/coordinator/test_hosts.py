"""Groups over hosts: lost, late, stopped, different and closed ranks are named as on one host."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

import coordinator
from coordinator import GroupCoordinator, remote_boards
from coordinator.compat.vllm import parallel_state
from shm_broadcast import (
    CoordinatorError,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
)
from tests.coordinator.hosts import NAMES, beside, groups_over, move_to, note, since
from tests.netns import Host, hosts_on_a_switch, two_hosts
from tests.pages.blocks import block_of, without_numbers
from tests.patience import PATIENCE_SECONDS, all_here, failure_of, quickest, until
from tests.ranks import run_ranks

Hosts = tuple[Host, Host]

pytestmark = pytest.mark.namespaces

NAMED_WITHIN = 2.0
"""Seconds in which a lost member is named on all hosts, as promised."""

SECRET = b"known to all the ranks"

X = torch.ones(1000)

VERBS: dict[str, Callable[[GroupCoordinator], object]] = {
    "all_reduce": lambda tp: tp.all_reduce(X),
    "recv_object": lambda tp: tp.recv_object(tp.world_size - 1),
    "work": lambda tp: tp.all_reduce(X, async_op=True).wait(),
}


@contextmanager
def warm(
    rank: int, n: int, folder: str, hosts: Hosts, **options: Any
) -> Iterator[tuple[GroupCoordinator, FileStore]]:
    """A group after fifty operations, and a store that no cable leads to."""
    with groups_over(rank, n, folder, hosts, **options) as groups:
        for _ in range(50):
            groups.tp.all_reduce(X)
        yield groups.tp, beside(folder, n)


def status_of(tp: GroupCoordinator, rank: int) -> MemberStatus:
    return tp.status()[rank]


def assert_documented(said: str) -> None:
    """docs/hosts.md shows ``said``, apart from silence: the machine stalls."""
    documented = block_of("docs/hosts.md", "tp all_reduce: lost rank").replace("\n  ", " ")
    said = without_numbers(said)
    heard = re.sub(r", silent for 0 s| \(host-b \(ranks 0, 0\).*", "", said)
    assert {said, heard} & {*without_numbers(documented).splitlines()}


# --- where they meet ---------------------------------------------------------------------


def sum_in_a_part_of_a_store(rank: int, n: int, folder: str, hosts: Hosts) -> float:
    move_to(folder, hosts, rank)
    find = coordinator.host_store if rank == 0 else coordinator.connect_store
    part = PrefixStore("2 ranks", find(hosts[0].address, 29400))
    with coordinator.init(tp=n, rank=rank, local_rank=0, store=part) as groups:
        total = groups.tp.all_reduce(X).mean().item()
        all_here(beside(folder, n), n)
    return total


def test_a_part_of_a_store_is_enough_to_meet_in(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        assert run_ranks(2, sum_in_a_part_of_a_store, mkdtemp(dir=tmp_path), hosts) == [2.0, 2.0]


# --- a member is killed ------------------------------------------------------------------


def one_is_killed(
    rank: int,
    n: int,
    folder: str,
    hosts: Hosts,
    victim: int,
    verb: str,
    secret: bytes | None = None,
) -> tuple[CoordinatorError, CoordinatorError, float]:
    with warm(rank, n, folder, hosts, secret=secret) as (tp, store):
        until(lambda: {each.sequence for each in tp.status()} == {50})
        all_here(store, n, "seen")
        if rank == victim:
            store.set("pid", str(os.getpid()))
            time.sleep(0.3)
            note(store, "died")
            os.kill(os.getpid(), signal.SIGKILL)
        error, raised = failure_of(lambda: VERBS[verb](tp))
        all_here(store, n - 1)
        later = failure_of(lambda: tp.all_reduce(X))[0]
    return error, later, since(store, "died", raised)


def seconds_until_named(folder: str, n: int, victim: int, verb: str, secret: bytes | None) -> float:
    with two_hosts("IPv4") as hosts:
        results = run_ranks(n, one_is_killed, folder, hosts, victim, verb, secret, may_die=[victim])
    pid = int(beside(folder, n).get("pid"))
    for rank, result in enumerate(results):
        if rank == victim:
            continue
        error, later, _ = result
        there = "" if (2 * rank >= n) == (2 * victim >= n) else f" on {NAMES[2 * victim >= n]}"
        assert isinstance(error, PeerLostError), error
        assert (error.rank, error.pid) == (victim, pid)
        assert f"rank {victim} (pid {pid}{there}" in str(error)
        assert "last seen in tp all_reduce #50" in str(error)
        assert isinstance(later, GroupAbortedError)
        assert later.failure.culprit == victim
        if verb == "all_reduce" and n == 4 and there.endswith("host-b"):
            assert_documented(str(error))
    return max(seconds for _, _, seconds in filter(None, results))


@pytest.mark.parametrize(
    ("verb", "n", "victim", "secret"),
    [
        ("all_reduce", 4, 3, None),
        ("recv_object", 4, 3, None),
        ("work", 4, 3, None),
        ("all_reduce", 2, 1, SECRET),  # alone on its host
        ("all_reduce", 4, 0, None),  # keeps the store
        ("all_reduce", 4, 0, SECRET),
    ],
)
def test_a_killed_member_is_named_on_all_hosts(
    verb: str, n: int, victim: int, secret: bytes | None, tmp_path: Path
) -> None:
    def attempt() -> float:
        return seconds_until_named(mkdtemp(dir=tmp_path), n, victim, verb, secret)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def keeper_of_an_engine_is_killed(
    rank: int, n: int, folder: str, hosts: Hosts
) -> tuple[CoordinatorError, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    store = beside(folder, n)
    move_to(folder, hosts, rank)
    parallel_state.init_distributed_environment(n, rank, f"tcp://{hosts[0].address}:29401", 0)
    world = parallel_state.get_world_group()
    world.all_reduce(X)
    all_here(store, n)
    if rank == 0:
        note(store, "died")
        os.kill(os.getpid(), signal.SIGKILL)
    error, raised = failure_of(lambda: world.all_reduce(X))
    return error, since(store, "died", raised)


def test_the_rank_that_keeps_the_store_of_an_engine_is_named(tmp_path: Path) -> None:
    def attempt() -> float:
        with two_hosts("IPv4") as hosts:
            _, (error, seconds) = run_ranks(
                2, keeper_of_an_engine_is_killed, mkdtemp(dir=tmp_path), hosts, may_die=[0]
            )
        assert isinstance(error, PeerLostError), error
        assert error.rank == 0
        assert "on host-a" in str(error)
        return float(seconds)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


# --- a member aborts ---------------------------------------------------------------------


def last_aborts(
    rank: int, n: int, folder: str, hosts: Hosts, verb: str
) -> tuple[CoordinatorError, float]:
    with warm(rank, n, folder, hosts) as (tp, store):
        if rank == n - 1:
            time.sleep(0.3)
            note(store, "aborted")
            tp.abort(KeyError("the reason"))
        enter = VERBS["all_reduce" if rank == n - 1 else verb]
        error, raised = failure_of(lambda: enter(tp))
        all_here(store, n)
    return error, since(store, "aborted", raised)


@pytest.mark.parametrize("verb", ["all_reduce", "recv_object"])
def test_an_abort_reaches_all_hosts_with_its_cause(verb: str, tmp_path: Path) -> None:
    def attempt() -> float:
        with two_hosts("IPv4") as hosts:
            results = run_ranks(4, last_aborts, mkdtemp(dir=tmp_path), hosts, verb)
        for rank, (error, _) in enumerate(results):
            assert isinstance(error, GroupAbortedError), error
            assert (error.failure.rank, error.failure.culprit) == (3, 3)
            assert "KeyError: 'the reason'" in str(error)
            assert ("rank 3 on host-b reported" in str(error)) == (rank < 2)
        return float(max(seconds for _, seconds in results))

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


# --- a member is slow, stopped, or leaves -------------------------------------------------


def with_liveness(rank: int, n: int, folder: str, hosts: Hosts) -> list[MemberStatus]:
    with warm(rank, n, folder, hosts) as (tp, store):
        all_here(store, n)
        time.sleep(1.0)
        found = tp.status()
        all_here(store, n, "there")
    return found


def test_healthy_members_are_seen_from_everywhere(tmp_path: Path) -> None:
    with two_hosts("IPv6") as hosts:
        seen = run_ranks(4, with_liveness, str(tmp_path), hosts)
    pids = [status.pid for status in seen[0]]
    for rank, found in enumerate(seen):
        assert [status.rank for status in found] == [0, 1, 2, 3]
        assert [status.pid for status in found] == pids
        assert {status.state for status in found} == {"idle"}
        assert {(status.operation, status.sequence) for status in found} == {("tp all_reduce", 50)}
        away = {status.host for status in found if (status.rank < 2) != (rank < 2)}
        assert away == {NAMES[rank < 2]}
        assert all(0.5 < (status.age or 0) < 20 for status in found)


def one_is_stopped(rank: int, n: int, folder: str, hosts: Hosts) -> Any:
    ready, goes_on = Path(folder, "ready"), Path(folder, "goes on")
    with warm(rank, n, folder, hosts) as (tp, store):
        if rank == 2:
            store.set("pid", str(os.getpid()))
            all_here(store, n)
            ready.touch()
            until(goes_on.exists)  # stopped in the store it would hold up all who use that
            all_here(store, n, "over")
            tp.all_reduce(X, timeout=30)
            return None
        all_here(store, n)
        if rank == 3:
            until(ready.exists)
            os.kill(int(store.get("pid")), signal.SIGSTOP)
        time.sleep(2.0)
        tp.board.record_begin("an operation")
        stamped = [status_of(tp, other) for other in (2, 3)]
        until(lambda: status_of(tp, 3).operation == "an operation")
        all_here(store, n - 1, "seen")
        if rank == 3:
            os.kill(int(store.get("pid")), signal.SIGCONT)
            goes_on.touch()
        all_here(store, n, "over")
        tp.board.idle()
        tp.all_reduce(X, timeout=30)
    return stamped


def test_a_stopped_member_does_not_silence_its_host(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        first, second, _, _ = run_ranks(4, one_is_stopped, str(tmp_path), hosts)
    for stopped, other in (first, second):
        assert stopped.silence == other.silence == 0
        assert (stopped.state, other.state) == ("idle", other.state)
        assert stopped.age > 1.5


def one_is_late(rank: int, n: int, folder: str, hosts: Hosts) -> GroupTimeoutError | None:
    with warm(rank, n, folder, hosts) as (tp, store):
        if rank == 3:
            all_here(store, n, "over")
            return None
        error, _ = failure_of(lambda: tp.all_reduce(X, timeout=2 + rank))
        all_here(store, n, "over")
    return error if isinstance(error, GroupTimeoutError) else None


def test_a_deadline_lists_the_late_ranks_alone(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        error, *_ = run_ranks(4, one_is_late, str(tmp_path), hosts)
    assert [late.rank for late in error.waiting_for] == [3]
    assert "waiting for rank 3 (pid" in str(error)
    # Its last step may end a little after rank 0 has begun the next.
    assert re.search(r"on host-b\), last seen in tp all_reduce #50, [12]\.\d s ago", str(error))
    assert_documented(str(error))


def two_leave(rank: int, n: int, folder: str, hosts: Hosts) -> list[str]:
    """Rank 0, which hosts the store, and rank 3."""
    with warm(rank, n, folder, hosts) as (tp, store):
        all_here(store, n)
        if rank in (0, 3):
            return []
        for other in (0, 3):
            until(lambda: status_of(tp, other).state in ("closed", "lost"))  # noqa: B023
        found = [str(status_of(tp, other)) for other in (0, 3)]
        all_here(store, 2, "seen")
    return found


def test_ranks_that_have_closed_are_not_lost(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        _, first, second, _ = run_ranks(4, two_leave, str(tmp_path), hosts)
    assert all("has closed its end" in said for said in first + second)
    assert "on host-b) has closed its end, last seen in tp all_reduce #50" in first[1]


# --- a host is out of reach --------------------------------------------------------------


def cut_off(rank: int, n: int, folder: str, hosts: Hosts, how: str, secret: bytes | None) -> Any:
    remote_boards.SILENCE_SECONDS = 4.0  # type: ignore[misc]
    with warm(rank, n, folder, hosts, secret=secret) as (tp, store):
        all_here(store, n)
        if rank == 0:
            note(store, "cut")
            if how == "down":
                hosts[0].ip("link", "set", "cable", "down")
            else:
                for host in hosts:
                    host.unplug()
        all_here(store, n, "cut off")
        other = 2 if rank < 2 else 0
        until(lambda: status_of(tp, other).silence > 1.5)
        seen = str(status_of(tp, other))
        error, raised = failure_of(lambda: tp.all_reduce(X, timeout=60))
        all_here(store, n, "over")
    return seen, error, since(store, "cut", raised)


@pytest.mark.parametrize(("how", "secret"), [("down", None), ("silent", SECRET)])
def test_a_cut_cable_is_named_on_both_sides(how: str, secret: bytes | None, tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        results = run_ranks(4, cut_off, str(tmp_path), hosts, how, secret)
    for rank, (seen, error, seconds) in enumerate(results):
        other, there = (2, "host-b") if rank < 2 else (0, "host-a")
        assert f"rank {other} (pid" in seen
        assert f"on {there}, silent for" in seen
        assert isinstance(error, PeerLostError), error
        assert error.rank == other
        assert f"on {there}, silent for" in str(error)
        assert 3.5 < seconds < 20


def host_is_stopped(rank: int, n: int, folder: str, hosts: Hosts) -> Any:
    stopped = Path(folder) / "stopped"  # a store's lock would be kept by who is stopped with it
    with warm(rank, n, folder, hosts) as (tp, store):
        store.set(f"pid {rank}", str(os.getpid()))
        all_here(store, n)
        found = None
        if rank == 0:
            pids = [int(store.get(f"pid {each}")) for each in (2, 3)]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            stopped.touch()
            work = tp.all_reduce(X, async_op=True)
            until(lambda: status_of(tp, 3).silence > 2.0)
            with pytest.raises(GroupTimeoutError) as caught:
                work.wait(0.1)
            found = str(caught.value)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            work.wait()
        else:
            until(stopped.exists)  # or they may have sent their part before
            tp.all_reduce(X)
        tp.all_reduce(X)
    return found


def test_a_stopped_host_is_named_and_not_lost_at_once(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        said, *_ = run_ranks(4, host_is_stopped, str(tmp_path), hosts)
    assert "host-b (ranks 2, 3) silent for 2." in said
    assert_documented(said)


# --- three hosts of one, two and three ranks, none of which are neighbours -------------------

PLACES = (2, 1, 0, 2, 1, 2)
"""On which host each rank is."""
PORT = 29400
VICTIM = 4


def over_three(rank: int, n: int, folder: str, hosts: Sequence[Host]) -> tuple[dict[str, Any], str]:
    move_to(folder, hosts, PLACES[rank])
    with coordinator.init(
        tp=n,
        rank=rank,
        local_rank=PLACES[:rank].count(PLACES[rank]),
        master_addr=hosts[PLACES[0]].address,
        master_port=PORT,
        timeout=PATIENCE_SECONDS,
        secret=SECRET,
    ) as groups:
        return moves(groups.tp), loses_one(groups.tp)


def moves(tp: GroupCoordinator) -> dict[str, Any]:
    rank, n = tp.rank, tp.world_size
    mine = torch.full((2,), float(rank))
    after, before = (rank + 1) % n, (rank - 1) % n
    found: dict[str, Any] = {
        # 0 + 1 + 2 + 3 + 4 + 5, in a few bytes, and in many
        "sums": [tp.all_reduce(torch.full((size,), float(rank))).unique() for size in (3, 1 << 20)],
        "gathered": tp.all_gather(mine),
        "scattered": tp.reduce_scatter(torch.arange(2.0 * n)),
        "exchanged": tp.all_to_all(torch.arange(float(n)) + 10 * rank),
        "objects": tp.all_gather_object({"rank": rank}),
        "object": tp.broadcast_object("of 1" if rank == 1 else None, src=1),
        "dict": tp.broadcast_tensor_dict({"x": mine} if rank == 2 else None, src=2)["x"],
    }
    work = tp.isend(mine, after)
    found["received"] = tp.recv((2,), torch.float32, before)
    work.wait()
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list) else value


def loses_one(tp: GroupCoordinator) -> str:
    tp.barrier()
    if tp.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as caught:
        tp.all_reduce(torch.ones(1000))
    assert caught.value.rank == VICTIM
    return str(caught.value)


def test_groups_over_three_hosts_move_data_and_name_a_killed_rank(tmp_path: Path) -> None:
    with hosts_on_a_switch(3) as hosts:
        results = run_ranks(6, over_three, str(tmp_path), hosts, may_die=[VICTIM])
    for rank, result in enumerate(results):
        if rank == VICTIM:
            continue
        found, lost = result
        assert found == {
            "sums": [[15.0], [15.0]],
            "gathered": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 5.0, 5.0],
            "scattered": [12.0 * rank, 12.0 * rank + 6],
            "exchanged": [10.0 * other + rank for other in range(6)],
            "objects": [{"rank": other} for other in range(6)],
            "object": "of 1",
            "dict": [2.0, 2.0],
            "received": [float((rank - 1) % 6)] * 2,
        }
        assert f"lost rank {VICTIM} (pid " in lost
        there = f" on {NAMES[PLACES[VICTIM]]}"
        assert (there in lost) == (PLACES[rank] != PLACES[VICTIM])
