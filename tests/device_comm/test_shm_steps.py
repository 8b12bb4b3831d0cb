"""The steps of `ShmBackend` by hand: both ends in one process, one move at a time."""

from __future__ import annotations

import shutil
import subprocess
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from torch import Tensor
from torch.overrides import TorchFunctionMode

from device_comm import ReduceOp, _native, reduce_in_rank_order
from device_comm.call_number import VERBS, OperationCounts
from device_comm.operation import NO_TENSOR
from device_comm.shm import layout
from device_comm.shm.collectives import Status
from device_comm.shm.layout import GroupLayout
from device_comm.shm.signature import sign, signature_text
from shm_broadcast import Board, Segment
from tests.device_comm.oracle import REDUCED, ops_for, reduced, same, values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N = 2
SMALL = GroupLayout(N, 128, 1024, 3 * 1024, 256)
"""Small: 1,000 floats take several steps, or are shared out, and go round the rings."""
SENT = sign("broadcast", torch.float32, (3,))


class Ends:
    """Both ranks' steps, on one segment."""

    def __init__(self, group: GroupLayout = SMALL) -> None:
        self.board = Board.create(N, 0)
        self.segment = Segment.create(group.size, "test")
        group.write(self.segment.words)
        self.group = group
        self.steps = [self.made(rank, self.board.slot_offset(rank)) for rank in range(N)]

    def made(self, rank: int, slot: int) -> _native.Comm:
        return _native.Comm(
            self.segment.memory,
            self.board.memory,
            rank,
            slot,
            tuple(self.board.eventcount_offset(member) for member in range(N)),
            (*VERBS, "send", "recv"),
            torch.Tensor,
            ReduceOp,
            lambda shape, like: like.new_empty(shape),
            OperationCounts(N).log.memory,
            array("I", [0]) * (1 + 2 * N),
            self.board.history,
            "test",
            rank == 1,
            True,
        )

    def begin(
        self,
        rank: int,
        signature: bytes,
        source: Tensor = NO_TENSOR,
        output: Tensor = NO_TENSOR,
        call: int = 0,
    ) -> int:
        """Begin a collective at a rank; return its `Status`."""
        spans = source.data_ptr(), source.nbytes, output.data_ptr(), output.nbytes
        return self.steps[rank].begin(signature, *spans, source.itemsize, None, None, call, 0)

    def all_reduce(
        self, rank: int, output: Tensor, source: Tensor, op: ReduceOp = ReduceOp.SUM, call: int = 0
    ) -> int:
        return self.begin(
            rank, sign("all_reduce", source.dtype, source.shape, op), source, output, call
        )

    def finish(self) -> None:
        """Advance both until both are done."""
        for _ in range(10_000):
            if [each.advance(0) for each in self.steps] == [Status.DONE, Status.DONE]:
                return
        raise AssertionError("they do not end")

    def arrived(self, buffer: int, rank: int) -> int:
        return self.segment.words.load64(self.group.slot(buffer, rank))

    def done(self, rank: int) -> int:
        return self.segment.words.load64(self.group.rank_line(rank) + layout.RANK_DONE)


Begun = tuple[Tensor, Tensor]
"""The output, and what it has to be."""


def reducing(ends: Ends, rank: int, inputs: list[Tensor], x: Tensor) -> Begun:
    output = torch.zeros_like(x)
    ends.all_reduce(rank, output, x)
    return output, inputs[0] + inputs[1]


def gathering(ends: Ends, rank: int, inputs: list[Tensor], x: Tensor) -> Begun:
    output = torch.zeros(N * len(x))
    ends.begin(rank, sign("all_gather", x.dtype, x.shape), x, output)
    return output, torch.cat(inputs)


def exchanging(ends: Ends, rank: int, inputs: list[Tensor], x: Tensor) -> Begun:
    output = torch.zeros_like(x)
    ends.begin(rank, sign("all_to_all", x.dtype, x.shape), x, output)
    return output, torch.cat([each.chunk(N)[rank] for each in inputs if len(x)] or [x])


def broadcasting(ends: Ends, rank: int, inputs: list[Tensor], x: Tensor) -> Begun:
    output = x.clone()
    broadcast(ends, rank, sign("broadcast", x.dtype, x.shape, place=1), output, 1)
    return output, inputs[1]


