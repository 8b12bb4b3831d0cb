"""Host a store, connect to one, seal its values with a secret.

The store is given, hosted by the launcher, or hosted by rank 0, which binds one address, never all
interfaces. The system may choose the port, which `host_store` returns; searching a free port first
would let another process take it.

Any process that reaches a store can write to it. A `SealedStore` raises an error for a value that a
process without the key wrote, altered, or copied from another key.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import ClassVar

from torch.distributed import DistStoreError, FileStore, PrefixStore, Store, TCPStore

from coordinator.daemon_threads import submit_in_thread
from coordinator.launcher import Launch, own_address, resolve, who_listens
from coordinator.secret import SecretError
from shm_broadcast import GroupClosedError
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupTimeoutError, MemberStatus
from shm_broadcast.net.derived_key import derive_key
from shm_broadcast.process import NO_DESCRIPTOR, describe_os_error

DEFAULT_TIMEOUT = 60.0
"""Default seconds for all ranks to meet and to set their groups up."""

_STORE_TIMEOUT = timedelta(seconds=300)
_BACKLOG = 4096
_STORE_FILES = 12
"""The files that a store opens, and one more. With too few, torch's store never answers, or
exits the process.
"""


def host_store(address: str = "127.0.0.1", port: int = 0) -> TCPStore:
    """Host a store at one address, as long as the returned object lives.

    Args:
        address: host name or address, IPv4 or IPv6. If it is not an address of this host, for
            example behind address translation, this host's address on the route to it is bound.
        port: 0 lets the system choose; the result's ``.port`` is the bound port. If a store of this
            process has the port already, both share it.

    Raises:
        ValueError: the address is a wildcard, 0.0.0.0 or ::.
        OSError: the port is in use, the address cannot be resolved, or the limit of open files is
            reached.
    """
    try:
        listener = _listen(address, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return _shared_store(address, port, error)
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        None,
        True,
        _STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def connect_store(
    address: str, port: int, timeout: float | Deadline | None = DEFAULT_TIMEOUT
) -> TCPStore:
    """Connect to the store at ``address``, a host name, IPv4 or IPv6; wait until its host listens.

    ``timeout``: seconds to wait; None: no limit.

    Raises:
        GroupTimeoutError: no process answered in time, or the process that answers is not a store.
        OSError: the limit of open files is reached.
        RuntimeError: no thread can be started.
    """
    deadline = Deadline.after(timeout)
    while True:
        try:
            host = who_listens(address, port, deadline.remaining(5.0))
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                raise
            problem = f"no process answers at {address}:{port}: {error}"
        else:
            store = _connected(host, port, deadline)
            if isinstance(store, TCPStore):
                return store
            problem = f"the server at {address}:{port} is no store: {store}"
        time.sleep(deadline.remaining(at_most=0.05))
        if deadline.expired:  # one more attempt would have no time, and a vaguer error
            absent = (MemberStatus(0, 0, "absent"),)
            raise GroupTimeoutError("rendezvous", deadline.timeout, absent, problem)


def _connected(host: str, port: int, deadline: Deadline) -> TCPStore | str:
    """Return a client of the store at ``host``, or the reason why that is not a store.

    Torch waits without limit for a host that never answers: it connects in a daemon thread, which
    is abandoned at the deadline.
    """
    seconds = deadline.remaining(_STORE_TIMEOUT.total_seconds())
    limit = timedelta(seconds=max(seconds, 0.001))
    connect = partial(TCPStore, host, port, None, False, limit, wait_for_workers=False)
    future = submit_in_thread(connect, "store-connect")
    try:
        store = future.result(seconds)
    except TimeoutError:
        return "it accepts connections and does not answer"
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    store.set_timeout(_STORE_TIMEOUT)
    return store


def open_store(launch: Launch, deadline: Deadline) -> TCPStore:
    """Host the store of ``launch`` if this rank is to, else `connect_store`.

    Raises ValueError if the port is 0 or the address a wildcard, OSError if rank 0 cannot bind the
    port.
    """
    hosts = launch.rank == 0 and not launch.hosted
    if not launch.master_port and not (hosts and launch.world_size == 1):
        raise ValueError(
            "master_port 0 is no port to connect to: call host_store() in one process and pass its "
            "port to all ranks"
        )
    if hosts:
        return host_store(launch.master_addr, launch.master_port)
    return connect_store(launch.master_addr, launch.master_port, deadline)


def _listen(address: str, port: int) -> socket.socket:
    family, kind, protocol, _, bind_to = resolve(address, port, socket.SOCK_STREAM)
    if ipaddress.ip_address(bind_to[0]).is_unspecified:
        raise ValueError(f"a store listens at one address, not at all of this host's: {address!r}")
    with ExitStack() as undo:
        try:
            listener = undo.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(bind_to)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listener.bind((own_address(address, port or 1), port))
            listener.listen(_BACKLOG)
            with ExitStack() as files:
                for _ in range(_STORE_FILES):
                    files.callback(os.close, os.dup(listener.fileno()))
        except OSError as error:
            no_store = f"no store can be hosted at {address}:{port}: {describe_os_error(error)}"
            raise OSError(error.errno, no_store) from error
        undo.pop_all()
    return listener


def _shared_store(address: str, port: int, in_use: OSError) -> TCPStore:
    host = resolve(address, port, socket.SOCK_STREAM)[4][0]
    try:
        return TCPStore(
            str(host), port, None, True, _STORE_TIMEOUT, wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError:
        raise in_use from None


_SALT_BYTES = 16
_MAC_BYTES = 32
_FIRST_NAP = 0.0005
_LONGEST_NAP = 0.05
_PURPOSE = b"group-coordinator store 1"


class SealedStore(Store):
    """A torch store whose values are sealed with a key. Any thread may use it; close it.

    A sealed value is 16 random bytes, an HMAC-SHA256 over these, the key's name and the value, and
    the value. The methods raise `SecretError` for any other value. No request blocks: `wait` polls.
    """

    _open: ClassVar[set[SealedStore]] = set()
    """References to all open stores. Torch keeps only the C++ half of a store alive. Without these,
    the Python half, with the methods that torch calls, goes with the caller's last reference."""

    def __init__(self, store: Store, secret: bytes, salt: bytes = b"") -> None:
        """Seal the values of ``store``, with the key of ``secret`` and ``salt``."""
        super().__init__()
        self._inner: Store | None = store
        self._key = derive_key(secret, salt, _PURPOSE)
        self.set_timeout(_STORE_TIMEOUT)
        self._open.add(self)

    @property
    def inner(self) -> Store:
        """Return the store of the sealed values, or raise GroupClosedError."""
        if self._inner is None:
            raise GroupClosedError("the store where the group met is closed in this process")
        return self._inner

    def proof(self, rank: int) -> bytes:
        """Return the proof that member ``rank`` has the secret."""
        return hmac.digest(self._key, b"rank %d" % rank, "sha256")

    def close(self) -> None:
        """Refuse further calls; idempotent."""
        self._inner = None
        self._open.discard(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key``."""
        self.inner.set(key, self._sealed(key, _bytes(value)))  # type: ignore[arg-type] # stub: text

    def get(self, key: str) -> bytes:
        """Wait until ``key`` exists; return its value."""
        self.wait([key])
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to the number in ``key``, 0 if it is missing; return the sum."""
        return int(self._update(key, lambda value: b"%d" % (int(value or b"0") + amount)))

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of ``key``."""
        self._update(key, lambda before: before + _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``; return its value then."""
        return self._update(key, lambda now: _bytes(desired) if now == _bytes(expected) else None)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it existed."""
        return self.inner.delete_key(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of ``keys`` exist."""
        return self.inner.check([*keys])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, which must all exist."""
        return list(map(self._opened, keys, values_of(self.inner, [*keys])))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set each of ``keys`` to its value."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of ``keys`` exist; raise DistStoreError after the timeout."""
        limit: timedelta = timeout or self.timeout  # type: ignore[attr-defined]
        deadline = Deadline.after(limit.total_seconds())
        for nap in backoff():
            if self.check(keys):
                return
            if deadline.expired:
                absent = ", ".join(key for key in keys if not self.check([key]))
                raise DistStoreError(f"wait timeout after {deadline.timeout:g} s, keys: {absent}")
            time.sleep(deadline.remaining(at_most=nap))

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` are supported."""
        return True

    def _update(self, key: str, change: Callable[[bytes], bytes | None]) -> bytes:
        """Change the value of ``key``, empty if missing, in one step; return the value then.

        ``change`` returns the new value; None: leave it.
        """
        while True:
            sealed = self.inner.get(key) if self.inner.check([key]) else b""
            value = self._opened(key, sealed) if sealed else b""
            new = change(value)
            if new is None:
                return value
            # Random bytes in it: no other process's value equals it.
            sealed_new = self._sealed(key, new)
            if self.inner.compare_set(key, sealed, sealed_new) == sealed_new:  # type: ignore[arg-type]
                return new

    def _sealed(self, key: str, value: bytes) -> bytes:
        salt = os.urandom(_SALT_BYTES)
        return salt + self._mac(salt, key, value) + value

    def _opened(self, key: str, sealed: bytes) -> bytes:
        begin = _SALT_BYTES + _MAC_BYTES
        value = sealed[begin:]
        mac = self._mac(sealed[:_SALT_BYTES], key, value)
        if not hmac.compare_digest(mac, sealed[_SALT_BYTES:begin]):
            raise SecretError(
                f"the value of {key!r} in the store is not of a process with this job's secret"
            )
        return value

    def _mac(self, salt: bytes, key: str, value: bytes) -> bytes:
        named = key.encode()
        return hmac.digest(self._key, b"%b%d %b%b" % (salt, len(named), named, value), "sha256")


def open_sealed_store(at: str, secret: bytes, deadline: Deadline) -> SealedStore:
    """Open a pool's store, sealed with the pool's secret.

    ``at`` is ``host:port``, or the path of a memfd in ``/proc``. Raises as `connect_store`.
    """
    if at.startswith("/"):
        fd = os.open(at, os.O_RDWR | os.O_CLOEXEC)
        store: Store = FileStore(f"/proc/self/fd/{fd}", -1)
        weakref.finalize(store, os.close, fd).atexit = False  # its destructor opens the path
    else:
        host, _, port = at.rpartition(":")
        store = connect_store(host, int(port), deadline)
    return SealedStore(store, secret)


def values_of(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of existing keys, in one request if the store supports it."""
    if store.has_extended_api():  # type: ignore[attr-defined]
        return store.multi_get(keys)
    return [store.get(key) for key in keys]


def behind_prefixes(store: Store) -> Store:
    """Return the store under all `PrefixStore` layers."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def base_of(store: Store) -> Store:
    """Return the store under all prefixes and seals."""
    store = behind_prefixes(store)
    return base_of(store.inner) if isinstance(store, SealedStore) else store


def address_towards(store: Store) -> str:
    """Return this host's address on the route to a store; ``""`` if no network leads there."""
    base = base_of(store)
    return own_address(base.host, base.port) if isinstance(base, TCPStore) else ""


def backoff() -> Iterator[float]:
    """Yield the seconds to sleep between two polls: short at first, then doubling."""
    nap = _FIRST_NAP
    while True:
        yield nap
        nap = min(nap * 2, _LONGEST_NAP)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
