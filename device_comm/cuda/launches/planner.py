"""Plans the kernel launches of each verb. Pure functions over addresses; nothing is launched here.

Guarantees
    - Ranks that plan the same verb with the same sizes get the same kernels, with the same grids,
      in the same order. Sizes that only some ranks know (`Planner.all_to_all`, `Planner.send`)
      affect only pairs of ranks.
    - A launch does not depend on the number of launches before it: it may be captured and replayed.

Assumptions
    - The launches of a verb run one after the other; so do all collectives of a group, all sends
      to one rank, and all receives from one rank: on one stream, or on streams that are ordered.

Addresses are device addresses of contiguous data. Any alignment works; 16 bytes is fast. Sizes are
in bytes.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from device_comm.cuda.launches import abi, pieces
from device_comm.cuda.launches.abi import KernelJob
from device_comm.cuda.launches.launch import (
    MOVE_KERNEL,
    NUMBERS,
    TRANSFER,
    Algorithm,
    KernelLaunch,
    Limits,
)
from device_comm.reduce_op import ReduceOp
from device_comm.span import NOTHING, Span
from shm_broadcast.layout import align

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Planner:
    """Plans the launches of one rank of a group."""

    def __init__(self, group: abi.Group, limits: Limits) -> None:
        """Plan for ``group``, whose timeout all launches have.

        Raises:
            ValueError: ``limits`` allow more lanes than a channel has room for.
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
        """The default algorithm of an all-reduce of ``size`` bytes."""
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
            output: the address of the result.
            source: the address of the input; not used with a table.
            size: bytes of the input, and of the result.
            dtype: a dtype that has kernels for ``op``; see `kernels_reduce`.
            op: the reduction.
            algorithm: None: chosen by the size. Packets take up to the layout's ``packet_bytes``.
            table: the table of the sources (see `abi.KernelJob`); 0: they are staged. Packets do
                not use it. In one shot with a table, the output must not be a source.
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
        for begin, chunk in pieces.chunks(size, self._piece() * self._n):
            share = align(-(-chunk // self._n), abi.ALIGN)
            parts = [pieces.part(chunk, rank * share, share) for rank in range(self._n)]
            mine = self._rank * share
            job = KernelJob(
                puts=[Span(source + begin + at, length) for at, length in parts],
                takes=[Span(output + begin + at, length) for at, length in parts],
                table=table,
                offset=begin + mine if table else mine,
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
            puts: the rows to sum over the ranks, in rank order; the residual; the norm's weight,
                one row, of whole `abi.ALIGN`.
            takes: the normed rows, which may be those to sum; the new residual, which may be the
                residual. It is rounded once, and normed as it was rounded.
            dtype: a dtype of `NUMBERS`.
            epsilon: what is added to the mean of a row's squares.

        Raises:
            ValueError: there are more bytes than go in packets.
        """
        source, _, weight = puts
        self._check_packets(source.size)
        grid = max(min(source.size // weight.size, self._limits.max_blocks), 1)
        job = KernelJob(puts, takes, op=ReduceOp.SUM, epsilon=epsilon)
        return [self._launch(f"ipc_packets_norm_{NUMBERS[dtype]}", grid, job)]

    def _check_packets(self, size: int) -> None:
        most = self._layout.packet_bytes
        if size > most:
            raise ValueError(f"{size} bytes do not go in packets; {most} do")

    # --- other reductions ----------------------------------------------------------------

    def reduce(
        self, output: int, source: int, size: int, dtype: torch.dtype, op: ReduceOp, root: int
    ) -> list[KernelLaunch]:
        """Reduce ``source`` of all ranks into the root's ``output``; elsewhere it is not used."""
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

        Args:
            output: the address of the result, ``sizes[rank]`` bytes; must not be a source.
            source: the address of the input, ``sum(sizes)`` bytes; not used with a table.
            sizes: bytes of each part, by rank.
            dtype: a dtype that has kernels for ``op``; see `kernels_reduce`.
            op: the reduction.
            table: the table of the sources (see `abi.KernelJob`); 0: they are staged.
        """
        kernel = f"ipc_reduce_{NUMBERS[dtype]}"
        begins = [0, *accumulate(sizes)]
        mine = sizes[self._rank]
        if table:
            job = KernelJob(
                takes=(Span(output, mine),), table=table, offset=begins[self._rank], op=op
            )
            return [self._launch(kernel, self._grid(max(sizes)), job)]
        piece = self._piece()
        launches = []
        for begin, longest in pieces.chunks(max(sizes), piece):
            job = KernelJob(
                puts=pieces.cut(source, sizes, begin, longest),
                takes=(pieces.span(output, pieces.part(mine, begin, longest)),),
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
        for begin, chunk in pieces.chunks(size, size if table else self._layout.staging_bytes):
            job = KernelJob(
                puts=() if table else (Span(source + begin, chunk),),
                takes=(Span(output + begin, chunk),) if receives else (),
                table=table,
                op=op,
            )
            launches.append(self._launch(f"ipc_reduce_{number}", self._grid(chunk), job))
        return launches

    # --- what moves bytes ----------------------------------------------------------------

    def barrier(self) -> list[KernelLaunch]:
        """A kernel that ends when every rank has launched it."""
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

        Args:
            output: the address of the result, ``sum(sizes)`` bytes; must not be a source.
            source: the address of the input, ``sizes[rank]`` bytes; not used with a table.
            sizes: bytes of each rank's input, by rank.
            table: the table of the sources (see `abi.KernelJob`); 0: they are staged.
            receives: whether this rank gets the result.
        """
        longest = max(sizes)
        launches = []
        for begin, chunk in pieces.chunks(
            longest, longest if table else self._layout.staging_bytes
        ):
            mine = pieces.part(sizes[self._rank], begin, chunk)
            job = KernelJob(
                puts=() if table else (pieces.span(source, mine),),
                takes=pieces.cut(output, sizes, begin, chunk) if receives else (),
                table=table,
            )
            launches.append(self._launch(MOVE_KERNEL, self._grid(chunk), job))
        return launches

    def gather(self, output: int, source: int, size: int, root: int) -> list[KernelLaunch]:
        """Concatenate all ranks' ``source``, ``size`` bytes each, in the root's ``output``."""
        return self.all_gather(output, source, (size,) * self._n, receives=root == self._rank)

    def broadcast(self, buffer: int, size: int, root: int) -> list[KernelLaunch]:
        """Copy the root's ``buffer`` to the other ranks' ``buffer``."""
        launches = []
        for begin, chunk in pieces.chunks(size, self._layout.staging_bytes):
            span = Span(buffer + begin, chunk)
            takes = self._only(root, span)
            job = KernelJob(puts=(span,)) if root == self._rank else KernelJob(takes=takes)
            launches.append(self._launch(MOVE_KERNEL, self._grid(chunk), job))
        return launches

    def scatter(self, output: int, source: int, size: int, root: int) -> list[KernelLaunch]:
        """Copy this rank's part of the root's ``source``, ``size`` bytes, to ``output``."""
        piece = self._piece()
        launches = []
        for begin, chunk in pieces.chunks(size, piece):
            puts = pieces.cut(source, (size,) * self._n, begin, chunk)
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
        """Send part r of ``source`` to rank r; put the part from rank r into part r of ``output``.

        ``source_sizes[r]`` on this rank must equal ``output_sizes[rank]`` on rank r. The data goes
        through the channels.
        """
        puts = pieces.cut(source, source_sizes)
        takes = pieces.cut(output, output_sizes)
        return self._transfer(puts, takes, abi.EXCHANGES)

    def send(
        self, source: int, size: int, peer: int, channel_set: int = abi.MESSAGES
    ) -> list[KernelLaunch]:
        """Send to ``peer``. Ends when all data is in the channel or received."""
        return self._transfer(self._only(peer, Span(source, size)), (), channel_set)

    def recv(
        self, output: int, size: int, peer: int, channel_set: int = abi.MESSAGES
    ) -> list[KernelLaunch]:
        """Receive the next message from ``peer``, which must have the same size and set."""
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
        """The size of a rank's part if a staging buffer holds one part for each rank."""
        return self._layout.staging_bytes // self._n // abi.ALIGN * abi.ALIGN

    def _only(self, rank: int, span: Span) -> tuple[Span, ...]:
        return tuple(span if other == rank else NOTHING for other in range(self._n))
