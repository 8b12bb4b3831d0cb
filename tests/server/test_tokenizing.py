"""Who waits for whom where requests are tokenised."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from server.service.embeddings import Tokenizing
from server.workers.minilm import SentenceTokenizer
from server.workers.minilm.model_config import EncodedText

if TYPE_CHECKING:
    from collections.abc import Sequence

LONG = "word " * 1000


class HeldUp(SentenceTokenizer):
    """Is not done with a long text before ``go_on``."""

    max_characters = 1 << 20

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def encode(
        self, inputs: Sequence[str | Sequence[int]], *, truncate: bool, first: int = 0
    ) -> EncodedText:
        assert LONG not in inputs or self.go_on.wait(60)
        return EncodedText([np.array([first], np.int32)], [1] if truncate else [])


@pytest.mark.parametrize("short", ["a few words", [101, 102], ""])
def test_a_short_text_waits_for_no_long_one(short: str | list[int]) -> None:
    tokenizer = HeldUp()
    tokenizing = Tokenizing(tokenizer)

    async def both() -> None:
        long = asyncio.create_task(tokenizing.encode([LONG], truncate=False))
        await asyncio.sleep(0)
        found = await asyncio.wait_for(tokenizing.encode([short], truncate=True), 60)
        assert (len(found.tokens), found.truncated) == (1, [1])
        assert not long.done()
        tokenizer.go_on.set()
        assert len((await long).tokens) == 1

    try:
        asyncio.run(both())
    finally:
        tokenizer.go_on.set()
        tokenizing.close()
