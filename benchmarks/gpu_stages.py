"""What `benchmarks.gpu_report` carries out, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST = 480.0
"""Seconds of a stage at most: it must fit into what is left of a loan."""

TESTS = "tests/device_comm/cuda/test_ipc_gpu.py"
LAZILY = (("CUDA_MODULE_LOADING", "LAZY"),)
"""For tools that look at each kernel that is loaded: torch has thousands."""


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        name: for the command line and the report.
        shows: what it proves.
        command: its words; ``{json}`` stands for a file that it may write, ``{seconds}`` for how
            long it may work: it does as much as fits.
        seconds: how long it may take at most.
        least: with less than that it is not begun.
        tool: the program without which it is left out.
        variables: environment variables that it has besides.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    seconds: float
    least: float
    tool: str = ""
    variables: tuple[tuple[str, str], ...] = ()


def stages(python: str) -> list[Stage]:
    """All of them, for this Python."""
    return [
        *_first(python),
        *_worlds(python),
        *_tests(python),
        *_pools(python),
        *(_checker(python, tool) for tool in ("memcheck", "initcheck", "synccheck")),
        _test(python, "nccl", "NCCL alone: a graph, windows, an abort, two ranks on a GPU", 240,
              "tests/device_comm/cuda/test_nccl_gpu.py"),
        Stage("times", "times and bandwidths, eager and captured",
              (*_run(python, "gpu"), "--seconds", "{seconds}"), LONGEST, 90),
        Stage("tokens", "a decoder's milliseconds a token, eager and in graphs",
              _run(python, "gpu_decoder"), 180, 90),
        _test(python, "tables-4", "every verb, dtype and form, 4 processes", 360,
              f"{TESTS}::test_table_on_one_device[4]"),
        _test(python, "tables-8", "every verb, dtype and form, 8 processes", LONGEST,
              f"{TESTS}::test_table_on_one_device[8]"),
        _checker(python, "memcheck", 500, suffix="-more"),
        _profile(python),
    ]  # fmt: skip


def _run(python: str, module: str) -> tuple[str, ...]:
    return (python, "-m", f"benchmarks.{module}", "--json", "{json}")


def _first(python: str) -> list[Stage]:
    looks = {
        "device": "torch computes on the device",
        "memory": "a process reads what another wrote into device memory (CUDA IPC)",
        "kernels": "our kernels compile and are loaded",
        "streams": "the smallest collectives, 2 ranks on streams of one process",
        "processes": "the smallest collectives, 2 ranks as processes",
    }
    return [
        Stage(f"first-{look}", shows, (*_run(python, "gpu_first"), look), 90, 30)
        for look, shows in looks.items()
    ]


def _worlds(python: str) -> list[Stage]:
    shows = "captured replays and eager calls, all checked, 2, 4 and 8 ranks"
    return [
        Stage(
            way,
            f"{shows} {how}",
            (
                *_run(python, "gpu_soak"),
                *("--ways", way, "--ranks", "2,4,8", "--seconds", "{seconds}"),
                *("--replays", count, "--eager", "10000"),
            ),
            300,
            90,
        )
        for way, how, count in (
            ("streams", "on streams of one process", "100000"),
            ("processes", "as processes", "10000"),
        )
    ]


def _test(python: str, name: str, shows: str, seconds: float, *which: str) -> Stage:
    command = (python, "-m", "pytest", "-m", "gpu", "-s", "-p", "no:cacheprovider", *which)
    return Stage(name, shows, command, seconds, seconds / 4)


def _tests(python: str) -> list[Stage]:
    return [
        _test(python, "forked", "a forked rank uses the device", 90, "tests/test_ranks.py"),
        _test(python, "tables-2", "every verb, dtype and form, 2 processes", 240,
              f"{TESTS}::test_table_on_one_device[2]", "tests/device_comm/test_tables.py"),
        _test(python, "faults", "a rank that dies, and one that is late", 240, TESTS,
              "-k", "dies or late"),
        _test(python, "graphs", "replays among eager calls, alternating streams", 400, TESTS,
              "-k", "replays or alternating or expandable"),
        _test(python, "groups", "groups whose ranks share devices", 240,
              "tests/coordinator/test_cuda_gpu.py"),
    ]  # fmt: skip


def _pools(python: str) -> list[Stage]:
    found = [
        Stage(
            f"pool-{dtype}",
            f"a pool at tp=2 in {dtype}, equal to the CPU, and steps in a graph",
            (*_run(python, "gpu_pool"), "--dtype", dtype),
            180,
            60,
        )
        for dtype in ("float32", "float16")
    ]
    shows = "pools of 2 and 4, equal to the CPU"
    found.append(_test(python, "pools", shows, 240, "tests/server/test_pool_gpu.py"))
    shows = "a decoder's tokens, eager and in graphs, are those of the CPU"
    return [*found, _test(python, "decoder", shows, 240, "tests/server/test_decoder_gpu.py")]


def _few(python: str, replays: int, way: str) -> tuple[str, ...]:
    count = str(replays)
    words = ("--ways", way, "--replays", count, "--eager", count)
    return (python, "-m", "benchmarks.gpu_soak", *words)


def _checker(python: str, tool: str, replays: int = 20, suffix: str = "") -> Stage:
    """With ranks as processes: the tools run the kernels of one process one by one."""
    checker = "compute-sanitizer"
    options = ("--tool", tool, "--error-exitcode", "9", "--target-processes", "all")
    if tool == "memcheck":
        # What calls return is asked for on purpose: of addresses, say, that may not be CUDA's.
        options += ("--report-api-errors", "no")
    return Stage(
        tool + suffix,
        f"{checker} {tool}, {replays} replays, ranks as processes",
        (checker, *options, *_few(python, replays, "processes")),
        300,
        60,
        checker,
        LAZILY,
    )


def _profile(python: str) -> Stage:
    metrics = "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed"
    command = (
        *("ncu", "--clock-control", "none"),
        *("--replay-mode", "app-range", "--profile-from-start", "off"),
        *("--metrics", metrics, *_few(python, 60, "streams"), "--profile"),
    )
    return Stage("profile", "the replays under Nsight Compute", command, 300, 60, "ncu", LAZILY)