def broadcast(ends: Ends, rank: int, signature: bytes, x: Tensor, root: int) -> int:
    return ends.begin(rank, signature, *((x,) if rank == root else (NO_TENSOR, x)))


SIZED = {each.__name__: each for each in (reducing, gathering, exchanging, broadcasting)}


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_a_rank_waits_for_the_arrival_and_names_who_is_missing(ends: Ends) -> None:
    first = ends.steps[0]
    assert ends.begin(0, sign("barrier")) == Status.BLOCKED
    assert not first.ready()
    assert first.missing() == [1]
    assert ends.arrived(1, 0) == 1
    assert ends.done(0) == 0
    assert ends.begin(1, sign("barrier")) == Status.DONE
    assert ends.done(1) == 1
    assert first.ready()
    assert first.advance(0) == Status.DONE


def test_two_calls_at_a_time_are_refused(ends: Ends) -> None:
    """As two threads make them, or a signal handler in the middle of one."""
    ends.begin(0, sign("barrier"))
    with pytest.raises(RuntimeError, match="another thread is in a call of this group"):
        ends.begin(0, sign("barrier"))


class Begins(TorchFunctionMode):
    """Begins a call as soon as torch is asked something, as another thread may."""

    def __init__(self, begin: Callable[[], object]) -> None:
        super().__init__()
        self.begin = begin

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.begin()
        return func(*args, **(kwargs or {}))


def test_a_call_that_begins_while_another_reads_its_tensor_is_not_overwritten() -> None:
    ends = Ends()
    x = torch.ones(4)
    with Begins(lambda: ends.begin(0, sign("barrier"))):
        assert ends.steps[0].all_reduce(x, ReduceOp.SUM, None) is NotImplemented
    ends.begin(1, sign("barrier"))
    ends.finish()


@pytest.mark.parametrize("count", [3, 200], ids=["in slots", "in rings"])
def test_a_root_may_run_two_steps_ahead_and_no_more(ends: Ends, count: int) -> None:
    first = ends.steps[0]
    sent = [torch.full((count,), float(i)) for i in range(3)]
    for x in sent[:2]:
        assert broadcast(ends, 0, SENT, x, 0) == Status.DONE
    assert broadcast(ends, 0, SENT, sent[2], 0) == Status.BLOCKED
    assert first.missing() == [1]
    assert not first.ready()
    got = torch.zeros(count)
    assert broadcast(ends, 1, SENT, got, 0) == Status.DONE
    assert torch.equal(got, sent[0])
    assert first.ready()
    assert first.advance(0) == Status.DONE
    for expected in sent[1:]:
        assert broadcast(ends, 1, SENT, got, 0) == Status.DONE
        assert torch.equal(got, expected)


def test_ranks_that_diverge_find_out_before_data_is_used(ends: Ends) -> None:
    x, outputs = torch.ones(3), [torch.zeros(3), torch.zeros(6)]
    assert ends.all_reduce(0, outputs[0], x) == Status.BLOCKED
    assert ends.steps[0].divergent() is None
    gathering = sign("all_gather", x.dtype, x.shape)
    assert ends.begin(1, gathering, x, outputs[1]) == Status.DIVERGED
    assert ends.steps[0].ready()
    assert ends.steps[0].advance(0) == Status.DIVERGED
    found = ends.steps[0].divergent()
    assert found is not None
    assert found[0] == 1
    assert not outputs[0].any()
    assert not outputs[1].any()


def test_the_same_operation_of_two_calls_is_not_taken_for_one(ends: Ends) -> None:
    """Through chunks as well, each of which has the number."""
    for size in (3, 1000):
        x, outputs = torch.ones(size), [torch.zeros(size), torch.zeros(size)]
        assert ends.all_reduce(0, outputs[0], x, call=3) == Status.BLOCKED
        assert ends.all_reduce(1, outputs[1], x, call=4) == Status.DIVERGED
        assert ends.steps[0].advance(0) == Status.DIVERGED
        found = ends.steps[0].divergent()
        assert found is not None
        assert signature_text(found[1]) == f"all_reduce SUM float32[{size}] in call 3"
        assert signature_text(found[2]) == f"all_reduce SUM float32[{size}] in call 4"
        assert not outputs[0].any()
        assert not outputs[1].any()
        ends = Ends()


