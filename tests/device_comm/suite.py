"""One table of verbs x dtypes x dims x ops x forms, over any communicator.

To run it over another backend:

    def body(rank, n, path):
        with Communicator(MyBackend(...)) as comm:
            return run_whole_table(comm)

    @pytest.mark.parametrize("n", [2, 3, 4])
    def test_table(n, store_path):
        check_table(run_ranks(n, body, store_path))  # of tests.ranks
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from device_comm import ALL_VERBS
from tests.device_comm.cases import move_cases, reduce_cases
from tests.device_comm.cases_named import named_cases

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from device_comm import Communicator
    from device_comm.operation import Verb


def run_whole_table(
    comm: Communicator,
    dtypes: Collection[torch.dtype] | None = None,
    verbs: frozenset[Verb] = ALL_VERBS,
) -> dict[str, str]:
    """Run the cases that ``comm`` offers; the failures by name, with their tracebacks.

    ``dtypes``: of reductions and moves, None: all. Whether it offers ``verbs``, and no other, is
    the first case. A wrong result does not stop the table: all ranks go on to the next case.
    Anything else than an AssertionError does: the ranks may be out of step.
    """
    failures: dict[str, str] = {}
    if (offered := comm.capabilities.verbs) != verbs:
        failures["verbs"] = f"lacking: {verbs - offered}, unexpected: {offered - verbs}"
    n, done = comm.world_size, 0
    typed = [
        each
        for each in (*reduce_cases(n), *move_cases(n))
        if dtypes is None or each.dtype in dtypes
    ]
    for case in (*typed, *named_cases(n)):
        if not case.verbs <= comm.capabilities.verbs:
            continue
        done += 1
        try:
            case.body(comm)
        except AssertionError:
            failures[case.name] = traceback.format_exc()
        except Exception:  # noqa: BLE001 - told, with the rest of the table left out
            failures[case.name] = traceback.format_exc()
            break
    if not done:
        failures["table"] = "no case was run"
    return failures


def check_table(failures_by_rank: Sequence[dict[str, str]]) -> None:
    """Fail, naming every case that failed on any rank, with the first tracebacks."""
    failed = {
        f"rank {rank}: {name}": text
        for rank, failures in enumerate(failures_by_rank)
        for name, text in failures.items()
    }
    if failed:
        shown = "\n".join(f"{name}\n{text}" for name, text in list(failed.items())[:5])
        names = "\n".join(failed)
        raise AssertionError(f"{len(failed)} cases failed:\n{names}\n\n{shown}")
