"""Tokenises requests in a thread beside the event loop, in pieces that take turns.

The next piece of a request is queued when the one before it is done, behind the pieces of other
requests, so a small request waits for one piece of each large one. A single short text is tokenised
in the event loop itself, because waking the thread would take longer.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from ..workers.minilm import EncodedText

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..workers.minilm import SentenceTokenizer
    from .embedding_api import Input

_PIECE_CHARACTERS = 1 << 15
"""About how long a piece is; it takes some 10 ms, and 10 MB of memory meanwhile."""
_SHORT_CHARACTERS = 1 << 10
"""The longest text that the event loop tokenises itself; it takes 1 ms at most."""


class Tokenizing:
    """A thread that tokenises; belongs to one event loop."""

    def __init__(self, tokenizer: SentenceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenize")

    async def encode(self, inputs: Sequence[Input], *, truncate: bool) -> EncodedText:
        """See `SentenceTokenizer.encode`."""
        if len(inputs) == 1 and len(inputs[0]) <= _SHORT_CHARACTERS:
            return self._tokenizer.encode(inputs, truncate=truncate)
        found = EncodedText()
        loop = asyncio.get_running_loop()
        for start, stop in self._pieces(inputs):
            work = partial(
                self._tokenizer.encode, inputs[start:stop], truncate=truncate, first=start
            )
            part = await loop.run_in_executor(self._thread, work)
            found.tokens.extend(part.tokens)
            found.truncated.extend(part.truncated)
        return found

    def close(self) -> None:
        """Tokenise nothing more; pieces that are queued are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pieces(self, inputs: Sequence[Input]) -> Iterator[tuple[int, int]]:
        start = size = 0
        for index, item in enumerate(inputs):
            size += min(len(item), self._tokenizer.max_characters)
            if size >= _PIECE_CHARACTERS:
                yield start, index + 1
                start, size = index + 1, 0
        if start < len(inputs):
            yield start, len(inputs)
