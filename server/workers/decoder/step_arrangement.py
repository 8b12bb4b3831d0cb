"""How the tokens of a step stand: where each belongs, what it sees, and how far it is turned."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .decoder_config import LlamaConfig
    from .kv_cache import KVCache, Row


class RotaryTable:
    """The factors of the rotary embedding, of each place in a sequence.

    Attributes:
        cos: [length, 1, head_size].
        sin: the same, with the sign that each half of a head needs.

    Args:
        config: the decoder's sizes.
        length: of a sequence at most.
        dtype: of the factors.
        device: where they lie.
    """

    def __init__(
        self, config: LlamaConfig, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = config.head_size
        evens = torch.arange(0, size, 2, dtype=torch.int64, device=device).float()
        places = torch.arange(length, device=device)[:, None, None].float()
        angles = places * (1.0 / config.rope_base ** (evens / size))
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.cos, self.sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class StepArrangement(Protocol):
    """How the tokens of a step stand, computed once for all layers.

    Attributes:
        cos, sin: of the rotary embedding, [tokens, 1, head_size].
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """What each token's queries find in its sequence, up to the token itself.

        Args:
            layer: its number in the cache.
            asked: the query heads of each key head, [tokens, key_heads, queries, head_size].
            new: the heads' keys and then their values, which are put into the cache;
                [tokens, 2 * key_heads, head_size].

        Returns:
            The shape of ``asked``.
        """


class RowsArrangement:
    """Of any step.

    Attributes:
        tokens: their ids, int64 [tokens].
        ends: the tokens after which another one is drawn, int64 [draws].
        cos, sin: see `StepArrangement`.

    Args:
        rows: the sequences' parts.
        config: the decoder's sizes.
        rotary: of the model.
        cache: has room for the rows.
    """

    def __init__(
        self, rows: Sequence[Row], config: LlamaConfig, rotary: RotaryTable, cache: KVCache
    ) -> None:
        device = rotary.cos.device
        self._cache = cache
        self._counts = [len(row.tokens) for row in rows]
        self._masks = [_causal(row, config.queries_of_key, device) for row in rows]
        tokens = [token for row in rows for token in row.tokens]
        slots = [row.slot for row in rows for _ in row.tokens]
        places = [place for row in rows for place in range(row.start, row.stop)]
        stops = accumulate(self._counts)
        ends = [stop - 1 for row, stop in zip(rows, stops, strict=True) if row.draw]
        # A copy to a device waits for the device: so it is one.
        numbers = torch.tensor([*tokens, *slots, *places, *ends], device=device)
        sizes = [len(tokens), len(slots), len(places), len(ends)]
        self.tokens, self._slots, self._places, self.ends = torch.split(numbers, sizes)
        self._held = list(zip(*map(cache.held, rows), strict=True))
        self.cos, self.sin = rotary.cos[self._places], rotary.sin[self._places]

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `StepArrangement`."""
        self._cache.put(layer, self._slots, self._places, new)
        # The query heads of a key head are computed as further tokens of it.
        by_row = torch.split(asked.transpose(0, 1).unsqueeze(0), self._counts, dim=2)
        parts = zip(by_row, self._held[layer], self._masks, strict=True)
        found = [
            functional.scaled_dot_product_attention(
                part.flatten(2, 3), keys, values, attn_mask=mask
            )
            for part, (keys, values), mask in parts
        ]
        got = found[0] if len(found) == 1 else torch.cat(found, dim=2)
        return torch.unflatten(got[0], 1, (len(asked), -1)).transpose(0, 1)


class FixedArrangement:
    """Of steps in which every row has one token. Its shapes and addresses stay the same, so what is
    computed with it can be a CUDA graph.

    Attributes:
        tokens: their ids, int64 [size].
        cos, sin: see `StepArrangement`.

    Args:
        size: rows of a step at most; in the place of those that it lacks, its last one is repeated.
        reach: tokens of a sequence at most.
        rotary: of the model.
        cache: has finite numbers everywhere.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: int, reach: int, rotary: RotaryTable, cache: KVCache) -> None:
        device = rotary.cos.device
        self._rotary, self._cache, self._reach = rotary, cache, reach
        self._numbers = torch.zeros((3, size), dtype=torch.int64, device=device)
        self.tokens, self._slots, self._places = self._numbers
        self._every = torch.arange(reach, device=device)

    def fill(self, rows: Sequence[Row]) -> None:
        """Take the rows of a step."""
        lacking = self._numbers.shape[1] - len(rows)
        padded = [*rows, *[rows[-1]] * lacking]
        numbers = [[row.tokens[0] for row in padded], [row.slot for row in padded]]
        self._numbers.copy_(torch.tensor([*numbers, [row.start for row in padded]]))

    def prepare(self) -> None:
        """Compute what follows from the rows, for all layers."""
        self.cos, self.sin = self._rotary.cos[self._places], self._rotary.sin[self._places]
        self._seen = (self._every <= self._places[:, None])[:, None, None]

    def attend(self, layer: int, asked: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """See `StepArrangement`."""
        self._cache.put(layer, self._slots, self._places, new)
        keys, values = self._cache.gathered(layer, self._slots, self._reach)
        return functional.scaled_dot_product_attention(asked, keys, values, attn_mask=self._seen)


def _causal(row: Row, queries: int, device: torch.device) -> torch.Tensor | None:
    """Which tokens of its sequence are seen by each of the ``queries`` of every token of a row;
    ``None``: all, since it has one token.
    """
    if len(row.tokens) == 1:
        return None
    every = torch.arange(row.stop, device=device)
    return every <= every[row.start :].repeat_interleave(queries)[:, None]
