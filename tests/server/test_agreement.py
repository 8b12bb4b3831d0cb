"""Whether ranks have done the same, decided without processes."""

from __future__ import annotations

import pickle

from server.calls.agreement import Difference, first_divergence
from server.errors import CallDivergedError
from tests.server.begun import begun


def test_ranks_that_did_nothing_agree() -> None:
    assert first_divergence({}) is None
    assert first_divergence({0: (), 1: ()}) is None


def test_ranks_that_did_the_same_agree() -> None:
    same = begun((0, 1), all_reduce=3, barrier=1)
    assert first_divergence({0: same, 1: same}) is None


def test_a_collective_left_out_names_both_ranks_and_what_they_did() -> None:
    ours, theirs = (begun((0, 1), all_reduce=n, barrier=1) for n in (3, 2))
    found = first_divergence({0: ours, 1: theirs})
    assert found == Difference("tp", (0, 1), ("began 3 all_reduce", "began 2 all_reduce"))
    assert first_divergence({0: theirs, 1: ours}) == Difference(
        "tp", (0, 1), ("began 2 all_reduce", "began 3 all_reduce")
    )


def test_a_rank_that_did_nothing_at_all_is_seen() -> None:
    found = first_divergence({0: (), 1: begun((0, 1), broadcast=1)})
    assert found == Difference("tp", (0, 1), ("began no broadcast", "began 1 broadcast"))


def test_another_verb_in_its_place_is_seen() -> None:
    found = first_divergence({0: begun((0, 1), all_reduce=1), 1: begun((0, 1), broadcast=1)})
    assert found is not None
    assert found.did == (
        "began 1 all_reduce and no broadcast",
        "began no all_reduce and 1 broadcast",
    )


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


def test_the_error_travels() -> None:
    error = CallDivergedError(3, "forward", "tp", (0, 1), ("began 1 barrier", "began no barrier"))
    again = pickle.loads(pickle.dumps(error))
    assert (
        str(again)
        == str(error)
        == ("call 3 (forward): in group tp, rank 0 began 1 barrier where rank 1 began no barrier")
    )
    assert (again.number, again.ranks, again.did) == (error.number, error.ranks, error.did)
