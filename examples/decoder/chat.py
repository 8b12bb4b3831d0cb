"""Talk with a small language model on two ranks: python examples/decoder/chat.py [--tp N] [--pp N].

The engine is in server/workers/decoder; read engine.py first. A worker that is killed while it
talks is replaced, and the answer goes on. Ctrl-C ends an answer, or the chat; Ctrl-D the chat.
"""

from __future__ import annotations

import argparse
import sys

from group_coordinator import WorkerPool
from group_coordinator.commands.progress import ProgressBar
from group_coordinator.workers.decoder import (
    DecoderFolder,
    DecoderText,
    DecoderWorker,
    Engine,
    Sampling,
    smollm2,
)


def main() -> None:
    """Start the workers, then answer one line after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp", type=int, default=2, help="parts of every layer (default 2)")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline (default 1)")
    parser.add_argument("--model", help="a Llama-type folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest")
    options = parser.parse_args()
    try:
        folder = DecoderFolder.open(options.model or smollm2())
        folder.config.check_parallel(options.tp, options.pp)
        text, sampling = DecoderText(folder), Sampling(options.temperature)
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    sys.stdin.reconfigure(errors="replace")
    grid = {"tp": options.tp, "pp": options.pp}
    arguments = {"model": str(folder.path), "slots": options.pp}
    bar, more = ProgressBar(), {"worker_kwargs": arguments, "restart": "worker"}
    bar.begin()
    with (
        WorkerPool(DecoderWorker, **grid, **more, on_progress=bar) as pool,
        Engine(pool) as engine,
    ):
        bar.end("Ctrl-C ends an answer, Ctrl-D the chat.")
        chat: list[dict[str, str]] = []
        while (line := ask()) is not None:
            chat.append({"role": "user", "content": line})
            while len(chat) > 1 and len(text.encode_chat(chat)) > engine.limits.context // 2:
                del chat[:2]  # what was said first is forgotten
            try:
                said = answer(engine, text, chat, sampling)
            except ValueError as error:  # it is too long
                print(error, file=sys.stderr)
                chat.clear()
            else:
                chat.append({"role": "assistant", "content": said})


def ask() -> str | None:
    """The next line that says something; None at the end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        if line:
            return line


def answer(engine: Engine, text: DecoderText, chat: list[dict[str, str]], how: Sampling) -> str:
    """Show the answer as it comes; Ctrl-C ends it early."""
    reader, said = text.reader(), ""
    with engine.submit(text.encode_chat(chat), sampling=how) as generation:
        try:
            for token in generation:
                said += (more := reader.read(token))
                print(more, end="", flush=True)
        except KeyboardInterrupt:
            pass
    said += (last := reader.rest())
    print(last)
    return said


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
