"""A rank that closes its group: only the ranks that still need it get an error, at once."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch.distributed import FileStore

import coordinator
from coordinator import GroupCoordinator
from shm_broadcast import CoordinatorError, GroupAbortedError, GroupClosedError
from tests.coordinator.hosts import beside, groups_over, note, since
from tests.netns import two_hosts
from tests.patience import ATTEMPTS, all_here, failure_of
from tests.ranks import run_ranks

PLACES = {
    "shared memory": {},
    "torch": {"torch_only": True},
    "checked": {"torch_only": True, "checked": True},
    "two hosts": {},
}
EVERYWHERE = pytest.mark.parametrize(
    "place",
    [
        pytest.param(each, marks=pytest.mark.namespaces if "hosts" in each else ())
        for each in PLACES
    ],
)
WITHIN = {"shared memory": 0.3, "torch": 0.6, "checked": 0.6, "two hosts": 1.2}
"""Seconds in which a collective ends."""

MESSAGE_WITHIN = 3.0
"""The same of a message over torch's groups, which may be on its way."""

GONE = 1
X = torch.ones(4)


def large() -> torch.Tensor:
    return torch.ones(8 << 20)


COLLECTIVES: dict[str, Callable[[GroupCoordinator], object]] = {
    "barrier": lambda tp: tp.barrier(),
    "all_reduce": lambda tp: tp.all_reduce(X),
    "later": lambda tp: tp.all_reduce(X, async_op=True).wait(),
    "large": lambda tp: tp.all_reduce(large()),
    "broadcast": lambda tp: tp.broadcast(X.clone(), src=GONE),
    "object": lambda tp: tp.broadcast_object(None, src=GONE),
}
MESSAGES: dict[str, Callable[[GroupCoordinator], object]] = {
    "recv": lambda tp: tp.recv(X.shape, X.dtype, src=GONE),
    "irecv": lambda tp: tp.irecv(X.shape, X.dtype, src=GONE).wait(),
    "recv_object": lambda tp: tp.recv_object(GONE),
    "recv_tensor_dict": lambda tp: tp.recv_tensor_dict(GONE),
    "send": lambda tp: [tp.send(large(), dst=GONE) for _ in range(5)],
}


NEEDED = ("barrier", "recv_object")
BOTH = [(call, before) for call in NEEDED for before in (True, False)]
OTHERS = [(call, False) for call in COLLECTIVES | MESSAGES if call not in NEEDED]
Cases = list[tuple[str, bool]]
"""What the others call, and whether the rank closes before that or meanwhile."""


def one_closes(
    rank: int, n: int, folder: str, hosts: Any, options: dict[str, Any], cases: Cases
) -> list[tuple[CoordinatorError, float] | None]:
    found = []
    for call, before in cases:
        inside = f"{folder}/{call} {before}"
        Path(inside).mkdir(exist_ok=True)
        with groups_over(rank, n, inside, hosts, **options) as groups:
            found.append(closes_or_needs(groups.tp, beside(inside, n), call, before))
        all_here(beside(inside, n), n)
    return found


def closes_or_needs(
    tp: GroupCoordinator, store: FileStore, call: str, before: bool
) -> tuple[CoordinatorError, float] | None:
    tp.barrier()
    if tp.rank == GONE:
        time.sleep(0.0 if before else 0.3)
        tp.close()
        tp.close()
        note(store, "closed")
        store.wait([f"told {each}" for each in tp.ranks if each != GONE])
        return None
    if before:
        store.wait(["closed"])
    error, raised = failure_of(lambda: (COLLECTIVES | MESSAGES)[call](tp))
    store.set(f"told {tp.rank}", "")
    return error, since(store, "closed", raised)


@EVERYWHERE
def test_a_rank_that_needs_the_closed_one_gets_an_error(place: str, tmp_path: Path) -> None:
    late = BOTH if place in ("checked", "two hosts") else BOTH + OTHERS
    for _ in range(ATTEMPTS):
        timed = ended(late, place, tmp_path)
        late = [case for case, seconds in timed if seconds >= limit(case[0], place)]
        if not late:
            return
    raise AssertionError(f"got their errors too late: {late}")


def ended(cases: Cases, place: str, folder: Path) -> Iterator[tuple[tuple[str, bool], float]]:
    """Each case, and the seconds until all have got their errors."""
    inside = mkdtemp(dir=folder)
    if place == "two hosts":
        with two_hosts("IPv4") as hosts:
            ranks = run_ranks(4, one_closes, inside, hosts, PLACES[place], cases)
    else:
        ranks = run_ranks(3, one_closes, inside, None, PLACES[place], cases)
    for case, results in zip(cases, zip(*ranks, strict=True), strict=True):
        found = [each for each in results if each is not None]
        for error, _ in found:
            assert isinstance(error, (GroupClosedError, GroupAbortedError)), (case, error)
            assert f"rank {GONE} has closed the group" in str(error), case
            assert " tp " in f" {error}", case
            if isinstance(error, GroupClosedError):
                assert error.rank == GONE, case
        assert any(isinstance(error, GroupClosedError) for error, _ in found), case
        yield case, max(seconds for _, seconds in found)


