"""Provide the named exchanges of a pipeline stage, as ColossalAI has them.

Forward goes from the first stage to the last, backward the other way. The first five do nothing and
return None at the ends of the pipeline. The last three go round in a ring, for stages that hold
several parts of the model; ``None`` and ``recv_*=False`` leave out a part.

All of them:
    - send and receive trees, with the arguments and errors of `PipelineEnd.exchange`;
    - accept ranks in ``pp`` instead of the neighbours;
    - check received trees against a given dtype and given shapes (one tensor's, as ``(4, 4)``, or a
      list with one shape per tensor of a tree), and raise `ValueError`;
    - with ``async_op=True`` return a `Work` of the result.

A send without ``async_op`` does not wait for its receive; the sent tensors may change afterwards:
see `GroupVerbs`.
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
"""One tensor's shape, or one shape per tensor of a tree, in order."""


def check(tree: Any, shapes: Shapes | None, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless the tensors of ``tree`` have the given shapes and dtype."""
    if tree is None:
        return
    tensors = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
    if shapes is not None:
        many = any(isinstance(each, Sequence) for each in shapes)
        expected = [tuple(each) for each in shapes] if many else [tuple(shapes)]  # type: ignore[arg-type]
        received = [tuple(tensor.shape) for tensor in tensors]
        if received != expected:
            raise ValueError(f"received tensors of shapes {received}; expected {expected}")
    others = {tensor.dtype for tensor in tensors} - {dtype}
    if dtype is not None and others:
        raise ValueError(f"received tensors of {others}; expected {dtype}")


class Stage(PipelineEnd):
    """One stage of a pipeline: ``Stage(groups.pp, groups.tp)``."""

    @property
    def is_first(self) -> bool:
        """Return whether this stage has no previous stage."""
        return self.pp.is_first_rank

    @property
    def is_last(self) -> bool:
        """Return whether this stage has no next stage."""
        return self.pp.is_last_rank

    def recv_forward(
        self,
        input_tensor_shape: Shapes | None = None,
        prev_rank: int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Return the previous stage's output; None on the first."""
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
        """Return the gradient of this stage's output; None on the last."""
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
    def send_forward(
        self,
        output_tensor: Any,
        next_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send an output to the next stage; do nothing on the last."""
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
    def send_backward(
        self,
        input_tensor_grad: Any,
        prev_rank: int | None = None,
        scatter_gather_tensors: bool | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """Send the gradient of an input to the previous stage; do nothing on the first."""
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
        """Send an output, return the gradient of one; None on the last."""
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
        """Send the gradient of an input, return an input; None on the first."""
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
        """Send an output to the next stage, return one from the previous."""
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
        """Send a gradient to the previous stage, return one from the next."""
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
        """Send both ways and receive both ways: return (input, gradient)."""
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
        """Run an exchange; its result is one tree, or with ``both`` two."""
        inputs, grads, dtype = expected

        def pick(received: list[Any]) -> Any:
            from_prev, from_next = received
            check(from_prev, inputs, dtype)
            check(from_next, grads, dtype)
            return (from_prev, from_next) if both else from_prev if recv_prev else from_next

        return self._swap(pick, recv_prev=recv_prev, recv_next=recv_next, **others)
