"""What an all-reduce that is fused with a model's residual and norm is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from device_comm.cuda.launches.abi import ALIGN, KernelJob
from device_comm.cuda.launches.launch import NUMBERS
from device_comm.reduce_op import ReduceOp
from device_comm.span import Span

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    import torch
    from torch import Tensor


class NormTask(NamedTuple):
    """``kept = residual + all_reduce(source)``, and ``output = rms_norm(kept) * weight``.

    All are contiguous rows of one dtype, ``weight`` is one row. ``kept`` is rounded once, and it is
    normed as it was rounded.

    Attributes:
        source: the address of what is summed over the ranks, in rank order.
        residual: the address of what is added, the same on all ranks.
        weight: the address of the row by which each row of the norm is multiplied.
        output: the address of the result; may be ``source``.
        kept: the address of the new residual; may be ``residual``.
        rows: the number of rows.
        row_bytes: bytes of a row, a multiple of `ALIGN`.
        dtype: a dtype of `NUMBERS`.
        epsilon: what is added to the mean of a row's squares.
    """

    source: int
    residual: int
    weight: int
    output: int
    kept: int
    rows: int
    row_bytes: int
    dtype: torch.dtype
    epsilon: float

    @classmethod
    def of(
        cls,
        source: Tensor,
        residual: Tensor,
        weight: Tensor,
        output: Tensor,
        kept: Tensor,
        epsilon: float,
    ) -> Self:
        """The task of tensors, whose last dimension is a row.

        Raises:
            ValueError: a tensor has another shape or dtype than ``source``, or is not contiguous,
                or there is no kernel for such rows; says which.
        """
        alike = {"source": source, "residual": residual, "output": output, "kept": kept}
        _check({**alike, "weight": weight}, source.dtype)
        for name, tensor in alike.items():
            if tensor.shape != source.shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, not {tuple(source.shape)}")
        if weight.shape != source.shape[-1:]:
            raise ValueError(f"weight is {tuple(weight.shape)}, not {tuple(source.shape[-1:])}")
        if not weight.nbytes or weight.nbytes % ALIGN:
            raise ValueError(f"rows of {weight.nbytes} bytes are not of whole {ALIGN} bytes")
        return cls(
            source.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            kept.data_ptr(),
            source.nbytes // weight.nbytes,
            weight.nbytes,
            source.dtype,
            epsilon,
        )

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    def job(self) -> KernelJob:
        """The kernel's task."""
        return KernelJob(
            puts=(
                Span(self.source, self.size),
                Span(self.residual, self.size),
                Span(self.weight, self.row_bytes),
            ),
            takes=(Span(self.output, self.size), Span(self.kept, self.size)),
            op=ReduceOp.SUM,
            epsilon=self.epsilon,
        )


def _check(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    if dtype not in NUMBERS:
        raise ValueError(f"no kernel norms {dtype}")
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is of {tensor.dtype}, not of {dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
