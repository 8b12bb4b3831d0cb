"""What can be said of symmetric memory without devices that share a switch."""

from __future__ import annotations

import pytest
import torch

from device_comm.cuda.errors import DeviceError
from device_comm.cuda.symmetric_backend import SymmetricBackend


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there may be a switch")
def test_without_a_switch_it_is_refused_with_the_reason() -> None:
    with pytest.raises(DeviceError, match=r"symmetric memory: cuda:0 has no multicast"):
        SymmetricBackend.check(torch.device("cuda", 0))


def test_torch_has_the_operation() -> None:
    schema = torch.ops.symm_mem.multimem_all_reduce_.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name"]
