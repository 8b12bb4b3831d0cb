"""Ranks that begin different operations in a call: it fails, and no other call gets its data."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.distributed import TCPStore

import coordinator
from device_comm import divergence
from server.config import PoolConfig
from server.errors import CallDivergedError, WorkerError, WorkerLostError
from server.pool import WorkerPool
from shm_broadcast import DivergenceError, GroupAbortedError
from shm_broadcast.state.fingerprint import Fingerprints
from tests.netns import two_hosts
from tests.patience import PATIENCE_SECONDS
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts

if TYPE_CHECKING:
    from pathlib import Path

    from coordinator import GroupCoordinator
    from server.worker import WorkerContext
    from tests.server.workers import Gate

CALLS = range(2, 10)
"""The pool's numbers of the calls under test; its first call holds them back until all are sent."""

ODD = 4
"""The call out of which something is left."""


class Forgetful:
    """Every call moves its own number about, and answers with what came.

    With the ``port`` of a store it uses torch's process groups instead of the pool's groups.
    """

    def __init__(self, context: WorkerContext, port: int, sizes: tuple[int, int]) -> None:
        self.rank = context.groups.world.rank
        self.groups = context.groups
        if port:
            self.groups = coordinator.init(
                *sizes,
                rank=self.rank,
                world_size=sizes[0] * sizes[1],
                store=coordinator.connect_store("127.0.0.1", port),
                timeout=60,
                torch_only=True,
                backend="gloo",
            )
        self.queue = self.groups.tp.create_mq_broadcaster() if not port and sizes[0] > 1 else None

    def hold(self, gate: Gate) -> None:
        gate.pass_through(self.rank)

    def step(self, verb: str, number: int, forgetful: int) -> list[float]:
        if number == ODD and self.rank == forgetful:
            return [float(number)]
        return [float(each) for each in getattr(self, verb)(float(number))]

    def all_reduce(self, number: float) -> Any:
        return (self.groups.tp.all_reduce(torch.full((4,), number)) / 2).tolist()

    def all_reduce_of_many(self, number: float) -> Any:
        work = self.groups.tp.all_reduce(torch.full((300_000,), number), async_op=True)
        return (work.wait() / 2)[:3].tolist()

    def broadcast(self, number: float) -> Any:
        return self.groups.tp.broadcast(torch.full((4,), number), src=0).tolist()

    def send(self, number: float) -> Any:
        tp = self.groups.tp
        if tp.is_first_rank:
            tp.send(torch.full((4,), number))
            return [number]
        return tp.recv((4,), torch.float32).tolist()

    def isend_of_much(self, number: float) -> Any:
        tp = self.groups.tp
        if tp.is_first_rank:
            tp.isend(torch.full((300_000,), number))
            return [number]
        return tp.irecv((300_000,), torch.float32).wait()[:3].tolist()

    def broadcast_object(self, number: float) -> Any:
        return [self.groups.tp.broadcast_object(number, src=0)]

    def broadcast_object_through_a_queue(self, number: float) -> Any:
        self.groups.tp.mq_broadcaster = self.queue
        return [self.groups.tp.broadcast_object(number, src=0)]

    def stages(self, number: float) -> Any:
        tp, pp = self.groups.tp, self.groups.pp
        x = tp.all_reduce(torch.full((4,), number)) / tp.world_size
        if not pp.is_first_rank:
            found = pp.recv_tensor_dict(all_gather_group=tp)
            x = found["x"] + found["n"] - number
        if not pp.is_last_rank:
            pp.send_tensor_dict({"x": x, "n": number}, all_gather_group=tp)
        return x.tolist()


