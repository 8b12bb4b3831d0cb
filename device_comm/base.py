"""The communicator: the verbs of a group of ranks over tensors on one device.

What all verbs share
    - Out of place: the input is never changed, except by the trailing-underscore forms and
      by ``out=`` that is the input. A result never shares memory with an input, except in a
      group of one, where every verb is the identity and returns its input itself.
    - Ranks are ranks in the group, 0 to N - 1, never negative. ``dim`` may be negative.
    - Shapes, dtypes, sizes and ranks are checked first, without communicating: `ValueError`
      or `TypeError`, and the communicator can be used on.
    - Every dtype is moved; reductions are defined by `device_comm.reduce_op`.
    - ``out`` has exactly the shape and dtype of the result and may be non-contiguous.
      Without it, results are new and contiguous, in memory that torch may be unable to resize.
      No autograd history is recorded.
    - ``async_op=True`` returns a `Work` whose ``wait()`` returns what the call would have.
    - ``timeout`` is in seconds; None: the communicator's own.

What they raise beyond that
    - `GroupTimeoutError`, `PeerLostError`, `DivergenceError`: the operation cannot be taken
      back, so the group is aborted with this error: all calls of all members raise
      `GroupAbortedError` from then on. Exception: the deadline of `Work.wait`, after which
      one can wait again.
    - `GroupAbortedError`, `GroupClosedError`: the group was over before.
    - `NotImplementedError`: a verb that ``capabilities.verbs`` does not name.
"""

from __future__ import annotations

from device_comm.in_place import InPlaceVerbs
from device_comm.primitives import ALL_VERBS, Call, Capabilities


class DeviceCommunicator(InPlaceVerbs):
    """All verbs. Backends subclass this; `device_comm.primitives` says what they write."""


__all__ = ["ALL_VERBS", "Call", "Capabilities", "DeviceCommunicator"]
