"""Random collectives and messages, each checked against a result computed locally.

All ranks draw the same steps from one seed, so that each knows what the others give. Steps are of
all verbs, sizes and dtypes, in several groups of one process, some asynchronous and waited for
later, with pauses of single ranks in between.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.device_comm.oracle import ops_for, reduced, same, values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm import Communicator, ReduceOp

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SIZES = [1, 2, 7, 64, 255, 1024, 5000, 20_000]
LARGE = [70_000, 200_001]
SALTS = 8
UNDER_WAY = 6
"""How many asynchronous operations may wait to be waited for."""


@dataclass(frozen=True)
class Step:
    """One operation of one group.

    Attributes:
        group: which.
        verb: what.
        dtype: of the elements.
        count: elements, of each part where there are parts.
        op: for reductions.
        root: the root, or the sender.
        receiver: of a message.
        sizes: of parts, for uneven verbs.
        later: asynchronous.
        late: the rank in the group that pauses before it; -1: nobody.
        salt: makes its values differ from others.
    """

    group: int
    verb: str
    dtype: torch.dtype
    count: int
    op: ReduceOp
    root: int
    receiver: int
    sizes: tuple[int, ...]
    later: bool
    late: int
    salt: int


def draw(seed: int, count: int, group_sizes: Sequence[int]) -> list[Step]:
    """``count`` steps; the same on every rank."""
    dice = random.Random(seed)
    return [_draw(dice, salt, group_sizes) for salt in range(count)]


def _draw(dice: random.Random, salt: int, group_sizes: Sequence[int]) -> Step:
    group = dice.randrange(len(group_sizes))
    n = group_sizes[group]
    dtype = dice.choice(DTYPES)
    root, receiver = dice.sample(range(n), 2)
    return Step(
        group,
        dice.choice(list(VERBS)),
        dtype,
        dice.choice(LARGE if dice.random() < 0.03 else SIZES),
        dice.choice(ops_for(dtype)),
        root,
        receiver,
        tuple(dice.randrange(200) for _ in range(n)),
        dice.random() < 0.3,
        dice.randrange(n) if dice.random() < 0.02 else -1,
        salt % SALTS,
    )


def run(steps: Sequence[Step], comms: Sequence[Communicator | None]) -> int:
    """Carry out this rank's share of ``steps``; how many that were.

    Args:
        steps: what `draw` returned.
        comms: this rank's end of each group; None where it is no member.
    """
    pending: deque[Callable[[], None]] = deque()
    done = 0
    for number, step in enumerate(steps):
        comm = comms[step.group]
        if comm is None:
            continue
        done += 1
        if comm.rank == step.late:
            time.sleep(0.002)
        try:
            check = VERBS[step.verb](comm, step)
            if step.later:
                pending.append(check)
            else:
                check()
            while len(pending) > (0 if number % 50 == 0 else UNDER_WAY):
                pending.popleft()()
        except AssertionError as error:
            raise AssertionError(f"rank {comm.rank}, step {number}, {step}: {error}") from error
    while pending:
        pending.popleft()()
    return done


@lru_cache(maxsize=2_000)
def _values(rank: int, count: int, dtype: torch.dtype, salt: int) -> Tensor:
    """As `values`; nobody may change them."""
    return values(rank, (count,), dtype, salt)


def _inputs(comm: Communicator, step: Step, parts: int = 1) -> list[Tensor]:
    count = parts * step.count
    return [_values(rank, count, step.dtype, step.salt) for rank in range(comm.world_size)]


def _check(step: Step, answer: object, expected: Tensor | None, x: Tensor) -> Callable[[], None]:
    """Waits for the answer if need be, and compares; the input has to be what it was."""
    before = x.clone()

    def check() -> None:
        result = answer.wait() if hasattr(answer, "wait") else answer
        if expected is None:
            assert result is None
        else:
            assert isinstance(result, Tensor)
            same(result, expected)
        assert result is x or torch.equal(x, before), "the input was changed"

    return check


def _all_reduce(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step)
    x = inputs[comm.rank].clone()
    answer = comm.all_reduce(x, op=step.op, async_op=step.later)
    return _check(step, answer, reduced(inputs, step.op), x)


def _all_reduce_in_place(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step)
    x = inputs[comm.rank].clone()
    answer = comm.all_reduce_(x, op=step.op, async_op=step.later)
    return _check(step, answer, reduced(inputs, step.op), x)


def _all_gather(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step)
    x = inputs[comm.rank].clone()
    return _check(step, comm.all_gather(x, async_op=step.later), torch.cat(inputs), x)


def _all_gatherv(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = [_values(rank, size, step.dtype, step.salt) for rank, size in enumerate(step.sizes)]
    x = inputs[comm.rank].clone()
    answer = comm.all_gatherv(x, sizes=step.sizes, async_op=step.later)
    return _check(step, answer, torch.cat(inputs), x)


def _reduce_scatter(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step, comm.world_size)
    x = inputs[comm.rank].clone()
    expected = reduced(inputs, step.op).chunk(comm.world_size)[comm.rank]
    return _check(step, comm.reduce_scatter(x, op=step.op, async_op=step.later), expected, x)


def _reduce_scatterv(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = [
        _values(rank, sum(step.sizes), step.dtype, step.salt) for rank in range(comm.world_size)
    ]
    x = inputs[comm.rank].clone()
    expected = reduced(inputs, step.op).split(list(step.sizes))[comm.rank]
    answer = comm.reduce_scatterv(x, sizes=step.sizes, op=step.op, async_op=step.later)
    return _check(step, answer, expected, x)


def _all_to_all(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step, comm.world_size)
    x = inputs[comm.rank].clone()
    expected = torch.cat([each.chunk(comm.world_size)[comm.rank] for each in inputs])
    return _check(step, comm.all_to_all(x, async_op=step.later), expected, x)


def _all_to_all_uneven(comm: Communicator, step: Step) -> Callable[[], None]:
    """Rank r gives ``sizes[r] % (j + 2)`` elements to rank j."""
    n = comm.world_size
    table = [[size % (j + 2) for j in range(n)] for size in step.sizes]
    inputs = [_values(r, sum(table[r]), step.dtype, step.salt) for r in range(n)]
    x = inputs[comm.rank].clone()
    takes = [table[r][comm.rank] for r in range(n)]
    expected = torch.cat([inputs[r].split(table[r])[comm.rank] for r in range(n)])
    answer = comm.all_to_all(
        x, input_sizes=table[comm.rank], output_sizes=takes, async_op=step.later
    )
    return _check(step, answer, expected, x)


def _broadcast(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step)
    x = inputs[comm.rank].clone()
    answer = comm.broadcast(x, src=step.root, async_op=step.later)
    return _check(step, answer, inputs[step.root], x)


def _reduce(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step)
    x = inputs[comm.rank].clone()
    expected = reduced(inputs, step.op) if comm.rank == step.root else None
    answer = comm.reduce(x, dst=step.root, op=step.op, async_op=step.later)
    return _check(step, answer, expected, x)


def _gather(comm: Communicator, step: Step) -> Callable[[], None]:
    inputs = _inputs(comm, step)
    x = inputs[comm.rank].clone()
    expected = torch.cat(inputs) if comm.rank == step.root else None
    return _check(step, comm.gather(x, dst=step.root, async_op=step.later), expected, x)


def _scatter(comm: Communicator, step: Step) -> Callable[[], None]:
    whole = _values(step.root, comm.world_size * step.count, step.dtype, step.salt)
    expected = whole.chunk(comm.world_size)[comm.rank]
    x = whole.clone() if comm.rank == step.root else None
    out = torch.empty_like(expected)
    answer = comm.scatter(x, src=step.root, out=out, async_op=step.later)
    return _check(step, answer, expected, whole if x is None else x)


def _barrier(comm: Communicator, step: Step) -> Callable[[], None]:
    return _check(step, comm.barrier(async_op=step.later), None, torch.empty(0))


def _message(comm: Communicator, step: Step) -> Callable[[], None]:
    x = _values(step.root, step.count, step.dtype, step.salt)
    if comm.rank == step.root:
        answer = comm.isend(x, step.receiver) if step.later else comm.send(x, step.receiver)
        return _check(step, answer, None, x)
    if comm.rank == step.receiver:
        receive = comm.irecv if step.later else comm.recv
        return _check(step, receive(x.shape, x.dtype, step.root), x.clone(), x)
    return lambda: None


VERBS: dict[str, Callable[[Communicator, Step], Callable[[], None]]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_in_place,
    "all_gather": _all_gather,
    "all_gatherv": _all_gatherv,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatterv": _reduce_scatterv,
    "all_to_all": _all_to_all,
    "all_to_all uneven": _all_to_all_uneven,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "message": _message,
}
