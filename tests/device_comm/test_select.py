"""Choosing by a table: pure logic, with communicators that only say what they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ALL_VERBS, Backend, Capabilities, Identity, Operation, ReduceOp
from device_comm.backend import Explanation, in_bytes
from device_comm.measuring import MEASURED_SIZES, measure_candidates
from device_comm.selection import MEASURED_AS, Candidate, Measured, Selection, Table, size_of

if TYPE_CHECKING:
    from collections.abc import Callable

KIB = 1 << 10
SUM_OF_FLOATS = frozenset({(ReduceOp.SUM, torch.float32)})


class Named(Backend):
    """Offers some verbs, and moves nothing."""

    def __init__(
        self,
        name: str,
        verbs: frozenset[str] = ALL_VERBS,
        reductions: frozenset[tuple[ReduceOp, torch.dtype]] | None = None,
        stream_ordered: bool = False,
    ) -> None:
        has = Capabilities(name, verbs, stream_ordered=stream_ordered, reductions=reductions)
        super().__init__(Identity.of(0, 2), has)

    def start(self, operation: Operation) -> None:
        raise AssertionError(f"{operation} was started")


def times(**seconds: list[float]) -> dict[str, list[Measured]]:
    """A table's rows of all_reduce, at 1 KiB, 16 KiB, 256 KiB, ... for each backend."""
    sizes = [KIB << 4 * step for step in range(len(next(iter(seconds.values()))))]
    rows = [
        Measured(size, {name: each[at] for name, each in seconds.items()})
        for at, size in enumerate(sizes)
    ]
    return {"all_reduce": rows}


def chooser(
    verbs: dict[str, list[Measured]], *names: str, **limits: int
) -> Callable[[str, int], str]:
    candidates = [Candidate(name, Named(name), up_to=limits.get(name)) for name in names]
    selection = Selection(candidates, Table({}, verbs))
    return lambda verb, size: selection.candidate(verb, size).name


def test_thresholds_follow_the_table() -> None:
    """D7: the same code, other figures, other thresholds."""
    here = chooser(times(ipc=[1, 2, 9], nccl=[3, 3, 3]), "ipc", "nccl")
    there = chooser(times(ipc=[1, 5, 9], nccl=[3, 3, 3]), "ipc", "nccl")
    # Halfway between 16 and 256 KiB, and between 1 and 16 KiB, on a logarithmic scale.
    sizes = [1, KIB, 4 * KIB, 4 * KIB + 1, 64 * KIB, 64 * KIB + 1, 1 << 30]
    assert [here("all_reduce", size) for size in sizes] == ["ipc"] * 5 + ["nccl"] * 2
    assert [there("all_reduce", size) for size in sizes] == ["ipc"] * 3 + ["nccl"] * 4


def test_a_backend_may_win_in_the_middle_only() -> None:
    pick = chooser(
        times(ipc=[1, 4, 9, 9], nccl=[3, 3, 3, 9], torch=[9, 9, 9, 1]), "torch", "ipc", "nccl"
    )
    found = [pick("all_reduce", KIB << shift) for shift in (0, 4, 8, 12, 13)]
    assert found == ["ipc", "nccl", "nccl", "torch", "torch"]


def test_without_figures_the_order_decides() -> None:
    pick = chooser({}, "ipc", "nccl", "torch")
    assert {pick(verb, 1 << 20) for verb in ALL_VERBS} == {"ipc"}


def test_verbs_without_figures_of_their_own_use_their_likes() -> None:
    rows = times(ipc=[2], nccl=[1])["all_reduce"]
    pick = chooser({"all_gather": rows, "send": rows}, "ipc", "nccl")
    likes = ["all_gather", "all_gatherv", "send", "recv"]
    assert [pick(verb, 9) for verb in [*likes, "reduce"]] == ["nccl"] * 4 + ["ipc"]


def test_ranks_that_may_differ_in_size_use_one_backend_for_all() -> None:
    rows = times(ipc=[1, 9], nccl=[2, 2])["all_reduce"]
    pick = chooser({"all_to_all": rows}, "ipc", "nccl")
    # 1 * 9 > 2 * 2
    assert {pick("all_to_all", size) for size in (0, KIB, 1 << 30)} == {"nccl"}


def test_a_limit_is_kept_though_the_table_says_otherwise() -> None:
    pick = chooser(times(packets=[1, 1, 1], ipc=[2, 2, 2]), "packets", "ipc", packets=10 * KIB)
    found = [pick("all_reduce", size) for size in (10 * KIB, 10 * KIB + 1, 1 << 30)]
    assert found == ["packets", "ipc", "ipc"]


def test_a_limit_is_kept_without_a_table() -> None:
    limited = Candidate("packets", Named("packets"), up_to=100)
    selection = Selection([limited, Candidate("ipc", Named("ipc"))])
    assert [selection.candidate("reduce", size).name for size in (100, 101)] == ["packets", "ipc"]
    assert selection.candidate("all_to_all", 1).name == "ipc"


