"""Every verb over objects and dicts, and every message, as a step: its call, and what it gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.device_comm.oracle import same, values
from tests.device_comm.suite import strided

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator import GroupCoordinator
    from tests.fuzz.verbs import Given


def an_object(given: Given, rank: int) -> Any:
    """A plain object of a size that the shape tells."""
    size = given.step.shape[0] if given.step.shape else 0
    return {"from": rank, "step": given.number, "bytes": bytes([rank]) * size, "none": [None, 1.5]}


def a_dict(given: Given, rank: int) -> dict[str, Any]:
    """Tensors and values."""
    return {
        "x": given.input(rank),
        "value": [rank, given.number],
        "empty": torch.zeros(0, 3),
        "again.x": values(rank, given.step.shape, torch.int64, given.number),
        "text": "step",
    }


def same_dict(found: Any, expected: dict[str, Any]) -> None:
    """Require equal names in equal order, and equal values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            same(found[name], value)
        else:
            assert found[name] == value


def same_object(found: Any, expected: Any) -> None:
    """Require equality."""
    assert found == expected, f"{found} is not {expected}"


def call_object_verb(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """Call a collective verb over objects or dicts; its result or work, and the check."""
    step, root = given.step, given.step.root
    run_on = step.run_on
    mine, roots = an_object(given, given.rank), an_object(given, root)
    if step.verb == "all_gather_object":
        everything = [an_object(given, rank) for rank in range(given.n)]
        work = group.all_gather_object(mine, async_op=run_on)
        return work, lambda found: same_object(found, everything)
    if step.verb == "broadcast_object":
        work = group.broadcast_object(given.at_root(roots), root, async_op=run_on)
        return work, lambda found: same_object(found, roots)
    if step.verb == "broadcast_object_list":
        work = group.broadcast_object_list([mine, given.rank], root, async_op=run_on)
        return work, lambda found: same_object(found, [roots, root])
    dict_of_root = a_dict(given, root)
    argument = given.at_root(dict_of_root)
    work = group.broadcast_tensor_dict(argument, root, async_op=run_on)
    return work, lambda found: same_dict(found, dict_of_root)


OBJECT_VERBS = (
    "all_gather_object",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_tensor_dict",
)


def send(group: GroupCoordinator, given: Given) -> Any:
    """Send this step's message; a work, where it is asynchronous."""
    step, verb = given.step, given.step.verb.removeprefix("message_")
    payload: Any = given.input()
    options: dict[str, Any] = {}
    if verb == "object":
        payload = an_object(given, given.rank)
    elif verb == "tensor_dict":
        payload = a_dict(given, given.rank)
        options["all_gather_group"] = given.slicing
    name = f"send_{verb}".removesuffix("_tensor")
    return getattr(group, f"i{name}" if step.run_on else name)(payload, step.peer, **options)


def sent_bytes(given: Given) -> int:
    """The bytes of the tensors in this step's message."""
    sent: dict[str, Any] = {
        "message_tensor": lambda: {"x": given.input()},
        "message_object": dict,
        "message_tensor_dict": lambda: a_dict(given, given.rank),
    }[given.step.verb]()
    return sum(value.nbytes for value in sent.values() if isinstance(value, Tensor))


def receive(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """Receive this step's message: its value or work, and the check."""
    step, verb = given.step, given.step.verb.removeprefix("message_")
    name = f"recv_{verb}".removesuffix("_tensor")
    call = getattr(group, f"i{name}" if step.run_on else name)
    if verb == "tensor":
        expected = given.input(step.root)
        if step.layout != "plain":
            out = strided(torch.zeros(step.shape, dtype=step.dtype))
            return call(src=step.root, out=out), lambda found: same(found, expected)
        return call(step.shape, step.dtype, step.root), lambda found: same(found, expected)
    if verb == "object":
        return call(step.root), lambda value: same_object(value, an_object(given, step.root))
    found = call(step.root, all_gather_group=given.slicing)
    return found, lambda value: same_dict(value, a_dict(given, step.root))


MESSAGES = ("message_tensor", "message_object", "message_tensor_dict")


def barrier(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """Meet; what it gives is nothing."""
    work = group.barrier(async_op=given.step.run_on)
    return work, lambda found: same_object(found, None)
