"""Every verb as a step: how it is called, and what it has to give, computed with plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.device_comm.oracle import reduced, same, values
from tests.device_comm.suite import strided
from tests.fuzz.program import Step, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coordinator import GroupCoordinator

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Given:
    """A step as one of its members sees it.

    Attributes:
        step: it.
        number: its place in the program.
        rank: this member's rank in the group.
        n: how many members.
    """

    step: Step
    number: int
    rank: int
    n: int

    def input(self, rank: int | None = None, rows: int | None = None) -> Tensor:
        """What a member gives; ``rows``: with so many along ``dim``."""
        step, shape = self.step, list(self.step.shape)
        if rows is not None:
            shape[step.dim] = rows
        giver = self.rank if rank is None else rank
        return lay_out(values(giver, shape, step.dtype, self.number), step.layout)

    def inputs(self, rows: int | None = None) -> list[Tensor]:
        """What all members give."""
        return [self.input(rank, rows) for rank in range(self.n)]

    @property
    def rows(self) -> int:
        """Rows of one member's part along ``dim``."""
        return self.step.shape[self.step.dim]

    def at_root(self, value: Any) -> Any:
        """``value`` on the root, None elsewhere."""
        return value if self.rank == self.step.root else None


@dataclass(frozen=True)
class Case:
    """What a member has to do, and what comes of it.

    Attributes:
        argument: the first one of the verb.
        options: the others.
        expected: its result.
        in_place: the first argument of the in-place form, where that is another one.
    """

    argument: Any
    options: Mapping[str, Any]
    expected: Any
    in_place: Tensor | None = None


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat of any dtype."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.cat(parts, dim)
    alike = [part.contiguous().view(_SAME_SIZE[dtype.itemsize]) for part in parts]
    return torch.cat(alike, dim).view(dtype)


def all_reduce(given: Given) -> Case:
    op = given.step.op
    return Case(given.input(), {"op": op}, reduced(given.inputs(), op))


def all_gather(given: Given) -> Case:
    dim, parts = given.step.dim, given.inputs()
    whole = joined(parts, dim)
    room = torch.zeros_like(whole)
    room.narrow(dim, given.rank * given.rows, given.rows).copy_(parts[given.rank])
    return Case(given.input(), {"dim": dim}, whole, room)


def all_gatherv(given: Given) -> Case:
    dim, sizes = given.step.dim, given.step.sizes[: given.n]
    parts = [given.input(rank, rows) for rank, rows in enumerate(sizes)]
    return Case(parts[given.rank], {"dim": dim, "sizes": list(sizes)}, joined(parts, dim))


def reduce_scatter(given: Given) -> Case:
    step = given.step
    parts = given.inputs(given.n * given.rows)
    mine = reduced(parts, step.op).narrow(step.dim, given.rank * given.rows, given.rows)
    return Case(parts[given.rank], {"dim": step.dim, "op": step.op}, mine)


def reduce_scatterv(given: Given) -> Case:
    step, sizes = given.step, list(given.step.sizes[: given.n])
    parts = given.inputs(sum(sizes))
    mine = reduced(parts, step.op).split(sizes, step.dim)[given.rank]
    return Case(parts[given.rank], {"dim": step.dim, "op": step.op, "sizes": sizes}, mine)


def all_to_all(given: Given) -> Case:
    dim, rows = given.step.dim, given.rows
    parts = given.inputs(given.n * rows)
    mine = joined([part.narrow(dim, given.rank * rows, rows) for part in parts], dim)
    return Case(parts[given.rank], {"dim": dim}, mine)


def all_to_all_uneven(given: Given) -> Case:
    dim, n = given.step.dim, given.n
    table = [list(given.step.sizes[r * n : (r + 1) * n]) for r in range(n)]
    parts = [given.input(rank, sum(row)) for rank, row in enumerate(table)]
    mine = joined(
        [part.split(row, dim)[given.rank] for part, row in zip(parts, table, strict=True)], dim
    )
    takes = [row[given.rank] for row in table]
    options = {"dim": dim, "input_sizes": table[given.rank], "output_sizes": takes}
    return Case(parts[given.rank], options, mine)


