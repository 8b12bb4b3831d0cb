"""What a service takes at once, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of one service.

    Attributes:
        max_tokens: tokens of one call to the workers, at most.
        max_waiting: inputs, or requests for completions, that may wait, at most.
        request_timeout: seconds for an answer, waiting included, of completions for each token; a
            call to the workers has half.
        stall_timeout: seconds that a call may take before the service counts as stalled.
    """

    max_tokens: int
    max_waiting: int
    request_timeout: float
    stall_timeout: float
