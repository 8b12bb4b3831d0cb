"""Every verb as a step: how it is called, and what it gives, by plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from device_comm import ReduceOp
from tests.device_comm.oracle import reduced, same, strided, values
from tests.fuzz.program import Step, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from coordinator import GroupCoordinator


# --- Verbs over tensors --------------------------------------------------------------------------

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Given:
    step: Step
    number: int
    rank: int
    n: int
    slicing: GroupCoordinator | None = None

    def input(self, rank: int | None = None, rows: int | None = None) -> Tensor:
        """What a member gives; ``rows``: with so many along ``dim``."""
        step, shape = self.step, list(self.step.shape)
        if rows is not None:
            shape[step.dim] = rows
        giver = self.rank if rank is None else rank
        return lay_out(values(giver, shape, step.dtype, self.number), step.layout)

    def inputs(self, rows: int | None = None) -> list[Tensor]:
        return [self.input(rank, rows) for rank in range(self.n)]

    @property
    def rows(self) -> int:
        return self.step.shape[self.step.dim]

    @property
    def sizes(self) -> list[int]:
        return list(self.step.sizes[: self.n])

    def at_root(self, value: Any) -> Any:
        """``value`` on the root, None elsewhere."""
        return value if self.rank == self.step.root else None


@dataclass(frozen=True)
class Case:
    argument: Any
    options: Mapping[str, Any]
    expected: Any
    in_place: Tensor | None = None


def joined(parts: list[Tensor], dim: int) -> Tensor:
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.cat(parts, dim)
    alike = [part.contiguous().view(_SAME_SIZE[dtype.itemsize]) for part in parts]
    return torch.cat(alike, dim).view(dtype)


def all_reduce(given: Given) -> Case:
    op = given.step.op
    return Case(given.input(), {"op": op}, reduced(given.inputs(), op))


def all_reduce_hierarchical(given: Given) -> Case:
    case = all_reduce(given)
    return replace(case, options={**case.options, "hierarchical": True})


def cpu_all_reduce(given: Given) -> Case:
    return Case(given.input(), {}, reduced(given.inputs(), ReduceOp.SUM))


def all_gather(given: Given) -> Case:
    dim, parts = given.step.dim, given.inputs()
    whole = joined(parts, dim)
    room = torch.zeros_like(whole)
    room.narrow(dim, given.rank * given.rows, given.rows).copy_(parts[given.rank])
    return Case(given.input(), {"dim": dim}, whole, room)


def all_gatherv(given: Given) -> Case:
    dim = given.step.dim
    sizes = given.sizes or [given.rows] * given.n
    parts = [given.input(rank, rows) for rank, rows in enumerate(sizes)]
    return Case(parts[given.rank], {"dim": dim, "sizes": given.sizes or None}, joined(parts, dim))


def reduce_scatter(given: Given) -> Case:
    step = given.step
    parts = given.inputs(given.n * given.rows)
    mine = reduced(parts, step.op).narrow(step.dim, given.rank * given.rows, given.rows)
    return Case(parts[given.rank], {"dim": step.dim, "op": step.op}, mine)


def reduce_scatterv(given: Given) -> Case:
    step, sizes = given.step, given.sizes or [given.rows] * given.n
    parts = given.inputs(sum(sizes))
    mine = reduced(parts, step.op).split(sizes, step.dim)[given.rank]
    options = {"dim": step.dim, "op": step.op, "sizes": given.sizes or None}
    return Case(parts[given.rank], options, mine)


def combine(given: Given) -> Case:
    case = reduce_scatterv(replace(given, step=replace(given.step, dim=0, op=ReduceOp.SUM)))
    return replace(case, options={"sizes": given.sizes})


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
        *(all_reduce, all_reduce_hierarchical, cpu_all_reduce),
        *(all_gather, all_gatherv, reduce_scatter, reduce_scatterv, combine),
        *(all_to_all, all_to_all_uneven, broadcast, reduce, gather, scatter),
    )
}
_OUT_OF_PLACE = ("plain", "out", "strided_out", "async")
_FORMS = {
    "all_reduce_hierarchical": _OUT_OF_PLACE,
    "cpu_all_reduce": ("in_place", "async_in_place"),
    "all_gatherv": _OUT_OF_PLACE,
    "reduce_scatterv": _OUT_OF_PLACE,
    "combine": _OUT_OF_PLACE,
    "all_to_all_uneven": _OUT_OF_PLACE,
}
WITH_FORMS: Mapping[str, Sequence[str]] = {
    verb: _FORMS.get(verb, (*_OUT_OF_PLACE, "in_place", "async_in_place")) for verb in TENSOR_VERBS
}
"""How each verb over tensors may be called."""

REDUCTIONS = frozenset({verb for verb in TENSOR_VERBS if "reduce" in verb} | {"combine"})
WITHOUT_DIM = frozenset({verb for verb in TENSOR_VERBS if "all_reduce" in verb})


WITHOUT_DIM |= {"broadcast", "reduce"}
"""The verbs that take tensors without dimensions, too."""


def call_tensor_verb(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    step = given.step
    case = TENSOR_VERBS[step.verb](given)
    x, expected = case.argument, case.expected
    name = step.verb.removesuffix("_uneven").removesuffix("_hierarchical")
    options = dict(case.options)
    if step.run_on:
        options["async_op"] = True
    if step.form.endswith("in_place"):
        x = x if case.in_place is None else case.in_place
        gaps = step.layout == "strided"
        x = _on(group, strided(x) if gaps else x.clone(memory_format=torch.contiguous_format))
        was = x.clone()
        check_in_place = partial(_check_in_place, given, expected, x, was)
        return getattr(group, f"{name}_")(x, **options), check_in_place
    x = x if x is None else _on(group, x)
    out = None
    # The others of a scatter know no shape but that of out.
    if expected is not None and ("out" in step.form or x is None):
        out = _on(group, torch.zeros_like(expected, memory_format=torch.contiguous_format))
        out = strided(out) if step.form == "strided_out" else out
        options["out"] = out
    before = None if x is None else x.clone()

    def check(found: Any) -> None:
        _check(found, expected)
        assert out is None or found is out, "the result is not out"
        if found is not None and found is not x and out is None:
            assert found.is_contiguous()
            shared = x is not None and _memory_of(found) == _memory_of(x)
            assert not shared or not found.numel(), "the result shares memory with the input"
        if before is not None:
            same(x, before.cpu())

    return getattr(group, name)(x, **options), check


def _on(group: Any, x: Tensor) -> Tensor:
    """``x`` on the group's device, with the same strides."""
    device = getattr(group, "device", None)
    if not isinstance(device, torch.device) or device == x.device:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def _memory_of(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _check_in_place(given: Given, expected: Any, x: Tensor, was: Tensor, found: Any) -> None:
    """Check a result in the memory of the input, and that the rest of that is as it was."""
    _check(found, expected)
    if expected is None:
        same(x, was.cpu())
    elif found is not x:
        dim, rows = given.step.dim, given.rows
        assert given.step.verb in ("reduce_scatter", "scatter")
        same(x.narrow(dim, 0, rows), expected)
        rest = x.shape[dim] - rows
        same(x.narrow(dim, rows, rest), was.narrow(dim, rows, rest).cpu())


def _check(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None, f"{found} where nothing was to come"
    else:
        same(found, expected)


def call_dispatch(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    step, columns = given.step, given.step.shape[1:]

    def rows_of(dtype: torch.dtype, *columns: int) -> tuple[Tensor, Tensor]:
        parts = [
            lay_out(values(rank, (rows, *columns), dtype, given.number), step.layout)
            for rank, rows in enumerate(given.sizes)
        ]
        return parts[given.rank], joined(parts, 0)

    pairs = [
        *(rows_of(step.dtype, *columns), rows_of(torch.float32, 2)),
        *(rows_of(torch.int64, 2), rows_of(torch.int32)),
    ]
    found = group.dispatch(
        *(mine for mine, _ in pairs),
        sizes=None if step.peer else given.sizes,
        async_op=step.run_on,
    )

    def check(found: Any) -> None:
        for each, (_, whole) in zip(found, pairs, strict=True):
            same(each, whole)

    return found, check


# --- Verbs over objects and dicts, and messages --------------------------------------------------


def an_object(given: Given, rank: int) -> Any:
    size = given.step.shape[0] if given.step.shape else 0
    return {"from": rank, "step": given.number, "bytes": bytes([rank]) * size, "none": [None, 1.5]}


def a_dict(given: Given, rank: int) -> dict[str, Any]:
    return {
        "x": given.input(rank),
        "value": [rank, given.number],
        "empty": torch.zeros(0, 3),
        "again.x": values(rank, given.step.shape, torch.int64, given.number),
        "text": "step",
    }


def same_dict(found: Any, expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            same(found[name], value)
        else:
            assert found[name] == value


def same_object(found: Any, expected: Any) -> None:
    assert found == expected, f"{found} is not {expected}"


def call_object_verb(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
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
    sent: dict[str, Any] = {
        "message_tensor": lambda: {"x": given.input()},
        "message_object": dict,
        "message_tensor_dict": lambda: a_dict(given, given.rank),
    }[given.step.verb]()
    return sum(value.nbytes for value in sent.values() if isinstance(value, Tensor))


def receive(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
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
    work = group.barrier(async_op=given.step.run_on)
    return work, lambda found: same_object(found, None)
