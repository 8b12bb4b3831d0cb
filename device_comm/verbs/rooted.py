"""The verbs in which one rank, the root, gives or gets a tensor like everybody's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

from device_comm.operation import NO_TENSOR, Operation
from device_comm.reduce_op import ReduceOp, check_reduction
from device_comm.verbs.arrange import (
    landing,
    plain,
    shares_memory,
)
from device_comm.verbs.checks import check_rank, check_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm.verbs.arguments import Later, Maybe, Now, Out, Timeout
    from device_comm.verbs.runner import Runner
    from device_comm.work import Work


class RootedVerbs:
    """Collectives with a root. See `device_comm.communicator` for what all verbs share."""

    runner: Runner

    @overload
    def broadcast(
        self, x: Tensor, src: int = ..., *, out: Out = ..., **how: Unpack[Now]
    ) -> Tensor: ...
    @overload
    def broadcast(
        self, x: Tensor, src: int = ..., *, out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor]: ...
    @overload
    def broadcast(
        self, x: Tensor, src: int = ..., *, out: Out = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def broadcast(
        self,
        x: Tensor,
        src: int = 0,
        *,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """The ``x`` of rank ``src``, on all ranks. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks; only the values on ``src`` matter.
            src: a rank in the group.
            out: like ``x``; may be ``x`` itself.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            A tensor like ``x``, a new one on ``src`` too; ``x`` itself in a group of one.
        """
        run = self.runner
        if not async_op and (shortcut := run.backend.shortcut) is not None:
            done = shortcut.collective("broadcast", timeout, x, src, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        src = check_rank("src", src, run.world_size)
        if run.world_size == 1:
            return run.identity("broadcast", x, out, async_op)
        buffer, finish = landing(run.new, out, x.shape, x, None if out is x else x)
        source, output = NO_TENSOR, buffer
        if run.rank == src:
            source, output = buffer, NO_TENSOR
            if not shares_memory(buffer, x):
                buffer.copy_(x.detach())
        operation = Operation(
            "broadcast", source, output, async_op, timeout, peer=src, shape=x.shape
        )
        return run.run(operation, buffer, finish)

    @overload
    def broadcast_(self, x: Tensor, src: int = ..., **how: Unpack[Now]) -> Tensor: ...
    @overload
    def broadcast_(self, x: Tensor, src: int = ..., **how: Unpack[Later]) -> Work[Tensor]: ...
    @overload
    def broadcast_(
        self, x: Tensor, src: int = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor]: ...
    def broadcast_(
        self, x: Tensor, src: int = 0, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """`broadcast` into ``x``. Collective: yes, every member. Returns ``x``."""
        return self.broadcast(x, src=src, out=x, async_op=async_op, timeout=timeout)

    @overload
    def reduce(
        self, x: Tensor, dst: int = ..., *, op: ReduceOp = ..., out: Out = ..., **how: Unpack[Now]
    ) -> Tensor | None: ...
    @overload
    def reduce(
        self, x: Tensor, dst: int = ..., *, op: ReduceOp = ..., out: Out = ..., **how: Unpack[Later]
    ) -> Work[Tensor | None]: ...
    @overload
    def reduce(
        self, x: Tensor, dst: int = ..., *, op: ReduceOp = ..., out: Out = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor | None] | None: ...
    def reduce(
        self,
        x: Tensor,
        dst: int = 0,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: Out = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """Reduce ``x`` over all ranks, for rank ``dst``. Collective: yes, every member.

        Args:
            x: the same shape and dtype on all ranks; unchanged on all.
            dst: a rank in the group.
            op: what `check_reduction` accepts for the dtype.
            out: on ``dst`` only: like ``x``; may be ``x`` itself.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            On ``dst`` a tensor like ``x``, or ``x`` itself in a group of one; elsewhere None.
        """
        run = self.runner
        if not async_op and (shortcut := run.backend.shortcut) is not None:
            done = shortcut.collective("reduce", timeout, x, dst, op, out)
            if done is not NotImplemented:
                return done
        check_tensor("x", x, run.device)
        check_reduction(op, x.dtype)
        dst = run.check_dst(dst, out)
        if run.world_size == 1:
            return run.identity("reduce", x, out, async_op)
        source = plain(x)
        buffer, finish = None, None
        if run.rank == dst:
            buffer, finish = landing(run.new, out, x.shape, source, None if out is x else x)
        output = NO_TENSOR if buffer is None else buffer
        operation = Operation(
            "reduce", source, output, async_op, timeout, op=op, peer=dst, shape=x.shape
        )
        return run.run(operation, buffer, finish)

    @overload
    def reduce_(
        self, x: Tensor, dst: int = ..., *, op: ReduceOp = ..., **how: Unpack[Now]
    ) -> Tensor | None: ...
    @overload
    def reduce_(
        self, x: Tensor, dst: int = ..., *, op: ReduceOp = ..., **how: Unpack[Later]
    ) -> Work[Tensor | None]: ...
    @overload
    def reduce_(
        self, x: Tensor, dst: int = ..., *, op: ReduceOp = ..., **how: Unpack[Maybe]
    ) -> Tensor | Work[Tensor | None] | None: ...
    def reduce_(
        self,
        x: Tensor,
        dst: int = 0,
        *,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """`reduce` into the ``x`` of ``dst``; the others' stay. Collective: yes, every member.

        Returns:
            ``x`` on ``dst``, None elsewhere.
        """
        run = self.runner
        out = x if run.rank == dst else None
        return self.reduce(x, dst=dst, op=op, out=out, async_op=async_op, timeout=timeout)