@pytest.mark.parametrize(
    ("verb", "tp", "pp", "forgetful", "over_torch"),
    [
        ("all_reduce", 2, 1, 1, False),
        ("all_reduce_of_many", 2, 1, 1, False),
        ("broadcast", 2, 1, 0, False),
        ("broadcast", 2, 1, 1, False),
        ("send", 2, 1, 0, False),
        ("send", 2, 1, 1, False),
        ("isend_of_much", 2, 1, 0, False),
        ("broadcast_object", 2, 1, 1, False),
        ("broadcast_object_through_a_queue", 2, 1, 1, False),
        ("stages", 2, 2, 3, False),
        ("all_reduce", 2, 1, 0, True),
        ("broadcast", 2, 1, 1, True),
        ("send", 2, 1, 0, True),
    ],
)
def test_calls_do_not_meet(
    gate: Gate, verb: str, tp: int, pp: int, forgetful: int, over_torch: bool
) -> None:
    """Rank ``forgetful`` leaves ``verb`` out of one of several calls that are all under way."""
    store = coordinator.host_store() if over_torch else None
    pool = WorkerPool(
        Forgetful,
        tp=tp,
        pp=pp,
        worker_kwargs={"port": store.port if store else 0, "sizes": (tp, pp)},
        config=PoolConfig(in_flight=1 + len(CALLS)),
    )
    with pool:
        pool.submit("hold", gate)
        futures = [pool.submit("step", verb, n, forgetful) for n in CALLS]
        gate.open()
        errors = [future.exception(timeout=60) for future in futures]
        for number, future, error in zip(CALLS, futures, errors, strict=True):
            if number < ODD and error is None:
                assert set(future.result()) == {float(number)}
            else:
                assert isinstance(error, (CallDivergedError, WorkerError)), number
        odd = errors[CALLS.index(ODD)]
        assert f"call {ODD}" in str(odd)
        assert isinstance(odd, CallDivergedError) or isinstance(
            odd.__cause__, (DivergenceError, GroupAbortedError)
        )
        assert f"call {ODD}" in str(pool.failure)
        with pytest.raises((CallDivergedError, WorkerError), match=f"call {ODD}"):
            pool.call("step", "all_reduce", 1, 0, timeout=30)


class Lagging:
    def __init__(self, context: WorkerContext) -> None:
        self.tp = context.groups.tp
        self.works: list[Any] = []

    def begin(self, number: int) -> None:
        x = torch.full((300_000,), float(number))
        self.works.append(self.tp.all_reduce(x, async_op=True))
        dicts = {"x": x, "long": "l" * 3000}
        if self.tp.is_first_rank:
            self.works.append(self.tp.isend_tensor_dict(dicts, 1))
        else:
            self.works += [self.tp.irecv_tensor_dict(0)]

    def end(self) -> float:
        reduced, found = (work.wait() for work in self.works)
        self.works.clear()
        return float(reduced[0] + (found["x"][0] if found else reduced[0] / 2))


def test_what_one_call_begins_another_may_end() -> None:
    with WorkerPool(Lagging, tp=2) as pool:
        for number in range(5):
            begun = pool.submit("begin", number)
            ended = pool.collective_rpc("end", timeout=60)
            begun.result(timeout=60)
            assert ended == [3.0 * number, 3.0 * number]


class Threaded:
    def __init__(self, context: WorkerContext) -> None:
        self.tp = context.groups.tp

    def rounds(self, count: int) -> None:
        def run() -> None:
            for _ in range(count):
                self.tp.all_reduce(torch.ones(4))

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def echo(self, value: int) -> int:
        return value

    def join(self) -> None:
        self.thread.join()


def test_a_thread_that_is_in_no_call_does_not_count() -> None:
    with WorkerPool(Threaded, tp=2) as pool:
        pool.call("rounds", 1000)
        for number in range(100):
            assert pool.call("echo", number) == number
        pool.call("join", timeout=60)


# A rank that calls a collective with something else than the others gets no answer.


def dtype(world: GroupCoordinator, odd: bool) -> Any:
    return world.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))


def order(world: GroupCoordinator, odd: bool) -> Any:
    dtypes = (torch.int32, torch.float32)
    return [world.all_reduce(torch.ones(4, dtype=each)) for each in dtypes[:: -1 if odd else 1]]


def size(world: GroupCoordinator, odd: bool) -> Any:
    """Gloo aborts the process of a rank that receives more bytes than it expects."""
    return world.all_reduce(torch.ones(8 if odd else 4))


def size_before_another(world: GroupCoordinator, odd: bool) -> Any:
    """The odd rank has sent its data, and goes on, when another process is aborted."""
    world.broadcast(torch.ones(8 if odd else 4), 0)
    return world.all_reduce(torch.ones(1))


def death(world: GroupCoordinator, odd: bool) -> Any:
    if odd:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.all_reduce(torch.ones(4))


SLIPS: Final[dict[str, Any]] = {
    each.__name__: each for each in (dtype, order, size, size_before_another, death)
}
NAMED: Final = {
    "dtype": ("SUM float32[4]", "SUM int32[4]"),
    "order": ("SUM int32[4]", "SUM float32[4]"),
}
"""What the error says of a rank and of the odd one, which slips in its second collective."""


def compare_no_more() -> None:
    """Only the pool compares: in its first collective a rank does so itself, and then not."""
    divergence.LOOK_SECONDS = 1e9  # type: ignore[misc]
    Fingerprints.local_entry = lambda *_: 0


