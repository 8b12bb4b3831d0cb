"""What a random program is: plain data that every rank reads the same, and a failure prints.

The members of a step's group carry it out; what it begins asynchronously, each ends at a later
place of its own. Inputs are computed from the number of the step and the rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch

from device_comm import ReduceOp
from tests.device_comm.oracle import strided

LAYOUTS = ("plain", "strided", "offset", "transposed", "expanded")


@dataclass(frozen=True)
class Step:
    """One verb of one group, for its members in their order.

    ``shape``: of one rank's input, before the verb's sizes are put in; ``sizes``: rows by rank, or
    by pair of ranks; ``later``: by rank, how many steps later what was begun is waited for;
    ``peer``: the receiver of a message; if not 0, the members of a `dispatch` exchange their sizes.
    """

    verb: str
    group: str
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (2,)
    layout: str = "plain"
    form: str = "plain"
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    peer: int = 0
    dim: int = 0
    sizes: tuple[int, ...] = ()
    later: tuple[int, ...] = ()

    def __str__(self) -> str:
        told = [
            f" {each.name}={getattr(self, each.name)}"
            for each in fields(self)[2:]
            if getattr(self, each.name) != each.default
        ]
        return "".join([self.verb, *told])

    @property
    def run_on(self) -> bool:
        return self.form.startswith("async")


@dataclass(frozen=True)
class Program:
    world_size: int
    steps: tuple[Step, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{self.world_size} ranks, groups {groups_of(self.world_size)}"]
        lines += [f"{number}: {step.group}.{step}" for number, step in enumerate(self.steps)]
        return "\n".join(lines)


def groups_of(n: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups that programs use, by the name of their kind: global ranks, some out of order.

    The halves are stateless groups, ``turned`` has a queue for broadcasts, and ``nodes`` is told
    that it stands on two hosts. The columns send dicts that the rows slice.
    """
    everyone = tuple(range(n))
    half = n // 2
    kinds = {
        "world": (everyone,),
        "halves": (everyone[::2], everyone[1::2]),
        "turned": ((*everyone[1:], 0),),
        "edges": ((0,), (n - 1, *everyone[1 : n - 1])),
        "nodes": (everyone,),
        "rows": (everyone[:half], everyone[half : 2 * half]),
        "columns": tuple((rank, rank + half) for rank in range(half)),
    }
    return {name: tuple(ranks for ranks in groups if ranks) for name, groups in kinds.items()}


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of ``x`` in another layout; of ``expanded`` only its first row, repeated."""
    if layout == "strided":
        return strided(x)
    if layout == "offset":
        wide = torch.zeros(x.numel() + 3, dtype=x.dtype)
        wide[3:] = x.flatten()
        return wide[3:].view(x.shape)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded" and x.dim() and x.shape[0] > 1:
        return x[:1].expand(x.shape)
    return x
