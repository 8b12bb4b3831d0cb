"""Concatenates token lists without padding into the batches that a model computes.

Only attention needs one row per input. For it, inputs of similar length form an `AttentionSpan` and
are padded to the longest of them, so that there is never more padding than tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SHORT = 16
"""Inputs of up to so many tokens form one span: one more span costs more than the padding."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Some of a call's inputs, the longest first.

    Attributes:
        rows: which inputs they are.
        lengths: tokens of each.
    """

    rows: list[int]
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class TokenArrangement:
    """How the tokens of a batch stand, as the model needs it on its device.

    Attributes:
        lengths: int64 [inputs].
        positions: int64 [tokens]: where in its input each token stands.
        spans: all inputs, in order.
    """

    lengths: torch.Tensor
    positions: torch.Tensor
    spans: list[AttentionSpan]


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Inputs of a batch that are padded to one length, for attention.

    Attributes:
        tokens: where their tokens stand in the batch.
        shape: how many inputs, and the tokens of the longest.
        places: int64: the row of each token once they are padded; ``None`` if none is padded.
        mask: bool [inputs, 1, 1, longest]: where a token stands; ``None`` if everywhere.
    """

    tokens: slice
    shape: tuple[int, int]
    places: torch.Tensor | None
    mask: torch.Tensor | None


def make_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[PackedBatch]:
    """Batches of at most ``max_tokens`` tokens, or of one input that has more."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rows: list[int] = []
    room = max_tokens
    for row in order:
        if rows and lengths[row] > room:
            yield PackedBatch(rows, [lengths[each] for each in rows])
            rows, room = [], max_tokens
        rows.append(row)
        room -= lengths[row]
    if rows:
        yield PackedBatch(rows, [lengths[each] for each in rows])


def arrange(lengths: Sequence[int], device: torch.device) -> TokenArrangement:
    """How the tokens of a batch stand whose inputs have ``lengths`` tokens, the longest first."""
    return TokenArrangement(
        torch.tensor(lengths, device=device),
        torch.cat([torch.arange(length) for length in lengths]).to(device),
        _spans(lengths, device),
    )


def _spans(lengths: Sequence[int], device: torch.device) -> list[AttentionSpan]:
    spans: list[AttentionSpan] = []
    row = token = 0
    while row < len(lengths):
        longest = lengths[row]
        least = longest // 2 if longest > _SHORT else 0
        end = row
        while end < len(lengths) and lengths[end] > least:
            end += 1
        spans.append(_span(np.array(lengths[row:end]), token, device))
        token = spans[-1].tokens.stop
        row = end
    return spans


def _span(lengths: np.ndarray, first: int, device: torch.device) -> AttentionSpan:
    longest = int(lengths[0])
    tokens = slice(first, first + int(lengths.sum()))
    shape = (len(lengths), longest)
    if lengths[-1] == longest:
        return AttentionSpan(tokens, shape, None, None)
    mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
    places = mask.flatten().nonzero().squeeze(1)
    return AttentionSpan(tokens, shape, places.to(device), mask[:, None, None, :].to(device))
