"""vLLM's and SGLang's queues, measured in their own interpreter.

Run as a child of `benchmarks.message_queue`. Imports nothing of ours but what needs the standard
library only.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

from benchmarks.queue_base import System, obey_input, serve

READERS = mp.get_context("forkserver")


def vllm_queue() -> Any:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


def sglang_queue() -> Any:
    root = Path(os.environ["PEERS"]) / "sgl" / "sglang"
    for name in (
        "sglang",
        "sglang.srt",
        "sglang.srt.distributed",
        "sglang.srt.distributed.device_communicators",
        "sglang.srt.utils",
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue


VLLM = "vllm.distributed.device_communicators.shm_broadcast"
PRELOADS = {"vLLM": [VLLM], "vLLM (arena)": [VLLM], "SGLang": ["torch"]}
LOADERS = {"vLLM": vllm_queue, "vLLM (arena)": vllm_queue, "SGLang": sglang_queue}


class Peer(System):
    """A queue of vLLM's shape: one broadcasts to the readers, one from each comes back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._options = {"enable_shm_tensor_arena": True} if name == "vLLM (arena)" else {}

    def start(self, n_readers: int) -> None:
        make = LOADERS[self.name]()
        READERS.set_forkserver_preload(PRELOADS[self.name])
        self._queue = make(n_readers, n_readers, **self._options)
        handle = pickle.dumps(self._queue.export_handle())
        pipes = [READERS.Pipe() for _ in range(n_readers)]
        self._processes = [
            READERS.Process(target=read, args=(self.name, handle, reader, end))
            for reader, (_, end) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._answers = [make.create_from_handle(ours.recv(), 0) for ours, _ in pipes]
        self._queue.wait_until_ready()
        for answer in self._answers:
            answer.wait_until_ready()

    def send(self, command: str, payload: Any) -> None:
        self._queue.enqueue((command, payload))

    def replies(self) -> list[Any]:
        return [answer.dequeue() for answer in self._answers]

    def stop(self) -> None:
        self.send("stop", None)
        for process in self._processes:
            process.join(30)


def read(name: str, handle: bytes, reader: int, end: Any) -> None:
    import torch

    torch.set_num_threads(1)
    make = LOADERS[name]()
    queue = make.create_from_handle(pickle.loads(handle), reader)
    answer = make(1, 1)
    end.send(answer.export_handle())
    queue.wait_until_ready()
    answer.wait_until_ready()
    serve(queue.dequeue, answer.enqueue)


def main() -> None:
    """Answer requests until the input ends."""
    obey_input(Peer)


if __name__ == "__main__":
    main()
