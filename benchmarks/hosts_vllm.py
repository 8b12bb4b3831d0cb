"""vLLM's queue between two hosts, in vLLM's own interpreter: a child of `benchmarks.hosts`.

    python -m benchmarks.hosts_vllm FOLDER ADDRESS CALLS       the head: prints the median seconds
    python -m benchmarks.hosts_vllm FOLDER ADDRESS RANK LOCAL  a worker; LOCAL: 1 on the head's host

As in vLLM's executors over hosts, the head broadcasts a call through one queue, and each worker
answers through one of its own. Imports nothing of ours but `benchmarks.queue_peers`.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.queue_peers import vllm_queue

WORKERS = 4
ON_HEAD = (0, 1)


def lead(folder: Path, address: str, calls: int) -> float:
    make = vllm_queue()
    queue = make(WORKERS, len(ON_HEAD), local_reader_ranks=list(ON_HEAD), connect_ip=address)
    _tell(folder / "calls", queue.export_handle())
    answers = [make.create_from_handle(_told(folder / str(rank)), 0) for rank in range(WORKERS)]
    queue.wait_until_ready()
    for answer in answers:
        answer.wait_until_ready()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        queue.enqueue("echo")
        for answer in answers:
            answer.dequeue()
        times.append(time.perf_counter() - began)
    queue.enqueue("stop")
    return statistics.median(times)


def work(folder: Path, address: str, rank: int, local: bool) -> None:
    make = vllm_queue()
    queue = make.create_from_handle(_told(folder / "calls"), rank)
    answer = make(1, int(local), connect_ip=address)
    _tell(folder / str(rank), answer.export_handle())
    queue.wait_until_ready()
    answer.wait_until_ready()
    while queue.dequeue() != "stop":
        answer.enqueue(None)


def _tell(file: Path, handle: Any) -> None:
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(handle))
    part.rename(file)


def _told(file: Path) -> Any:
    while not file.exists():
        time.sleep(0.01)
    return pickle.loads(file.read_bytes())


if __name__ == "__main__":
    folder, address, number, *local = sys.argv[1:]
    if local:
        work(Path(folder), address, int(number), local == ["1"])
    else:
        print(lead(Path(folder), address, int(number)))
