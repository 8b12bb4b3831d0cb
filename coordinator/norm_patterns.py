"""Match and rewrite graphs of torch's compiler. Only this file uses torch's private interfaces.

The compiler decomposes a normalised sum to these ATen operations (``wide`` is in float32: ``kept``
itself, or converted)::

    kept = residual + sum
    unit = wide * rsqrt(mean(wide ** 2) + epsilon)
    output = unit * weight, rounded before or after
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import (
    MULTIPLE,
    CallFunction,
    Ignored,
    KeywordArg,
    Match,
    PatternExpr,
    PatternMatcherPass,
    register_graph_pattern,
)
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq
from torch.fx.node import map_arg

from coordinator import compile_ops
from device_comm import ReduceOp

if TYPE_CHECKING:
    from torch._ops import OpOverload


_ATEN = torch.ops.aten
_MEAN = _ATEN.mean.dim
_ALL_REDUCE = torch.ops.group_coordinator.all_reduce.default
_ALL_REDUCE_NORM = torch.ops.group_coordinator.all_reduce_norm.default
_CONVERT = torch.ops.prims.convert_element_type.default


class NormPass(CustomGraphPass):
    """The pass that `coordinator.norm_pass.all_reduce_norm_pass` returns."""

    def __init__(self) -> None:
        self._patterns = PatternMatcherPass("all_reduce_norm")
        for pattern in _patterns():
            register_graph_pattern(pattern, _fits, pass_dict=self._patterns)(_rewrite)

    def __call__(self, graph: Graph) -> None:
        """Rewrite all matches."""
        self._patterns.apply(graph)

    def uuid(self) -> Any:
        """Return the rest of the compiler's cache key: this code, and the groups' kernels."""
        code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return code, compile_ops.norms_by_group()


def _patterns() -> Iterator[PatternExpr]:
    x, residual, weight = map(KeywordArg, ("x", "residual", "weight"))
    total = CallFunction(_ALL_REDUCE, x, int(ReduceOp.SUM), KeywordArg("group"))
    for kept in _either(_ATEN.add.Tensor, residual, total, _users=MULTIPLE):
        for unit in _units(kept):
            yield from _either(_ATEN.mul.Tensor, unit, weight)
        yield from _rounded(_wider(kept), weight)
    for kept in _either(_ATEN.add.Tensor, _wider(residual), _wider(total, 1), _users=MULTIPLE):
        yield from _rounded(kept, weight)


def _rounded(wide: PatternExpr, weight: PatternExpr) -> Iterator[PatternExpr]:
    """Yield patterns of a float32 norm of narrower tensors."""
    for unit in _units(wide):
        yield from _either(_ATEN.mul.Tensor, CallFunction(_CONVERT, unit, Ignored()), weight)
        for scale in (weight, _wider(weight)):
            for scaled in _either(_ATEN.mul.Tensor, unit, scale):
                yield CallFunction(_CONVERT, scaled, Ignored())


def _units(wide: PatternExpr) -> Iterator[PatternExpr]:
    """Yield patterns of rows normalised to a mean square of one."""
    for square in (
        CallFunction(_ATEN.pow.Tensor_Scalar, wide, 2),
        CallFunction(_ATEN.mul.Tensor, wide, wide),
    ):
        mean = CallFunction(_MEAN, square, KeywordArg("dims"), True)
        sums = [_ATEN.add.Tensor, _ATEN.add.Scalar]
        scale = CallFunction(_ATEN.rsqrt.default, CallFunction(sums, mean, KeywordArg("epsilon")))
        yield from _either(_ATEN.mul.Tensor, wide, scale)


def _wider(x: PatternExpr, users: Any = MULTIPLE) -> PatternExpr:
    return CallFunction(_CONVERT, x, torch.float32, _users=users)


def _either(
    function: OpOverload, a: PatternExpr, b: PatternExpr, **options: Any
) -> list[PatternExpr]:
    """Return the patterns of ``function`` with its arguments in both orders."""
    return [CallFunction(function, *pair, **options) for pair in ((a, b), (b, a))]


def _fits(match: Match) -> bool:
    """Return whether the op computes the same as the match."""
    values = match.kwargs
    nodes = [values[name] for name in ("x", "residual", "weight")]
    if not all(isinstance(node, Node) for node in nodes):
        return False
    x, residual, weight = (node.meta["val"] for node in nodes)
    return (
        compile_ops.has_norms(values["group"], x.dtype)
        and residual.dtype == weight.dtype == _dtype(match.output_node()) == x.dtype
        and all(_dtype(node) == torch.float32 for node in match.nodes if node.target is _MEAN)
        and [dim % x.dim() for dim in values["dims"]] == [x.dim() - 1]
        and weight.dim() == 1
        and statically_known_true(
            sym_eq((*residual.shape, weight.shape[0]), (*x.shape, x.shape[-1]))
        )
        and isinstance(values["epsilon"], (int, float))
        and nodes[2] < _kept(match)
    )


def _rewrite(
    match: Match, x: Node, residual: Node, weight: Node, epsilon: float, group: str, **_: Any
) -> None:
    graph, kept = match.graph, _kept(match)

    def call(function: Any, *args: Any) -> Node:
        node = graph.call_function(function, args)
        node.meta["val"] = function(*map_arg(args, lambda each: each.meta["val"]))
        return node

    with graph.inserting_before(kept):
        both = call(_ALL_REDUCE_NORM, x, residual, weight, float(epsilon), group)
        output, new = call(operator.getitem, both, 0), call(operator.getitem, both, 1)
        if _dtype(kept) != _dtype(x):
            new = call(_CONVERT, new, _dtype(kept))
    match.output_node().replace_all_uses_with(output)
    kept.replace_all_uses_with(new)
    match.erase_nodes()


def _kept(match: Match) -> Node:
    """Return the node that adds the residual."""
    (total,) = (node for node in match.nodes if node.target is _ALL_REDUCE)
    (user,) = total.users
    return user if user.target is _ATEN.add.Tensor else next(iter(user.users))


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
