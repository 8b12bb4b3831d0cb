"""Whether ranks have done the same, decided without processes."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.call_number import CollectiveLog, log_memory
from device_comm.operation import Operation
from device_comm.shm.signature import sign, signature_text, signature_with_sizes
from server.calls.pending_call import Difference, fatal_divergence, first_divergence
from server.errors import CallDivergedError
from shm_broadcast.layout import FINGERPRINT_ENTRIES
from shm_broadcast.state.fingerprint import Fingerprint
from tests.server.begun import begun

if TYPE_CHECKING:
    from coordinator.call_counts import GroupOperationCounts


def test_ranks_that_did_nothing_agree() -> None:
    assert first_divergence({}) is None
    assert first_divergence({0: (), 1: ()}) is None


def test_ranks_that_did_the_same_agree() -> None:
    same = begun((0, 1), all_reduce=3, barrier=1)
    assert first_divergence({0: same, 1: same}) is None


def test_a_collective_left_out_names_both_ranks_and_what_they_did() -> None:
    ours, theirs = (begun((0, 1), all_reduce=n, barrier=1) for n in (3, 2))
    found = first_divergence({0: ours, 1: theirs})
    assert found == Difference(
        "tp", (0, 1), ("began all_reduce (collective 3)", "began barrier (collective 3)")
    )
    ours, theirs = (begun((0, 1), all_reduce=n) for n in (3, 2))
    assert first_divergence({0: theirs, 1: ours}) == Difference(
        "tp", (0, 1), ("began 2 collectives", "began all_reduce (collective 3)")
    )


def test_a_rank_that_did_nothing_at_all_is_seen() -> None:
    found = first_divergence({0: (), 1: begun((0, 1), broadcast=1)})
    assert found == Difference(
        "tp", (0, 1), ("began no collective", "began broadcast from rank 0 (collective 1)")
    )


def test_another_verb_in_its_place_is_seen() -> None:
    found = first_divergence({0: begun((0, 1), all_reduce=1), 1: begun((0, 1), broadcast=1)})
    assert found is not None
    assert found.did == (
        "began all_reduce (collective 1)",
        "began broadcast from rank 0 (collective 1)",
    )


F32 = sign("all_reduce", torch.float32, (4,), ReduceOp.SUM)
UNLIKE = {
    "dtype": sign("all_reduce", torch.int32, (4,), ReduceOp.SUM),
    "shape": sign("all_reduce", torch.float32, (2, 2), ReduceOp.SUM),
    "reduction": sign("all_reduce", torch.float32, (4,), ReduceOp.MAX),
}


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("n_before", [0, 7, 20])
def test_a_collective_of_another_kind_is_named_with_the_odd_rank(what: str, n_before: int) -> None:
    before = (sign("barrier"),) * n_before
    same = begun((0, 1, 2), signatures=(*before, F32, F32))
    odd = begun((0, 1, 2), signatures=(*before, UNLIKE[what], F32))
    found = first_divergence({0: odd, 1: same, 2: same})
    number = n_before + 1
    assert found == Difference(
        "tp",
        (1, 0),
        (
            f"began {signature_text(F32)} (collective {number})",
            f"began {signature_text(UNLIKE[what])} (collective {number})",
        ),
    )


def test_another_root_or_dimension_differs() -> None:
    for verb in ("broadcast", "all_gather"):
        ours, theirs = (
            begun((0, 1), signatures=(sign(verb, torch.float32, (2, 2), None, place),))
            for place in (0, 1)
        )
        assert first_divergence({0: ours, 1: theirs}) is not None


def test_as_many_collectives_of_each_kind_in_another_order_differ() -> None:
    one, other = F32, UNLIKE["dtype"]
    rest = (sign("barrier"),) * 20
    ours, theirs = (
        begun((0, 1), signatures=(*pair, *rest)) for pair in ((one, other), (other, one))
    )
    assert first_divergence({0: ours, 1: ours}) is None
    assert first_divergence({0: ours, 1: theirs}) == Difference(
        "tp",
        (0, 1),
        ("began 22 collectives", "began 22 others: they differ before the last 8"),
    )


def test_sizes_that_all_ranks_must_give_alike_differ() -> None:
    def gathered(sizes: tuple[int, ...]) -> tuple[GroupOperationCounts, ...]:
        operation = Operation("all_gatherv", torch.ones(1), output_sizes=sizes, shape=(-1,))
        return begun((0, 1), signatures=(signature_with_sizes(operation),))

    assert first_divergence({0: gathered((1, 3)), 1: gathered((1, 3))}) is None
    assert first_divergence({0: gathered((1, 3)), 1: gathered((2, 2))}) == Difference(
        "tp",
        (0, 1),
        (
            "began all_gatherv float32[-1] (collective 1)",
            "began all_gatherv float32[-1] (collective 1), of other sizes",
        ),
    )


def test_parts_of_an_all_to_all_may_differ() -> None:
    def swapped(gives: tuple[int, ...], takes: tuple[int, ...]) -> tuple[GroupOperationCounts, ...]:
        operation = Operation(
            "all_to_all", torch.ones(4), source_sizes=gives, output_sizes=takes, shape=(-1,)
        )
        return begun((0, 1), signatures=(signature_with_sizes(operation),))

    assert first_divergence({0: swapped((1, 3), (1, 2)), 1: swapped((2, 2), (3, 2))}) is None


def test_groups_are_compared_apart() -> None:
    """Stages of a pipeline do different things; so do groups of one name and other ranks."""
    reports = {rank: begun((0, 1), all_reduce=2) for rank in (0, 1)}
    reports |= {rank: begun((2, 3), all_reduce=5) for rank in (2, 3)}
    assert first_divergence(reports) is None
    reports[3] = begun((2, 3), all_reduce=4)
    found = first_divergence(reports)
    assert found is not None
    assert found.ranks == (2, 3)


def test_groups_of_one_name_and_the_same_ranks_are_compared_apart() -> None:
    found = first_divergence(
        {
            0: begun((0, 1), number=0, barrier=1) + begun((0, 1), number=1, all_reduce=1),
            1: begun((0, 1), number=0, barrier=1, all_reduce=1),
        }
    )
    assert found is not None


def test_messages_are_compared_by_pair_and_direction() -> None:
    """Ranks 4 and 6 are 0 and 1 in their group."""
    sends = begun((4, 6), "pp", sent={1: 2}, received={1: 1})
    takes = begun((4, 6), "pp", sent={0: 1}, received={0: 2})
    assert first_divergence({4: sends, 5: (), 6: takes}) is None
    fewer = begun((4, 6), "pp", sent={0: 1}, received={0: 1})
    assert first_divergence({4: sends, 6: fewer}) == Difference(
        "pp", (4, 6), ("sent 2 messages to rank 6", "received 1 message from it")
    )
    silent = begun((4, 6), "pp", received={0: 2})
    assert first_divergence({4: sends, 6: silent}) == Difference(
        "pp", (6, 4), ("sent no messages to rank 4", "received 1 message from it")
    )


def test_what_a_member_did_is_not_known_is_not_compared() -> None:
    did = begun((0, 1, 2), all_reduce=1)
    assert first_divergence({0: did, 2: did}) is None
    assert first_divergence({0: did, 2: ()}) is not None


def tally(*signatures: bytes, group: int = 9) -> tuple[Fingerprint, ...]:
    """On the board: a member's collectives after four barriers."""
    log = CollectiveLog(log_memory(FINGERPRINT_ENTRIES))
    for each in (*(sign("barrier"),) * 4, *signatures):
        log.add(each)
    return (Fingerprint(group, bytes(log.memory)),)


