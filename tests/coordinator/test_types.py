"""A user's type checker finds types in the installed packages: no verb returns Any."""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import venv
import zipfile
from typing import TYPE_CHECKING, get_overloads

import pytest

import coordinator
from coordinator.pipeline import Stage
from device_comm import Communicator
from tests.commands import ROOT, run_to_end
from tests.packages import source_wheel

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("coordinator", "device_comm", "group_coordinator", "shm_broadcast")

USER = """
import torch
import coordinator
from coordinator.pipeline import Stage
from device_comm import Communicator
from group_coordinator import PoolConfig, Replicas, WorkerContext, WorkerLostError, WorkerPool
from shm_broadcast import MessageQueue

groups = coordinator.init(tp=2)
tp, x, sizes = groups.tp, torch.ones(4), [2, 2]
comm: Communicator = tp.device_communicator
stage = Stage(groups.pp, groups.tp)


class Model:
    def __init__(self, context: WorkerContext, scale: float) -> None:
        self.tp, self.scale = context.groups.tp, scale

    def forward(self, rows: int) -> "torch.Tensor":
        return self.tp.all_reduce(torch.full((rows,), self.scale))


def use() -> None:
    with WorkerPool(Model, tp=2, worker_kwargs={"scale": 10.0}, config=PoolConfig()) as pool:
        reveal_type(pool.submit("forward", 1).result())
        try:
            print(pool.call("forward", 3, timeout=1.0), list(pool.stream("count", 3)))
        except WorkerLostError as lost:
            reveal_type(lost.rank)
    with Replicas(Model, dp=2) as replicas:
        print(replicas.call("forward", 3))
    with MessageQueue(n_reader=2, n_local_reader=2) as queue:
        queue.enqueue({"step": 1}, timeout=1.0)
        reveal_type(queue.dequeue(timeout=1.0))
"""

# an expression and its type; {} stands for nothing, or for async_op=True: then it is a Work of that
TYPES = {
    **{
        f"{owner}.{call}": "Tensor"
        for owner in ("tp", "comm")
        for call in (
            "all_reduce(x{})",
            "all_reduce_(x{})",
            "all_gather(x, dim=0{})",
            "all_gather_(x, dim=0{})",
            "all_gatherv(x, sizes=sizes{})",
            "reduce_scatter(x, dim=0{})",
            "reduce_scatter_(x, dim=0{})",
            "reduce_scatterv(x, sizes=sizes{})",
            "all_to_all(x, dim=0{})",
            "all_to_all_(x, dim=0{})",
            "broadcast(x, src=1{})",
            "broadcast_(x, src=1{})",
            "scatter(None, src=1, out=x{})",
            "scatter_(x, src=1{})",
        )
    },
    **{
        f"{owner}.{verb}(x, dst=1{{}})": "Tensor | None"
        for owner in ("tp", "comm")
        for verb in ("reduce", "reduce_", "gather", "gather_")
    },
    **{f"{owner}.all_gatherv([x, x]{{}})": "list[Tensor]" for owner in ("tp", "comm")},
    **{f"{owner}.barrier({{}})": "None" for owner in ("tp", "comm")},
    "tp.all_reduce(x, op=coordinator.ReduceOp.MAX, timeout=3.0{})": "Tensor",
    "tp.cpu_all_reduce_(x{})": "Tensor",
    "tp.broadcast_object_list([1]{})": "list[Any]",
    "tp.all_gather_object('x'{})": "list[str]",
    "tp.broadcast_tensor_dict({{'x': x}}{})": "dict[Any, Any]",
    "tp.dispatch(x, x, x{})": "tuple[Tensor, ...]",
    "tp.combine(x{})": "Tensor",
    "stage.send_forward(x{})": "None",
    "stage.send_backward(x{})": "None",
    "stage.exchange(x, recv_prev=True{})": "tuple[Any, Any, fallback=Exchanged]",
}

