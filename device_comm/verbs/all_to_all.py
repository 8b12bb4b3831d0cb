"""The verb in which every rank has a part for every other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

from device_comm.operation import Operation
from device_comm.verbs.arrange import (
    elements_of,
    landing_pieces,
    pieces_first,
    resized,
    row_elements,
)
from device_comm.verbs.checks import (
    check_dim,
    check_sizes,
    check_tensor,
    check_total,
    equal_share,
)

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm.verbs.arguments import Later, Maybe, Now, Out, Sizes, Timeout
    from device_comm.verbs.runner import Runner
    from device_comm.work import Work


class AllToAllVerbs:
    """The exchange of parts. See `device_comm.communicator` for what all verbs share."""

    runner: Runner

    @overload
    def all_to_all(
        self,
        x: Tensor,
        dim: int = ...,
        *,
        input_sizes: Sizes = ...,
        output_sizes: Sizes = ...,
        out: Out = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        x: Tensor,
        dim: int = ...,
        *,
        input_sizes: Sizes = ...,
        output_sizes: Sizes = ...,
        out: Out = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    @overload
    def all_to_all(
        self,
        x: Tensor,
        dim: int = ...,
        *,
        input_sizes: Sizes = ...,
        output_sizes: Sizes = ...,
        out: Out = ...,
        **how: Unpack[Maybe],
    ) -> Tensor | Work[Tensor]: ...
    def all_to_all(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        input_sizes: Sizes = None,
        output_sizes: Sizes = None,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Send part r of ``x`` to rank r; concatenate what comes. Collective: yes, every member.

        Args:
            x: the same shape on all ranks but for the rows along ``dim``.
            dim: along which ``x`` is cut and the parts are concatenated.
            input_sizes: rows that go to each rank; None: equal parts. All ranks give sizes, or
                none does.
            output_sizes: rows that come from each rank: rank r's ``input_sizes`` for this
                rank. Given together with ``input_sizes``, or not at all.
            out: ``sum(output_sizes)`` rows.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            ``sum(output_sizes)`` rows, contiguous; ``x`` itself in a group of one.
        """
        run = self.runner
        plain = not async_op and input_sizes is None and output_sizes is None
        if plain and (shortcut := run.backend.shortcut) is not None:
            done = shortcut.collective("all_to_all", timeout, x, dim, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        dim = check_dim(dim, x)
        n = run.world_size
        rows = x.shape[dim]
        if (input_sizes is None) != (output_sizes is None):
            raise ValueError("input_sizes and output_sizes are given together, or not at all")
        shape: tuple[int, ...] = x.shape
        alike, gives, takes = shape, None, None
        if input_sizes is None:
            equal_share(rows, n, dim)
        else:
            gives = check_sizes("input_sizes", input_sizes, n)
            takes = check_sizes("output_sizes", output_sizes, n)
            check_total("input_sizes", gives, rows, dim)
            if gives[run.rank] != takes[run.rank]:
                raise ValueError(
                    f"input_sizes and output_sizes differ about what rank {run.rank} sends itself: "
                    f"{gives[run.rank]} and {takes[run.rank]}"
                )
            row = row_elements(shape, dim)
            shape, alike = resized(shape, dim, sum(takes)), resized(shape, dim, -1)
            gives, takes = elements_of(gives, row), elements_of(takes, row)
        if n == 1:
            return run.identity("all_to_all", x, out, async_op)
        source = pieces_first(x, dim, rows)
        buffer, finish = landing_pieces(run.new, out, shape, dim, shape[dim], source, x)
        operation = Operation(
            "all_to_all",
            source,
            buffer,
            async_op,
            timeout,
            source_sizes=gives,
            output_sizes=takes,
            shape=alike,
            dim=dim,
        )
        return run.run(operation, buffer, finish)

    @overload
    def all_to_all_(self, x: Tensor, dim: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def all_to_all_(self, x: Tensor, dim: int = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    @overload
    def all_to_all_(
        self, x: Tensor, dim: int = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def all_to_all_(
        self, x: Tensor, dim: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """`all_to_all` of equal parts, into ``x``. Collective: yes, every member. Returns ``x``."""
        return self.all_to_all(x, dim=dim, out=x, async_op=async_op, timeout=timeout)
