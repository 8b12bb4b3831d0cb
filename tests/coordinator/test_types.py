"""What a user's type checker sees: no verb returns Any."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator
from coordinator.pipeline.stage import Stage
from device_comm import Communicator

ROOT = Path(coordinator.__file__).parents[1]

USER = """
import torch
import coordinator
from coordinator.pipeline.pipeline_end import PipelineEnd
from coordinator.pipeline.stage import Stage
from device_comm import Communicator
from shm_broadcast import MessageQueue

groups = coordinator.init(tp=2)
tp, x, sizes = groups.tp, torch.ones(4), [2, 2]
comm: Communicator = tp.device_communicator
stage = Stage(groups.pp, groups.tp)
later = True if x.numel() else False
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
    "tp.reduce_scatterv_into_output(x, x, 0, sizes{})": "Tensor",
    "tp.cpu_all_reduce_(x{})": "Tensor",
    "tp.broadcast_object_list([1]{})": "list[Any]",
    "tp.all_gather_object('x'{})": "list[str]",
    "tp.broadcast_tensor_dict({{'x': x}}{})": "dict[Any, Any]",
    "tp.dispatch(x, x, x{})": "tuple[Tensor, Tensor, Tensor]",
    "tp.dispatch_router_logits(x, x, extra_tensors=[x]{})": "tuple[Tensor, Tensor, list[Tensor]]",
    "tp.combine(x{})": "Tensor",
    "tp.combine_into_output(x, x{})": "Tensor",
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
    "tp.all_reduce(x, async_op=later)": "Tensor | Work[Tensor]",
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


def revealed(lines: list[str], folder: Path) -> list[str]:
    """What mypy says of each of these expressions, in a user's file and a user's folder."""
    file = folder / "user.py"
    file.write_text(USER + "".join(f"reveal_type({line})\n" for line in lines))
    (folder / "mypy.ini").write_text("[mypy]\n")
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file", "mypy.ini"),
            *("--cache-dir", str(ROOT / ".mypy_cache" / "user"), file.name),
        ],
        cwd=folder,
        env={"MYPYPATH": str(ROOT), "PATH": ""} | {"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return re.findall(r'user\.py:\d+: note: Revealed type is "(.*)"', ran.stdout)


def short(revealed_type: str) -> str:
    """A type without the modules that it is from."""
    return re.sub(r"[\w.]+\.(?=\w)", "", revealed_type).replace("builtins.", "")


def test_a_users_type_checker_knows_what_verbs_return(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    wanted = expected()
    found = dict(zip(wanted, map(short, revealed(list(wanted), tmp_path)), strict=True))
    assert found == wanted


@pytest.mark.parametrize("kind", [coordinator.GroupCoordinator, Communicator, Stage])
def test_every_public_verb_is_looked_at(kind: type) -> None:
    """A verb whose annotation is Any has overloads that say more, or is listed."""
    looked_at = {re.split(r"[.(]", call)[1] for call in (*TYPES, *FIXED)}
    for name in dir(kind):
        method = getattr(kind, name)
        if name.startswith("_") or not callable(method):
            continue
        if getattr(method, "__annotations__", {}).get("return") == "Any":
            assert name in looked_at | BY_NATURE, name
