"""Our queue with vLLM's arguments and the ways its executor uses it; needs no vLLM."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from coordinator.plugins.vllm.queue import MessageQueue
from shm_broadcast import DRIVER_RANK, GroupClosedError, PeerLostError
from tests.patience import NAMED_WITHIN
from tests.ranks import CONTEXT

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path


def answer(input_handle: Any, rank: int, pipe: Connection) -> None:
    """What vLLM's worker does: read calls, write answers to a queue of its own."""
    calls = MessageQueue.create_from_handle(input_handle, rank)
    answers = MessageQueue(1, 1)
    pipe.send(answers.export_handle())
    calls.wait_until_ready()
    answers.wait_until_ready()
    while (call := calls.dequeue(indefinite=True)) is not None:
        answers.enqueue((rank, call))


def test_calls_and_answers_go_as_in_the_executor_of_vllm() -> None:
    calls = MessageQueue(2, 2, max_chunk_bytes=16 << 20, connect_ip="127.0.0.1")
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    workers = [
        CONTEXT.Process(target=answer, args=(calls.export_handle(), rank, pipes[rank][1]))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    handles = [reader.recv() for reader, _ in pipes]
    assert [handle.local_reader_ranks for handle in handles] == [[0], [0]]
    answers = [MessageQueue.create_from_handle(handle, 0) for handle in handles]
    calls.wait_until_ready()
    for queue in answers:
        queue.wait_until_ready()
    for step in range(100):
        calls.enqueue(("execute_model", step))
        assert [queue.dequeue(timeout=30) for queue in answers] == [
            (rank, ("execute_model", step)) for rank in range(2)
        ]
    calls.enqueue(None)
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0


def test_a_killed_worker_is_named_to_the_engine_that_waits_for_its_answer() -> None:
    calls = MessageQueue(1, 1)
    reader, writer = CONTEXT.Pipe(duplex=False)
    worker = CONTEXT.Process(target=answer, args=(calls.export_handle(), 0, writer))
    worker.start()
    answers = MessageQueue.create_from_handle(reader.recv(), 0)
    calls.wait_until_ready()
    answers.wait_until_ready()
    assert worker.pid is not None
    killer = threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL))
    killer.start()
    begun = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        answers.dequeue()
    assert time.monotonic() - begun - 0.2 < NAMED_WITHIN
    assert caught.value.pid == worker.pid
    worker.join()


def test_shutdown_wakes_a_thread_that_waits() -> None:
    queue = MessageQueue(1, 1)
    assert queue.export_handle().board.ranks == (DRIVER_RANK, 0)  # outside of a group
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    threading.Timer(0.2, reader.shutdown).start()
    with pytest.raises(GroupClosedError):
        reader.dequeue(indefinite=True)
    assert reader.shutting_down


def test_the_engine_reads_workers_on_other_nodes_by_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 2)
    monkeypatch.setenv("GROUP_COORDINATOR_SECRET_FILE", str(secret))
    answers = MessageQueue(1, 0, connect_ip="127.0.0.1")
    assert answers.export_handle().remote_subscribe_addr is not None
    engine = MessageQueue.create_from_handle(answers.export_handle(), -1)
    joining = threading.Thread(target=engine.wait_until_ready)
    joining.start()
    answers.wait_until_ready()
    joining.join()
    answers.enqueue("ready")
    assert engine.dequeue(timeout=30) == "ready"
    engine.shutdown()
    answers.shutdown()


def test_a_queue_between_nodes_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_COORDINATOR_SECRET_FILE", raising=False)
    with pytest.raises(ValueError, match="the launcher's secret"):
        MessageQueue(2, 1, connect_ip="127.0.0.1")