def broadcast(given: Given) -> Case:
    return Case(given.input(), {"src": given.step.root}, given.input(given.step.root))


def reduce(given: Given) -> Case:
    step = given.step
    total = given.at_root(reduced(given.inputs(), step.op))
    return Case(given.input(), {"dst": step.root, "op": step.op}, total)


def gather(given: Given) -> Case:
    step, case = given.step, all_gather(given)
    options = {"dst": step.root, "dim": step.dim}
    place = case.in_place if given.rank == step.root else case.argument
    return Case(case.argument, options, given.at_root(case.expected), place)


def scatter(given: Given) -> Case:
    step = given.step
    whole = given.input(step.root, given.n * given.rows)
    mine = whole.narrow(step.dim, given.rank * given.rows, given.rows)
    place = whole if given.rank == step.root else torch.zeros_like(mine)
    return Case(given.at_root(whole), {"src": step.root, "dim": step.dim}, mine, place)


TENSOR_VERBS: Mapping[str, Callable[[Given], Case]] = {
    verb.__name__: verb
    for verb in (
        *(all_reduce, all_gather, all_gatherv, reduce_scatter, reduce_scatterv, all_to_all),
        *(all_to_all_uneven, broadcast, reduce, gather, scatter),
    )
}
IN_PLACE = frozenset(TENSOR_VERBS) - {"all_gatherv", "reduce_scatterv", "all_to_all_uneven"}


def call_tensor_verb(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """Call a verb over tensors; its result or work, and what checks the result."""
    step = given.step
    case = TENSOR_VERBS[step.verb](given)
    x, expected = case.argument, case.expected
    verb = getattr(group, step.verb.removesuffix("_uneven"))
    options = dict(case.options)
    if step.form == "in_place":
        x = x if case.in_place is None else case.in_place
        x = x.clone(memory_format=torch.contiguous_format)
        return getattr(group, f"{step.verb}_")(x, **options), lambda found: _check(found, expected)
    out = None
    # The others of a scatter know no shape but that of out.
    if expected is not None and (step.form.endswith("out") or x is None):
        out = torch.zeros_like(expected, memory_format=torch.contiguous_format)
        out = strided(out) if step.form == "strided_out" else out
        options["out"] = out
    before = None if x is None else x.clone()

    def check(found: Any) -> None:
        _check(found, expected)
        assert out is None or found is out, "the result is not out"
        if before is not None:
            same(x, before)

    return verb(x, **options, async_op=step.form == "async"), check


def _check(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None, f"{found} where nothing was to come"
    else:
        same(found, expected)


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
    run_on = step.form == "async"
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
    if verb == "object":
        payload = an_object(given, given.rank)
    elif verb == "tensor_dict":
        payload = a_dict(given, given.rank)
    name = f"send_{verb}".removesuffix("_tensor")
    return getattr(group, f"i{name}" if step.form == "async" else name)(payload, step.peer)


def receive(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """Receive this step's message: its value or work, and the check."""
    step, verb = given.step, given.step.verb.removeprefix("message_")
    name = f"recv_{verb}".removesuffix("_tensor")
    call = getattr(group, f"i{name}" if step.form == "async" else name)
    if verb == "tensor":
        expected = given.input(step.root)
        return call(step.shape, step.dtype, step.root), lambda found: same(found, expected)
    found = call(step.root)
    if verb == "object":
        return found, lambda value: same_object(value, an_object(given, step.root))
    return found, lambda value: same_dict(value, a_dict(given, step.root))


MESSAGES = ("message_tensor", "message_object", "message_tensor_dict")


def barrier(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """Meet; what it gives is nothing."""
    work = group.barrier(async_op=given.step.form == "async")
    return work, lambda found: same_object(found, None)


def hierarchical(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    """All-reduce by way of the nodes."""
    case = all_reduce(given)
    found = group.all_reduce(case.argument, hierarchical=True, **case.options)
    return found, lambda value: same(value, case.expected)
