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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from device_comm import ALL_VERBS, Communicator, Work
from device_comm.operation import Verb
from tests.device_comm.oracle import same

Body = Callable[..., None]
FORMS = ["plain", "out", "strided_out", "async"]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: unique.
        verbs: what the communicator must offer.
        dtype: likewise.
        body: raises AssertionError if the communicator is wrong.
    """

    name: str
    verbs: frozenset[str]
    dtype: torch.dtype
    body: Callable[[Communicator], None]


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


def strided(x: Tensor) -> Tensor:
    """The values of ``x`` in a tensor that is not contiguous."""
    wide = torch.zeros((*x.shape, 2), dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


def apply(
    verb: Callable[..., object],
    form: str,
    x: Tensor | None,
    expected: Tensor | None,
    device: torch.device,
    **options: object,
) -> None:
    """Call ``verb`` in one of `FORMS`; check its result, and what it must leave alone.

    ``expected`` is None where the verb returns None, as on ranks that are not the root.
    """
    before = None if x is None else x.clone()
    out = None
    if form.endswith("out") and expected is not None:
        out = torch.zeros(expected.shape, dtype=expected.dtype, device=device)
        out = strided(out) if form == "strided_out" else out
        options = {**options, "out": out}
    if form == "async":
        work = verb(x, async_op=True, **options)
        assert isinstance(work, Work)
        result = work.wait()
        assert work.is_completed()
        assert work.wait() is result, "a second wait returns something else"
    else:
        result = verb(x, **options)
    if expected is None:
        assert result is None
    else:
        assert isinstance(result, Tensor)
        assert out is None or result is out, "the result is not out"
        same(result, expected)
        assert out is not None or result is x or result.is_contiguous()
        if x is not None and result is not x:
            shared = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert not shared or not result.numel(), "the result shares memory with the input"
    if x is not None and before is not None:
        same(x, before.cpu())
