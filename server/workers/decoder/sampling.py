"""How the next token is drawn. A draw holds its random number, so it can be repeated exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


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
class Draw:
    """One token to draw.

    Attributes:
        sampling: how.
        number: from 0 to 1, which decides.
    """

    sampling: Sampling
    number: float


def choose(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Draw a token from each row of ``logits``, [draws, vocabulary]."""
    chosen = logits.argmax(dim=1)
    for row, draw in enumerate(draws):
        if draw.sampling.temperature > 0:
            chosen[row] = _sample(logits[row].double(), draw)
    tokens: list[int] = chosen.tolist()  # the only time that it waits for the device
    return tokens


def _sample(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
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
