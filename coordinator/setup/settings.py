"""The settings that all groups of one topology share."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist

from coordinator.setup import torch_groups
from coordinator.setup.torch_groups import SocketChoice
from coordinator.stores.secret import SecretError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.setup.exchange import Exchange

OPERATION_TIMEOUT = 600.0
"""Default seconds that an operation may take."""

_TERMS = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True)
class Settings:
    """How the groups of one topology move tensors, and how long they wait.

    Attributes:
        backend: the device's torch backend, named as for `torch.distributed.new_group`.
        device: the device of the tensors in collectives.
        local_rank: this process's number on its node.
        sockets: where gloo listens.
        timeout: seconds that an operation may take; None: for ever.
        torch_only: whether to move tensors only by torch's process groups.
        checked: debug mode: whether to compare the members' operations before each collective,
            for backends that do not do so anyway.
        stream: the stream that collectives on the device run on; None: the current stream.
        secret: the launcher's secret, which all ranks have and nobody else; None: there is none.
    """

    backend: str
    device: torch.device
    local_rank: int
    sockets: SocketChoice
    timeout: float | None
    torch_only: bool
    checked: bool
    stream: torch.cuda.Stream | None = None
    secret: bytes | None = field(default=None, repr=False)

    def terms(self) -> dict[str, str]:
        """What all members have to be given alike, by name; nothing of the secret itself."""
        return {
            "secret": "not given" if self.secret is None else "given",
            "backend": self.backend,
            "torch_only": str(self.torch_only),
            "checked": str(self.checked),
        }

    @classmethod
    def of(
        cls,
        backend: str | None,
        local_rank: int,
        sockets: SocketChoice | None = None,
        timeout: float | None = OPERATION_TIMEOUT,
        *,
        torch_only: bool = False,
        checked: bool = False,
        stream: torch.cuda.Stream | None = None,
        secret: bytes | None = None,
    ) -> Settings:
        """Settings for a backend, with the device that it implies: the CPU for gloo, else a GPU.

        Args:
            backend: None: NCCL if this process sees a GPU, else gloo.
            local_rank: chooses the GPU.
            sockets: where gloo listens; None: torch's choice.
            timeout: seconds that an operation may take; None: for ever.
            torch_only: see the attribute.
            checked: see the attribute; also where ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``.
            stream: see the attribute.
            secret: see the attribute.

        Raises:
            ValueError: ``backend`` names another one than gloo and NCCL, or ``stream`` is not of
                that device.
        """
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        device = torch.device("cpu")
        if "nccl" in torch_groups.kinds(backend):
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        if stream is not None and stream.device != device:
            raise ValueError(f"a stream of {stream.device} is not for a group on {device}")
        return cls(
            backend,
            device,
            local_rank,
            sockets or SocketChoice(),
            timeout,
            torch_only,
            checked or dist.get_debug_level() == dist.DebugLevel.DETAIL,
            stream,
            secret,
        )


def enter_on_terms(members: Exchange, place: str, what: str, terms: Mapping[str, str]) -> Exchange:
    """`Exchange.enter` a place, and require that all members were given the same.

    Args:
        members: an exchange of them; anybody may read what is said there.
        place: where they meet.
        what: the swap's name.
        terms: what this member was given, by name.

    Collective: yes, every member.

    Raises:
        ValueError: they were not; names a term, and who was given what. All members raise it.
        SecretError: likewise, where only some were given the launcher's secret.
        What `Exchange.enter` raises.
    """
    exchange, payloads = members.enter(place, what, msgspec.msgpack.encode(terms))
    told = [exchange.decoded(_TERMS, what, each, rank) for rank, each in enumerate(payloads)]
    for name in dict.fromkeys(chain(*told)):
        given: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            given.setdefault(each.get(name, "not given"), []).append(exchange.global_rank(rank))
        if len(given) > 1:
            exchange.let_all_read()
            said = ", ".join(f"{value} on ranks {ranks}" for value, ranks in given.items())
            error = SecretError if name == "secret" else ValueError
            raise error(f"{exchange.name}: {name} is {said}: give all ranks the same")
    return exchange
