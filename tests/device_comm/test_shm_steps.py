"""The steps of shared memory's collectives: both ends in one process, one move at a time."""

from __future__ import annotations

import importlib
import math
import re
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

from device_comm import Operation, ReduceOp, _native, call_number, reduce_in_rank_order
from device_comm.call_number import VERBS, OperationCounts
from device_comm.operation import NO_TENSOR, ROOTED
from device_comm.shm import channel, layout, signature
from device_comm.shm.collectives import Collective, GroupMembership, Status
from device_comm.shm.layout import GroupLayout
from device_comm.shm.signature import sign, signature_text
from shm_broadcast import Board, DivergenceError, Segment
from shm_broadcast import layout as board_layout
from shm_broadcast.ring import buffers
from tests.device_comm.oracle import REDUCED, ops_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


N = 2
SMALL = GroupLayout(N, 128, 1024, 3 * 1024, 256)
"""Small: 1,000 floats take several steps, or are shared out, and go round the rings."""

SENT = sign("broadcast", torch.float32, (3,))


class Ends:
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
        spans = source.data_ptr(), source.nbytes, output.data_ptr(), output.nbytes
        return self.steps[rank].begin(signature, *spans, source.itemsize, None, None, call, 0)

    def all_reduce(
        self, rank: int, output: Tensor, source: Tensor, op: ReduceOp = ReduceOp.SUM, call: int = 0
    ) -> int:
        return self.begin(
            rank, sign("all_reduce", source.dtype, source.shape, op), source, output, call
        )

    def finish(self) -> None:
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
def test_of_two_that_wait_for_no_rank_the_second_diverges(ends: Ends, verb: str) -> None:
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


