"""Offer the named exchanges of a pipeline stage, as ColossalAI has them.

Forward goes from the first stage to the last, backward the other way. The first five do nothing
and return None at the ends of the pipeline; the last three go round in a ring, for stages that
hold several parts of the model: leave out by ``None`` and ``recv_*=False`` what is not there.

All of them:
    - send and receive trees, as `PipelineEnd.exchange`, and raise what that raises;
    - take ranks in ``pp`` instead of the neighbours;
    - check what arrives, where shapes or a dtype are given, and raise `ValueError` then. Shapes:
      one tensor's, as ``(4, 4)``, or a list of them, one for each tensor of a tree;
    - with ``async_op=True`` return a `Work` of what they would have returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack, overload

import torch
from torch import Tensor

from coordinator.pipeline.pipeline_end import PipelineEnd
from coordinator.tree import flatten
from device_comm import Work
from device_comm.verbs.checks import Later, Maybe, Now

Shapes = Sequence[int] | Sequence[Sequence[int]]
"""One tensor's shape; or one for each tensor of a tree, in order."""


def check(tree: Any, shapes: Shapes | None, dtype: torch.dtype | None) -> None:
    """Require that the tensors of ``tree`` have these shapes and this dtype; None: any will do.

    Raises:
        ValueError: they have not.
    """
    if tree is None:
        return
    tensors = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
    if shapes is not None:
        many = any(isinstance(each, Sequence) for each in shapes)
        wanted = [tuple(each) for each in shapes] if many else [tuple(shapes)]  # type: ignore[arg-type]
        found = [tuple(tensor.shape) for tensor in tensors]
        if found != wanted:
            raise ValueError(f"tensors of shapes {found} arrived where {wanted} were expected")
    others = {tensor.dtype for tensor in tensors} - {dtype}
    if dtype is not None and others:
        raise ValueError(f"tensors of {others} arrived where {dtype} was expected")


class Stage(PipelineEnd):
    """One stage of a pipeline: ``Stage(groups.pp, groups.tp)``."""

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before this stage."""
        return self.pp.is_first_rank

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after this stage."""
        return self.pp.is_last_rank

    def recv_forward(
        self,
        input_tensor_shape: Shapes | None = None,
        prev_rank: int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """The previous stage's output; None on the first. Collective: no, with that stage."""
        return self._do(
            recv_prev=not self.is_first,
            prev_rank=prev_rank,
            expected=(input_tensor_shape, None, dtype),
            **options,
        )

    def recv_backward(
        self,
        output_grad_shape: Shapes | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """The gradient of this stage's output; None on the last. Collective: no."""
        return self._do(
            recv_next=not self.is_last,
            next_rank=next_rank,
            expected=(None, output_grad_shape, dtype),
            **options,
        )

    @overload
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Now],
    ) -> None: ...
    @overload
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Later],
    ) -> Work[None]: ...
    @overload
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Maybe],
    ) -> Work[None] | None: ...
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send an output to the next stage; nothing on the last. Collective: no.

        It may be changed afterwards; its receive is not waited for, as `MessageVerbs` says.
        """
        return self._do(
            send_next=None if self.is_last else output_tensor,
            next_rank=next_rank,
            scatter_gather_tensors=scatter_gather_tensors,
            **options,
        )

    @overload
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Now],
    ) -> None: ...
    @overload
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Later],
    ) -> Work[None]: ...
    @overload
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = ...,
        scatter_gather_tensors: bool | None = ...,
        **how: Unpack[Maybe],
    ) -> Work[None] | None: ...
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send the gradient of an input to the previous stage; nothing on the first.

        It may be changed afterwards; its receive is not waited for, as `MessageVerbs` says.
        Collective: no.
        """
        return self._do(
            send_prev=None if self.is_first else input_tensor_grad,
            prev_rank=prev_rank,
            scatter_gather_tensors=scatter_gather_tensors,
            **options,
        )

    def send_forward_recv_backward(
        self,
        output_tensor: Any,
        output_grad_shape: Shapes | None = None,
        recv_next: bool = True,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send an output, receive the gradient of one; None on the last. Collective: no."""
        return self._do(
            send_next=None if self.is_last else output_tensor,
            recv_next=recv_next and not self.is_last,
            next_rank=next_rank,
            expected=(None, output_grad_shape, dtype),
            scatter_gather_tensors=scatter_gather_tensors,
            **options,
        )

    def send_backward_recv_forward(
        self,
        input_tensor_grad: Any,
        input_tensor_shape: Shapes | None = None,
        recv_prev: bool = True,
        prev_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send the gradient of an input, receive an input; None on the first. Collective: no."""
        return self._do(
            send_prev=None if self.is_first else input_tensor_grad,
            recv_prev=recv_prev and not self.is_first,
            prev_rank=prev_rank,
            expected=(input_tensor_shape, None, dtype),
            scatter_gather_tensors=scatter_gather_tensors,
            **options,
        )

    def send_forward_recv_forward(
        self,
        output_tensor: Any,
        input_tensor_shape: Shapes | None = None,
        recv_prev: bool = True,
        prev_rank: int | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send an output to the next stage, receive one from the previous. Collective: no."""
        return self._do(
            send_next=output_tensor,
            recv_prev=recv_prev,
            prev_rank=prev_rank,
            next_rank=next_rank,
            expected=(input_tensor_shape, None, dtype),
            scatter_gather_tensors=scatter_gather_tensors,
            **options,
        )

    def send_backward_recv_backward(
        self,
        input_tensor_grad: Any,
        output_grad_shape: Shapes | None = None,
        recv_next: bool = True,
        prev_rank: int | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send a gradient to the previous stage, receive one from the next. Collective: no."""
        return self._do(
            send_prev=input_tensor_grad,
            recv_next=recv_next,
            prev_rank=prev_rank,
            next_rank=next_rank,
            expected=(None, output_grad_shape, dtype),
            scatter_gather_tensors=scatter_gather_tensors,
            **options,
        )

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Any,
        input_tensor_grad: Any,
        input_tensor_shape: Shapes | None = None,
        output_grad_shape: Shapes | None = None,
        recv_prev: bool = True,
        recv_next: bool = True,
        prev_rank: int | None = None,
        next_rank: int | None = None,
        dtype: torch.dtype | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send both ways and receive both ways: (input, gradient). Collective: no."""
        return self._do(
            send_next=output_tensor,
            send_prev=input_tensor_grad,
            recv_prev=recv_prev,
            recv_next=recv_next,
            prev_rank=prev_rank,
            next_rank=next_rank,
            expected=(input_tensor_shape, output_grad_shape, dtype),
            scatter_gather_tensors=scatter_gather_tensors,
            both=True,
            **options,
        )

    def _do(
        self,
        *,
        recv_prev: bool = False,
        recv_next: bool = False,
        expected: tuple[Shapes | None, Shapes | None, torch.dtype | None] = (None, None, None),
        both: bool = False,
        **others: Any,
    ) -> Any:
        """An exchange whose result is one tree, or with ``both`` two."""
        inputs, grads, dtype = expected

        def pick(received: list[Any]) -> Any:
            from_prev, from_next = received
            check(from_prev, inputs, dtype)
            check(from_next, grads, dtype)
            return (from_prev, from_next) if both else from_prev if recv_prev else from_next

        return self._swap(pick, recv_prev=recv_prev, recv_next=recv_next, **others)
