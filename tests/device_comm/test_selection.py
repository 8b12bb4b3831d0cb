"""Choosing a backend for each verb and size by a table of times; measuring and keeping that."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import (
    ALL_VERBS,
    Backend,
    Capabilities,
    Communicator,
    Identity,
    LoopbackBackend,
    Operation,
    ReduceOp,
)
from device_comm.backend import Explanation, in_bytes
from device_comm.measuring import (
    MEASURED_SIZES,
    HostStopwatch,
    Key,
    TableCache,
    cache_folder,
    measure_candidates,
)
from device_comm.selection import (
    MEASURED_AS,
    Candidate,
    Measured,
    SelectingBackend,
    Selection,
    Table,
    size_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.quick
KIB = 1 << 10


class Noting(Backend):
    """Keeps what it is asked, and takes ``cost`` seconds of ``clock`` for each operation."""

    def __init__(
        self,
        name: str,
        verbs: frozenset[str] = ALL_VERBS,
        clock: list[float] | None = None,
        cost: Callable[[int], float] = lambda _: 0.0,
        **has: Any,
    ) -> None:
        super().__init__(Identity.of(0, 2), Capabilities(name, verbs, **has))
        self.started: list[Operation] = []
        self.did: list[str] = []
        self._clock, self._cost = clock, cost

    def start(self, operation: Operation) -> None:
        self.started.append(operation)
        self.did.append(operation.verb)
        if self._clock is not None:
            barrier = operation.verb == "barrier"
            self._clock[0] += 1.0 if barrier else self._cost(operation.source.nbytes)

    def check(self) -> None:
        self.did.append("check")

    def norms(self, x: torch.Tensor, weight: torch.Tensor) -> bool:  # noqa: ARG002 - any
        return x.dtype in self.capabilities.normed

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        self.did.append("begin")
        yield
        self.did.append("end")


def candidate(name: str, *, up_to: int | None = None, **has: Any) -> Candidate:
    return Candidate(name, Noting(name, **has), up_to=up_to)


def times(**seconds: list[float]) -> dict[str, list[Measured]]:
    """A table's rows of all_reduce, at 1 KiB, 16 KiB, 256 KiB, ... for each backend."""
    count = len(next(iter(seconds.values())))
    return {
        "all_reduce": [
            Measured(KIB << 4 * at, {name: each[at] for name, each in seconds.items()})
            for at in range(count)
        ]
    }


def chooser(
    verbs: dict[str, list[Measured]], *names: str, **limits: int
) -> Callable[[str, int], str]:
    candidates = [candidate(name, up_to=limits.get(name)) for name in names]
    selection = Selection(candidates, Table({}, verbs))
    return lambda verb, size: selection.candidate(verb, size).name


# --- What a table chooses -------------------------------------------------------------------------

# Halfway between measured sizes, on a logarithmic scale, the choice changes.
AT_SIZES = [
    (times(ipc=[1, 2, 9], nccl=[3, 3, 3]), {}, {1: "ipc", 64 * KIB: "ipc", 64 * KIB + 1: "nccl"}),
    (
        times(ipc=[1, 5, 9], nccl=[3, 3, 3]),
        {},
        {4 * KIB: "ipc", 4 * KIB + 1: "nccl", 1 << 30: "nccl"},
    ),
    (
        times(ipc=[1, 4, 9, 9], nccl=[3, 3, 3, 9], torch=[9, 9, 9, 1]),
        {},
        {KIB: "ipc", 16 * KIB: "nccl", 256 * KIB: "nccl", 4096 * KIB: "torch", 8192 * KIB: "torch"},
    ),
    (
        times(ipc=[1, 1, 1], nccl=[2, 2, 2]),
        {"ipc": 10 * KIB},
        {10 * KIB: "ipc", 10 * KIB + 1: "nccl", 1 << 30: "nccl"},
    ),
    ({}, {}, {1 << 20: "torch"}),
    ({}, {"torch": 100}, {100: "torch", 101: "ipc"}),
]


@pytest.mark.parametrize(("verbs", "limits", "expected"), AT_SIZES)
def test_thresholds_follow_the_table_and_the_limits(
    verbs: dict[str, list[Measured]], limits: dict[str, int], expected: dict[int, str]
) -> None:
    """D7: the same code, other figures, other thresholds; without figures the order decides."""
    measured = [*verbs.get("all_reduce", [Measured(1, {})])[0].seconds]
    names = [name for name in ("torch", "ipc", "nccl") if not measured or name in measured]
    pick = chooser(verbs, *names, **limits)
    assert {size: pick("all_reduce", size) for size in expected} == expected