def test_reductions_that_the_quickest_lacks_go_to_another() -> None:
    special = Candidate("symmetric", Named("symmetric", frozenset({"all_reduce"}), SUM_OF_FLOATS))
    selection = Selection(
        [special, Candidate("nccl", Named("nccl"))], Table({}, times(symmetric=[1], nccl=[2]))
    )

    def reducer(op: ReduceOp, dtype: torch.dtype) -> str:
        return selection.reducer("all_reduce", 9, op, dtype).name

    assert reducer(ReduceOp.SUM, torch.float32) == "symmetric"
    assert reducer(ReduceOp.MAX, torch.float32) == "nccl"
    assert reducer(ReduceOp.SUM, torch.int64) == "nccl"
    assert selection.candidate("all_gather", 9).name == "nccl"


def queueing(name: str, verbs: frozenset[str] = ALL_VERBS) -> Candidate:
    return Candidate(name, Named(name, verbs, stream_ordered=True))


def test_what_is_captured_goes_to_what_can_be() -> None:
    rows = times(host=[1, 1], ipc=[2, 9], nccl=[3, 3])
    candidates = [queueing("ipc"), queueing("nccl"), Candidate("host", Named("host"))]
    selection = Selection(candidates, Table({}, rows))
    assert [selection.candidate("all_reduce", KIB << s).name for s in (0, 4)] == ["host"] * 2
    captured = [selection.captured.candidate("all_reduce", KIB << s).name for s in (0, 4)]
    assert captured == ["ipc", "nccl"]
    reduced = selection.captured.reducer("all_reduce", KIB, ReduceOp.MAX, torch.int64)
    assert reduced.name == "ipc"


def test_where_all_can_be_captured_or_none_the_choice_is_the_same() -> None:
    all_of_them = Selection([queueing("ipc"), Candidate("gone", None, "why"), queueing("nccl")])
    none = Selection([Candidate("host", Named("host"))])
    assert all_of_them.captured is all_of_them
    assert none.captured is none


def test_choices_say_why() -> None:
    candidates = [
        Candidate("ipc", Named("ipc", frozenset({"all_reduce", "recv"}))),
        Candidate("nccl", Named("nccl", frozenset({"all_reduce", "send"}))),
        Candidate("window", Named("nccl", frozenset({"all_reduce"})), up_to=KIB),
        Candidate("multimem", None, "no multicast"),
    ]
    taken = times(ipc=[1e-6, 9e-6], nccl=[3e-6, 3e-6], window=[2e-6, 2e-6])
    selection = Selection(candidates, Table({}, taken))
    small, large, recv, send = selection.choices()
    assert (small.above, small.up_to, small.backend) == (-1, 4 * KIB, "ipc")
    others = (("nccl", "slower"), ("window", "slower"))
    assert (small.reason, small.unavailable) == ("1.0 us at 1 KiB", others)
    assert (large.above, large.up_to, large.backend) == (4 * KIB, None, "nccl")
    assert large.unavailable == (("ipc", "slower"), ("window", "takes up to 1 KiB"))
    assert (recv.reason, recv.unavailable) == ("the only one", (("nccl", "has no recv"),))
    assert (send.reason, send.unavailable) == ("the only one", (("ipc", "has no send"),))
    explained = Explanation("tp:0", tuple(selection.choices()), (("multimem", "no multicast"),))
    assert explained.backend("all_reduce", 4 * KIB) == "ipc"
    assert explained.backend("all_reduce", 4 * KIB + 1) == "nccl"
    with pytest.raises(KeyError, match="no barrier"):
        explained.backend("barrier", 0)
    lines = str(explained).splitlines()
    assert " ".join(lines[1].split()) == "all_reduce up to 4 KiB ipc 1.0 us at 1 KiB"
    assert lines[2] == "      not nccl: slower"
    assert lines[-1] == "  not used: multimem: no multicast"


def test_sizes_for_people() -> None:
    assert [in_bytes(size) for size in (0, 1023, 1024, 1025, 3 << 20, 1 << 30)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1025 B",
        "3 MiB",
        "1 GiB",
    ]


@pytest.mark.parametrize(
    ("rows", "sound"),
    [
        ([Measured(0, {"a": 1.0})], True),
        ([Measured(1, {"a": 1.0}), Measured(2, {"a": 1.0})], True),
        ([], False),
        ([Measured(2, {"a": 1.0}), Measured(1, {"a": 1.0})], False),
        ([Measured(1, {"a": 1.0}), Measured(1, {"a": 1.0})], False),
        ([Measured(-1, {"a": 1.0})], False),
        ([Measured(1, {"a": 0.0})], False),
        ([Measured(1, {"a": float("nan")})], False),
        ([Measured(1, {})], False),
    ],
)
def test_soundness(rows: list[Measured], sound: bool) -> None:
    assert Table({}, {"all_reduce": rows}).sound() is sound


