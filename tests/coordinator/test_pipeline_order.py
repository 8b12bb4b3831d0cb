"""In which order stages work: by hand, and that every order can be run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.pipeline import Action, Order, forward_only, gpipe, one_f_one_b
from coordinator.pipeline.expect import check
from coordinator.pipeline.message import NEXT, from_dict, to_dict
from coordinator.tree import flatten, unflatten


def shown(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


def test_the_picture_in_the_docstring() -> None:
    assert shown(gpipe(0, 3, 4)) == "0 1 2 3 [0] [1] [2] [3]"
    assert [shown(one_f_one_b(stage, 3, 4)) for stage in range(3)] == [
        "0 1 2 [0] 3 [1] [2] [3]",
        "0 1 [0] 2 [1] 3 [2] [3]",
        "0 [0] 1 [1] 2 [2] 3 [3]",
    ]
    assert shown(forward_only(1, 2, 3)) == "0 1 2"


def test_fewer_micro_batches_than_stages() -> None:
    assert shown(one_f_one_b(0, 4, 2)) == "0 1 [0] [1]"


@pytest.mark.parametrize("arguments", [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
@pytest.mark.parametrize("order", [gpipe, one_f_one_b, forward_only])
def test_what_cannot_be_is_refused(order: Order, arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"stage|micro-batch"):
        order(*arguments)


@given(st.integers(1, 6), st.integers(1, 12), st.sampled_from([gpipe, one_f_one_b]))
def test_every_order_runs_to_its_end(stages: int, micro_batches: int, order: Order) -> None:
    """Simulated: an action starts once its neighbour has done its part."""
    waiting = [order(stage, stages, micro_batches) for stage in range(stages)]
    done: set[tuple[int, Action]] = set()
    kept = [0] * stages
    most = [0] * stages
    while any(waiting):
        before = len(done)
        for stage, actions in enumerate(waiting):
            if not actions:
                continue
            action = actions[0]
            needs = stage + 1 if action.is_backward else stage - 1
            own = Action(action.micro_batch)
            if 0 <= needs < stages and (needs, action) not in done:
                continue
            assert not action.is_backward or (stage, own) in done
            done.add((stage, actions.pop(0)))
            kept[stage] += -1 if action.is_backward else 1
            most[stage] = max(most[stage], kept[stage])
        assert len(done) > before, "deadlock"
    assert len(done) == 2 * stages * micro_batches
    if order is one_f_one_b:
        assert most == [min(stages - stage, micro_batches) for stage in range(stages)]


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
def test_any_tree_comes_back(tree: object) -> None:
    leaves, structure = flatten(tree)
    assert unflatten(structure, leaves) == tree
    assert from_dict(to_dict(tree, NEXT)) == tree


def test_expected_shapes() -> None:
    import torch

    tree = {"a": torch.zeros(4, 4), "b": [torch.zeros(2), "text"]}
    check(torch.zeros(4, 4), (4, 4), torch.float32)
    check(torch.zeros(4, 4), torch.Size((4, 4)), None)
    check(torch.zeros(()), (), None)
    check(tree, [(4, 4), (2,)], torch.float32)
    check(None, (4, 4), None)
    for shapes, dtype in (((4, 4), None), ([(4, 4)], None), (None, torch.int64)):
        with pytest.raises(ValueError, match="arrived"):
            check(tree, shapes, dtype)