@given(st.lists(st.tuples(st.sampled_from(sorted(SIZED)), st.integers(0, 1700)), max_size=30))
@example(
    list(
        zip(
            ["broadcasting", "exchanging", "exchanging", "gathering", "broadcasting"],
            [235, 563, 93, 33, 85],
            strict=True,
        )
    )
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
            if dtype.is_floating_point and count > 3:
                drawn[0, 1] = drawn[1, 2] = drawn[0, 3] = drawn[1, 3] = math.nan
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
                    torch.testing.assert_close(
                        output, expected, rtol=0, atol=0, equal_nan=True, msg=f"{op} {count}"
                    )


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
@pytest.mark.parametrize(("together", "step"), [(1 << 16, 1), (7, 5)], ids=["vectors", "scalars"])
def test_halves_of_every_bit_pattern_keep_their_bits(
    together: int, step: int, op: ReduceOp, flushed: bool
) -> None:
    patterns = np.arange(0, 1 << 16, step, dtype=np.uint16)
    is_nan = (patterns & 0x7FFF) > 0x7C00
    expected = np.where(is_nan, patterns | 0x0200, patterns)  # a NaN becomes a quiet one
    every = torch.from_numpy(patterns.view(np.float16))
    neutral = torch.full_like(every, -0.0 if op is ReduceOp.SUM else -float("inf"))
    ends = Ends()
    outputs = [torch.empty_like(every) for _ in range(N)]
    for begin in range(0, len(patterns), together):
        here = slice(begin, begin + together)
        for rank, x in enumerate((every, neutral)):
            ends.all_reduce(rank, outputs[rank][here], x[here], op)
        ends.finish()
    for output in outputs:
        assert_array_equal(output.numpy().view(np.uint16), expected)


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


# --- Shares of any sizes -------------------------------------------------------------------------

sizes = st.lists(st.integers(0, 700), min_size=N, max_size=N).filter(any)


def run(operation: Callable[[int], Operation]) -> None:
    ends = Ends()
    tasks = [
        Collective(
            ends.steps[rank],
            GroupMembership(ends.board, range(N), rank, ends.segment, ends.group),
            operation(rank),
        )
        for rank in range(N)
    ]
    done = [False] * N
    for _ in range(1000):
        for rank in range(N):
            done[rank] = done[rank] or tasks[rank].advance(0)
        if all(done):
            return
    raise AssertionError("they do not end")


def numbers(count: int, rank: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32) + 1000 * rank


@given(sizes, st.lists(sizes, min_size=N, max_size=N))
@settings(deadline=None, max_examples=60)
def test_uneven_shares_of_any_sizes(parts: list[int], table: list[list[int]]) -> None:
    """``table[r][s]`` elements go from rank r to rank s."""
    inputs = [numbers(size, rank) for rank, size in enumerate(parts)]
    whole = [torch.zeros(sum(parts)) for _ in range(N)]
    run(lambda rank: Operation("all_gatherv", inputs[rank], whole[rank], output_sizes=parts))
    for output in whole:
        assert torch.equal(output, torch.cat(inputs))

    terms = [numbers(sum(parts), rank) for rank in range(N)]
    shares = [torch.zeros(size) for size in parts]
    run(lambda rank: Operation("reduce_scatterv", terms[rank], shares[rank], source_sizes=parts))
    for share, expected in zip(shares, (terms[0] + terms[1]).split(parts), strict=True):
        assert torch.equal(share, expected)

    sent = [numbers(sum(row), rank) for rank, row in enumerate(table)]
    columns = [[row[rank] for row in table] for rank in range(N)]
    received = [torch.zeros(sum(column)) for column in columns]

    def exchange(rank: int) -> Operation:
        given = {"source_sizes": table[rank], "output_sizes": columns[rank]}
        return Operation("all_to_all", sent[rank], received[rank], **given)

    run(exchange)
    cut = [x.split(row) for x, row in zip(sent, table, strict=True)]
    for rank, output in enumerate(received):
        assert torch.equal(output, torch.cat([pieces[rank] for pieces in cut]))


@given(sizes, sizes)
@settings(deadline=None, max_examples=30)
def test_ranks_that_differ_about_any_sizes_use_no_data(ours: list[int], theirs: list[int]) -> None:
    if ours == theirs:
        return
    outputs = [torch.full((sum(each),), -1.0) for each in (ours, theirs)]

    def gather(rank: int) -> Operation:
        each = (ours, theirs)[rank]
        source = numbers(each[rank], rank)
        return Operation("all_gatherv", source, outputs[rank], output_sizes=each)

    with pytest.raises(DivergenceError, match="issued all_gatherv of"):
        run(gather)
    assert all(bool((output == -1).all()) for output in outputs)


def test_an_exchange_of_other_sizes_than_expected_uses_no_data() -> None:
    sizes = [([1, 2], [1, 3]), ([5, 1], [2, 1])]
    outputs = [torch.full((sum(received),), -1.0) for _, received in sizes]

    def exchange(rank: int) -> Operation:
        sent, received = sizes[rank]
        source = numbers(sum(sent), rank)
        return Operation(
            "all_to_all", source, outputs[rank], source_sizes=sent, output_sizes=received
        )

    with pytest.raises(DivergenceError) as caught:
        run(exchange)
    assert "all_to_all that receives 3 elements from that rank" in str(caught.value)
    assert "all_to_all that sends 5 elements to rank 0" in str(caught.value)
    assert bool((outputs[0] == -1).all())


# --- Layouts and signatures, and what C has to agree with ----------------------------------------

HEADER = Path(layout.__file__).parents[1] / "native" / "group_layout.h"
SHARED: list[tuple[object, str, str, str]] = [
    (
        layout,
        "GROUP_",
        "GROUP_",
        "RANKS INSIDE_BYTES WHOLE_BYTES STEP_BYTES RING_BYTES SLOTS RINGS",
    ),
    (layout, "", "", "RING_STEPS RANK_LINES RANK_STRIDE RANK_DONE RANK_READS BUFFERS SLOT_HEADER"),
    (layout, "", "", "SLOT_ARRIVED SLOT_SIGNATURE PIECE_ALIGN"),
    (signature, "SIGNATURE_", "", "COMPARED CALL"),
    (signature, "", "", "SHAPE_DIMS NO_OP"),
    (board_layout, "", "", "LOG_COUNT LOG_ENTRIES COLLECTIVE_WORD COLLECTIVE_SIGNATURE"),
    (board_layout, "", "", "COLLECTIVE_STRIDE STATE_IDLE STATE_BUSY"),
    (call_number, "", "", "CALL_ENTRIES"),
    (buffers, "", "", "RECYCLED_BYTES"),
    (channel, "PIPE_", "", "POSTED TAKEN READS RING INSIDE RING_BYTES PIECE_BYTES RESERVED_BYTES"),
    (channel, "PIPE_", "", "SMALL_BYTES HEADER_BYTES AT_ONCE_BYTES"),
]
"""Constants: a module, the prefixes of their names in C and in it, and the rest of the names."""


def test_the_extension_was_built_and_agrees() -> None:
    native: Any = importlib.import_module("device_comm._native")
    for module, in_c, here, names in SHARED:
        for name in names.split():
            assert getattr(native, in_c + name) == getattr(module, here + name), name
    assert signature.SIGNATURE.size == native.SIGNATURE_BYTES
    assert native.SIGNATURE_CHUNK == signature.COMPARED
    assert native.COLLECTIVE_SIGNATURE + signature.SIGNATURE.size == native.COLLECTIVE_STRIDE
    codes = re.findall(r"\bVERB_(\w+),", HEADER.read_text())
    assert codes == [verb.upper() for verb in VERBS]
    # C takes every code from that of broadcast on for a verb with a root.
    assert {*VERBS[VERBS.index("broadcast") :]} == {*ROOTED}
    for dtype, code in signature.DTYPE_CODES.items():
        name = str(dtype).removeprefix("torch.").upper()
        if dtype not in (torch.uint64, torch.complex32) and not name.startswith("FLOAT8"):
            assert getattr(native, f"DTYPE_{name}") == code
    for status in Status:
        assert getattr(native, f"STEPS_{status.name}") == status


@given(st.integers(1, 300))
def test_nothing_overlaps_and_the_footprint_is_as_documented(n: int) -> None:
    group = GroupLayout.for_ranks(n)
    assert group.rank_line(n) == group.pipe(0, 0)
    assert group.pipe(n - 1, n - 1) + layout.PIPE_STRIDE <= group.slots
    assert group.slots % 4096 == 0
    slot = layout.SLOT_HEADER + group.inside_bytes
    assert group.slot(0, 0) == group.slots
    assert group.slot(1, 0) == group.slot(0, n - 1) + slot
    assert group.slot(1, n - 1) + slot <= group.ring(0)
    assert group.ring(0) % 4096 == group.ring_bytes % 4096 == 0
    assert group.ring_bytes >= layout.RING_STEPS * group.step_bytes
    assert group.step_bytes // n >= layout.PIECE_ALIGN
    assert group.whole_bytes <= group.step_bytes
    documented = n * (group.ring_bytes + 2 * (group.inside_bytes + 64) + 64 * (n + 1))
    assert documented <= group.size <= documented + 128 + 2 * 4096


SIGNED = {
    "barrier": sign("barrier"),
    "all_reduce SUM float32[2, 3]": sign("all_reduce", torch.float32, (2, 3), ReduceOp.SUM),
    "broadcast bool[7] from rank 3": sign("broadcast", torch.bool, (7,), place=3),
    "all_gather float8_e5m2[24, 5, 6, 7, 8] along dim 1": sign(
        "all_gather", torch.float8_e5m2, (2, 3, 4, 5, 6, 7, 8), place=1
    ),
    "all_gatherv other[2, -1] along dim 1": sign("all_gatherv", torch.qint8, (2, -1), place=1),
    "reduce MAX int64[1] to rank 1, step 5": signature.with_chunk(
        sign("reduce", torch.int64, (1,), ReduceOp.MAX, 1), 4
    ),
}


@pytest.mark.parametrize("words", SIGNED)
def test_signatures_name_the_operation(words: str) -> None:
    assert len(SIGNED[words]) == 56
    assert signature_text(SIGNED[words]) == words
