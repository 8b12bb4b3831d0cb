"""Plan the kernel launches of each verb with pure functions, and cache repeated plans.

Guarantees
    - Ranks that plan the same verb with the same sizes get the same kernels with the same grids in
      the same order. Sizes that only some ranks have (`Planner.all_to_all`, `Planner.send`) affect
      only pairs of ranks.
    - A launch does not depend on earlier launches: it may be captured and replayed.

Assumes that the launches of a verb run one after the other, as do all collectives of a group, all
sends to one rank, and all receives from one rank: on one stream, or on ordered streams.

Addresses are device addresses of contiguous data; 16-byte alignment is fast, any works. Sizes are
in bytes. Planning and packing a launch costs more than the launch, so launches are cached by
memory, sizes and reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, assert_never

import torch
from torch import Tensor

from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import (
    CAPTURED,
    MESSAGES,
    MOVE_KERNEL,
    NUMBERS,
    TRANSFER,
    Algorithm,
    KernelJob,
    KernelLaunch,
    Limits,
)
from device_comm.operation import Norm, Operation, ReduceOp
from device_comm.span import NOTHING, Span
from shm_broadcast.layout import align

if TYPE_CHECKING:
    from device_comm.cuda.driver import Driver, PreparedLaunch


def chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of consecutive chunks of ``size`` bytes, of at most ``most`` bytes."""
    for begin in range(0, size, max(most, 1)):
        yield begin, min(size - begin, most)


def part(size: int, begin: int, most: int) -> tuple[int, int]:
    """Return (offset, size) of at most ``most`` bytes from ``begin`` on; may be empty."""
    return begin, max(min(size - begin, most), 0)


def span(address: int, within: tuple[int, int]) -> Span:
    """Return the memory of a `part` of the data at ``address``."""
    begin, size = within
    return Span(address + begin, size) if size else NOTHING


def cut(address: int, sizes: Sequence[int], begin: int = 0, most: int | None = None) -> list[Span]:
    """Return the same `part` of each of several consecutive pieces of memory.

    ``address`` is the start of the first piece, ``begin`` the part's offset in each; ``most`` None:
    the whole piece.
    """
    starts = accumulate(sizes[:-1], initial=address)
    return [
        span(start, part(size, begin, size if most is None else most))
        for start, size in zip(starts, sizes, strict=True)
    ]


