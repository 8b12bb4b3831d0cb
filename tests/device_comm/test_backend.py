"""What the verbs promise to a backend, and what a backend may leave out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_comm import (
    ALL_VERBS,
    Backend,
    Capabilities,
    Communicator,
    Identity,
    Operation,
    ReduceOp,
    check_reduction,
    reduce_in_rank_order,
)
from device_comm.operation import NO_TENSOR
from shm_broadcast import CoordinatorError, GroupAbortedError, GroupTimeoutError
from tests.device_comm.oracle import REDUCED, ops_for, reduced, same, values

pytestmark = pytest.mark.quick


class Recorder(Backend):
    def __init__(self, verbs: frozenset[str] = ALL_VERBS) -> None:
        super().__init__(Identity.of(1, 3, name="tp", timeout=9), Capabilities("recorder", verbs))
        self.started: list[Operation] = []
        self.error: CoordinatorError | None = None
        self.discarded = 0

    def start(self, operation: Operation) -> None:
        self.started.append(operation)
        if self.error is not None:
            raise self.error
        if operation.verb == "all_reduce":
            operation.output.copy_(operation.source * 3)

    def discard(self) -> None:
        self.discarded += 1


def record(verbs: frozenset[str] = ALL_VERBS) -> tuple[Communicator, Recorder]:
    backend = Recorder(verbs)
    return Communicator(backend), backend


ODD = torch.randn(6, 3, 2, dtype=torch.complex64, requires_grad=True).transpose(0, 1).conj()
X = torch.zeros(3, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.all_reduce(ODD),
        lambda c: c.all_reduce(ODD, out=torch.empty_like(ODD)),
        lambda c: c.all_gather(ODD),
        lambda c: c.all_gather(ODD, dim=1),
        lambda c: c.all_gatherv(ODD, sizes=[1, 3, 5]),
        lambda c: c.reduce_scatter(ODD, dim=1),
        lambda c: c.reduce_scatterv(ODD, dim=1, sizes=[0, 5, 1]),
        lambda c: c.all_to_all(ODD),
        lambda c: c.all_to_all(ODD, dim=1),
        lambda c: c.broadcast(ODD, src=1),
        lambda c: c.broadcast(ODD, src=2),
        lambda c: c.reduce(ODD, dst=1),
        lambda c: c.gather(ODD, dst=1),
        lambda c: c.scatter(ODD, src=1, dim=1),
        lambda c: c.scatter(None, src=0, out=torch.empty(2, 3).t()),
        lambda c: c.send(ODD),
        lambda c: c.recv(out=torch.empty(2, 3).t(), src=2),
    ],
)
def test_backends_get_plain_tensors_that_do_not_overlap(call: Any) -> None:
    comm, backend = record()
    call(comm)
    both = (backend.started[0].source, backend.started[0].output)
    tensors = [each for each in both if each is not NO_TENSOR]
    assert tensors
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert not tensor.is_conj()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


FILLED: dict[str, tuple[Any, tuple[int, ...]]] = {
    "all_reduce": (lambda c, out: c.all_reduce(X, out=out), (3, 2)),
    "all_gather": (lambda c, out: c.all_gather(X, dim=0, out=out), (9, 2)),
    "all_gather of columns": (lambda c, out: c.all_gather(X, out=out), (3, 6)),
    "all_gatherv": (lambda c, out: c.all_gatherv([X, X], out=[None, out]), (9, 2)),
    "reduce_scatter": (lambda c, out: c.reduce_scatter(X, dim=0, out=out), (1, 2)),
    "reduce_scatterv": (lambda c, out: c.reduce_scatterv(X, 0, [0, 2, 1], out=out), (2, 2)),
    "all_to_all": (lambda c, out: c.all_to_all(X, out=out), (3, 2)),
    "broadcast": (lambda c, out: c.broadcast(X, out=out), (3, 2)),
    "reduce": (lambda c, out: c.reduce(X, dst=1, out=out), (3, 2)),
    "gather": (lambda c, out: c.gather(X, dst=1, dim=0, out=out), (9, 2)),
    "scatter": (lambda c, out: c.scatter(X, src=1, dim=0, out=out), (1, 2)),
    "recv": (lambda c, out: c.recv((3, 2), torch.float32, out=out), (3, 2)),
}


def unfit(shape: tuple[int, ...]) -> list[tuple[type[Exception], str, Any]]:
    """Outputs that a float32 result of ``shape`` on the CPU does not fit, and what is said."""
    return [
        (TypeError, "out must be a tensor, not list", [1.0]),
        (TypeError, "out is torch.float64; the result is", torch.zeros(shape).double()),
        (ValueError, "out has shape (7,); the result has", torch.zeros(7)),
        (ValueError, "the output is expanded", torch.zeros(shape[0], 1).expand(shape)),
        (ValueError, "out is on meta; this communicator moves", torch.zeros(shape, device="meta")),
    ]


@pytest.mark.parametrize("verb", FILLED)
def test_an_output_that_the_result_does_not_fit_is_refused_before_anything_moves(verb: str) -> None:
    (call, shape), (comm, backend) = FILLED[verb], record()
    for kind, said, out in unfit(shape):
        if verb == "all_gatherv" and isinstance(out, list):
            said = "out must be of tensors, not list"
        with pytest.raises(kind, match=re.escape(said)):
            call(comm, out)
    assert backend.started == []
    call(comm, torch.zeros(shape))
    assert len(backend.started) == (2 if verb == "all_gatherv" else 1)


def test_in_place_is_passed_on_and_copies_only_if_needed() -> None:
    comm, backend = record()
    x = torch.ones(4)
    assert comm.all_reduce_(x) is x
    first = backend.started[0]
    assert first.output.data_ptr() == first.source.data_ptr() == x.data_ptr()
    assert x.tolist() == [3, 3, 3, 3]
    y = torch.ones(4, 2)[:, 0]
    assert comm.all_reduce_(y) is y
    assert backend.started[1].output.is_contiguous()
    assert y.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("shift", [-2, 0, 2])
def test_an_output_over_memory_of_the_input_is_filled_when_all_was_read(shift: int) -> None:
    comm, backend = record()
    z = torch.arange(8.0)
    shown = z.numpy()
    apart = torch.from_numpy(shown[2:6]), torch.from_numpy(shown[2 + shift : 6 + shift])
    for x, out in ((z[2:6], z[2 + shift : 6 + shift]), apart):
        z.copy_(torch.arange(8.0))
        comm.all_reduce(x, out=out)
        assert backend.started[-1].output.data_ptr() != out.data_ptr()
        assert out.tolist() == [6, 9, 12, 15]


def test_a_neighbour_in_the_same_buffer_is_written_as_it_is() -> None:
    comm, backend = record()
    shown = torch.ones(8).numpy()
    x, out = torch.from_numpy(shown[:4]), torch.from_numpy(shown[4:])
    comm.all_reduce(x, out=out)
    assert backend.started[0].output.data_ptr() == out.data_ptr()


def test_sizes_are_elements() -> None:
    comm, backend = record()
    comm.all_gatherv(torch.ones(2, 5), sizes=[1, 2, 0])
    comm.all_to_all(torch.ones(2, 4), dim=1, input_sizes=[1, 2, 1], output_sizes=[0, 2, 3])
    comm.reduce_scatterv(torch.ones(2, 4), dim=1, sizes=[1, 3, 0])
    comm.all_to_all(torch.ones(6, 4))
    gather, exchange, scatter, equal = backend.started
    assert gather.output_sizes == (5, 10, 0)
    assert (exchange.output_sizes, exchange.source_sizes) == ((0, 4, 6), (2, 4, 2))
    assert scatter.source_sizes == (2, 6, 0)
    assert (equal.output_sizes, equal.source_sizes) == (None, None)
    assert equal.source_parts(3) == equal.output_parts(3) == (8, 8, 8)


def test_an_operation_has_its_verb_name_and_deadline() -> None:
    comm, backend = record()
    comm.barrier()
    comm.barrier(async_op=True, timeout=3)
    comm.all_gatherv([torch.ones(1, 5), torch.ones(1, 0), torch.ones(1)], timeout=3)
    first, second, *listed = backend.started
    assert (first.verb, first.name, first.background) == ("barrier", "tp barrier", False)
    assert first.deadline is first.deadline
    assert (first.deadline.timeout, second.deadline.timeout) == (9, 3)
    assert second.background
    assert [(each.verb, each.name) for each in listed] == [("all_gatherv", "tp all_gatherv")] * 2
    assert listed[0].deadline is listed[1].deadline
    assert listed[0].deadline.timeout == 3
    assert Operation("barrier").deadline.timeout is None
    x = torch.zeros(6)
    assert Operation("broadcast", x).buffer is x
    assert Operation("broadcast", output=x).buffer is x


def test_verbs_that_a_backend_lacks_are_refused_by_name() -> None:
    comm, backend = record(frozenset({"all_reduce"}))
    comm.all_reduce(torch.ones(1))
    with pytest.raises(NotImplementedError, match="recorder has no all_gather"):
        comm.all_gather(torch.ones(1))
    assert len(backend.started) == 1


def test_a_failed_operation_ends_the_group() -> None:
    comm, backend = record()
    backend.error = GroupTimeoutError("tp all_reduce", 9)
    with pytest.raises(GroupTimeoutError):
        comm.all_reduce(torch.ones(1))
    assert backend.discarded == 1
    with pytest.raises(GroupAbortedError, match="timed out after 9 s"):
        comm.barrier()
    assert len(backend.started) == 1


@pytest.mark.parametrize("wrong", [{"rank": 3}, {"rank": -1}, {"members": [0, 1]}, {"timeout": -1}])
def test_a_wrong_identity_is_refused(wrong: dict[str, Any]) -> None:
    right = {"rank": 0, "world_size": 3, "device": "cpu"}
    with pytest.raises(ValueError, match=r"rank|members|timeout"):
        Identity.of(**(right | wrong))


# --- Reductions ----------------------------------------------------------------------------------


def test_reduce_ops_have_the_numbers_of_bagua_and_the_names_of_torch() -> None:
    numbers = {
        "SUM": 0,
        "PRODUCT": 1,
        "MIN": 2,
        "MAX": 3,
        "BOR": 7,
        "BAND": 8,
        "BXOR": 9,
        "AVG": 10,
    }
    assert {op.name: op.value for op in ReduceOp} == numbers
    for op in ReduceOp:
        assert op.torch == getattr(dist.ReduceOp, op.name)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_the_local_reduction_is_right(dtype: torch.dtype) -> None:
    parts = [values(rank, (4, 3), dtype) for rank in range(3)]
    for op in ReduceOp:
        if op not in ops_for(dtype):
            with pytest.raises(TypeError, match=r"AVG|BOR|BAND|BXOR|MIN|MAX"):
                check_reduction(op, dtype)
            continue
        check_reduction(op, dtype)
        output = torch.empty_like(parts[0])
        reduce_in_rank_order(parts, op, output)
        same(output, reduced(parts, op))
    if dtype is torch.float16:  # accumulated in float32
        parts = [torch.tensor([value], dtype=dtype) for value in (6e4, 6e4, -6e4)]
        output = torch.empty_like(parts[0])
        reduce_in_rank_order(parts, ReduceOp.SUM, output)
        assert output.item() == 6e4


def test_reductions_that_cannot_be_are_refused() -> None:
    for dtype in (torch.uint64, torch.float8_e4m3fn, torch.complex32):
        with pytest.raises(TypeError, match="not reduced"):
            check_reduction(ReduceOp.SUM, dtype)
    with pytest.raises(TypeError, match=r"must be a coordinator\.ReduceOp, not 0"):
        check_reduction(0, torch.float32)
