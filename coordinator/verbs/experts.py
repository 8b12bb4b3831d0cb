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
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import torch

from coordinator.verbs.member import Member
from device_comm import Work
from device_comm.verbs.checks import check_shape
from device_comm.verbs.uneven import UnevenVerbs
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.setup.link import Link
    from device_comm.verbs.arguments import Later, Maybe, Now, Timeout
    from device_comm.verbs.checks import Shape


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
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Now],
    ) -> tuple[Tensor, ...]: ...
    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Later],
    ) -> Work[tuple[Tensor, ...]]: ...
    @overload
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = ...,
        sizes: Sequence[int] | None = ...,
        **how: Unpack[Maybe],
    ) -> tuple[Tensor, ...] | Work[tuple[Tensor, ...]]: ...
    def dispatch(
        self,
        *rows: Tensor,
        is_sequence_parallel: bool = False,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        timeout: Timeout = None,
    ) -> Any:
        """The rows of all members, in rank order. Collective: yes, every member.

        Args:
            rows: one or more tensors (rows, ...), such as hidden states, weights and ids.
            is_sequence_parallel: members of a replica hold different rows.
            sizes: rows of each member, the same on all; None: ask them, and wait for that.
            async_op: return a `Work` of the result.
            timeout: seconds; None: what the group allows.

        Returns:
            As many tensors, each with the rows of all members.
        """
        group = self._rows_differ_in(is_sequence_parallel)
        if timeout is not None:
            timeout = Deadline.after(timeout)
        if sizes is None:
            sizes = group._messenger.all_gather_object(len(rows[0]), timeout)
        found = group.all_gatherv(rows, 0, sizes, async_op=async_op, timeout=timeout)
        alike = group._dispatched.setdefault(sum(sizes), Counter())
        alike += Counter()  # what is combined goes
        alike[tuple(sizes)] += 1
        return found.then(tuple) if isinstance(found, Work) else tuple(found)

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