class Planner:
    """Plans the launches of one rank of a group."""

    def __init__(self, group: abi.Group, limits: Limits) -> None:
        """Plan for ``group``, whose timeout all launches have.

        Raises `ValueError` if ``limits`` allow more lanes than a channel has room for.
        """
        lanes = {
            abi.MESSAGES: limits.lanes,
            abi.EXCHANGES: min(limits.max_blocks, abi.MAX_LANES),
            abi.CAPTURED: limits.lanes,
        }
        self._lanes = lanes
        self._slots = {which: group.layout.slot_bytes(lanes[which]) for which in lanes}
        self._groups = {which: group.pack(lanes[which]) for which in lanes}
        self._limits = limits
        self._layout = group.layout
        self._n = group.layout.world_size
        self._rank = group.rank

    # --- all-reduce ----------------------------------------------------------------------

    def algorithm(self, size: int) -> Algorithm:
        """Return the default algorithm of an all-reduce of ``size`` bytes."""
        if size <= min(self._limits.packets_up_to, self._layout.packet_bytes):
            return Algorithm.PACKETS
        return Algorithm.ONE_SHOT if size <= self._limits.one_shot_up_to else Algorithm.TWO_SHOT

    def all_reduce(
        self,
        output: int,
        source: int,
        size: int,
        dtype: torch.dtype,
        op: ReduceOp,
        *,
        algorithm: Algorithm | None = None,
        table: int = 0,
    ) -> list[KernelLaunch]:
        """Reduce ``source`` of all ranks into ``output``, which may be ``source``.

        Args:
            output, source, size: addresses and bytes; ``source`` is not used with a table.
            dtype: with kernels for ``op``; see `kernels_reduce`.
            op: the reduction.
            algorithm: None: by size. Packets support up to the layout's ``packet_bytes``.
            table: the table of the sources (see `abi.KernelJob`); 0: staged. Packets ignore it. In
                one shot with a table, the output must not be a source.
        """
        algorithm = algorithm or self.algorithm(size)
        number = NUMBERS[dtype]
        if algorithm is Algorithm.PACKETS:
            self._check_packets(size)
            job = KernelJob((Span(source, size),), (Span(output, size),), op=op)
            return [self._launch(f"ipc_packets_{number}", self._grid(size), job)]
        if algorithm is Algorithm.ONE_SHOT:
            if table and output == source:
                raise ValueError("one shot from a table cannot be in place")
            return self._reduce(output, source, size, number, op, table=table)
        return self._two_shot(output, source, size, number, op, table)

    def _two_shot(
        self, output: int, source: int, size: int, number: str, op: ReduceOp, table: int
    ) -> list[KernelLaunch]:
        launches = []
        for begin, chunk in chunks(size, self._piece() * self._n):
            share = align(-(-chunk // self._n), abi.ALIGN)
            parts = [part(chunk, rank * share, share) for rank in range(self._n)]
            own_offset = self._rank * share
            job = KernelJob(
                puts=[Span(source + begin + at, length) for at, length in parts],
                takes=[Span(output + begin + at, length) for at, length in parts],
                table=table,
                offset=begin + own_offset if table else own_offset,
                piece=share,
                op=op,
            )
            launches.append(self._launch(f"ipc_all_reduce_{number}", self._grid(share), job))
        return launches

    def all_reduce_norm(
        self,
        puts: tuple[Span, Span, Span],
        takes: tuple[Span, Span],
        dtype: torch.dtype,
        epsilon: float,
    ) -> list[KernelLaunch]:
        """Reduce, add the residual and norm, in one kernel with a block for each row.

        Args:
            puts: the rows to sum in rank order; the residual; the norm's weight, one row of whole
                `abi.ALIGN`.
            takes: the normed rows, which may be those to sum; the new residual, which may be the
                old one. It is rounded once, and normed after rounding.
            dtype: a dtype of `NUMBERS`.
            epsilon: added to the mean of a row's squares.

        Raises:
            ValueError: the rows exceed the layout's ``packet_bytes``.
        """
        source, _, weight = puts
        self._check_packets(source.size)
        grid = max(min(source.size // weight.size, self._limits.max_blocks), 1)
        job = KernelJob(puts, takes, op=ReduceOp.SUM, epsilon=epsilon)
        return [self._launch(f"ipc_packets_norm_{NUMBERS[dtype]}", grid, job)]

    def _check_packets(self, size: int) -> None:
        most = self._layout.packet_bytes
        if size > most:
            raise ValueError(f"packets carry at most {most} bytes, not {size}")

    # --- other reductions ----------------------------------------------------------------

    def reduce(
        self, output: int, source: int, size: int, dtype: torch.dtype, op: ReduceOp, root: int
    ) -> list[KernelLaunch]:
        """Reduce ``source`` of all ranks into the root's ``output``; other ranks ignore it."""
        number = NUMBERS[dtype]
        return self._reduce(output, source, size, number, op, receives=root == self._rank)

    def reduce_scatter(
        self,
        output: int,
        source: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        op: ReduceOp,
        *,
        table: int = 0,
    ) -> list[KernelLaunch]:
        """Reduce part r of all ``source`` into the ``output`` of rank r.

        ``source`` has ``sum(sizes)`` bytes and ``output`` ``sizes[rank]``; ``output`` must not be a
        source. ``table`` is as for `all_reduce`.
        """
        kernel = f"ipc_reduce_{NUMBERS[dtype]}"
        begins = [0, *accumulate(sizes)]
        own_size = sizes[self._rank]
        if table:
            job = KernelJob(
                takes=(Span(output, own_size),), table=table, offset=begins[self._rank], op=op
            )
            return [self._launch(kernel, self._grid(max(sizes)), job)]
        piece = self._piece()
        launches = []
        for begin, longest in chunks(max(sizes), piece):
            job = KernelJob(
                puts=cut(source, sizes, begin, longest),
                takes=(span(output, part(own_size, begin, longest)),),
                offset=self._rank * piece,
                piece=piece,
                op=op,
            )
            launches.append(self._launch(kernel, self._grid(longest), job))
        return launches

    def _reduce(
        self,
        output: int,
        source: int,
        size: int,
        number: str,
        op: ReduceOp,
        *,
        table: int = 0,
        receives: bool = True,
    ) -> list[KernelLaunch]:
        launches = []
        for begin, chunk in chunks(size, size if table else self._layout.staging_bytes):
            job = KernelJob(
                puts=() if table else (Span(source + begin, chunk),),
                takes=(Span(output + begin, chunk),) if receives else (),
                table=table,
                op=op,
            )
            launches.append(self._launch(f"ipc_reduce_{number}", self._grid(chunk), job))
        return launches

    # --- moves ---------------------------------------------------------------------------

    def barrier(self) -> list[KernelLaunch]:
        """Return a kernel that ends after every rank has launched it."""
        return [self._launch(MOVE_KERNEL, 1, KernelJob())]

    def all_gather(
        self,
        output: int,
        source: int,
        sizes: Sequence[int],
        *,
        table: int = 0,
        receives: bool = True,
    ) -> list[KernelLaunch]:
        """Concatenate all ranks' ``source``, in rank order.

        ``source`` has ``sizes[rank]`` bytes and ``output`` ``sum(sizes)``; ``output`` must not be a
        source. ``table`` is as for `all_reduce`. Only ranks with ``receives`` need the result.
        """
        longest = max(sizes)
        launches = []
        for begin, chunk in chunks(longest, longest if table else self._layout.staging_bytes):
            own_part = part(sizes[self._rank], begin, chunk)
            job = KernelJob(
                puts=() if table else (span(source, own_part),),
                takes=cut(output, sizes, begin, chunk) if receives else (),
                table=table,
            )
            launches.append(self._launch(MOVE_KERNEL, self._grid(chunk), job))
        return launches

    def gather(self, output: int, source: int, size: int, root: int) -> list[KernelLaunch]:
        """Concatenate all ranks' ``source`` of ``size`` bytes in the root's ``output``."""
        return self.all_gather(output, source, (size,) * self._n, receives=root == self._rank)

    def broadcast(self, buffer: int, size: int, root: int) -> list[KernelLaunch]:
        """Copy the root's ``buffer`` to the other ranks' ``buffer``."""
        launches = []
        for begin, chunk in chunks(size, self._layout.staging_bytes):
            span = Span(buffer + begin, chunk)
            takes = self._only(root, span)
            job = KernelJob(puts=(span,)) if root == self._rank else KernelJob(takes=takes)
            launches.append(self._launch(MOVE_KERNEL, self._grid(chunk), job))
        return launches

    def scatter(self, output: int, source: int, size: int, root: int) -> list[KernelLaunch]:
        """Copy this rank's ``size`` bytes of the root's ``source`` to ``output``."""
        piece = self._piece()
        launches = []
        for begin, chunk in chunks(size, piece):
            puts = cut(source, (size,) * self._n, begin, chunk)
            job = KernelJob(
                puts=puts if root == self._rank else (),
                takes=self._only(root, Span(output + begin, chunk)),
                offset=self._rank * piece,
                piece=piece,
            )
            launches.append(self._launch(MOVE_KERNEL, self._grid(chunk), job))
        return launches

    # --- channels ------------------------------------------------------------------------

    def all_to_all(
        self, output: int, source: int, output_sizes: Sequence[int], source_sizes: Sequence[int]
    ) -> list[KernelLaunch]:
        """Send part r of ``source`` to rank r, through channels; receive into ``output``.

        ``source_sizes[r]`` on this rank must equal ``output_sizes[rank]`` on rank r.
        """
        puts = cut(source, source_sizes)
        takes = cut(output, output_sizes)
        return self._transfer(puts, takes, abi.EXCHANGES)

    def send(
        self, source: int, size: int, peer: int, channel_set: int = abi.MESSAGES
    ) -> list[KernelLaunch]:
        """Send to ``peer``. Ends when all data is in the channel or received."""
        return self._transfer(self._only(peer, Span(source, size)), (), channel_set)

    def recv(
        self, output: int, size: int, peer: int, channel_set: int = abi.MESSAGES
    ) -> list[KernelLaunch]:
        """Receive the next message from ``peer``, of the same size and set."""
        return self._transfer((), self._only(peer, Span(output, size)), channel_set)

    def _transfer(
        self, puts: Sequence[Span], takes: Sequence[Span], channel_set: int
    ) -> list[KernelLaunch]:
        longest = max(span.size for span in (*puts, *takes))
        if longest == 0:
            return []
        job = KernelJob(puts, takes, channel_set=channel_set)
        grid = min(-(-longest // self._slots[channel_set]), self._lanes[channel_set])
        return [self._launch(TRANSFER, grid, job)]

    # --- common --------------------------------------------------------------------------

    def _launch(self, kernel: str, grid: int, job: KernelJob) -> KernelLaunch:
        args = job.pack(self._groups[job.channel_set])
        return KernelLaunch(kernel, grid, self._limits.threads, (args,))

    def _grid(self, size: int) -> int:
        blocks = -(-size // (abi.ALIGN * self._limits.threads))
        return max(min(blocks, self._limits.max_blocks), 1)

    def _piece(self) -> int:
        """Return the size of a rank's part if a staging buffer holds all parts."""
        return self._layout.staging_bytes // self._n // abi.ALIGN * abi.ALIGN

    def _only(self, rank: int, span: Span) -> tuple[Span, ...]:
        return tuple(span if other == rank else NOTHING for other in range(self._n))


class LaunchPlan(NamedTuple):
    """The launches of an operation, by planner and address of a table, or 0.

    ``direct`` is the tensor that peers read directly through a table; None: always staged.
    """

    launches: Callable[[Planner, int], list[KernelLaunch]]
    direct: Tensor | None = None


def launch_plan(
    operation: Operation, world_size: int, algorithm: Algorithm, *, captured: bool = False
) -> LaunchPlan:
    """Return the plan of an operation.

    ``algorithm`` is for an all-reduce. A reduction needs a kernel for its dtype. ``captured``: it
    is part of a graph.
    """
    source, output = operation.source, operation.output
    given, taken, size = source.data_ptr(), output.data_ptr(), source.nbytes
    dtype, op, peer = source.dtype, operation.op, operation.peer
    messages = CAPTURED if captured else MESSAGES
    match operation.verb:
        case "all_reduce" if (norm := operation.norm) is not None:
            given_rows = Span.of(source), Span.of(norm.residual), Span.of(norm.weight)
            made_rows = Span.of(output), Span.of(norm.kept)
            return LaunchPlan(
                lambda plan, _: plan.all_reduce_norm(given_rows, made_rows, dtype, norm.epsilon)
            )
        case "all_reduce":
            from_table = algorithm is Algorithm.TWO_SHOT or (
                algorithm is Algorithm.ONE_SHOT and given != taken
            )
            return LaunchPlan(
                lambda plan, table: plan.all_reduce(
                    taken, given, size, dtype, op, algorithm=algorithm, table=table
                ),
                source if from_table else None,
            )
        case "all_gather":
            sizes = [size] * world_size
            return LaunchPlan(
                lambda plan, table: plan.all_gather(taken, given, sizes, table=table), source
            )
        case "all_gatherv":
            received = _in_bytes(operation.output_parts(world_size), source)
            return LaunchPlan(lambda plan, _: plan.all_gather(taken, given, received))
        case "reduce_scatter" | "reduce_scatterv":
            sent = _in_bytes(operation.source_parts(world_size), source)
            return LaunchPlan(
                lambda plan, table: plan.reduce_scatter(taken, given, sent, dtype, op, table=table),
                source,
            )
        case "all_to_all":
            received = _in_bytes(operation.output_parts(world_size), source)
            sent = _in_bytes(operation.source_parts(world_size), source)
            return LaunchPlan(lambda plan, _: plan.all_to_all(taken, given, received, sent))
        case "broadcast":
            buffer = operation.buffer
            return LaunchPlan(
                lambda plan, _: plan.broadcast(buffer.data_ptr(), buffer.nbytes, peer)
            )
        case "reduce":
            return LaunchPlan(lambda plan, _: plan.reduce(taken, given, size, dtype, op, peer))
        case "gather":
            return LaunchPlan(lambda plan, _: plan.gather(taken, given, size, peer))
        case "scatter":
            return LaunchPlan(lambda plan, _: plan.scatter(taken, given, output.nbytes, peer))
        case "send":
            return LaunchPlan(lambda plan, _: plan.send(given, size, peer, messages))
        case "recv":
            return LaunchPlan(lambda plan, _: plan.recv(taken, output.nbytes, peer, messages))
        case "barrier":
            return LaunchPlan(lambda plan, _: plan.barrier())
    assert_never(operation.verb)


def _in_bytes(sizes: Sequence[int], like: Tensor) -> list[int]:
    return [size * like.element_size() for size in sizes]


MOST: Final = 4096
"""The most cached operations, of about 1 KiB each; then all are dropped."""


class PreparedLaunches:
    """A cache of one rank's launches with the planner's time limit."""

    def __init__(self, driver: Driver, planner: Planner, world_size: int) -> None:
        self._driver = driver
        self._planner = planner
        self._world_size = world_size
        self._kept: dict[object, Sequence[PreparedLaunch]] = {}

    def launches(self, operation: Operation, algorithm: Algorithm) -> Sequence[PreparedLaunch]:
        """Return the staged launches of ``operation``; arguments are as for `launch_plan`."""
        source, output = operation.source, operation.output
        key = (
            operation.verb,
            source.data_ptr(),
            output.data_ptr(),
            source.nbytes,
            output.nbytes,
            source.dtype,
            output.dtype,
            operation.op,
            operation.peer,
            algorithm,
            _fixed(operation.source_sizes),
            _fixed(operation.output_sizes),
            None if operation.norm is None else _marks(operation.norm),
        )
        cached = self._kept.get(key)
        if cached is None:
            planned = launch_plan(operation, self._world_size, algorithm).launches(self._planner, 0)
            cached = [self._driver.prepare(*each) for each in planned]
            if len(self._kept) >= MOST:
                self._kept.clear()
            self._kept[key] = cached
        return cached


def _fixed(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if sizes is None else tuple(sizes)


def _marks(norm: Norm) -> tuple[float, ...]:
    weight = norm.weight
    rest = norm.residual.data_ptr(), norm.kept.data_ptr(), norm.epsilon
    return (weight.data_ptr(), weight.nbytes, *rest)
