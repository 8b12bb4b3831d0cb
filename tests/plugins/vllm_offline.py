"""The greedy tokens of ``vllm.LLM``, case by case, in a process that keeps the engine itself.

``python -m tests.plugins.vllm_offline stock|ours FILE`` writes a line of JSON for each.
The engine has all prompts before its first step, so that a step has the same rows in every run:
only what ranks tell each other can make the tokens of stock and ours differ. Models run in
float32: stock cuts sums of bf16 off, rather than round them, where the CPU has AVX-512 without
its BF16 part.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.vllm_models import random_qwen2
from benchmarks.vllm_served import LAYOUTS, TRACED, keywords

PROMPTS = (
    *("The capital of France is", "Two and two make", "Once upon a time", "Dear Sir or Madam,"),
    *("To be or not to be", "if __name__ ==", "In the year 1492", "My favourite colour is"),
    *("Water boils at", "The opposite of hot is", "Monday, Tuesday,", "Mix the flour with"),
    *("A triangle has", "The first president", "Roses are red,", "She opened the door and"),
    *("import numpy as", "The sun rises in", "I have never seen", "Chapter 1\n"),
)

CASES = {
    "TP=3": LAYOUTS["TP=3"],
    "PP=2": LAYOUTS["PP=2"],
    "TP=2": (random_qwen2, ("-tp", "2", *TRACED)),
}


def run(name: str, executor: Any) -> dict[str, Any]:
    """Start the workers of a case, generate, and end them.

    Returns:
        The tokens, what the workers had mapped, how many have not ended, and how many files of
        shared memory they have left, which are removed here.
    """
    from vllm import LLM, SamplingParams

    make, arguments = CASES[name]
    llm = LLM(
        str(make()),
        dtype="float32",
        distributed_executor_backend=executor,
        **keywords(arguments),
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = llm.generate(PROMPTS, sampling, use_tqdm=False)
    workers = psutil.Process().children()
    maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in workers]
    llm.llm_engine.engine_core.shutdown()
    _, left = psutil.wait_procs(workers, 30)
    mapped = {name for text in maps for name in re.findall(r"/dev/shm/vllm_\S+", text)}
    files = [file for file in map(Path, mapped) if file.exists()]
    for file in files:
        file.unlink()
    return {
        "case": name,
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "workers with a queue of vLLM's": sum("/dev/shm/psm_" in text for text in maps),
        "workers with a board of ours": sum("/memfd:" in text for text in maps),
        "files left": len(files),
        "workers left": sum("VLLM::" in "".join(each.cmdline()) for each in left),
    }


def main(whose: str, file: str) -> None:
    executor: Any = "mp"
    if whose == "ours":
        from coordinator.plugins.vllm.executor import GroupCoordinatorExecutor

        executor = GroupCoordinatorExecutor
    with Path(file).open("w", buffering=1) as told:
        for name in CASES:
            print(json.dumps(run(name, executor)), file=told)


if __name__ == "__main__":
    main(*sys.argv[1:])
