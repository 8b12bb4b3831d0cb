from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from device_comm import ReduceOp, check_reduction, reduce_in_rank_order
from tests.device_comm.oracle import REDUCED, ops_for, reduced, same, values


def test_numbers_are_bagua_s() -> None:
    assert {op.name: op.value for op in ReduceOp} == {
        "SUM": 0,
        "PRODUCT": 1,
        "MIN": 2,
        "MAX": 3,
        "BOR": 7,
        "BAND": 8,
        "BXOR": 9,
        "AVG": 10,
    }


def test_torch_s_operation_has_the_same_name_whatever_its_number() -> None:
    assert ReduceOp.BAND.torch == dist.ReduceOp.BAND
    assert ReduceOp.AVG.torch == dist.ReduceOp.AVG
    for op in ReduceOp:
        assert op.torch == getattr(dist.ReduceOp, op.name)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_the_local_reduction_is_right(dtype: torch.dtype) -> None:
    parts = [values(rank, (4, 3), dtype) for rank in range(3)]
    for op in ReduceOp:
        if op not in ops_for(dtype):
            with pytest.raises(TypeError, match=r"AVG|BOR|BAND|BXOR|MIN|MAX"):
                check_reduction(op, dtype)
            continue
        check_reduction(op, dtype)
        output = torch.empty_like(parts[0])
        reduce_in_rank_order(parts, op, output)
        same(output, reduced(parts, op))


def test_halves_are_accumulated_in_float32() -> None:
    parts = [torch.tensor([value], dtype=torch.float16) for value in (60000.0, 60000.0, -60000.0)]
    output = torch.empty_like(parts[0])
    reduce_in_rank_order(parts, ReduceOp.SUM, output)
    assert output.item() == 60000.0


@pytest.mark.parametrize("dtype", [torch.uint64, torch.float8_e4m3fn, torch.complex32], ids=str)
def test_some_dtypes_are_only_moved(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="not reduced"):
        check_reduction(ReduceOp.SUM, dtype)


def test_a_number_is_not_an_operation() -> None:
    check_reduction(ReduceOp.SUM, torch.float32)
    with pytest.raises(TypeError, match=r"must be a coordinator\.ReduceOp, not 0"):
        check_reduction(0, torch.float32)