@pytest.mark.parametrize("verb", ["broadcast", "reduce"])
def test_of_two_that_wait_for_nobody_the_second_finds_out(ends: Ends, verb: str) -> None:
    """Both think that they are the root of a broadcast, or that the other is that of a reduce."""
    mine, x = [0, 1] if verb == "broadcast" else [1, 0], torch.ones(3)
    op = ReduceOp.SUM if verb == "reduce" else None
    said = [sign(verb, x.dtype, x.shape, op, place=root) for root in mine]
    assert ends.begin(0, said[0], x) == Status.DONE
    assert ends.begin(1, said[1], x) == Status.DIVERGED
    found = ends.steps[1].divergent()
    assert found is not None
    rank, ours, theirs = found
    assert rank == 0
    assert (signature_text(ours)[-1], signature_text(theirs)[-1]) == (str(mine[1]), str(mine[0]))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64, 65, 255, 256, 257, 512, 1000, 1024, 3333])
@pytest.mark.parametrize("in_place", [True, False])
def test_all_reduce_of_every_size(ends: Ends, count: int, in_place: bool) -> None:
    for _ in range(3):
        inputs = [values(rank, (count,), torch.float32) for rank in range(N)]
        outputs = [x.clone() if in_place else torch.zeros(count) for x in inputs]
        for rank in range(N):
            source = outputs[rank] if in_place else inputs[rank]
            ends.all_reduce(rank, outputs[rank], source)
        ends.finish()
        for output in outputs:
            same(output, reduced(inputs, ReduceOp.SUM))


