"""Moves an exchange from a store that anyone can write to into one that only the members can use.

In the first store the members only learn the address of the second one, which the launcher's secret
protects (`coordinator.stores.curve_store`). Everything else, also the addresses of torch's process
groups, goes through the second. Whoever alters the first store can keep the members from meeting,
but cannot read or forge anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from coordinator.setup.addresses import own_address
from coordinator.stores.asked_store import AskedStore, address_towards, behind_prefixes
from coordinator.stores.key_values import Check
from coordinator.stores.store_address import StoreAddress
from shm_broadcast import Deadline, GroupTimeoutError, PeerProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from coordinator.setup.exchange import Exchange

_LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 1.0
"""How often a member that waits for the store's host looks whether one has left."""
_ADDRESS = msgspec.msgpack.Decoder(StoreAddress)
_OFFER = "address of the authenticated store"


def authenticated(
    exchange: Exchange, secret: bytes | None, closing: ExitStack, bind_host: str = ""
) -> Exchange:
    """The exchange, moved to a store that only its members can use.

    Args:
        exchange: in any store. It is returned itself if its store is authenticated already.
        secret: the launcher's secret; None: the exchange is returned itself.
        closing: closes the connections.
        bind_host: the address at which member 0 listens; ``""``: its address on the route to the
            first store, or loopback if that is not a `TCPStore`.

    Collective: yes, every member.

    Raises:
        GroupTimeoutError: member 0 did not come in time, or has another secret.
        PeerProtocolError: the address in the first store is not valid.
    """
    base = behind_prefixes(exchange.store)
    if secret is None or isinstance(base, AskedStore):
        return exchange
    offer = None
    if exchange.rank == 0:
        from coordinator.stores.curve_store import StoreHost  # noqa: PLC0415 - loads ZeroMQ

        listen_at = bind_host or address_towards(base) or _LOOPBACK
        host = StoreHost(range(exchange.size), listen_at, secret)
        closing.callback(host.close)
        offer = msgspec.msgpack.encode(host.at)
    told = exchange.broadcast(_OFFER, offer)
    at = exchange.decoded(_ADDRESS, _OFFER, told, 0)
    try:
        store = guest_store(
            at,
            exchange.rank,
            secret,
            exchange.deadline,
            closing,
            lambda: exchange.require_all_stay(f"{exchange.name} authenticated store"),
        )
    except ValueError as error:
        detail = f"the value of '{_OFFER}/0' in the store: {error}"
        raise PeerProtocolError(exchange.name, 0, detail) from error
    except GroupTimeoutError as error:
        exchange.give_up(error)
        raise
    return replace(exchange, store=store, host=at.address, keeper=0)


def guest_store(
    at: StoreAddress,
    rank: int,
    secret: bytes,
    deadline: Deadline,
    closing: ExitStack,
    watch: Callable[[], None] = lambda: None,
) -> AskedStore:
    """A connection to a store that a secret protects.

    Args:
        at: where it is.
        rank: this member's rank.
        secret: the secret.
        deadline: when to give up; its seconds are the limit of later questions, too.
        closing: closes the connection.
        watch: raises if its host will not answer any more: called now and then.

    Raises:
        ValueError: ``at`` is no address.
        GroupTimeoutError: its host did not answer in time, or has another secret.
        TransportError, PeerProtocolError: as for `StoreGuest.ask`.
    """
    from coordinator.stores.curve_store import StoreGuest  # noqa: PLC0415 - loads ZeroMQ

    guest = StoreGuest(at, rank, secret)
    closing.callback(guest.close)
    while True:
        latest = min(deadline, Deadline.after(_LOOK_SECONDS), key=lambda each: each.at)
        try:
            guest.ask(Check(0, []), latest)
            break
        except GroupTimeoutError:
            watch()
            if latest is deadline:
                raise
    where = urlsplit(at.address)
    address = own_address(where.hostname or "", where.port or 1)
    store = AskedStore(guest.ask, deadline.timeout, address)
    closing.callback(store.close)
    return store