def test_verbs_without_figures_of_their_own_use_their_likes() -> None:
    rows = times(ipc=[2], nccl=[1])["all_reduce"]
    pick = chooser({"all_gather": rows, "send": rows}, "ipc", "nccl")
    likes = ["all_gather", "all_gatherv", "send", "recv"]
    assert [pick(verb, 9) for verb in [*likes, "reduce"]] == ["nccl"] * 4 + ["ipc"]
    assert {*MEASURED_SIZES, *MEASURED_AS} == ALL_VERBS
    assert {*MEASURED_AS.values()} <= {*MEASURED_SIZES}


def test_ranks_that_may_differ_in_size_use_one_backend_for_all() -> None:
    rows = times(ipc=[1, 9], nccl=[2, 2])["all_reduce"]
    pick = chooser({"all_to_all": rows}, "ipc", "nccl")
    # 1 * 9 > 2 * 2
    assert {pick("all_to_all", size) for size in (0, KIB, 1 << 30)} == {"nccl"}
    limited = Selection([candidate("packets", up_to=100), candidate("ipc")])
    assert limited.candidate("all_to_all", 1).name == "ipc"


def test_reductions_that_the_quickest_lacks_go_to_another() -> None:
    sums = frozenset({(ReduceOp.SUM, torch.float32)})
    special = candidate("symmetric", verbs=frozenset({"all_reduce"}), reductions=sums)
    selection = Selection([special, candidate("nccl")], Table({}, times(symmetric=[1], nccl=[2])))
    for op, dtype, name in [
        (ReduceOp.SUM, torch.float32, "symmetric"),
        (ReduceOp.MAX, torch.float32, "nccl"),
        (ReduceOp.SUM, torch.int64, "nccl"),
    ]:
        assert selection.reducer("all_reduce", 9, op, dtype).name == name
    assert selection.candidate("all_gather", 9).name == "nccl"


def test_a_capture_takes_what_can_be_captured() -> None:
    ipc, nccl = (candidate(name, stream_ordered=True) for name in ("ipc", "nccl"))
    host, gone = candidate("host"), Candidate("gone", None, "why")
    rows = times(host=[1, 1], ipc=[2, 9], nccl=[3, 3])
    selection = Selection([ipc, nccl, host], Table({}, rows))
    assert [selection.candidate("all_reduce", KIB << s).name for s in (0, 4)] == ["host"] * 2
    captured = [selection.captured.candidate("all_reduce", KIB << s).name for s in (0, 4)]
    assert captured == ["ipc", "nccl"]
    reducer = selection.captured.reducer("all_reduce", KIB, ReduceOp.MAX, torch.int64)
    assert reducer.name == "ipc"
    for same in (Selection([ipc, gone, nccl]), Selection([host])):
        assert same.captured is same