WIDER = sign("all_reduce", torch.float32, (8,), ReduceOp.SUM)
NARROW_AND_WIDE = "began all_reduce SUM float32[4]", "began all_reduce SUM float32[8]"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("further", [0, 1, 3])
def test_whoever_ends_in_a_collective_that_differs_the_odd_rank_is_named(
    rank: int, further: int
) -> None:
    ahead = (F32,) * further
    rests = [() if each == rank else ahead for each in range(3)]
    fingerprints = {
        0: tally(WIDER, *rests[0]),
        1: tally(F32, *rests[1]),
        2: tally(F32, *rests[2]),
    }
    assert fatal_divergence(rank, "tp all_reduce", fingerprints) == Difference(
        "tp", (1, 0), NARROW_AND_WIDE
    )


def test_a_collective_behind_others_that_differ_is_not_the_difference() -> None:
    fingerprints = {0: tally(WIDER, F32), 1: tally(F32, F32)}
    assert fatal_divergence(0, "tp all_reduce", fingerprints) == Difference(
        "tp", (0, 1), (NARROW_AND_WIDE[0], f"{NARROW_AND_WIDE[0]}, after others")
    )


@pytest.mark.parametrize(
    ("operation", "other"),
    [
        ("tp all_reduce", tally(F32)),  # the same
        ("tp all_reduce", tally()),  # not as far
        ("tp all_reduce", tally(WIDER, F32, F32, F32, F32)),  # too far ahead
        ("tp all_reduce", tally(WIDER, group=8)),
        ("tp all_reduce", ()),
        ("tp barrier", tally(WIDER)),  # it has ended in another one
        ("dequeue", tally(WIDER)),
        ("", tally(WIDER)),
    ],
)
def test_a_rank_that_ends_where_nothing_differs_is_lost(
    operation: str, other: tuple[Fingerprint, ...]
) -> None:
    assert fatal_divergence(0, operation, {0: tally(F32), 1: other}) is None


def test_the_error_travels() -> None:
    error = CallDivergedError(3, "forward", "tp", (0, 1), ("began 1 barrier", "began no barrier"))
    again = pickle.loads(pickle.dumps(error))
    assert (
        str(again)
        == str(error)
        == ("call 3 (forward): in group tp, rank 0 began 1 barrier where rank 1 began no barrier")
    )
    assert (again.number, again.ranks, again.did) == (error.number, error.ranks, error.did)
