"""The table over the group of one that ships, and what only a group of one does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from device_comm import ALL_VERBS, Capabilities, Communicator, LoopbackBackend, Operation, Work
from device_comm.operation import Verb
from shm_broadcast import Board, GroupAbortedError, GroupClosedError
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.suite import check_table
from tests.device_comm.whole_table import run_whole_table


def test_table() -> None:
    with Communicator(LoopbackBackend()) as comm:
        check_table([run_whole_table(comm, [torch.float32, torch.int64, torch.bool])])


def test_the_table_leaves_out_the_verbs_that_a_backend_has_not() -> None:
    backend, few = LoopbackBackend(), frozenset[Verb]({"barrier", "all_gather"})
    backend.capabilities = Capabilities("few", few)
    with Communicator(backend) as comm:
        assert run_whole_table(comm, verbs=few) == {}
        assert list(run_whole_table(comm)) == ["verbs"]


def test_the_table_has_rows_for_every_verb() -> None:
    rows = Counter(verb for case in (*reduce_cases(2), *move_cases(2)) for verb in case.verbs)
    assert {verb for verb in ALL_VERBS if rows[verb] < 4} == {"barrier"}
    assert any(case.name == "barrier_waits_for_the_late" for case in named_cases(2))


def test_results_are_the_input_itself() -> None:
    comm, x = Communicator(LoopbackBackend()), torch.ones(2, 2).t()
    for verb in (comm.all_reduce, comm.all_gather, comm.reduce_scatter, comm.gather, comm.scatter):
        assert verb(x) is x
        work = verb(x, async_op=True)
        assert isinstance(work, Work)
        assert work.is_completed()
        assert work.wait() is x
    out = torch.zeros(2, 2)
    assert comm.all_to_all(x, out=out) is out
    assert torch.equal(out, x)


def test_an_output_is_checked_as_in_a_larger_group() -> None:
    comm, x = Communicator(LoopbackBackend()), torch.ones(3, 2)
    for verb in (
        *(comm.all_reduce, comm.all_gather, comm.all_gatherv, comm.all_to_all, comm.broadcast),
        *(comm.reduce_scatter, comm.reduce_scatterv, comm.reduce, comm.gather, comm.scatter),
    ):
        with pytest.raises(ValueError, match="out has shape"):
            verb(x, out=torch.zeros(6))
        with pytest.raises(TypeError, match="the result is"):
            verb(x, out=torch.zeros(3, 2).double())
        with pytest.raises(ValueError, match="the output is expanded"):
            verb(x, out=torch.zeros(2).expand(3, 2))
    wide = torch.zeros(2).expand(3, 2)
    with pytest.raises(ValueError, match="the output is expanded"):
        comm.all_reduce_(wide)


def test_its_backend_copies_what_it_is_given() -> None:
    backend, x = LoopbackBackend(), torch.arange(6.0)
    for verb in ALL_VERBS - {"send", "recv", "barrier", "broadcast"}:
        y = torch.zeros(2, 3)
        backend.start(Operation(verb, x, y))
        assert y.view(-1).tolist() == x.tolist()
    backend.start(Operation("broadcast", x))
    backend.start(Operation("barrier"))


def test_it_closes_and_aborts_like_any_other() -> None:
    with Board.create(3, 1) as board:
        comm = Communicator(LoopbackBackend(watch=board, member=1, name="dp"))
        assert comm.all_reduce(torch.ones(1)).item() == 1
        assert board.member_status(1).operation == "dp all_reduce"
        assert repr(comm) == "<Communicator 'dp' rank 0 of 1 on cpu, loopback, open>"
        comm.abort("enough")
        assert "aborted" in repr(comm)
        with pytest.raises(GroupAbortedError, match="enough"):
            comm.barrier()
        comm.close()
        comm.close()
        with pytest.raises(GroupClosedError):
            comm.barrier()