def test_choices_say_why() -> None:
    candidates = [
        candidate("ipc", verbs=frozenset({"all_reduce", "recv"})),
        candidate("nccl", verbs=frozenset({"all_reduce", "send"})),
        candidate("window", verbs=frozenset({"all_reduce"}), up_to=KIB),
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
    sizes = {0: "0 B", 1023: "1023 B", KIB: "1 KiB", 1025: "1025 B", 3 << 20: "3 MiB"}
    assert {size: in_bytes(size) for size in sizes} == sizes
    assert in_bytes(1 << 30) == "1 GiB"


A = {"a": 1.0}


@pytest.mark.parametrize(
    ("rows", "sound"),
    [
        ([(0, A)], True),
        ([(1, A), (2, A)], True),
        ([], False),
        ([(2, A), (1, A)], False),
        ([(1, A), (1, A)], False),
        ([(-1, A)], False),
        ([(1, {"a": 0.0})], False),
        ([(1, {"a": float("nan")})], False),
        ([(1, {})], False),
    ],
)
def test_soundness(rows: list[tuple[int, dict[str, float]]], sound: bool) -> None:
    measured = [Measured(*each) for each in rows]
    assert Table({}, {"all_reduce": measured}).sound() is sound


def test_the_size_of_an_operation_is_that_of_the_whole_tensor() -> None:
    n, given, taken = 3, torch.zeros(8), torch.zeros(10)
    found = {verb: size_of(Operation(verb, given, taken), n) for verb in ALL_VERBS}
    expected = dict.fromkeys(ALL_VERBS, 32) | dict.fromkeys(("all_to_all", "barrier"), 0)
    expected |= dict.fromkeys(("all_gather", "all_gatherv", "recv"), 40)
    assert found == expected | {"gather": 32 * n, "scatter": 40 * n}
    assert size_of(Operation("broadcast", given), n) == 32
    assert size_of(Operation("broadcast", output=taken), n) == 40


# --- A backend that selects -----------------------------------------------------------------------


def test_during_a_capture_another_backend_may_do_it() -> None:
    ipc, host = Noting("ipc", stream_ordered=True), Noting("host")
    rows = [Measured(32, {"ipc": 2.0, "host": 1.0})]
    table = Table({}, {"all_reduce": rows, "send": rows})
    capturing = [False]
    backend = SelectingBackend(
        Selection([Candidate("ipc", ipc), Candidate("host", host)], table), lambda: capturing[0]
    )
    x = torch.ones(3)
    for capturing[0] in (False, True, False):
        backend.start(Operation("all_reduce", x, x))
        backend.start(Operation("send", x, peer=1))
    assert ipc.did == ["all_reduce", "send"]
    assert len(host.did) == 4


def test_it_norms_with_the_backends_chosen_for_some_sum() -> None:
    candidates = [
        candidate("nccl", stream_ordered=True, normed=frozenset({torch.float32})),
        candidate("ipc", stream_ordered=True, normed=frozenset({torch.float16})),
        candidate("host", normed=frozenset({torch.bfloat16})),
    ]

    def backend(*taken: dict[str, float], verb: str = "all_reduce") -> SelectingBackend:
        rows = [Measured(64**turn, each) for turn, each in enumerate(taken, 1)]
        return SelectingBackend(Selection(candidates, Table({}, {verb: rows})), lambda: False)

    small, large = {"nccl": 3.0, "ipc": 2.0, "host": 9.0}, {"nccl": 1.0, "ipc": 2.0, "host": 9.0}
    for made, normed in [
        (backend(small, large), {torch.float16, torch.float32}),
        (backend(large), {torch.float32}),
        (backend(small, verb="broadcast"), {torch.float32}),
        # In the capture of a graph it is the one that can be captured.
        (backend({"nccl": 2.0, "ipc": 3.0, "host": 1.0}), {torch.bfloat16, torch.float32}),
    ]:
        assert made.capabilities.normed == normed
    by_size = [
        backend(small, large).norms(torch.ones(count, dtype=torch.float16), torch.ones(1))
        for count in (32, 4096)
    ]
    assert by_size == [True, False]


def test_refused_candidates_are_explained() -> None:
    refused = Candidate("ipc", None, "rank 1: no peer access")
    with pytest.raises(ValueError, match="needs a candidate"):
        SelectingBackend(Selection([refused]))
    one, other = LoopbackBackend("cpu"), LoopbackBackend("meta")
    with pytest.raises(ValueError, match="not of one group"):
        SelectingBackend(Selection([Candidate("a", one), Candidate("b", other)]))
    selecting = SelectingBackend(Selection([refused, Candidate("loopback", one)]))
    assert selecting.explain().unavailable == (("ipc", "rank 1: no peer access"),)
    assert selecting.explain().backend("all_reduce", 1) == "loopback"
    choices = {(choice.backend, choice.sizes) for choice in one.explain().choices}
    assert choices == {("loopback", "any size")}


# --- Measuring ------------------------------------------------------------------------------------


def alone(payload: bytes) -> list[bytes]:
    return [payload]


def test_measured_is_in_the_type_that_models_have() -> None:
    candidates = [candidate("one"), candidate("other")]
    now = iter(range(1 << 20))
    measure_candidates(candidates, {}, alone, clock=lambda: float(next(now)))
    for each in candidates:
        assert isinstance(each.backend, Noting)
        assert {*each.backend.did} == {*MEASURED_SIZES, "recv"}
        for operation in each.backend.started:
            given = [x.dtype for x in (operation.source, operation.output) if x.numel()]
            assert {*given} == (set() if operation.verb == "barrier" else {torch.bfloat16})


def test_measured_times_decide() -> None:
    """D7, from times to choices: a latency of 1 and 100 B/s, against 9 and 1000 B/s."""
    clock = [0.0]
    candidates = [
        candidate("near", clock=clock, cost=lambda size: 1 + size / 100),
        candidate("far", clock=clock, cost=lambda size: 9 + size / 1000),
        Candidate("gone", None, "not here"),
    ]
    sizes = {"all_reduce": (128, 512, 2048, 8192)}
    table = measure_candidates(candidates, {"machine": "this"}, alone, sizes, lambda: clock[0])
    assert table.key == {"machine": "this"}
    assert table.verbs["all_reduce"][0].seconds == pytest.approx({"near": 2.28, "far": 9.128})
    selection = Selection(candidates, table)
    # They are equal at 889 bytes, between 512 and 2048, whose middle is 1024.
    chosen = {512: "near", 1024: "near", 1025: "far"}
    assert {size: selection.candidate("all_reduce", size).name for size in chosen} == chosen
    assert measure_candidates(candidates[:1], {}, alone, sizes, lambda: clock[0]).verbs == {}


def test_a_table_grows_where_there_is_no_time_for_all_of_it() -> None:
    """As on a device that processes take turns on: each set-up may take a part of its time."""
    clock = [0.0]
    slow = [candidate(name, clock=clock, cost=lambda _: 10.0) for name in ("near", "far")]
    sizes = {"all_reduce": (128, 512, 2048), "reduce": (128,)}

    def set_up(known: Table | None, limit: float) -> Table:
        return measure_candidates(slow, {}, alone, sizes, lambda: clock[0], known, limit)

    began = clock[0]
    first = set_up(None, 1.0)
    assert [row.size for row in first.verbs["all_reduce"]] == [128]
    second = set_up(first, 1.5 * (clock[0] - began))
    assert [row.size for row in second.verbs["all_reduce"]] == [128, 512, 2048]
    assert second.sound()
    assert second.verbs["all_reduce"][0] is first.verbs["all_reduce"][0]
    assert "reduce" not in second.verbs
    assert Selection(slow, second).candidate("reduce", 128).name == "near"
    before = clock[0]
    assert set_up(second, 0.0) == second
    assert clock[0] == before


def test_the_quickest_series_counts_after_all_have_met() -> None:
    now, takes = [0.0], iter((8, 1, 2, 1, 4, 5))
    backend = Noting("quiet")

    def call() -> None:
        now[0] += next(takes)

    comm = Communicator(backend)
    assert HostStopwatch(comm, comm, lambda: now[0]).time(call, 2, 3) == 1.5
    assert backend.did == ["barrier"] * 3


# --- Tables between runs --------------------------------------------------------------------------

LIBRARIES = "torch 2.11, nccl 2.28.9"
KEY = Key("0.1.0", "NVIDIA H100", "580.1", LIBRARIES, 2, "2 ranks on 1 device", "ipc, nccl")
TABLE = Table(KEY.as_dict(), {"all_reduce": [Measured(1024, {"ipc": 4e-6, "nccl": 9e-6})]})


@pytest.fixture
def cache(tmp_path: Path) -> TableCache:
    made = TableCache(tmp_path / "cache")
    assert made.load(KEY) is None
    assert made.store(TABLE, KEY) == ""
    return made


def stored_file(cache: TableCache) -> Path:
    assert cache.folder is not None
    (path,) = cache.folder.rglob("*.json")
    return path


def test_a_table_is_found_again_by_the_same_machine_and_group(cache: TableCache) -> None:
    assert cache.load(KEY) == TABLE
    assert [path.name for path in stored_file(cache).parent.iterdir()] == [stored_file(cache).name]
    for name in KEY.as_dict():
        value = 4 if name == "world_size" else "another"
        assert cache.load(replace(KEY, **{name: value})) is None, name


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"not json",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"key": {}, "verbs": {}}',
            b'{"key": 3}',
        ),
        b'{"verbs": {"all_reduce": [{"size": 1024, "seconds": {"ipc": -1}}]}}',
        None,
    ],
    ids=repr,
)
def test_a_broken_file_is_as_good_as_none(cache: TableCache, content: bytes | None) -> None:
    path = stored_file(cache)
    if content is None:  # sound but for a time
        content = path.read_bytes().replace(b"0.000004", b"-1").replace(b"4e-6", b"-1")
        assert b"-1" in content
    path.write_bytes(content)
    assert cache.load(KEY) is None
    assert cache.store(TABLE, KEY) == ""
    assert cache.load(KEY) == TABLE