def limit(call: str, place: str) -> float:
    seconds = WITHIN[place]
    if place != "shared memory" and call in MESSAGES:
        seconds = MESSAGE_WITHIN
    return seconds + 5.0 if call == "send" else seconds  # for what it sends before


# --- ranks that need nothing more get no error ----------------------------------------------


def programs(rank: int, n: int, folder: str, options: dict[str, Any]) -> None:
    """Programs at random, at whose ends all close as soon as they may, some long before others."""
    plan, own = random.Random(n), random.Random(n * n + rank)
    for turn in range(8):
        store = FileStore(f"{folder}/{turn}", n)
        with coordinator.init(tp=n, rank=rank, store=store, **options) as groups:
            tp, x = groups.tp, torch.full((plan.choice([1, 1000, 300_000]),), float(rank))
            for _ in range(plan.randrange(1, 6)):
                step, root = plan.randrange(8), plan.randrange(n)
                dst = (root + 1 + plan.randrange(n - 1)) % n
                if own.random() < 0.2:
                    time.sleep(own.choice([0.0, 0.001, 0.05]))
                if step == 0:
                    assert tp.all_reduce(x)[0] == sum(range(n))
                elif step == 1:
                    assert tp.broadcast(x.clone(), src=root)[0] == root
                elif step == 2:
                    tp.gather(x, dst=root)
                elif step == 3:
                    tp.barrier()
                elif step == 4:
                    assert tp.broadcast_object(rank if rank == root else None, src=root) == root
                elif step == 5:
                    assert tp.all_reduce(x, async_op=True).wait()[0] == sum(range(n))
                elif rank == root and step == 6:
                    tp.send_object({"from": rank}, dst)
                elif rank == dst and step == 6:
                    assert tp.recv_object(root) == {"from": root}
                elif rank == root:
                    tp.send(x, dst=dst)
                elif rank == dst:
                    assert tp.recv(x.shape, x.dtype, src=root)[0] == root
            tp.close()
            time.sleep(own.choice([0.0, 0.0, 0.05]))
            groups.world.barrier()


@pytest.mark.parametrize("place", ["shared memory", "torch", "checked"])
@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_may_close_after_its_last_call(n: int, place: str, tmp_path: Path) -> None:
    run_ranks(n, programs, str(tmp_path), PLACES[place])


def root_goes(rank: int, n: int, folder: str) -> float:
    """The root of a broadcast has gone before others come."""
    store = beside(folder, n)
    with coordinator.init(tp=n, rank=rank, store=FileStore(f"{folder}/meet", n)) as all_:
        tp, x = all_.tp, torch.full((1000,), float(rank))
        tp.barrier()
        if rank != 0 and rank != n - 1:
            store.wait(["closed"])
            time.sleep(0.3)
        result = tp.broadcast(x, src=0)
        if rank == 0:
            tp.close()
            store.set("closed", "")
        all_.world.barrier()
        return result[0].item()


def test_a_rank_may_close_after_its_part_of_a_collective(tmp_path: Path) -> None:
    assert run_ranks(4, root_goes, str(tmp_path)) == [0.0] * 4


def work_is_dropped(rank: int, n: int, folder: str, options: dict[str, Any]) -> list[float]:
    """All but one close while collectives that they have begun wait for that one."""
    store = beside(folder, n)
    with coordinator.init(tp=n, rank=rank, store=FileStore(f"{folder}/meet", n), **options) as all_:
        tp, sizes, found = all_.tp, (1, 1000, 1 << 20), []
        tp.barrier()
        if rank == 0:
            store.wait(["begun"])
            time.sleep(0.3)
            found = [tp.all_reduce(torch.ones(size))[-1].item() for size in sizes]
        else:
            for size in sizes:
                tp.all_reduce(torch.ones(size), async_op=True)
            store.set("begun", "")
        tp.close()
        all_.world.barrier()
        return found


@pytest.mark.parametrize("place", ["shared memory", "torch"])
def test_a_dropped_work_takes_place_though_its_group_is_closed(place: str, tmp_path: Path) -> None:
    found = run_ranks(3, work_is_dropped, str(tmp_path), PLACES[place])
    assert found == [[3.0] * 3, [], []]


def closes_in_a_handler(rank: int, n: int, folder: str, options: dict[str, Any]) -> str:
    with coordinator.init(tp=n, rank=rank, store=FileStore(f"{folder}/meet", n), **options) as all_:
        tp = all_.tp
        tp.barrier()
        if rank == GONE:
            signal.signal(signal.SIGALRM, lambda *_: tp.close())
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            error, _ = failure_of(lambda: tp.recv(X.shape, X.dtype, src=0))
        else:
            error, _ = failure_of(tp.barrier)
        return f"{type(error).__name__}: {error}"


def test_a_signal_handler_may_close(tmp_path: Path) -> None:
    here, there = run_ranks(2, closes_in_a_handler, str(tmp_path), PLACES["shared memory"])
    assert here.startswith(("GroupClosedError", "GroupAbortedError"))
    assert f"rank {GONE}" in here
    assert "GroupClosedError" in there