class Slipping:
    """Its ranks meet over torch's process groups; those do not compare what a rank calls."""

    def __init__(self, context: WorkerContext, port: int = 0) -> None:
        self.rank = context.groups.world.rank
        self.world = context.groups.world
        if port:
            self.world = coordinator.init(
                tp=self.world.world_size,
                rank=self.rank,
                store=coordinator.connect_store("127.0.0.1", port),
                board=self.world.board,
                torch_only=True,
                backend="gloo",
                timeout=PATIENCE_SECONDS,
            ).world
            compare_no_more()
            self.world.barrier()

    def step(self, what: str, odd: int) -> float:
        total = self.world.all_reduce(torch.ones(1))
        SLIPS[what](self.world, self.rank == odd)
        return float(total)


@pytest.fixture
def store() -> TCPStore:
    return coordinator.host_store()


@pytest.mark.parametrize("what", NAMED)
def test_a_slip_over_torch_is_never_answered(what: str, store: TCPStore) -> None:
    with WorkerPool(Slipping, tp=3, worker_kwargs={"port": store.port}) as pool:
        assert pool.call("step", what, -1, timeout=PATIENCE_SECONDS) == 3.0
        with pytest.raises(CallDivergedError) as raised:
            pool.call("step", what, 0, timeout=PATIENCE_SECONDS)
        began = tuple(f"began all_reduce {did} (collective 2)" for did in NAMED[what])
        assert (raised.value.rank, raised.value.ranks, raised.value.did) == (0, (1, 0), began)


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        (
            *("size_before_another", CallDivergedError),
            r"rank \d began broadcast .* rank \d began broadcast",
        ),
        ("death", WorkerLostError, r"rank 0 .*killed by SIGKILL"),
    ],
)
def test_a_death_is_a_slip_only_after_one(
    what: str, error: type[Exception], text: str, store: TCPStore
) -> None:
    given = {"port": store.port}
    with WorkerPool(Slipping, tp=2, worker_kwargs=given) as pool, pytest.raises(error, match=text):
        pool.call("step", what, 0, timeout=PATIENCE_SECONDS)


def test_a_slip_that_ends_another_process_is_the_error(store: TCPStore) -> None:
    with WorkerPool(Slipping, tp=3, worker_kwargs={"port": store.port}, restart="worker") as pool:
        for number in range(2):
            with pytest.raises(CallDivergedError) as raised:
                pool.call("step", "size", 0, timeout=PATIENCE_SECONDS)
            error = raised.value
            assert (error.number, error.method, error.group) == (number + 1, "step", "world")
            began = dict(zip(error.ranks, error.did, strict=True))
            assert began.pop(0) == "began all_reduce SUM float32[8]"
            assert [*began.values()] == ["began all_reduce SUM float32[4]"]
            assert isinstance(error.__cause__, WorkerLostError)
            assert error.__cause__.end == "killed by SIGABRT"


def slips(pool: WorkerPool) -> list[str]:
    errors = []
    for n_before in (0, 3):
        for _ in range(n_before):
            assert pool.call("step", "dtype", -1, retry=True) == 4.0
        # With the worker's report late, the error is the abort, whose text is the divergence.
        with pytest.raises((CallDivergedError, WorkerError, GroupAbortedError)) as raised:
            pool.call("step", "dtype", 0, retry=False, timeout=PATIENCE_SECONDS)
        error = raised.value
        if isinstance(error, GroupAbortedError):
            assert error.failure.kind == DivergenceError.__name__
        else:
            assert isinstance(error, DivergenceError) or isinstance(
                error.__cause__, DivergenceError
            )
        errors.append(str(error))
    return errors


@pytest.mark.namespaces
def test_a_slip_over_hosts_is_never_answered(tmp_path: Path) -> None:
    options = {"worker": Slipping, "tp": 2, "pp": 2, "restart": "worker"}
    with two_hosts("IPv4") as hosts:
        errors, _ = run_ranks(2, over_hosts, str(tmp_path), hosts, slips, (), options)
    for error in errors:
        assert "all_reduce SUM int32[4]" in error
        assert "all_reduce SUM float32[4]" in error


class Uncompared(Slipping):
    """Its ranks do not compare what they call, over hosts either: its process ends first."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        compare_no_more()
        self.world.barrier()


def slip_of_the_other_host(pool: WorkerPool) -> str:
    with pytest.raises(CallDivergedError) as raised:
        pool.call("step", "size", 0, timeout=PATIENCE_SECONDS)
    return str(raised.value.__cause__)


@pytest.mark.namespaces
def test_a_slip_that_ends_a_process_of_another_host_is_the_error(tmp_path: Path) -> None:
    options = {"worker": Uncompared, "tp": 2}
    with two_hosts("IPv4") as hosts:
        ends = run_ranks(2, over_hosts, str(tmp_path), hosts, slip_of_the_other_host, (), options)
    assert "rank 1" in ends[0]
    assert "killed by SIGABRT on host" in ends[0]
