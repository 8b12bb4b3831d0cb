"""Which GPU each rank gets, and what is refused: arithmetic, without GPUs."""

from __future__ import annotations

import pytest

from server.cli import main
from server.driver.binding import assign
from server.pool import WorkerPool
from tests.server.workers import Worker


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "share", "expected"),
    [
        ("cpu", 2, 0, False, ["cpu", "cpu"]),
        ("cpu", 2, 8, False, ["cpu", "cpu"]),
        ("cuda", 2, 2, False, ["cuda:0", "cuda:1"]),
        ("cuda", 2, 8, True, ["cuda:0", "cuda:1"]),
        ("cuda", 4, 1, True, ["cuda:0"] * 4),
        ("cuda", 5, 2, True, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:1", 1, 2, False, ["cuda:1"]),
        ("cuda:1", 2, 2, True, ["cuda:1", "cuda:1"]),
    ],
)
def test_devices(device: str, ranks: int, gpus: int, share: bool, expected: list[str]) -> None:
    assert list(assign(device, ranks, gpus, share)) == expected


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "share", "text"),
    [
        ("cuda", 1, 0, False, "device 'cuda': torch sees no CUDA device"),
        ("cuda", 1, 0, True, "torch sees no CUDA device"),
        ("cuda", 3, 2, False, "3 ranks for 2 GPUs: several ranks on one need share_gpu"),
        (
            "cuda",
            2,
            1,
            False,
            "2 ranks for 1 GPU: several ranks on one need share_gpu=True or --share",
        ),
        ("cuda:0", 2, 8, False, "2 ranks for 1 GPU"),
        ("cuda:2", 1, 2, False, "device 'cuda:2': there are 2 GPUs, numbered from 0"),
        ("cpu", 2, 2, True, "sharing a GPU is for device 'cuda'; got 'cpu'"),
        (
            "abacus",
            1,
            1,
            False,
            "device must be .cpu., .cuda. or one GPU as .cuda:0.; got .abacus.",
        ),
        ("mps", 1, 0, False, "device must be .cpu., .cuda. or one GPU"),
        ("cpu:1", 1, 0, False, "device must be .cpu., .cuda. or one GPU"),
    ],
)
def test_what_is_refused(device: str, ranks: int, gpus: int, share: bool, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        assign(device, ranks, gpus, share)


def test_a_pool_asks_before_it_starts_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks for 1 GPU"):
        WorkerPool(Worker, tp=2, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "gpus", "text"),
    [
        (["--device=cuda"], 0, "device 'cuda': torch sees no CUDA device"),
        (["--device=cuda", "--share-gpu"], 0, "torch sees no CUDA device"),
        (["--device=cuda", "--tp=2", "--pp=2"], 2, "4 ranks for 2 GPUs"),
        (["--share-gpu"], 1, "sharing a GPU is for device 'cuda'; got 'cpu'"),
        (["--dtype=int3"], 1, "--dtype: invalid choice: 'int3'"),
    ],
)
def test_commands_end_with_status_2_and_one_line(
    arguments: list[str],
    gpus: int,
    text: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    with pytest.raises(SystemExit) as info:
        main(["serve", *arguments])
    stdout, stderr = capfd.readouterr()
    assert (info.value.code, stdout) == (2, "")
    assert stderr.count("\n") == 1
    assert stderr.startswith("group-coordinator serve: error: ")
    assert text in stderr
