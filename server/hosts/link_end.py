"""What both ends of the link between hosts share: one thread has the socket, and any may post.

Both sides send a pulse in short intervals and say that they leave, so a silence means that a host
is gone, or cannot be reached. Encrypted; each end proves that it knows the launcher's secret before
anything else is exchanged (`shm_broadcast.remote.keys`).
"""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import zmq

from shm_broadcast.remote.end import RemoteEnd
from shm_broadcast.remote.keys import HANDSHAKE_NONCE_BYTES
from shm_broadcast.remote.wake_fd import WakeFd

from ..control.attentive_clock import AttentiveClock

if TYPE_CHECKING:
    from shm_broadcast.remote.keys import CurveKey

LINK_NONCE: Final = b"the link between the hosts of a pool".ljust(HANDSHAKE_NONCE_BYTES, b".")[
    :HANDSHAKE_NONCE_BYTES
]
"""Fixed, since nothing publishes a link's address: hosts know it from their launcher."""

ANY_HOST: Final = 1
"""The rank of the key that all hosts but the head have: which node one is, it says in its hello."""

PULSE_SECONDS: Final = 0.25
"""How often each end tells the other what its board says."""

_FRAME_BYTES: Final = 1 << 28
"""The longest message; a worker's arguments are in one."""

_LOOK_SECONDS: Final = 0.1
_log = logging.getLogger(__name__)


def endpoint(address: str, port: int) -> str:
    """Where a link leads, as zmq and people write it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class LinkEnd(RemoteEnd):
    """One end; a subclass says what to do with messages. Call `begin`, and close it."""

    def __init__(self, kind: int, key: CurveKey, silence: float, *, ipv6: bool) -> None:
        # libzmq would close a silent link as if it had ended; here it says that it was silent.
        super().__init__(kind, key, silence=4 * silence, frame_bytes=_FRAME_BYTES, ipv6=ipv6)
        self._silence = silence
        self._clock = AttentiveClock(PULSE_SECONDS)
        self._outbox: deque[Any] = deque()
        self._wake = WakeFd()
        self._poller.register(self._wake, zmq.POLLIN)
        self._pulse_at = 0.0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._thread = threading.Thread(target=self._serve, name="pool-hosts", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # `close` waits for none
            raise

    def pulse_now(self) -> None:
        """Send a pulse at once: the board has news. Any thread; does not wait."""
        self._pulse_at = 0.0
        self._wake.ring()

    def close(self) -> None:
        """Send what was posted, say that this end leaves, and close. Idempotent."""
        self._closing = True
        if self._thread is None:
            self._tear_down()
        elif self._thread is not threading.current_thread():
            self._wake.ring()
            self._thread.join()

    def _post(self, message: Any) -> None:
        """Send a message soon. Any thread; does not wait."""
        self._outbox.append(message)
        self._wake.ring()

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._step()
            self._send_posted()
        except Exception as error:  # noqa: BLE001 - or it would look like silence
            _log.exception("the link between the hosts has failed")
            self._fail(f"the link has failed: {type(error).__name__}: {error}")
        finally:
            self._tear_down()

    def _step(self) -> None:
        self._take_in()
        self._send_posted()
        if time.monotonic() >= self._pulse_at:
            self._pulse_at = time.monotonic() + PULSE_SECONDS
            self._send_pulse()
        self._look_for_silence(self._clock.look())
        self._poller.poll(int(_LOOK_SECONDS * 1000))
        self._wake.clear()

    def _send_posted(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())

    @abstractmethod
    def _take_in(self) -> None:
        """Handle the frames that have arrived."""

    @abstractmethod
    def _send(self, posted: Any) -> None:
        """Send what was posted."""

    @abstractmethod
    def _send_pulse(self) -> None:
        """Tell the other side what the board here says."""

    @abstractmethod
    def _look_for_silence(self, now: float) -> None:
        """Note who was not heard of for too long; ``now`` is of the `AttentiveClock`."""

    @abstractmethod
    def _fail(self, why: str) -> None:
        """Note that the link has ended by a fault here."""

    def _release(self) -> None:
        self._wake.close()
