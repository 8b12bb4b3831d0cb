"""What can be said of symmetric memory without devices that share a switch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import _symmetric_memory

from device_comm.cuda.errors import DeviceError
from device_comm.cuda.symmetric_backend import SymmetricBackend


@pytest.mark.skipif(torch.cuda.is_available(), reason="here there may be a switch")
def test_without_a_switch_it_is_refused_with_the_reason() -> None:
    with pytest.raises(DeviceError, match=r"symmetric memory: cuda:0 has no multicast"):
        SymmetricBackend.allocate(torch.device("cuda", 0))


class SomeGroup:
    group_name = "0"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.mark.parametrize(
    "error", [RuntimeError("no\nand a trace"), TypeError("no"), AttributeError("no")]
)
def test_whatever_torch_raises_is_an_error_that_all_ranks_get(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(_symmetric_memory, "rendezvous", refuse)
    group: Any = SomeGroup()
    with pytest.raises(DeviceError, match=rf"rendezvous: {type(error).__name__}: no$"):
        SymmetricBackend(group, torch.empty(16, dtype=torch.uint8))


def test_torch_has_the_operation() -> None:
    schema = torch.ops.symm_mem.multimem_all_reduce_.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name"]
