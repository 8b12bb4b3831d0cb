"""One table of verbs x dtypes x dims x ops x forms, over any communicator.

A case is a function of the communicator: it computes every rank's input and the result
by itself, so that ranks need not talk about it. To run all of it over another backend:

    def body(rank, n, path):
        with Communicator(MyBackend(...)) as comm:
            return run_whole_table(comm)  # of tests.device_comm.whole_table

    @pytest.mark.parametrize("n", [2, 3, 4])
    def test_table(n, store_path):
        check_table(run_ranks(n, body, store_path))  # of tests.ranks
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from device_comm import ALL_VERBS, Work
from tests.fuzz.program import Step
from tests.fuzz.verbs import Given, call_tensor_verb

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch

    from device_comm import Communicator
    from device_comm.operation import Verb


@dataclass(frozen=True)
class Case:
    name: str
    verbs: frozenset[str]
    dtype: torch.dtype
    body: Callable[[Communicator], None]


def verb_case(verb: str, *of: Any, **others: Any) -> Case:
    """A row for a `Step`, with the inputs and the result of random programs."""
    step = Step(verb, "", *of, **others)
    name = verb.removesuffix("_uneven")
    return Case(str(step), frozenset({name}), step.dtype, partial(_check_step, step))


def _check_step(step: Step, comm: Communicator) -> None:
    found, check = call_tensor_verb(comm, Given(step, 0, comm.rank, comm.world_size))
    if step.run_on:
        work = found
        assert isinstance(work, Work)
        found = work.wait()
        assert work.is_completed()
        assert work.wait() is found, "a second wait returns something else"
    check(found)


def run_table(
    comm: Communicator,
    cases: Callable[[int], Iterator[Case]],
    dtypes: Collection[torch.dtype] | None = None,
    verbs: frozenset[Verb] = ALL_VERBS,
) -> dict[str, str]:
    """Run the cases that ``comm`` offers; the failures by name, with their tracebacks.

    Whether it offers ``verbs``, and no other, is the first case.
    A wrong result does not stop the table: all ranks go on to the next case. Anything else
    than an AssertionError does: the ranks may be out of step.
    """
    failures: dict[str, str] = {}
    if (offered := comm.capabilities.verbs) != verbs:
        failures["verbs"] = f"lacking: {verbs - offered}, unexpected: {offered - verbs}"
    done = 0
    for case in cases(comm.world_size):
        if not case.verbs <= comm.capabilities.verbs:
            continue
        if dtypes is not None and case.dtype not in dtypes:
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
