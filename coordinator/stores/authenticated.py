"""Moves an exchange from a store that anyone can write to into one that only the members can use.

In the first store the members only learn the address of the second one, which the launcher's secret
protects (`coordinator.stores.curve_store`). Everything else, also the addresses of torch's process
groups, goes through the second. Whoever alters the first store can keep the members from meeting,
but cannot read or forge anything.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from torch.distributed import TCPStore

from coordinator.setup.addresses import own_address
from coordinator.stores.asked_store import AskedStore, behind_prefixes
from coordinator.stores.curve_store import StoreAddress, StoreGuest, StoreHost
from coordinator.stores.key_values import Check
from shm_broadcast import PeerProtocolError
from shm_broadcast.codec import UNDECODABLE

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch.distributed import Store

    from coordinator.setup.exchange import Exchange

_LOOPBACK = "127.0.0.1"


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
        host = StoreHost(range(exchange.size), bind_host or _own_address(base), secret)
        closing.callback(host.close)
        offer = msgspec.msgpack.encode(host.at)
    told = exchange.broadcast("address of the authenticated store", offer)
    try:
        at = msgspec.msgpack.decode(told, type=StoreAddress)
        guest = StoreGuest(at, exchange.rank, secret)
    except (*UNDECODABLE, ValueError) as error:
        detail = f"what stands in the store is no address: {error}"
        raise PeerProtocolError(exchange.name, 0, detail) from error
    closing.callback(guest.close)
    guest.ask(Check(0, []), exchange.deadline)
    store = AskedStore(guest.ask, exchange.deadline.timeout)
    closing.callback(store.close)
    return replace(exchange, store=store, host=at.address, keeper=0)


def _own_address(store: Store) -> str:
    return own_address(store.host, store.port) if isinstance(store, TCPStore) else _LOOPBACK