def test_a_table_under_the_name_of_another_is_as_good_as_none(cache: TableCache) -> None:
    other = replace(KEY, device="NVIDIA H200")
    foreign = stored_file(cache).read_bytes()
    stored_file(cache).unlink()
    cache.store(Table(other.as_dict(), TABLE.verbs), other)
    stored_file(cache).write_bytes(foreign)
    assert cache.load(other) is None


def test_a_folder_that_cannot_be_written_is_named(cache: TableCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken = TableCache(tmp_path / "file")
    assert "Not a directory" in broken.store(TABLE, KEY)
    assert broken.load(KEY) is None
    assert TableCache(None).store(TABLE, KEY) == "there is no cache folder"
    assert TableCache(None).load(KEY) is None
    path = stored_file(cache)
    path.unlink()
    path.mkdir()
    assert os.strerror(21) in cache.store(TABLE, KEY)
    assert list(path.parent.iterdir()) == [path], "nothing is left behind"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/group-coordinator")),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, Path("/h/.cache/group-coordinator")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/group-coordinator")),
        ({"HOME": "/h"}, Path("/h/.cache/group-coordinator")),
        ({}, None),
    ],
    ids=str,
)
def test_the_folder_is_the_users(environment: dict[str, str], folder: Path | None) -> None:
    assert cache_folder(environment) == folder
