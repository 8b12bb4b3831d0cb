"""Keep the keys and values of each sequence, and draw the next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the tokens of an answer are drawn.

    Attributes:
        temperature: 0: always the most likely token; the higher, the more even the chances.
        top_p: only the most likely tokens that make up this share are drawn from.
        top_k: only so many of the most likely; 0: no limit.
        seed: of the random numbers; ``None``: others each time.

    Raises:
        ValueError: a value is out of range, or not a number.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more; got {self.top_k}")


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One token to draw.

    Attributes:
        sampling: how.
        number: from 0 to 1, which decides.
    """

    sampling: Sampling
    number: float


def choose(logits: torch.Tensor, draws: Sequence[SampleRequest]) -> list[int]:
    """Draw a token from each row of ``logits``, [draws, vocabulary]."""
    chosen = logits.argmax(dim=1)
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            chosen[row] = _sample(logits[row].double(), draw)
    tokens: list[int] = chosen.tolist()  # the only time that it waits for the device
    return tokens


def _sample(logits: torch.Tensor, draw: SampleRequest) -> torch.Tensor:
    how = draw.sampling
    # The most likely one becomes 0 first, so that no temperature, however low, overflows.
    scaled = (logits - logits.max()) / max(how.temperature, 1e-6)
    chances, tokens = scaled.softmax(0).sort(descending=True, stable=True)
    if how.top_k:
        chances = chances[: how.top_k]
    before = chances.cumsum(0) - chances
    kept = before < how.top_p * chances.sum()
    sums = (chances * kept).cumsum(0)
    at = torch.searchsorted(sums, draw.number * sums[-1], right=True)
    at = at.minimum(kept.sum() - 1).clamp(min=0)  # the least of all shares keeps none
    return tokens.take(at)


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """What one sequence contributes to a step.

    Attributes:
        sequence: a number that no other sequence has.
        slot: where in the cache it is.
        start: how many of its tokens are in the cache already.
        tokens: the next ones, one or more.
        draw: how the token after them is drawn; ``None``: it is known, the prompt goes on.
    """

    sequence: int
    slot: int
    start: int
    tokens: Sequence[int]
    draw: SampleRequest | None

    @property
    def stop(self) -> int:
        """How many of its tokens are in the cache after this step."""
        return self.start + len(self.tokens)


class CacheLostError(RuntimeError):
    """A sequence was to go on, but the cache does not hold it: the workers were restarted, or
    another sequence has its slot.

    It can begin anew with all tokens that it has so far.
    """


class KVCache:
    """Keys and values of this rank's heads and layers, for a number of sequences at once.

    On a CPU, memory is only used as far as it is written to.

    Attributes:
        slots: sequences at once.
        context: tokens of a sequence at most.

    Args:
        layers: how many layers.
        slots: see above.
        heads: this rank's key-value heads.
        context: see above.
        head_size: elements of a head.
        dtype: of keys and values.
        device: where they lie.
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
        """Make room for the tokens of a step. Every rank of the pool decides alike.

        Raises:
            CacheLostError: a sequence does not go on where its slot ends.
            ValueError: a row has no such slot, no token, or more than there is room for.
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
        """Add keys and values.

        Args:
            layer: of which layer.
            slots: of each token, int64 [tokens].
            places: of each token in its sequence, int64 [tokens].
            new: the heads' keys and then their values, [tokens, 2 * heads, head_size].
        """
        self._layers[layer][slots, :, places] = new

    def held(self, row: ScheduledSequence) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a row's sequence up to its end, of each layer, each
        [1, heads, ``row.stop``, head_size]; views of the cache.
        """
        keys, values = self._cells[:, row.slot, None, :, : row.stop].chunk(2, dim=2)
        return list(zip(keys, values, strict=True))

    def gathered(
        self, layer: int, slots: torch.Tensor, reach: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [tokens, heads, ``reach``, head_size]; copies.

        Args:
            layer: of which layer.
            slots: of each token, int64 [tokens].
            reach: from the first place on, so many, whether something was put there or not.
        """
        found = self._layers[layer][:, :, :reach].index_select(0, slots)
        keys, values = found.chunk(2, dim=1)
        return keys, values

    def clear(self, *, wipe: bool = False) -> None:
        """Forget all sequences.

        Args:
            wipe: write zeros, which are finite, everywhere.
        """
        self._held = [None] * self.slots
        if wipe:
            self._cells.zero_()
