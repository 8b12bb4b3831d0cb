"""Mixture of experts: rows go to where experts are, and what these make of them comes back.

    dispatch    every member gets the rows of all: all_gatherv
    combine     the experts' results are summed, each member gets its own rows: reduce_scatterv

The rows that members hold may differ in number. ``sizes`` says how many each has; without it
the members tell each other, which costs one small exchange per `dispatch`, and `combine`
takes the sizes of the `dispatch` that had as many rows in all. Two of as many rows in all, of other
sizes, may be under way at once: their `combine` has to be told the sizes.

Members of one data-parallel replica hold the same rows, unless they split them
(sequence-parallel). The rows are therefore exchanged within `token_group`, if the group has
one, and with ``is_sequence_parallel`` within the whole group.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack, overload, runtime_checkable

import torch

from coordinator.verbs.member import Member
from device_comm import Work
from device_comm.verbs.checks import check_shape
from device_comm.verbs.uneven import UnevenVerbs
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from coordinator.setup.link import Link
    from device_comm.verbs.arguments import Later, Maybe, Now
    from device_comm.verbs.checks import Shape


@runtime_checkable
class UsesCommunicationBuffers(Protocol):
    """A module that prepares buffers once it is known in which group it communicates."""

    def prepare_communication_buffers(self, group: Member) -> None:
        """Allocate or register what communicating in ``group`` needs."""


class ExpertVerbs(Member, UnevenVerbs):
    """Dispatching rows to experts and combining their results.

    Attributes:
        token_group: the members whose rows differ where rows are not sequence-parallel,
            usually the data-parallel group; None: this group.
    """

    token_group: ExpertVerbs | None = None
    _dispatched: dict[int, Counter[tuple[int, ...]]]

    def _adopt(self, link: Link) -> None:
        super()._adopt(link)
        # By the number of all rows: the sizes dispatched, and how many of them are not combined.
        self._dispatched = {}

    def exchanging_rows_in(self, token_group: ExpertVerbs) -> Self:
        """This group under a second name, with another `token_group`; they are closed together.

        Collective: no.
        """
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), token_group=token_group)
        return other

    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = ...,
        extra_tensors: None = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        extra_tensors: Sequence[Tensor],
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]: ...
    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = ...,
        extra_tensors: None = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, Tensor, Tensor]]: ...
    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        extra_tensors: Sequence[Tensor],
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, Tensor, Tensor, list[Tensor]]]: ...
    @overload
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = ...,
        extra_tensors: Sequence[Tensor] | None = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Maybe],
    ) -> tuple[Any, ...] | Work[tuple[Any, ...]]: ...
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """The rows of all members, in rank order. Collective: yes, every member.

        Args:
            hidden_states: (rows, ...).
            topk_weights: (rows, k).
            topk_ids: (rows, k).
            is_sequence_parallel: members of a replica hold different rows.
            extra_tensors: more tensors of as many rows.
            sizes: rows of each member, the same on all; None: ask them, and wait for that.
            options: ``async_op`` and ``timeout``, as every verb takes them.

        Returns:
            The three tensors with the rows of all members, and a list of the extra ones if given.
        """
        main = (hidden_states, topk_weights, topk_ids)
        return self._gather_rows(main, extra_tensors, is_sequence_parallel, sizes, options)

    @overload
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = ...,
        extra_tensors: None = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        extra_tensors: Sequence[Tensor],
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, Tensor, list[Tensor]]: ...
    @overload
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = ...,
        extra_tensors: None = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, Tensor]]: ...
    @overload
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        extra_tensors: Sequence[Tensor],
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, Tensor, list[Tensor]]]: ...
    @overload
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = ...,
        extra_tensors: Sequence[Tensor] | None = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Maybe],
    ) -> tuple[Any, ...] | Work[tuple[Any, ...]]: ...
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Sequence[Tensor] | None = None,
        *,
        sizes: Sequence[int] | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """As `dispatch`, before the experts are chosen. Collective: yes, every member."""
        main = (hidden_states, router_logits)
        return self._gather_rows(main, extra_tensors, is_sequence_parallel, sizes, options)

    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    @overload
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        out: Tensor | None = ...,
        **how: Unpack[Maybe],
    ) -> Tensor | Work[Tensor]: ...
    def combine(
        self,
        hidden_states: Tensor,
        is_sequence_parallel: bool = False,
        *,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """The sum of all members' results, for this member's rows. Collective: yes, every member.

        Args:
            hidden_states: (all rows, ...), as `dispatch` gave them.
            is_sequence_parallel: as for `dispatch`.
            sizes: rows of each member; None: those of the `dispatch` of as many rows in all.
            out: (this member's rows, ...).
            options: ``async_op`` and ``timeout``, as every verb takes them.

        Returns:
            (this member's rows, ...).

        Raises:
            ValueError: ``sizes`` is not given, and no `dispatch` had as many rows, or several of
                other sizes had.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        if sizes is None:
            sizes = group._sizes_of(len(hidden_states))
        found = group.reduce_scatterv(hidden_states, 0, sizes, out=out, **options)
        alike = group._dispatched.get(sum(sizes), Counter())
        if tuple(sizes) in alike:
            alike[tuple(sizes)] -= 1
        return found

    @overload
    def combine_into_output(
        self,
        hidden_states: Tensor,
        output: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> Tensor: ...
    @overload
    def combine_into_output(
        self,
        hidden_states: Tensor,
        output: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[Tensor]: ...
    @overload
    def combine_into_output(
        self,
        hidden_states: Tensor,
        output: Tensor,
        is_sequence_parallel: bool = ...,
        *,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Maybe],
    ) -> Tensor | Work[Tensor]: ...
    def combine_into_output(
        self,
        hidden_states: Tensor,
        output: Tensor,
        is_sequence_parallel: bool = False,
        *,
        sizes: Sequence[int] | None = None,
        **options: Unpack[Maybe],
    ) -> Any:
        """As `combine`, into ``output``, which is returned. Collective: yes, every member."""
        return self.combine(hidden_states, is_sequence_parallel, sizes=sizes, out=output, **options)

    def allocate_combine_input(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | None = None,
        is_sequence_parallel: bool = False,
    ) -> Tensor:
        """Memory for what goes into `combine`, not initialised. Collective: no.

        Args:
            shape: (all rows, ...), the same on all members.
            dtype: the same on all members.
            device: None: the group's.
            is_sequence_parallel: as for `dispatch`.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        return torch.empty(check_shape("shape", shape), dtype=dtype, device=device or group.device)

    def prepare_communication_buffer_for_model(self, model: nn.Module) -> None:
        """Call `prepare_communication_buffers` once on each module of a model that has it.

        Collective: yes, every member, with models of the same structure.
        """
        for module in model.modules():
            if isinstance(module, UsesCommunicationBuffers):
                module.prepare_communication_buffers(self)

    def _gather_rows(
        self,
        main: Sequence[Tensor],
        extra: Sequence[Tensor] | None,
        is_sequence_parallel: bool,
        sizes: Sequence[int] | None,
        options: Maybe,
    ) -> Any:
        group = self._rows_differ_in(is_sequence_parallel)
        timeout = options.get("timeout")
        if timeout is not None:
            timeout = Deadline.after(timeout)
        if sizes is None:
            sizes = group._messenger.all_gather_object(len(main[0]), timeout)

        def arrange(gathered: list[Tensor]) -> tuple[Any, ...]:
            first, rest = gathered[: len(main)], gathered[len(main) :]
            return tuple(first) if extra is None else (*first, rest)

        async_op = options.get("async_op", False)
        found = group.all_gatherv(
            [*main, *(extra or ())], 0, sizes, async_op=async_op, timeout=timeout
        )
        alike = group._dispatched.setdefault(sum(sizes), Counter())
        alike += Counter()  # what is combined goes
        alike[tuple(sizes)] += 1
        return found.then(arrange) if isinstance(found, Work) else arrange(found)

    def _sizes_of(self, rows: int) -> tuple[int, ...]:
        """The sizes with which ``rows`` rows in all were dispatched."""
        alike = self._dispatched.get(rows)
        if not alike:
            raise ValueError(f"combine needs sizes: no {rows} rows were dispatched before")
        if len(alike) > 1:
            several = " and as ".join(str(list(sizes)) for sizes in alike)
            raise ValueError(
                f"combine needs sizes: {rows} rows were dispatched as {several}, before the first "
                "of these was combined"
            )
        return next(iter(alike))

    def _rows_differ_in(self, is_sequence_parallel: bool) -> ExpertVerbs:
        return self if is_sequence_parallel or self.token_group is None else self.token_group
