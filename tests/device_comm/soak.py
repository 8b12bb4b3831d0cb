"""Random collectives and messages of several groups, each checked against a local result.

All ranks draw the same steps from one seed. Some are asynchronous and waited for later, and single
ranks pause in between.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tests.device_comm.oracle import ops_for
from tests.fuzz.program import Step
from tests.fuzz.verbs import (
    TENSOR_VERBS,
    WITH_FORMS,
    Given,
    barrier,
    call_tensor_verb,
    receive,
    send,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm import Communicator

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64]
SIZES = [1, 2, 7, 64, 255, 1024, 5000, 20_000]
LARGE = [70_000, 200_001]
VERBS = sorted({*TENSOR_VERBS, "barrier", "message_tensor"})
for _each in ("all_reduce_hierarchical", "cpu_all_reduce", "combine"):  # of coordinators
    VERBS.remove(_each)
SALTS = 8
"""So many steps after each other have different values."""

UNDER_WAY = 6
"""How many asynchronous operations may wait to be waited for."""

Drawn = tuple[int, Step, int]
"""The group, what it does, and the rank that pauses before it, or -1."""


def draw(seed: int, count: int, group_sizes: Sequence[int]) -> list[Drawn]:
    dice = random.Random(seed)
    return [_draw(dice, group_sizes) for _ in range(count)]


def _draw(dice: random.Random, group_sizes: Sequence[int]) -> Drawn:
    group = dice.randrange(len(group_sizes))
    n = group_sizes[group]
    verb, dtype = dice.choice(VERBS), dice.choice(DTYPES)
    root, peer = dice.sample(range(n), 2)
    step = Step(
        verb,
        f"group {group}",
        dtype,
        (dice.choice(LARGE if dice.random() < 0.03 else SIZES),),
        form="async" if dice.random() < 0.3 else "plain",
        op=dice.choice(ops_for(dtype)),
        root=root,
        peer=peer,
        sizes=tuple(dice.randrange(200) for _ in range(n * n)),
    )
    if "in_place" in WITH_FORMS.get(verb, ()) and dice.random() < 0.2:
        step = replace(step, form="async_in_place" if step.run_on else "in_place")
    return group, step, dice.randrange(n) if dice.random() < 0.02 else -1


def run(steps: Sequence[Drawn], comms: Sequence[Communicator | None]) -> int:
    """Carry out this rank's share of ``steps``, by its end of each group; how many that were."""
    pending: deque[Callable[[], None]] = deque()
    done = 0
    for number, (group, step, late) in enumerate(steps):
        comm = comms[group]
        if comm is None:
            continue
        done += 1
        if comm.rank == late:
            time.sleep(0.002)
        try:
            check = _begin(comm, Given(step, number % SALTS, comm.rank, comm.world_size))
            if step.run_on:
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


def _begin(comm: Any, given: Given) -> Callable[[], None]:
    step = given.step
    if step.verb == "message_tensor":
        if given.rank == step.root:
            begun, check = send(comm, given), lambda _: None
        elif given.rank == step.peer:
            begun, check = receive(comm, given)
        else:
            return lambda: None
    else:
        begun, check = (barrier if step.verb == "barrier" else call_tensor_verb)(comm, given)
    return lambda: check(begun.wait() if step.run_on else begun)
