"""What the verbs promise to a backend's primitives, and what a backend may leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import device_comm
from device_comm import ALL_VERBS, Call, Capabilities, DeviceCommunicator, ReduceOp
from device_comm.arrange import landing_pieces, pieces_first, resized
from shm_broadcast import CoordinatorError, GroupAbortedError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


class Recorder(DeviceCommunicator):
    """Rank 1 of 3: keeps what its primitives are given."""

    def __init__(self, verbs: frozenset[str] = ALL_VERBS) -> None:
        super().__init__(
            rank=1,
            world_size=3,
            device="cpu",
            capabilities=Capabilities("recorder", verbs),
            name="tp",
            timeout=9,
        )
        self.calls: list[tuple[Any, ...]] = []
        self.error: CoordinatorError | None = None
        self.launched: list[str] = []
        self.discarded = 0

    def _record(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error

    def _launch(self, primitive: Callable[[Call], Any], call: Call) -> Any:
        self.launched.append(call.verb)
        return primitive(call)

    def _discard(self) -> None:
        self.discarded += 1

    def _all_reduce(self, output: Tensor, source: Tensor, op: ReduceOp, call: Call) -> None:
        self._record(output, source, op, call)
        output.copy_(source * 3)

    def _all_gatherv(self, output: Tensor, source: Tensor, sizes: Any, call: Call) -> None:
        self._record(output, source, sizes, call)

    def _reduce(self, output: Tensor | None, source: Tensor, *rest: Any) -> None:
        self._record(output, source, *rest)

    _all_gather = _reduce_scatter = _reduce_scatterv = _all_to_all = _broadcast = _record
    _gather = _scatter = _send = _recv = _barrier = _record


ODD = torch.randn(6, 3, 2, dtype=torch.complex64, requires_grad=True).transpose(0, 1).conj()


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
def test_primitives_get_plain_tensors_that_do_not_overlap(call: Any) -> None:
    comm = Recorder()
    call(comm)
    tensors = [each for each in comm.calls[0] if isinstance(each, Tensor)]
    assert tensors
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert not tensor.is_conj()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def test_in_place_is_passed_on_and_copies_only_if_needed() -> None:
    comm = Recorder()
    x = torch.ones(4)
    assert comm.all_reduce_(x) is x
    output, source, *_ = comm.calls[0]
    assert output.data_ptr() == source.data_ptr() == x.data_ptr()
    assert x.tolist() == [3, 3, 3, 3]
    y = torch.ones(4, 2)[:, 0]
    assert comm.all_reduce_(y) is y
    assert comm.calls[1][0].is_contiguous()
    assert y.tolist() == [3, 3, 3, 3]
    z = torch.ones(8)
    comm.all_reduce(z[:4], out=z[2:6])
    assert z.tolist() == [1, 1, 3, 3, 3, 3, 1, 1]


def test_one_outer_row_is_never_copied() -> None:
    comm = Recorder()
    x = torch.ones(1, 1, 6)
    result = comm.all_gather(x)
    assert comm.calls[0][0].data_ptr() == result.data_ptr()
    assert comm.calls[0][1].data_ptr() == x.data_ptr()


def test_sizes_are_elements() -> None:
    comm = Recorder()
    comm.all_gatherv(torch.ones(2, 5), sizes=[1, 2, 0])
    assert comm.calls[0][2] == (5, 10, 0)
    comm.all_to_all(torch.ones(2, 4), dim=1, input_sizes=[1, 2, 1], output_sizes=[0, 2, 3])
    assert comm.calls[1][2:4] == ((0, 4, 6), (2, 4, 2))


def test_the_call_says_what_and_how_long() -> None:
    comm = Recorder()
    comm.barrier()
    comm.barrier(async_op=True, timeout=3)
    first, second = (call[0] for call in comm.calls)
    assert (first.verb, first.operation, first.background) == ("barrier", "tp barrier", False)
    assert first.deadline is first.deadline
    assert (first.deadline.timeout, second.deadline.timeout) == (9, 3)
    assert second.background
    assert comm.launched == ["barrier", "barrier"]


def test_what_a_backend_does_not_offer_is_refused_by_name() -> None:
    comm = Recorder(frozenset({"all_reduce"}))
    comm.all_reduce(torch.ones(1))
    with pytest.raises(NotImplementedError, match="recorder has no all_gather"):
        comm.all_gather(torch.ones(1))
    assert len(comm.calls) == 1


def test_a_failed_operation_ends_the_group() -> None:
    comm = Recorder()
    comm.error = GroupTimeoutError("tp all_reduce", 9)
    with pytest.raises(GroupTimeoutError):
        comm.all_reduce(torch.ones(1))
    assert comm.discarded == 1
    with pytest.raises(GroupAbortedError, match="timed out after 9 s"):
        comm.barrier()
    assert len(comm.calls) == 1


@pytest.mark.parametrize("wrong", [{"rank": 3}, {"rank": -1}, {"members": [0, 1]}, {"timeout": -1}])
def test_a_wrong_identity_is_refused(wrong: dict[str, Any]) -> None:
    right = {"rank": 0, "world_size": 3, "device": "cpu", "capabilities": Capabilities("x")}
    with pytest.raises(ValueError, match=r"rank|members|timeout"):
        DeviceCommunicator(**(right | wrong))


@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    data=st.data(),
    count=st.integers(1, 4),
)
def test_pieces_and_their_landing_undo_each_other(
    shape: list[int], data: st.DataObject, count: int
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= count
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    pieces = pieces_first(x, dim, count)
    expected = torch.cat([part.reshape(-1) for part in x.chunk(count, dim)])
    if x.numel():
        assert pieces.is_contiguous()
        assert pieces.view(-1).tolist() == expected.tolist()
    for out in (None, torch.zeros_like(x), torch.zeros(*shape, 2, dtype=x.dtype)[..., 0]):
        empty = Recorder()._empty
        buffer, finish = landing_pieces(empty, out, x.shape, dim, count, x, x)
        if x.numel():
            buffer.view(-1).copy_(pieces.reshape(-1))
        result = buffer if finish is None else finish()
        assert torch.equal(result, x)
        assert out is None or result is out


def test_resized() -> None:
    assert resized((2, 3, 4), 1, 9) == (2, 9, 4)


def test_what_is_exported_exists() -> None:
    assert all(hasattr(device_comm, name) for name in device_comm.__all__)
    assert len(set(device_comm.__all__)) == len(device_comm.__all__)
