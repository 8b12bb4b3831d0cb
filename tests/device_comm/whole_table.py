"""The table of `tests.device_comm.suite` with all of its cases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm import ALL_VERBS
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.suite import run_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

    from device_comm import Communicator
    from device_comm.operation import Verb
    from tests.device_comm.suite import Case


def run_whole_table(
    comm: Communicator,
    dtypes: Collection[torch.dtype] | None = None,
    verbs: frozenset[Verb] = ALL_VERBS,
) -> dict[str, str]:
    """What fails, by case; ``dtypes``: of reductions and moves, None: all. Collective: yes."""

    def cases(n: int) -> Iterator[Case]:
        for case in (*reduce_cases(n), *move_cases(n)):
            if dtypes is None or case.dtype in dtypes:
                yield case
        yield from named_cases(n)

    return run_table(comm, cases, verbs=verbs)