@given(st.lists(st.tuples(st.sampled_from(sorted(SIZED)), st.integers(0, 700)), max_size=30))
@example(
    [
        ("broadcasting", 235),
        ("exchanging", 563),
        ("exchanging", 93),
        ("gathering", 33),
        ("broadcasting", 85),
    ]
)  # the last payload fits behind the others, and a step does not
@settings(max_examples=60)
def test_any_sizes_after_each_other_arrive(asked: list[tuple[str, int]]) -> None:
    """Inside slots and through rings, which begin anew at other places each time."""
    ends = Ends()
    for turn, (verb, count) in enumerate(asked):
        inputs = [torch.arange(N * count, dtype=torch.float32) + rank + turn for rank in (0, 1)]
        outputs, expected = [], []
        for rank, x in enumerate(inputs):
            output, right = SIZED[verb](ends, rank, inputs, x)
            outputs.append(output)
            expected.append(right)
        ends.finish()
        for output, right in zip(outputs, expected, strict=True):
            assert torch.equal(output, right), turn


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reductions_of_every_dtype_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    for op in ops_for(dtype):
        for count in (1, 31, 700):
            drawn = torch.randn(N, count, generator=generator, dtype=wide) * 40
            inputs = [
                each.abs().to(dtype) if not dtype.is_signed else each.to(dtype) for each in drawn
            ]
            expected = torch.zeros(count, dtype=dtype)
            reduce_in_rank_order(inputs, op, expected)
            ends = Ends()
            outputs = [torch.zeros(count, dtype=dtype) for _ in range(N)]
            for rank in range(N):
                ends.all_reduce(rank, outputs[rank], inputs[rank], op)
            ends.finish()
            for output in outputs:
                if dtype.is_complex and op is not ReduceOp.SUM:
                    torch.testing.assert_close(output, expected)
                else:
                    assert torch.equal(output, expected), (dtype, op, count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_of_every_bit_pattern_add_like_torch(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    other = every.flip(0).contiguous()
    ends = Ends()
    outputs = [torch.empty_like(every) for _ in range(N)]
    for rank, x in enumerate((every, other)):
        ends.all_reduce(rank, outputs[rank], x)
    ends.finish()
    expected = (every.float() + other.float()).to(dtype)
    for output in outputs:
        assert torch.equal(output.isnan(), expected.isnan())
        finite = ~expected.isnan()
        assert torch.equal(output[finite], expected[finite])


@pytest.fixture(params=[False, True], ids=["as they are", "flushed"])
def flushed(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether this thread's arithmetic takes subnormal numbers for zero."""
    assert torch.set_flush_denormal(request.param)
    yield request.param
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
@pytest.mark.parametrize("together", [1 << 16, 7], ids=["in vectors", "one by one"])
def test_halves_of_every_bit_pattern_keep_their_bits(
    together: int, op: ReduceOp, flushed: bool
) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    is_nan = (patterns & 0x7FFF) > 0x7C00
    expected = np.where(is_nan, patterns | 0x0200, patterns)  # a NaN becomes a quiet one
    every = torch.from_numpy(patterns.view(np.float16))
    neutral = torch.full_like(every, -0.0 if op is ReduceOp.SUM else -float("inf"))
    ends = Ends()
    outputs = [torch.empty_like(every) for _ in range(N)]
    for begin in range(0, 1 << 16, together):
        here = slice(begin, begin + together)
        for rank, x in enumerate((every, neutral)):
            ends.all_reduce(rank, outputs[rank][here], x[here], op)
        ends.finish()
    for output in outputs:
        assert_array_equal(output.numpy().view(np.uint16), expected)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_nan_wins(op: ReduceOp) -> None:
    nan = float("nan")
    inputs = [torch.tensor([nan, 1.0, nan]), torch.tensor([1.0, nan, nan])]
    ends = Ends()
    outputs = [torch.zeros(3) for _ in range(N)]
    for rank in range(N):
        ends.all_reduce(rank, outputs[rank], inputs[rank], op)
    ends.finish()
    for output in outputs:
        assert output.isnan().all()


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("SLOTS", value) for value in (0, 128, SMALL.slots + 1, HUGE)),
        *(("INSIDE_BYTES", value) for value in (3, SMALL.size, HUGE)),
        *(("RINGS", value) for value in (0, SMALL.slots, SMALL.ring(0) + 1, SMALL.size, HUGE)),
        *(("RING_BYTES", value) for value in (0, 3 * 1024 - 64, SMALL.ring_bytes + 1, HUGE)),
        *(("STEP_BYTES", value) for value in (0, 64 * N - 1, SMALL.ring_bytes // 3 + 1, HUGE)),
    ],
)
def test_the_extension_refuses_memory_that_is_not_a_groups(word: str, value: int) -> None:
    ends = Ends()
    ends.segment.words.store64(getattr(layout, f"GROUP_{word}"), value)
    with pytest.raises(ValueError, match=r"a (slot|ring) does not lie in the memory given"):
        ends.made(0, ends.board.slot_offset(0))


@pytest.mark.parametrize("slot", [-128, -8, 4, 1 << 40])
def test_a_slot_that_is_not_on_the_board_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match="the slot on the board does not lie in the memory given"):
        Ends().made(0, slot)


def test_collectives_that_cannot_be_are_refused_by_the_extension(ends: Ends) -> None:
    barrier = sign("barrier")
    bitwise = sign("all_reduce", torch.float32, (3,), ReduceOp.BOR)
    far = sign("broadcast", torch.float32, (3,), place=N)
    for wrong in (b"short", b"\x7f" + barrier[1:], far, bitwise):
        with pytest.raises(ValueError, match=r"wrong length|no such verb|no reduction"):
            ends.begin(0, wrong)
    uneven = sign("all_gatherv", torch.float32, (-1,))
    for sizes, error in (((1,), ValueError), ((1, -1), OverflowError), ((1, "1"), TypeError)):
        with pytest.raises(error):
            ends.steps[0].begin(uneven, 0, 0, 0, 0, 4, None, sizes, 0, 0)
    assert not ends.steps[0].under_way


EMPTY = """
#include "way.h"
int main(void) {
    char to[1] = {1};
    for (int past = 0; past < 2; past++) {
        way_begin_with(past, true);
        gc_way way = way_new();
        way_copy(&way, WAYS, to, 0, 0);
    }
    return to[0] - 1;
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_an_empty_tensor_without_memory_is_not_copied(tmp_path: Path) -> None:
    """``memcpy`` may not be passed NULL, as UndefinedBehaviorSanitizer reports."""
    root, program = Path(__file__).parents[2], tmp_path / "program"
    sources = [root / "shm_broadcast/native" / name for name in ("way.c", "stream.c")]
    (tmp_path / "main.c").write_text(EMPTY)
    flags = "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{sources[0].parent}"
    subprocess.run(["gcc", *flags, tmp_path / "main.c", *sources, "-o", program], check=True)
    subprocess.run([program], check=True)
