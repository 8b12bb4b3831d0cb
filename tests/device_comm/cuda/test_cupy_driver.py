"""What can be known of `CupyDriver` without a device: names it uses, and what it compiles."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm.cuda import cupy_driver
from device_comm.cuda import driver as kernel_source
from device_comm.cuda.driver import DeviceError, Driver
from device_comm.cuda.ipc.abi import KERNELS
from tests.device_comm.cuda.host_driver import HostDriver

if TYPE_CHECKING:
    from collections.abc import Callable


def names_used() -> set[str]:
    """Every dotted name in the module that begins with ``cupy.``, as far as it is spelled out."""
    tree = ast.parse(Path(cupy_driver.__file__).read_text())
    inner = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }
    whole = (
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and id(node) not in inner
    )
    return {name for name in whole if re.fullmatch(r"cupy(\.\w+)+", name)}


def test_every_name_of_cupy_exists() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    names = names_used()
    assert len(names) > 25
    missing = []
    for name in names:
        found = cupy
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if found is None:
            missing.append(name)
    assert missing == []
    assert hasattr(cupy.RawKernel, "kernel")
    assert hasattr(cupy.cuda.function.Function, "ptr")


def test_nobody_else_imports_cupy() -> None:
    root = Path(cupy_driver.__file__).parents[2]
    users = [
        str(path.relative_to(root))
        for floor in ("shm_broadcast", "device_comm", "coordinator", "server")
        for path in (root / floor).rglob("*.py")
        if re.search(r"^\s*(import|from) cupy\b", path.read_text(), re.MULTILINE)
    ]
    assert users == ["device_comm/cuda/cupy_driver.py"]


@pytest.mark.parametrize("kind", [cupy_driver.CupyDriver, HostDriver])
def test_it_has_all_that_communicators_need(kind: type) -> None:
    wanted = {name for name in vars(Driver) if not name.startswith("_")}
    assert wanted - set(dir(kind)) == {"device", "identity"}
    assert len(wanted) > 20
    for name in wanted - {"device", "identity"}:
        assert parameters(getattr(kind, name)) == parameters(getattr(Driver, name)), name


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_without_cupy_or_a_device_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_driver, "_missing", "No module named 'cupy'")
    with pytest.raises(DeviceError, match="import cupy: No module named 'cupy'"):
        cupy_driver.CupyDriver(0)


def test_the_default_stream_is_marked_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.ExternalStream(0)`` is a new stream (pytorch issue 182960)."""
    recorded: list[object] = []

    def external(stream: int, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(stream=stream, device=device)

    monkeypatch.setattr(torch.cuda, "get_stream_from_external", external)
    monkeypatch.setattr(torch.cuda, "ExternalStream", None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=recorded.append))
    driver = object.__new__(cupy_driver.CupyDriver)
    driver.device = torch.device("cuda", 3)
    for stream in (0, 0x5000):
        driver.mark(stream)
    assert recorded == [external(0, driver.device), external(0x5000, driver.device)]


@pytest.mark.parametrize("call", ["getDevice", "setDevice"])
def test_a_device_that_cannot_be_entered_is_an_error_of_the_device(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no other type: for `try_together` this rank has refused, and is not broken."""

    def fails(*_: int) -> None:
        raise RuntimeError("initialization error")

    runtime = SimpleNamespace(getDevice=lambda: 1, setDevice=lambda _: None)
    setattr(runtime, call, fails)
    monkeypatch.setattr(cupy_driver, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    driver = object.__new__(cupy_driver.CupyDriver)
    driver._index = 3
    with pytest.raises(DeviceError, match="cudaFree: initialization error"):
        driver.free(0x1000)


def test_the_kernels_as_one_text() -> None:
    text = kernel_source.kernel_source()
    left = re.findall(r"#include\s+(\S+)", text)
    assert left
    assert all(name.startswith("<cuda/") for name in left)
    assert all(f"KERNEL({kernel}," in text for kernel in KERNELS)
    files = [path.read_text() for path in Path(kernel_source.__file__).parent.glob("kernels/*.cu*")]
    guards = [guard for each in files for guard in re.findall(r"#define (GC_\w+_CUH)", each)]
    assert len(guards) == len(files) - 1
    assert all(text.count(f"#define {guard}") == 1 for guard in guards)
