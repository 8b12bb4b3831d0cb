"""Whatever a backend offers, each wrapper passes on: nothing of its face, of what it can do, or of
an operation is lost on the way.

The face is not written down here but looked up, so that a member that is added to it and forgotten
in a wrapper is found.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import contextmanager
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
from device_comm.wrappers import HostStaging, OnStream
from shm_broadcast import Board, Deadline, DivergenceError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    """Rank 0 of 2, with an answer of its own to everything; keeps what it is told."""

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        super().__init__(
            Identity.of(0, 2, name="tp"), capabilities or Capabilities("told", ALL_VERBS)
        )
        self.told: list[tuple[Any, ...]] = []
        self.started: list[Operation] = []
        self.room = torch.empty(0)
        self.pending: Later | None = None

    def start(self, operation: Operation, *_: object) -> Later | None:
        self.started.append(operation)
        return self.pending

    def flush(self, deadline: Deadline) -> None:
        self.told.append(("flush", deadline))

    def check(self) -> None:
        self.told.append(("check",))

    def norms(self, x: torch.Tensor, weight: torch.Tensor, *_: object) -> bool:
        self.told.append(("norms", x, weight))
        return True

    def sends_eagerly(self, peer: int, size: int) -> bool:
        self.told.append(("sends_eagerly", peer, size))
        return True

    def empty(self, *given: Any) -> torch.Tensor:
        self.told.append(("empty", *given))
        return self.room

    def explain(self) -> Explanation:
        self.told.append(("explain",))
        return Explanation("tp", (), (("the best way", "there is a reason"),))

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        self.told.append(("graph_capture",))
        yield

    def discard(self) -> None:
        self.told.append(("discard",))

    def close(self) -> None:
        self.told.append(("close",))


class Later:
    """An operation that is done when it is waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def ready(self) -> bool:
        return self.waited > 0

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - at once
        self.waited += 1


class NoStream:
    """A side stream that is the current one."""

    @contextmanager
    def as_current(self) -> Iterator[None]:
        yield

    def stream_wait(self) -> None:
        pass

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def is_capturing(self) -> bool:
        return False


class Capturing:
    """Streams of which a capture keeps the order."""

    def capturing(self) -> bool:
        return True


def in_a_window(inner: Any) -> Backend:
    """Over what offers as much of an `NcclBackend` as it takes."""
    inner.streams, inner.register = Capturing(), lambda *_: None
    inner.after = lambda _: inner.pending
    memory: Any = SimpleNamespace(address=0, size=128)
    return NcclWindow(inner, memory, DEADLINE, lambda *_: torch.zeros(128, dtype=torch.uint8))


WRAPPERS: dict[type[Backend], Callable[[Any], Backend]] = {
    HostStaging: lambda inner: HostStaging(inner, "cpu"),
    IpcAlgorithm: lambda inner: IpcAlgorithm(inner, Algorithm.ONE_SHOT),
    FingerprintBackend: lambda inner: FingerprintBackend(inner, Board.create(2, 0), b"token"),
    NcclWindow: in_a_window,
    OnStream: lambda inner: OnStream(inner, NoStream()),
    SelectingBackend: lambda inner: SelectingBackend(Selection([Candidate("told", inner)])),
}

LENT = {HostStaging, IpcAlgorithm, NcclWindow}
"""These leave what they wrap to its maker to close."""

ANSWERED = {HostStaging: ("empty", "norms")}
"""Its device is not that of what it wraps."""


def of_the_project(kind: type) -> set[type]:
    below: list[type] = kind.__subclasses__()
    found = {each for each in below if not each.__module__.startswith("tests.")}
    return found.union(*map(of_the_project, found))


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
    assert of_the_project(Wrapper) | {SelectingBackend} == set(WRAPPERS)
    assert {"start", "fail", "after_fork_in_child"} | set(ARGUMENTS) == FACE


@pytest.mark.parametrize("method", sorted(ARGUMENTS))
@pytest.mark.parametrize("kind", WRAPPERS)
def test_every_method_reaches_what_is_wrapped(kind: type[Backend], method: str) -> None:
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
        assert (answer is inner.room) is not kept
    elif method == "explain":
        assert ("the best way", "there is a reason") in answer.unavailable


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_failure_is_told_to_the_group_and_discards_what_is_wrapped(kind: type[Backend]) -> None:
    inner = Told()
    wrapper = WRAPPERS[kind](inner)
    wrapper.fail(GroupTimeoutError("tp barrier", 3))
    assert inner.told == [("discard",)]
    assert inner.watch.aborted is not None


@pytest.mark.parametrize("kind", WRAPPERS)
def test_who_this_is_is_passed_on(kind: type[Backend]) -> None:
    inner = Told()
    assert WRAPPERS[kind](inner).identity == inner.identity


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
def test_what_is_wrapped_can_do_the_wrapper_can_do(kind: type[Backend], value: bool) -> None:
    has = Capabilities("told", ALL_VERBS)
    flags = [each.name for each in fields(has) if isinstance(getattr(has, each.name), bool)]
    assert "overlaps" in flags
    has = replace(has, **dict.fromkeys(flags, value))
    found = WRAPPERS[kind](Told(has)).capabilities
    assert replace(found, reductions=None) == replace(has, **OWN.get(kind, {}))


def operations() -> list[Operation]:
    """One of each verb that a wrapper has to pass on as it is, all-to-alls of both kinds, and an
    all-reduce that all can do.
    """
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
def test_what_is_under_way_is_waited_for(kind: type[Backend], background: bool) -> None:
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
    assert WRAPPERS[kind](inner).fast_path is None
