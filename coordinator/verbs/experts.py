"""Mixture of experts: rows are sent to the experts, and the experts' results come back.

    dispatch    every member gets the rows of all: all_gatherv
    combine     the experts' results are summed, each member gets its own rows: reduce_scatterv

The rows that members hold may differ in number. ``sizes`` says how many each has; without it the
members tell each other, which costs one small exchange per `dispatch`, and `combine` takes the
sizes of the `dispatch` with the same total number of rows. If two with the same total but different
sizes are under way at once, their `combine` has to be told the sizes. A `dispatch` that is not
combined while `UNDER_WAY` others are dispatched counts as abandoned.

Tensor-parallel members hold the same rows, unless they split them (sequence-parallel). The rows
are therefore exchanged within `token_group`, if the group has one, and with
``is_sequence_parallel`` within the whole group. Within `token_group`, `combine` sums what the
experts of its members have made: the tensor-parallel group has to sum what the others have.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, Self, Unpack, overload

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


UNDER_WAY: Final = 8
"""How many dispatches may be under way at once whose sizes `combine` is not told."""


class Dispatches:
    """The sizes of what one member has dispatched and not combined. Pure logic."""

    def __init__(self) -> None:
        self._count = 0
        self._under_way: deque[tuple[int, tuple[int, ...]]] = deque()
        self._combined: tuple[int, ...] = ()

    def add(self, sizes: Sequence[int]) -> None:
        """Rows were dispatched, so many of each member."""
        self._count += 1
        self._under_way.append((self._count, tuple(sizes)))
        while self._under_way[0][0] <= self._count - UNDER_WAY:
            self._under_way.popleft()

    def combined(self, sizes: Sequence[int]) -> None:
        """The first of these sizes are no longer under way."""
        self._combined = tuple(sizes)
        found = next((each for each in self._under_way if each[1] == self._combined), None)
        if found is not None:
            self._under_way.remove(found)

    def sizes_of(self, rows: int) -> tuple[int, ...]:
        """The sizes with which ``rows`` rows in all were dispatched; those combined last, if none
        are under way.

        Raises:
            ValueError: there are none, or several.
        """
        under_way = [sizes for _, sizes in self._under_way if sum(sizes) == rows]
        alike = list(dict.fromkeys(under_way))
        if not alike and self._combined and sum(self._combined) == rows:
            return self._combined
        if not alike:
            raise ValueError(f"combine needs sizes: no {rows} rows were dispatched before")
        if len(alike) > 1:
            several = " and as ".join(str(list(sizes)) for sizes in alike)
            raise ValueError(
                f"combine needs sizes: {rows} rows were dispatched as {several}, before the first "
                "of these was combined"
            )
        return alike[0]


class ExpertVerbs(Member, UnevenVerbs):
    """Dispatching rows to experts and combining their results.

    Attributes:
        token_group: the members whose rows differ where rows are not sequence-parallel,
            usually those of the data-parallel and the prefill-context-parallel group; None: this
            group.
    """

    token_group: ExpertVerbs | None = None
    _dispatches: Dispatches

    def _adopt(self, link: Link) -> None:
        super()._adopt(link)
        self._dispatches = Dispatches()

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
        if not rows:
            raise TypeError("dispatch needs one tensor or more")
        if sizes is None:
            count = torch.tensor([len(rows[0])], device="cpu")
            sizes = group._link.cpu.all_gather(count, timeout=timeout).tolist()
        found = group.all_gatherv(rows, 0, sizes, async_op=async_op, timeout=timeout)
        group._dispatches.add(sizes)
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
        """The sum of what the members that exchange rows have made of this member's rows.

        Collective: yes, every member.

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
            sizes = group._dispatches.sizes_of(len(hidden_states))
        found = group.reduce_scatterv(hidden_states, 0, sizes, out=out, **options)
        group._dispatches.combined(sizes)
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

    def _rows_differ_in(self, is_sequence_parallel: bool) -> ExpertVerbs:
        return self if is_sequence_parallel or self.token_group is None else self.token_group