FIXED = {
    "tp.send(x)": "None",
    "tp.isend(x)": "Work[None]",
    "tp.recv(64, x.dtype)": "Tensor",
    "tp.irecv((8, 8), x.dtype)": "Work[Tensor]",
    "comm.recv(x.shape, x.dtype)": "Tensor",
    "comm.irecv([8], x.dtype)": "Work[Tensor]",
    "tp.isend_object(1, 0)": "Work[None]",
    "tp.recv_tensor_dict()": "dict[Any, Any]",
    "tp.irecv_tensor_dict()": "Work[dict[Any, Any]]",
    "tp.cpu_group": "ProcessGroup",
    "tp.device_group.size()": "int",
    "tp.create_mq_broadcaster()": "MessageQueue",
    "groups.ep.rank_in_group": "int",
    "groups.axes['a']": "GroupCoordinator",
}

BY_NATURE = {
    *("broadcast_object", "recv_object", "irecv_object"),
    *("recv_forward", "recv_backward"),
    *("send_forward_recv_backward", "send_backward_recv_forward"),
    *("send_forward_recv_forward", "send_backward_recv_backward"),
    "send_forward_backward_recv_forward_backward",
}
"""What was sent is what comes, and the receiver does not say what that is."""


def expected() -> dict[str, str]:
    found = dict(FIXED)
    for call, kind in TYPES.items():
        found[call.format("")] = kind
        more = "async_op=True" if call.endswith("({})") else ", async_op=True"
        found[call.format(more)] = f"Work[{kind}]"
    return found


def installed(folder: Path, wheel: Path) -> Path:
    """The Python of an environment where the packages are installed, beside what they need."""
    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    others = [path for path in sys.path if path and path != str(ROOT)]
    (site / "others.pth").write_text("\n".join([*others, sysconfig.get_path("purelib")]))
    return folder / "bin" / "python"


def revealed(code: str, folder: Path, python: Path) -> list[str]:
    """The types that a strict mypy reveals in a user's file, which must be without errors."""
    (folder / "user.py").write_text(code)
    (folder / "mypy.ini").write_text("[mypy]\n")
    ran = run_to_end(
        *(sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini"),
        *("--python-executable", str(python), "user.py"),
        *("--cache-dir", str(ROOT / ".mypy_cache" / "user")),
        cwd=folder,
        env={name: text for name, text in os.environ.items() if name != "MYPYPATH"},
        timeout=300,
    )
    found = re.findall(r'user\.py:\d+: note: Revealed type is "(.*)"', ran.stdout)
    return [re.sub(r"[\w.]+\.(?=\w)", "", each).replace("builtins.", "") for each in found]


def test_a_users_type_checker_knows_verbs_and_public_names(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = expected()
    names = [(each, name) for each in PACKAGES for name in importlib.import_module(each).__all__]
    lines = [
        *(f"reveal_type({line})" for line in wanted),
        *(f"from {package} import {name} as {package}_{name}" for package, name in names),
        *(f"reveal_type({package}_{name})" for package, name in names),
    ]
    python = installed(tmp_path / "environment", source_wheel(tmp_path_factory))
    found = revealed(USER + "\n".join(lines), tmp_path, python)
    assert found[:3] == ["Any", "int", "Any"]
    assert dict(zip(wanted, found[3:], strict=False)) == wanted
    public = found[3 + len(wanted) :]
    assert len(public) == len(names) and "Any" not in public


@pytest.mark.parametrize("kind", [coordinator.GroupCoordinator, Communicator, Stage])
def test_every_public_verb_has_a_type(kind: type) -> None:
    """A verb whose annotation is Any has overloads without Any, or is listed."""
    for name in dir(kind):
        method = getattr(kind, name)
        if name.startswith("_") or not callable(method):
            continue
        if getattr(method, "__annotations__", {}).get("return") == "Any":
            forms = [each.__annotations__["return"] for each in get_overloads(method)]
            assert name in BY_NATURE or (forms and "Any" not in forms), name
