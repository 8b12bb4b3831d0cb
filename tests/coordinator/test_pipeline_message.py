"""A tree as a tensor dict and back, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from coordinator.tree import from_dict, to_dict


def through(tree: Any) -> Any:
    return from_dict(to_dict(tree))


@pytest.mark.parametrize(
    "keys", [(1, True, 1.0), (0.0, -0.0, False), ((1,), (True,), (1.0,)), (True, 1)]
)
def test_keys_that_are_equal_stay_what_they_are(keys: tuple[Any, ...]) -> None:
    """One after the other, as the nesting of earlier messages is remembered."""
    x = torch.zeros(1)
    for key in keys:
        for tree in ({key: x}, {"outer": [{key: x, "beside": None}]}):
            assert repr(through(tree)) == repr(tree)
