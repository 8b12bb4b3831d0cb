"""Each wrapper passes on all that a backend offers, and adds its own."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import coordinator
import device_comm
from device_comm import (
    ALL_VERBS,
    Backend,
    Capabilities,
    Communicator,
    Identity,
    Operation,
    ReduceOp,
    Wrapper,
)
from device_comm.backend import Explanation
from device_comm.cuda.ipc.abi import Algorithm
from device_comm.cuda.ipc.ipc_backend import IpcAlgorithm
from device_comm.cuda.nccl.nccl_backend import NcclWindow
from device_comm.divergence import FingerprintBackend
from device_comm.selection import Candidate, SelectingBackend, Selection
from device_comm.shm.signature import signature_with_sizes
from device_comm.wrappers import CudaSideStream, HostStaging, OnStream
from shm_broadcast import Board, Deadline, DivergenceError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from device_comm import Pending


FACE = {
    name for name, member in vars(Backend).items() if callable(member) and not name.startswith("_")
}
"""The methods of a backend."""

DEADLINE = Deadline.after(60)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "flush": (DEADLINE,),
    "check": (),
    "norms": (torch.ones(3), torch.ones(3)),
    "sends_eagerly": (1, 100),
    "empty": ((2,), torch.float32, torch.ones(3)),
    "explain": (),
    "graph_capture": (),
    "discard": (),
    "close": (),
}
"""Of all methods but `start`, which is what wrappers change, and `fail`, which is `discard`."""


class Told(Backend):
    """Rank 0 of 2, with an answer of its own to everything; records each call."""

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        has = capabilities or Capabilities("told", ALL_VERBS)
        super().__init__(Identity.of(0, 2, name="tp"), has)
        self.told: list[tuple[Any, ...]] = []
        self.started: list[Operation] = []
        self.pending: Later | None = None
        self.answers = {
            "norms": True,
            "sends_eagerly": True,
            "empty": torch.empty(0),
            "explain": Explanation("tp", (), (("the best way", "there is a reason"),)),
            "graph_capture": nullcontext(),
        }

    def start(self, operation: Operation, *_: object) -> Later | None:
        self.started.append(operation)
        return self.pending


def _recorded(name: str) -> Callable[..., Any]:
    def method(self: Told, *given: Any) -> Any:
        self.told.append((name, *given[: len(ARGUMENTS[name])]))
        return self.answers.get(name)

    return method


for _name in ARGUMENTS:
    setattr(Told, _name, _recorded(_name))


class Later:
    def __init__(self) -> None:
        self.waited = 0

    def ready(self) -> bool:
        return self.waited > 0

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - at once
        self.waited += 1


class Side:
    def __init__(self) -> None:
        self.log: list[str] = []
        self.done = True
        self.captures = False

    @contextmanager
    def as_current(self) -> Iterator[None]:
        self.log.append("enter")
        yield
        self.log.append("leave")

    def stream_wait(self) -> None:
        self.log.append("follow")

    def mark(self) -> Callable[[], bool]:
        assert not self.captures, "operation not permitted when stream is capturing"
        return self._is_done

    def is_capturing(self) -> bool:
        return self.captures

    def _is_done(self) -> bool:
        assert not self.captures, "operation not permitted when stream is capturing"
        return self.done


def in_a_window(inner: Any) -> Backend:
    inner.streams = SimpleNamespace(capturing=lambda: True)
    inner.register = lambda *_: None
    inner.after = lambda _: inner.pending
    memory: Any = SimpleNamespace(address=0, size=128)
    return NcclWindow(inner, memory, DEADLINE, lambda *_: torch.zeros(128, dtype=torch.uint8))


WRAPPERS: dict[type[Backend], Callable[[Any], Backend]] = {
    HostStaging: lambda inner: HostStaging(inner, "cpu"),
    IpcAlgorithm: lambda inner: IpcAlgorithm(inner, Algorithm.ONE_SHOT),
    FingerprintBackend: lambda inner: FingerprintBackend(inner, Board.create(2, 0), b"token"),
    NcclWindow: in_a_window,
    OnStream: lambda inner: OnStream(inner, Side()),
    SelectingBackend: lambda inner: SelectingBackend(Selection([Candidate("told", inner)])),
}
LENT = {HostStaging, IpcAlgorithm, NcclWindow}
"""These leave what they wrap to its maker to close."""

ANSWERED = {HostStaging: ("empty", "norms")}
"""Its device is not that of what it wraps."""


def test_members_compare_each_collective_before_it_starts() -> None:
    """Rank 1 of 2 gives the signature of another operation than rank 0."""
    sizes = tuple(range(4000, 4100))
    x = torch.empty(sum(sizes))

    def operation(op: ReduceOp, last: int) -> Operation:
        given = (*sizes[:-1], last)
        return Operation("reduce_scatterv", x, x[:4000], op=op, source_sizes=given, shape=(-1,))

    class Other(Told):
        def start(self, operation: Operation, *_: object) -> None:
            rows = operation.output
            rows[0], rows[1] = operation.source, torch.frombuffer(theirs, dtype=torch.uint8)

    same = "reduce_scatterv SUM float32[-1]"
    for other, text in [
        (operation(ReduceOp.SUM, 4099), ""),
        (operation(ReduceOp.MAX, 4099), "reduce_scatterv MAX float32[-1]"),
        (operation(ReduceOp.SUM, 5000), f"{same} of other sizes"),
    ]:
        theirs = bytearray(signature_with_sizes(other))
        inner = Told()
        backend = FingerprintBackend(inner, Board.create(2, 0), b"token", Other())
        ours = operation(ReduceOp.SUM, 4099)
        if not text:
            backend.start(ours)
            assert inner.started == [ours]
            continue
        with pytest.raises(DivergenceError) as caught:
            backend.start(ours)
        assert (caught.value.rank, inner.started) == (1, [])
        assert str(caught.value) == (
            f"rank 1 issued {text} where this rank issued {same}, collective 1 of tp"
        )


def test_no_wrapper_is_forgotten_here() -> None:
    for package in (device_comm, coordinator):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            engine = module.name.startswith("coordinator.plugins.")  # needs what is not there
            if not engine and not module.name.endswith((".cupy_driver", "_native")):
                importlib.import_module(module.name)

    def below(kind: type) -> set[type]:
        kinds: list[type] = kind.__subclasses__()
        found = {each for each in kinds if not each.__module__.startswith("tests.")}
        return found.union(*map(below, found))

    assert below(Wrapper) | {SelectingBackend} == set(WRAPPERS)
    assert {"start", "fail", "after_fork_in_child"} | set(ARGUMENTS) == FACE


@pytest.mark.parametrize("method", sorted(ARGUMENTS))
@pytest.mark.parametrize("kind", WRAPPERS)
def test_every_method_reaches_the_wrapped_backend(kind: type[Backend], method: str) -> None:
    inner = Told(Capabilities("told", ALL_VERBS, overlaps=False))
    wrapper = WRAPPERS[kind](inner)
    answer = getattr(wrapper, method)(*ARGUMENTS[method])
    if method == "graph_capture":
        with answer:
            pass
    kept = (method == "close" and kind in LENT) or method in ANSWERED.get(kind, ())
    assert inner.told == ([] if kept else [(method, *ARGUMENTS[method])])
    if method == "sends_eagerly":
        assert answer is True
    elif method == "empty":
        assert (answer is inner.answers["empty"]) is not kept
    elif method == "explain":
        assert ("the best way", "there is a reason") in answer.unavailable


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_failure_aborts_the_group_and_discards_the_backend(kind: type[Backend]) -> None:
    inner = Told()
    wrapper = WRAPPERS[kind](inner)
    wrapper.fail(GroupTimeoutError("tp barrier", 3))
    assert inner.told == [("discard",)]
    assert inner.watch.aborted is not None


OWN: dict[type[Backend], dict[str, Any]] = {
    HostStaging: {"backend": "host", "series": False},
    IpcAlgorithm: {"verbs": frozenset({"all_reduce"})},
    FingerprintBackend: {"detects_divergence": True},
    NcclWindow: {"verbs": frozenset({"all_reduce"})},
    SelectingBackend: {"series": False},
}
"""What wrappers can do that what they wrap cannot, or the other way round."""


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("value", [True, False])
def test_a_wrapper_has_the_capabilities_of_its_backend(kind: type[Backend], value: bool) -> None:
    has = Capabilities("told", ALL_VERBS)
    flags = [each.name for each in fields(has) if isinstance(getattr(has, each.name), bool)]
    assert "overlaps" in flags
    has = replace(has, **dict.fromkeys(flags, value))
    found = WRAPPERS[kind](Told(has)).capabilities
    assert replace(found, reductions=None) == replace(has, **OWN.get(kind, {}))


def operations() -> list[Operation]:
    """One of each verb, all-to-alls of both kinds, and an all-reduce that all wrappers can do."""
    x, y = torch.arange(4.0), torch.zeros(4)
    sizes = {"source_sizes": (1, 3), "output_sizes": (3, 1)}
    plain = [
        Operation(verb, x, y, op=ReduceOp.MAX, peer=1, background=True, timeout=DEADLINE, name="tp")
        for verb in sorted(ALL_VERBS)
    ]
    uneven = Operation("all_to_all", x, y, **sizes, timeout=DEADLINE, name="tp all_to_all")
    total = Operation("all_reduce", x, y, timeout=DEADLINE, name="tp all_reduce")
    return [*plain, uneven, total]


def parts_of(operation: Operation) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, torch.Tensor) else value

    slots: Sequence[str] = [each for each in Operation.__slots__ if each != "output"]
    return {name: plain(getattr(operation, name)) for name in slots}


@pytest.mark.parametrize("operation", operations(), ids=repr)
@pytest.mark.parametrize("kind", WRAPPERS)
def test_an_operation_arrives_as_it_was(kind: type[Backend], operation: Operation) -> None:
    inner = Told()
    wrapper = WRAPPERS[kind](inner)
    has = wrapper.capabilities
    if operation.verb in has.verbs and has.reduces(operation.op, operation.source.dtype):
        wrapper.start(operation)
        assert [parts_of(each) for each in inner.started] == [parts_of(operation)]
        assert inner.started[0].output.shape == operation.output.shape


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_pending_operations_are_waited_for(kind: type[Backend], background: bool) -> None:
    inner = Told()
    inner.pending = Later()
    answer = Communicator(WRAPPERS[kind](inner)).all_reduce(torch.ones(2), async_op=background)
    if background:
        assert not answer.is_completed()
        answer.wait()
    assert inner.pending.waited == 1


@pytest.mark.parametrize("kind", WRAPPERS)
def test_no_wrapper_lets_calls_go_past_it(kind: type[Backend]) -> None:
    inner = Told()
    inner.fast_path = object()
    wrapper = WRAPPERS[kind](inner)
    assert wrapper.fast_path is None
    assert wrapper.identity == inner.identity


# --- Operations on a stream of their own ----------------------------------------------------------


class Doubling(Backend):
    """Two ranks that hold the same: a sum is twice the input, in the order of a stream."""

    def __init__(self, side: Side | None, device: str = "cpu") -> None:
        has = Capabilities("toy", ALL_VERBS, stream_ordered=True)
        super().__init__(Identity.of(0, 2, device), has)
        self._side = side

    def start(self, operation: Operation) -> Pending | None:
        torch.add(operation.source, operation.source, out=operation.output)
        if self._side is None:
            return None
        self._side.log.append(operation.verb)
        return InOrder(self._side)


class InOrder:
    def __init__(self, side: Side) -> None:
        self._side = side

    def ready(self) -> bool:
        return False

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the device waits
        self._side.log.append("wait")


def on_stream() -> tuple[Communicator, Side]:
    side = Side()
    side.done = False
    return Communicator(OnStream(Doubling(side), side)), side


def test_a_call_is_ordered_with_the_current_stream() -> None:
    comm, side = on_stream()
    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert side.log == ["enter", "all_reduce", "wait", "leave", "follow"]
    side.log.clear()
    work = comm.all_reduce(torch.ones(2), async_op=True)
    assert side.log == ["enter", "all_reduce", "leave"]
    assert not work.is_completed()
    assert work.wait().tolist() == [2, 2]
    assert side.log[3:] == ["enter", "wait", "leave", "follow"]


@pytest.mark.parametrize("captured", [False, True])
def test_tensors_live_until_the_stream_has_passed(captured: bool) -> None:
    """In a capture, no event may be recorded or polled."""
    comm, side = on_stream()
    comm.all_reduce(torch.ones(2), async_op=True)
    side.captures, x = captured, torch.ones(2)
    alive = weakref.ref(x)
    assert comm.all_reduce(x, async_op=True).wait().tolist() == [2, 2]
    del x
    assert comm.all_reduce(torch.ones(2)).tolist() == [2, 2]
    gc.collect()
    assert alive() is not None
    side.captures, side.done = False, True
    comm.all_reduce(torch.ones(2))
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    side: Any = torch.cuda.Stream()
    comm = Communicator(OnStream(Doubling(None, "cuda"), CudaSideStream(side)))
    for _ in range(50):
        x = torch.zeros(1 << 22, device="cuda")
        torch.cuda._sleep(1_000_000)
        x += 1
        y = comm.all_reduce(x)
        work = comm.all_reduce(x, async_op=True)
        del x
        assert (y + work.wait()).eq(4).all().item()
