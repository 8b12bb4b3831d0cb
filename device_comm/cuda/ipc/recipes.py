"""Translates operations to kernel launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, assert_never

from device_comm.cuda.launches.abi import CAPTURED, MESSAGES
from device_comm.cuda.launches.launch import Algorithm
from device_comm.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from device_comm.cuda.launches.launch import KernelLaunch
    from device_comm.cuda.launches.planner import Planner
    from device_comm.operation import Operation


class Recipe(NamedTuple):
    """How an operation is carried out.

    Attributes:
        launches: makes the launches, given a planner and the address of a table, or 0.
        direct: the tensor that peers read directly if there is a table; None: there is none.
    """

    launches: Callable[[Planner, int], list[KernelLaunch]]
    direct: Tensor | None = None


def recipe(
    operation: Operation, world_size: int, algorithm: Algorithm, *, captured: bool = False
) -> Recipe:
    """How to carry out an operation.

    Args:
        operation: the operation; if it reduces, there must be a kernel for its dtype.
        world_size: the number of ranks.
        algorithm: the algorithm of an all-reduce.
        captured: whether it is part of a graph.
    """
    source, output = operation.source, operation.output
    given, taken, size = source.data_ptr(), output.data_ptr(), source.nbytes
    dtype, op, peer = source.dtype, operation.op, operation.peer
    messages = CAPTURED if captured else MESSAGES
    match operation.verb:
        case "all_reduce" if (norm := operation.norm) is not None:
            given_rows = Span.of(source), Span.of(norm.residual), Span.of(norm.weight)
            made_rows = Span.of(output), Span.of(norm.kept)
            return Recipe(
                lambda plan, _: plan.all_reduce_norm(given_rows, made_rows, dtype, norm.epsilon)
            )
        case "all_reduce":
            from_table = algorithm is Algorithm.TWO_SHOT or (
                algorithm is Algorithm.ONE_SHOT and given != taken
            )
            return Recipe(
                lambda plan, table: plan.all_reduce(
                    taken, given, size, dtype, op, algorithm=algorithm, table=table
                ),
                source if from_table else None,
            )
        case "all_gather":
            sizes = [size] * world_size
            return Recipe(
                lambda plan, table: plan.all_gather(taken, given, sizes, table=table), source
            )
        case "all_gatherv":
            takes = _in_bytes(operation.output_parts(world_size), source)
            return Recipe(lambda plan, _: plan.all_gather(taken, given, takes))
        case "reduce_scatter" | "reduce_scatterv":
            gives = _in_bytes(operation.source_parts(world_size), source)
            return Recipe(
                lambda plan, table: plan.reduce_scatter(
                    taken, given, gives, dtype, op, table=table
                ),
                source,
            )
        case "all_to_all":
            takes = _in_bytes(operation.output_parts(world_size), source)
            gives = _in_bytes(operation.source_parts(world_size), source)
            return Recipe(lambda plan, _: plan.all_to_all(taken, given, takes, gives))
        case "broadcast":
            buffer = operation.buffer
            return Recipe(lambda plan, _: plan.broadcast(buffer.data_ptr(), buffer.nbytes, peer))
        case "reduce":
            return Recipe(lambda plan, _: plan.reduce(taken, given, size, dtype, op, peer))
        case "gather":
            return Recipe(lambda plan, _: plan.gather(taken, given, size, peer))
        case "scatter":
            return Recipe(lambda plan, _: plan.scatter(taken, given, output.nbytes, peer))
        case "send":
            return Recipe(lambda plan, _: plan.send(given, size, peer, messages))
        case "recv":
            return Recipe(lambda plan, _: plan.recv(taken, output.nbytes, peer, messages))
        case "barrier":
            return Recipe(lambda plan, _: plan.barrier())
    assert_never(operation.verb)


def _in_bytes(sizes: Sequence[int], like: Tensor) -> list[int]:
    return [size * like.element_size() for size in sizes]
