"""Encodes objects as a main part and out-of-band buffers, and decodes them.

`PickleCodec` is for peers that trust each other: processes of one user on one host, or peers that
proved the launcher's secret. `MsgpackCodec` carries messages of one type, validates them, and is
about twice as fast. Nothing that comes from a client is ever unpickled.

Contiguous memory of `OUT_OF_BAND_BYTES` and more is not copied into the main part: it travels as a
buffer of its own (pickle protocol 5, PEP 574). numpy's arrays support that; torch's tensors do not,
so `tensor_pickling` has a reducer for them. It loads torch, and is itself loaded with the first
tensor: a process that sends and receives none does not load torch.
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
"""Buffers of a message at most; further ones stay in the main part.

A table of so many sizes fits into one record of the smallest ring.
"""

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises of bytes that are no message of the type it looks for."""

_KEPT_MAIN_BYTES: Final = 4 << 10
"""A message with a larger main part may have so grown its pickler's memo, which never shrinks, that
clearing it for each later message would cost more than a new pickler.
"""

PICKLE: Final = 1
MSGPACK: Final = 2


Encoded: TypeAlias = "tuple[Sequence[Buffer], Sequence[memoryview]]"
"""The main part in pieces (contiguous, of any shape), and the out-of-band buffers (flat bytes).

All of it may still be the memory of the message itself.
"""


class PickleCodec:
    """Any picklable object; tensors of every dtype and numpy arrays out of band."""

    code = PICKLE
    encode_whole = None

    def __init__(self) -> None:
        self._main = _Sink()
        self._buffers: list[memoryview] = []
        # Kept between messages: to make a pickler costs as much as to pickle a small message.
        self._pickler = self._new_pickler()
        self._is_clean = True

    def encode(self, message: Any) -> Encoded:
        """Pickle ``message``.

        Raises:
            TypeError: it cannot be pickled.
        """
        if not self._is_clean:  # a signal handler raised while the last message was forgotten
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
        """Unpickle a message whose sender is trusted."""
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
        else:  # a message that is large, or of which nothing was written before it failed
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
    """One type that msgspec can validate: a Struct, a dataclass, builtin containers."""

    code = MSGPACK

    def __init__(self, message_type: Any) -> None:
        self.encode_whole = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: Any) -> Encoded:
        """Encode ``message``; one that msgspec does not know raises TypeError."""
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
"""How one queue's messages are encoded; every record's header has its ``code``.

``encode_whole`` gives the main part of a message that is in one piece, as all are; None: they may
be in several, and have buffers. One thread at a time encodes. What `decode` gives may refer to the
memory of ``buffers``, never to that of ``main``.
"""


def _raised_in_signal_handler(error: Exception) -> bool:
    """Whether a signal handler has raised it, which runs wherever Python happens to be: the message
    is not to blame.
    """
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [getattr(handler, "__code__", None) for handler in handlers]  # a function's, a method's
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def codec_for(message_type: Any | None) -> Codec:
    """The codec of a queue: typed if ``message_type`` is given."""
    return PickleCodec() if message_type is None else MsgpackCodec(message_type)


class _Sink(list[bytes]):
    """What a pickler writes to: a list of pieces, so that large ones are not copied."""

    write = list.append


class _Reducers(dict[type, Any]):
    """copyreg's reducers, which a pickler with its own dispatch table ignores; of torch's types,
    those of `tensor_pickling`.
    """

    def __missing__(self, kind: type) -> Any:
        if kind.__module__.partition(".")[0] == "torch":
            from shm_broadcast.tensor_pickling import REDUCERS  # noqa: PLC0415

            if kind in REDUCERS:
                self.update(REDUCERS)
                return REDUCERS[kind]
        return copyreg.dispatch_table[kind]


_REDUCERS: Final = _Reducers()


def pickled(value: Any) -> bytes:
    """``value`` in one piece, with its tensors as `tensor_pickling` has them.

    `pickle.dumps` would take all the memory that a view shows a part of, and what it makes of a
    float8 tensor cannot be restored.
    """
    main = io.BytesIO()
    pickler = pickle.Pickler(main, protocol=5)
    pickler.dispatch_table = _REDUCERS
    pickler.dump(value)
    return main.getvalue()
