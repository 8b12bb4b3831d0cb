"""What the options of `serve` come to, once they are checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..hosts.place import Hosts
    from ..service.service_limits import ServiceLimits
    from .read_model import DecoderModel, Model


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The checked options of a server; see `options.serve_options`.

    Attributes:
        model: what it serves.
        pool: what the pool is to be made with, or each replica.
        limits: what the service takes.
        name, host, port, api_key, and all others: as the options.
    """

    model: Model | DecoderModel
    pool: dict[str, Any]
    limits: ServiceLimits
    name: str
    host: str
    port: int
    api_key: str | None
    max_connections: int
    truncate: bool
    access_log: str
    log_json: bool
    spans: str | None
    drain_timeout: float


@dataclass(frozen=True, slots=True)
class HeadlessPlan:
    """The checked options of a host that runs workers for the one that serves."""

    hosts: Hosts
    start_timeout: float
