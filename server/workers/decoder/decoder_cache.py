"""Cache the keys and values of each sequence, and sample the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling.

    Attributes:
        temperature: 0: greedy; higher values flatten the distribution.
        top_p: probability mass of the most likely tokens that may be drawn.
        top_k: number of the most likely tokens that may be drawn; 0: all.
        seed: seed of the random numbers; ``None``: random.

    Raises:
        ValueError: a value is out of range, or not a number.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more; got {self.top_k}")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One token to draw; ``number``: random number from 0 to 1."""

    sampling: Sampling
    number: float


def choose(logits: torch.Tensor, draws: Sequence[SampleRequest]) -> list[int]:
    """Draw a token from each row of ``logits``, [draws, vocabulary]."""
    chosen = logits.argmax(dim=1)
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            chosen[row] = _sample(logits[row].double(), draw)
    tokens: list[int] = chosen.tolist()  # the only wait for the device
    return tokens


def _sample(logits: torch.Tensor, draw: SampleRequest) -> torch.Tensor:
    sampling = draw.sampling
    # Subtract the maximum first, so that no low temperature overflows.
    scaled = (logits - logits.max()) / max(sampling.temperature, 1e-6)
    chances, tokens = scaled.softmax(0).sort(descending=True, stable=True)
    if sampling.top_k:
        chances = chances[: sampling.top_k]
    before = chances.cumsum(0) - chances
    kept = before < sampling.top_p * chances.sum()
    sums = (chances * kept).cumsum(0)
    at = torch.searchsorted(sums, draw.number * sums[-1], right=True)
    at = at.minimum(kept.sum() - 1).clamp(min=0)  # a tiny top_p keeps no token
    return tokens.take(at)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Part of one sequence in a step.

    Attributes:
        sequence: unique number of the sequence.
        slot: slot in the cache.
        start: number of its tokens in the cache.
        tokens: next tokens, one or more.
        draw: draw of the token after them; ``None``: the prompt continues.
    """

    sequence: int
    slot: int
    start: int
    tokens: Sequence[int]
    draw: SampleRequest | None

    @property
    def stop(self) -> int:
        """Return the number of its tokens in the cache after this step."""
        return self.start + len(self.tokens)


class CacheLostError(RuntimeError):
    """The cache does not have a sequence: workers restarted, or its slot was reused.

    The sequence can start again with all its tokens so far.
    """


class KVCache:
    """Keys and values of this rank's heads and layers, for many sequences.

    On a CPU, only written memory is resident.

    Attributes:
        slots: maximum number of sequences.
        context: maximum tokens of a sequence.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        context: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (layers, slots, 2 * heads, context, head_size)
        self._cells = torch.empty(shape, dtype=dtype, device=device)
        self._layers = self._cells.unbind()
        self.slots, self.context = slots, context
        self._held: list[tuple[int, int] | None] = [None] * slots

    def extend(self, rows: Sequence[ScheduledSequence]) -> None:
        """Make room for the tokens of a step; every rank decides alike.

        Raises:
            CacheLostError: a sequence does not continue at the end of its slot.
            ValueError: a row has an invalid slot, no token, or too many tokens.
        """
        for row in rows:
            if not 0 <= row.slot < self.slots or not row.start < row.stop <= self.context:
                raise ValueError(
                    f"slot {row.slot}, tokens {row.start} to {row.stop}: there are "
                    f"{self.slots} slots of {self.context} tokens"
                )
            if row.start and self._held[row.slot] != (row.sequence, row.start):
                raise CacheLostError(
                    f"slot {row.slot} does not hold {row.start} tokens of sequence {row.sequence}"
                )
        for row in rows:
            self._held[row.slot] = row.sequence, row.stop

    def put(self, layer: int, slots: torch.Tensor, places: torch.Tensor, new: torch.Tensor) -> None:
        """Write keys and values.

        Args:
            layer: layer on this rank.
            slots: slot of each token, int64 [tokens].
            places: position of each token in its sequence, int64 [tokens].
            new: keys and then values of the heads, [tokens, 2 * heads, head_size].
        """
        self._layers[layer][slots, :, places] = new

    def held(self, row: ScheduledSequence) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values of a row's sequence, up to its end, for each layer.

        Each is a view of the cache, [1, heads, ``row.stop``, head_size].
        """
        keys, values = self._cells[:, row.slot, None, :, : row.stop].chunk(2, dim=2)
        return list(zip(keys, values, strict=True))

    def gathered(
        self, layer: int, slots: torch.Tensor, reach: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of a layer's keys and values, each [tokens, heads, ``reach``, head_size].

        Args:
            layer: layer on this rank.
            slots: slot of each token, int64 [tokens].
            reach: number of positions from the first, written or not.
        """
        cells = self._layers[layer][:, :, :reach].index_select(0, slots)
        keys, values = cells.chunk(2, dim=1)
        return keys, values

    def clear(self, *, wipe: bool = False) -> None:
        """Forget all sequences; ``wipe``: overwrite the memory with zeros, which are finite."""
        self._held = [None] * self.slots
        if wipe:
            self._cells.zero_()
