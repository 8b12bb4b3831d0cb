"""Encode objects as a main part and out-of-band buffers, and decode them.

`PickleCodec` is for peers that trust each other: processes of one user on one host, or peers that
proved the launcher's secret. `MsgpackCodec` carries messages of one type, validates them, and is
about twice as fast. Data from clients is never unpickled.

Contiguous memory of `OUT_OF_BAND_BYTES` and more travels as a buffer of its own (pickle protocol 5,
PEP 574): numpy's arrays directly, torch's tensors by `tensor_pickling`. The first tensor loads
torch.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import signal
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from shm_broadcast.errors import MessageDecodeError

if TYPE_CHECKING:
    from typing_extensions import Buffer

OUT_OF_BAND_BYTES: Final = 16 << 10
MAX_BUFFERS: Final = 512
"""The most buffers of a message; further ones stay in the main part.

A table of so many sizes fits into one record of the smallest ring.
"""

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""msgspec's errors for bytes that are no message of the decoder's type."""

_KEPT_MAIN_BYTES: Final = 4 << 10
"""The largest main part after which the pickler is kept.

A pickler's memo never shrinks: after a large message, clearing it for each later message would cost
more than a new pickler.
"""

PICKLE: Final = 1
MSGPACK: Final = 2


Encoded: TypeAlias = "tuple[Sequence[Buffer], Sequence[memoryview]]"
"""The main part in pieces (contiguous, of any shape), and the out-of-band buffers (flat bytes).

All of it may alias the memory of the message.
"""


class PickleCodec:
    """Encodes any picklable object; tensors of every dtype and numpy arrays go out of band."""

    code = PICKLE
    encode_whole = None

    def __init__(self) -> None:
        self._main = _Sink()
        self._buffers: list[memoryview] = []
        # Kept between messages: making a pickler costs as much as pickling a small message.
        self._pickler = self._new_pickler()
        self._is_clean = True

    def encode(self, message: Any) -> Encoded:
        """Pickle ``message``; raise TypeError if that is impossible."""
        if not self._is_clean:  # a signal handler raised inside `_forget`
            self._forget()
        self._is_clean = False
        try:
            self._pickler.dump(message)
            return tuple(self._main), tuple(self._buffers)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"cannot send a {type(message).__name__}: {error}") from error
        finally:
            self._forget()

    def decode(self, main: Buffer, buffers: Sequence[Buffer]) -> Any:
        """Unpickle a message of a trusted sender."""
        try:
            return pickle.loads(main, buffers=buffers)
        except Exception as error:
            if _raised_in_signal_handler(error):
                raise
            raise MessageDecodeError(f"cannot unpickle: {type(error).__name__}: {error}") from error

    def _new_pickler(self) -> pickle.Pickler:
        pickler = pickle.Pickler(self._main, protocol=5, buffer_callback=self._keep_in_band)
        pickler.dispatch_table = _REDUCERS
        return pickler

    def _forget(self) -> None:
        main = self._main
        if len(main) == 1 and len(main[0]) <= _KEPT_MAIN_BYTES:
            self._pickler.clear_memo()
        else:  # the message is large, or failed before its first piece was written
            self._pickler = self._new_pickler()
        self._main.clear()
        self._buffers.clear()
        self._is_clean = True

    def _keep_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND_BYTES or len(self._buffers) == MAX_BUFFERS:
            return True
        self._buffers.append(raw)
        return False


class MsgpackCodec:
    """Encodes one type that msgspec can validate: a Struct, a dataclass, builtin containers."""

    code = MSGPACK

    def __init__(self, message_type: Any) -> None:
        self.encode_whole = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: Any) -> Encoded:
        """Encode ``message``; raise TypeError if msgspec does not support its type."""
        return (self.encode_whole(message),), ()

    def decode(self, main: Buffer, buffers: Sequence[Buffer]) -> Any:
        """Decode and validate a message."""
        if buffers:
            raise MessageDecodeError("a typed message carries no out-of-band buffers")
        try:
            return self._decoder.decode(main)
        except Exception as error:
            if _raised_in_signal_handler(error):
                raise
            raise MessageDecodeError(f"cannot decode: {type(error).__name__}: {error}") from error


Codec: TypeAlias = PickleCodec | MsgpackCodec
"""The encoding of one queue's messages; every record's header has its ``code``.

``encode_whole`` returns the main part of a message that is always one piece without buffers; None:
messages may have several pieces, and buffers. One thread at a time encodes. Results of `decode` may
alias the memory of ``buffers``, never that of ``main``.
"""


def _raised_in_signal_handler(error: Exception) -> bool:
    """Return whether a signal handler, which may run inside the decoder, raised ``error``."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(handler, "__code__", None) for handler in handlers]  # a function's, a method's
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def codec_for(message_type: Any | None) -> Codec:
    """Return the codec of a queue: typed if ``message_type`` is given."""
    return PickleCodec() if message_type is None else MsgpackCodec(message_type)


class _Sink(list[bytes]):
    write = list.append


class _Reducers(dict[type, Any]):
    """copyreg's reducers, which a pickler with its own table ignores, and `tensor_pickling`'s."""

    def __missing__(self, kind: type) -> Any:
        if kind.__module__.partition(".")[0] == "torch":
            from shm_broadcast.tensor_pickling import REDUCERS  # noqa: PLC0415

            if kind in REDUCERS:
                self.update(REDUCERS)
                return REDUCERS[kind]
        return copyreg.dispatch_table[kind]


_REDUCERS: Final = _Reducers()


def pickled(value: Any) -> bytes:
    """Return ``value`` in one piece, its tensors reduced by `tensor_pickling`.

    `pickle.dumps` would include the whole storage of a view, and its float8 tensors cannot be
    restored.
    """
    main = io.BytesIO()
    pickler = pickle.Pickler(main, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return main.getvalue()
