"""Many clients that ask the embeddings service for a while and check every answer.

They speak HTTP/1.1 over connections of their own, in one process and with as little work as can be:
they share the machine with what they measure.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE = 1e-5
"""How far an element may be from the reference's."""

MOST_TEXTS = 3
"""Texts of one request, at most."""


@dataclass
class Load:
    """What the clients saw.

    Attributes:
        seconds: of each request that was answered with 200.
        refused: requests answered otherwise, by status.
        texts: how many texts were embedded.
        worst: the largest difference of any element from what was expected.
        elapsed: seconds that it took in all.
    """

    seconds: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    texts: int = 0
    worst: float = 0.0
    elapsed: float = 0.0

    def check(self) -> None:
        """Raise unless every answer was right.

        Raises:
            RuntimeError: one was not, or was refused; or nothing was answered.
        """
        if self.refused or not self.seconds or not self.worst <= TOLERANCE:
            raise RuntimeError(
                f"{len(self.seconds)} answers, the worst off by {self.worst}; "
                f"refused: {dict(self.refused)}"
            )


@dataclass(frozen=True)
class Questions:
    """Texts whose embeddings are known and far from each other.

    Attributes:
        texts: n texts.
        vectors: float32 [n, hidden].
    """

    texts: Sequence[str]
    vectors: np.ndarray

    def __post_init__(self) -> None:
        """Refuse questions that could be confused.

        Raises:
            ValueError: two have nearly the same answer.
        """
        for index, vector in enumerate(self.vectors):
            others = np.delete(self.vectors, index, axis=0)
            if len(others) and np.abs(others - vector).max(axis=1).min() < 100 * TOLERANCE:
                raise ValueError(f"another text has the embedding of {self.texts[index]!r}")


class Client:
    """One connection to the service.

    Args:
        url: the service's.
        model: the name to ask for.
    """

    def __init__(self, url: str, model: str) -> None:
        self._at = urlsplit(url)
        self._model = model

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            self._at.hostname, self._at.port, limit=1 << 20
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def send(self, texts: Sequence[str], encoding: str = "base64") -> None:
        """Ask, without waiting."""
        asked = {"model": self._model, "input": texts, "encoding_format": encoding}
        body = json.dumps(asked).encode()
        self._writer.write(
            b"POST /v1/embeddings HTTP/1.1\r\nhost: %b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (self._at.netloc.encode(), len(body), body)
        )

    async def receive(self) -> tuple[int, Any]:
        """The status and JSON of the next answer."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), json.loads(body)

    async def embed(self, texts: Sequence[str]) -> tuple[int, Any]:
        """Ask, and wait for the answer."""
        self.send(texts)
        return await self.receive()


def vectors_of(answer: Any) -> np.ndarray:
    """The embeddings of a base64 answer in order, float32 [n, hidden]."""
    ordered = sorted(answer["data"], key=lambda entry: entry["index"])
    return np.stack(
        [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in ordered]
    )


async def load(
    url: str,
    model: str,
    questions: Questions,
    n_clients: int,
    seconds: float,
    seed: int = 0,
    n_texts: tuple[int, int] = (1, MOST_TEXTS),
) -> Load:
    """Let ``n_clients`` ask one question after another, each its own, for some seconds.

    Args:
        url: the service's.
        model: the name to ask for.
        questions: what to ask.
        n_clients: how many connections.
        seconds: for how long; what was asked by then is waited for.
        seed: of the choice of questions.
        n_texts: of a request, at least and at most.
    """
    found = Load()
    began = time.perf_counter()

    async def ask_on(number: int) -> None:
        choice = random.Random(f"{seed} {number}")
        async with Client(url, model) as client:
            while time.perf_counter() < began + seconds:
                rows = choice.sample(range(len(questions.texts)), choice.randint(*n_texts))
                asked = time.perf_counter()
                status, answer = await client.embed([questions.texts[row] for row in rows])
                if status != 200:
                    found.refused[status] += 1
                    continue
                found.seconds.append(time.perf_counter() - asked)
                found.texts += len(rows)
                difference = np.abs(vectors_of(answer) - questions.vectors[rows]).max()
                found.worst = max(found.worst, float(difference))

    await asyncio.gather(*(ask_on(number) for number in range(n_clients)))
    found.elapsed = time.perf_counter() - began
    return found