N = 3
GIVEN, TAKEN = torch.zeros(8), torch.zeros(10)
OTHER_SIZES = {
    "all_gather": 40,
    "all_gatherv": 40,
    "all_to_all": 0,
    "gather": 32 * N,
    "scatter": 40 * N,
    "recv": 40,
    "barrier": 0,
}
"""Of verbs whose source is not the whole tensor."""


def test_the_size_of_an_operation_is_that_of_the_whole_tensor() -> None:
    found = {verb: size_of(Operation(verb, GIVEN, TAKEN), N) for verb in ALL_VERBS}
    assert found == dict.fromkeys(ALL_VERBS, 32) | OTHER_SIZES
    assert size_of(Operation("broadcast", GIVEN), N) == 32
    assert size_of(Operation("broadcast", output=TAKEN), N) == 40


def test_every_verb_has_times_of_its_own_or_of_another() -> None:
    assert {*MEASURED_SIZES, *MEASURED_AS} == ALL_VERBS
    assert {*MEASURED_AS.values()} <= {*MEASURED_SIZES}


class Timed(Named):
    """Takes as long as it is told, on a clock of its own."""

    def __init__(self, name: str, clock: list[float], cost: Callable[[int], float]) -> None:
        super().__init__(name)
        self._clock = clock
        self._cost = cost

    def start(self, operation: Operation) -> None:
        if operation.verb == "barrier":
            self._clock[0] += 1.0
        else:
            assert operation.verb == "all_reduce"
            self._clock[0] += self._cost(operation.source.nbytes)


def alone(payload: bytes) -> list[bytes]:
    return [payload]


class Typed(Named):
    """Notes the types of what it is given."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen: dict[str, set[torch.dtype]] = {}

    def start(self, operation: Operation) -> None:
        given = {each.dtype for each in (operation.source, operation.output) if each.numel()}
        self.seen.setdefault(operation.verb, set()).update(given)


def test_measured_is_in_the_type_that_models_have() -> None:
    backends = [Typed("one"), Typed("other")]
    candidates = [Candidate(each.capabilities.backend, each) for each in backends]
    now = iter(range(1 << 20))
    measure_candidates(candidates, {}, alone, clock=lambda: float(next(now)))
    for backend in backends:
        assert backend.seen.pop("barrier") == set()
        assert {*backend.seen, "barrier"} == {*MEASURED_SIZES, "recv"}
        assert set().union(*backend.seen.values()) == {torch.bfloat16}


def test_what_is_measured_decides() -> None:
    """D7, from times to choices: a latency of 1 and 100 B/s, against 9 and 1000 B/s."""
    clock = [0.0]
    candidates = [
        Candidate("near", Timed("near", clock, lambda size: 1 + size / 100)),
        Candidate("far", Timed("far", clock, lambda size: 9 + size / 1000)),
        Candidate("gone", None, "not here"),
    ]
    sizes = {"all_reduce": (128, 512, 2048, 8192)}
    table = measure_candidates(candidates, {"machine": "this"}, alone, sizes, lambda: clock[0])
    assert table.key == {"machine": "this"}
    assert table.verbs["all_reduce"][0].seconds == pytest.approx({"near": 2.28, "far": 9.128})
    selection = Selection(candidates, table)
    # They are equal at 889 bytes, between 512 and 2048, whose middle is 1024.
    assert [selection.candidate("all_reduce", size).name for size in (512, 1024, 1025)] == [
        "near",
        "near",
        "far",
    ]
    assert measure_candidates(candidates[:1], {}, alone, sizes, lambda: clock[0]).verbs == {}


def test_a_table_grows_where_there_is_no_time_for_all_of_it() -> None:
    """As on a device that processes take turns on: each set-up may take a part of its time."""
    clock = [0.0]
    slow = [Candidate(name, Timed(name, clock, lambda _: 10.0)) for name in ("near", "far")]
    sizes = {"all_reduce": (128, 512, 2048), "reduce": (128,)}

    def set_up(known: Table | None, limit: float) -> Table:
        return measure_candidates(slow, {}, alone, sizes, lambda: clock[0], known, limit)

    began = clock[0]
    first = set_up(None, 1.0)
    assert [row.size for row in first.verbs["all_reduce"]] == [128]
    each = clock[0] - began
    second = set_up(first, 1.5 * each)
    assert [row.size for row in second.verbs["all_reduce"]] == [128, 512, 2048]
    assert second.sound()
    assert second.verbs["all_reduce"][0] is first.verbs["all_reduce"][0]
    assert "reduce" not in second.verbs
    assert Selection(slow, second).candidate("reduce", 128).name == "near"
    before = clock[0]
    assert set_up(second, 0.0) == second
    assert clock[0] == before
