"""A rank that leaves an operation out of one call: no other call may see what was left over."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
from coordinator.pipeline import Stage
from server.config import PoolConfig
from server.errors import CallDivergedError, WorkerError
from server.pool import WorkerPool
from shm_broadcast import DivergenceError, GroupAbortedError

if TYPE_CHECKING:
    from coordinator import ParallelGroups
    from server.worker import WorkerContext
    from tests.server.workers import Gate

CALLS = range(2, 10)
"""The pool's numbers of the calls under test; its first call holds them back until all are sent."""
ODD = 4
"""The call out of which something is left."""


class Forgetful:
    """Every call moves its own number about, and answers with what came.

    Args:
        context: the pool's.
        port: of a store, to meet for groups over torch's process groups; 0: the pool's groups.
        sizes: tp and pp.
    """

    def __init__(self, context: WorkerContext, port: int, sizes: tuple[int, int]) -> None:
        self.rank = context.groups.world.rank
        self.groups = _over_torch(self.rank, port, sizes) if port else context.groups
        self.queue = self.groups.tp.create_mq_broadcaster() if not port and sizes[0] > 1 else None
        self.end = Stage(self.groups.pp) if sizes[1] > 1 else None

    def hold(self, gate: Gate) -> None:
        gate.pass_through(self.rank)

    def step(self, verb: str, number: int, forgetful: int) -> list[float]:
        """Answers with ``number`` in every place, on every rank."""
        if number == ODD and self.rank == forgetful:
            return [float(number)]
        return [float(each) for each in getattr(self, verb)(float(number))]

    def all_reduce(self, number: float) -> Any:
        return (self.groups.tp.all_reduce(torch.full((4,), number)) / 2).tolist()

    def all_reduce_of_many(self, number: float) -> Any:
        work = self.groups.tp.all_reduce(torch.full((300_000,), number), async_op=True)
        return (work.wait() / 2)[:3].tolist()

    def all_gatherv(self, number: float) -> Any:
        return self.groups.tp.all_gatherv(torch.full((2,), number), sizes=[2, 2]).tolist()

    def broadcast(self, number: float) -> Any:
        return self.groups.tp.broadcast(torch.full((4,), number), src=0).tolist()

    def gather(self, number: float) -> Any:
        found = self.groups.tp.gather(torch.full((4,), number), dst=0)
        return [number] if found is None else found.tolist()

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

    def send_object(self, number: float) -> Any:
        tp = self.groups.tp
        if tp.is_first_rank:
            tp.send_object({"number": number}, 1)
            return [number]
        return [tp.recv_object(0)["number"]]

    def broadcast_object(self, number: float) -> Any:
        return [self.groups.tp.broadcast_object(number, src=0)]

    def broadcast_object_through_a_queue(self, number: float) -> Any:
        self.groups.tp.mq_broadcaster = self.queue
        return [self.groups.tp.broadcast_object(number, src=0)]

    def send_tensor_dict(self, number: float) -> Any:
        tp, tensors = self.groups.tp, {"x": torch.full((4,), number), "n": number}
        if tp.is_first_rank:
            tp.send_tensor_dict(tensors)
            return [number]
        found = tp.recv_tensor_dict()
        return [found["n"], *found["x"].tolist()]

    def broadcast_tensor_dict(self, number: float) -> Any:
        found = self.groups.tp.broadcast_tensor_dict({"x": torch.full((4,), number)}, src=0)
        return found["x"].tolist()

    def stages(self, number: float) -> Any:
        """Reduce within each stage, and hand the result on."""
        tp, pp = self.groups.tp, self.groups.pp
        x = torch.full((4,), number)
        if tp.world_size > 1:
            x = tp.all_reduce(x) / tp.world_size
        if not pp.is_first_rank:
            found = pp.recv_tensor_dict(all_gather_group=tp)
            x = found["x"] + found["n"] - number
        if not pp.is_last_rank:
            pp.send_tensor_dict({"x": x, "n": number}, all_gather_group=tp)
        return x.tolist()

    def pipeline(self, number: float) -> Any:
        assert self.end is not None
        if self.groups.pp.is_first_rank:
            self.end.exchange(send_next={"x": torch.full((4,), number)})
            return [number]
        return self.end.exchange(recv_prev=True).from_prev["x"].tolist()


def _over_torch(rank: int, port: int, sizes: tuple[int, int]) -> ParallelGroups:
    return coordinator.init(
        *sizes,
        rank=rank,
        world_size=sizes[0] * sizes[1],
        store=coordinator.connect_store("127.0.0.1", port),
        timeout=60,
        torch_only=True,
        backend="gloo",
    )


def forget(
    gate: Gate, verb: str, forgetful: int, *, tp: int = 1, pp: int = 1, over_torch: bool
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


@pytest.mark.parametrize("forgetful", [0, 1])
@pytest.mark.parametrize("over_torch", [False, True], ids=["shared memory", "torch"])
def test_calls_do_not_meet_where_a_rank_leaves_a_collective_out(
    gate: Gate, forgetful: int, over_torch: bool
) -> None:
    forget(gate, "all_reduce", forgetful, tp=2, over_torch=over_torch)


@pytest.mark.parametrize(
    ("verb", "forgetful"),
    [
        ("all_reduce_of_many", 1),
        ("all_gatherv", 0),
        ("broadcast", 0),
        ("broadcast", 1),
        ("gather", 0),
        ("send", 0),
        ("send", 1),
        ("isend_of_much", 0),
        ("broadcast_object", 1),
        ("broadcast_object_through_a_queue", 1),
        ("send_tensor_dict", 0),
        ("send_tensor_dict", 1),
        ("broadcast_tensor_dict", 1),
    ],
)
def test_calls_do_not_meet_in_shared_memory(gate: Gate, verb: str, forgetful: int) -> None:
    forget(gate, verb, forgetful, tp=2, over_torch=False)


@pytest.mark.parametrize(
    ("verb", "forgetful"),
    [("broadcast", 1), ("send", 0), ("send_object", 1), ("send_tensor_dict", 0)],
)
def test_calls_do_not_meet_over_torch(gate: Gate, verb: str, forgetful: int) -> None:
    forget(gate, verb, forgetful, tp=2, over_torch=True)


@pytest.mark.parametrize(
    ("verb", "tp", "pp", "forgetful"),
    [("stages", 1, 2, 0), ("stages", 2, 2, 3), ("pipeline", 1, 2, 1), ("pipeline", 1, 2, 0)],
)
def test_calls_do_not_meet_between_stages(
    gate: Gate, verb: str, tp: int, pp: int, forgetful: int
) -> None:
    forget(gate, verb, forgetful, tp=tp, pp=pp, over_torch=False)


class Lagging:
    """Hands work from call to call, as all ranks do alike."""

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
    """Has a thread that uses a group all the time, whatever calls there are."""

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
        pool.call("rounds", 2000)
        for number in range(200):
            assert pool.call("echo", number) == number
        pool.call("join", timeout=60)
