"""The clock that is read by the processor's counter, with both of them made up."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from tests.device_comm.cuda.fakes import COMPILER, compile_library

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="no such counter"),
]

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "atomics.h"
static uint64_t the_ns, the_ticks, slow;
static uint64_t read_clock(void) {
    uint64_t now = the_ns;
    uint64_t ticks = slow;
    slow = ticks ? 40 : 0;
    the_ticks += ticks;
    the_ns += ticks / 2;
    return now;
}
#define gc_now_ns() read_clock()
#define __builtin_ia32_rdtsc() the_ticks
#include "pace.h"
static gc_pace pace;
uint64_t told(uint64_t ns, uint64_t ticks, uint64_t first) {
    the_ns = ns;
    the_ticks = ticks;
    slow = first;
    return gc_pace_now(&pace);
}
"""
SECOND, MS = 1_000_000_000, 1_000_000
HOUR = 3600 * SECOND


@pytest.fixture
def told(tmp_path: Path) -> Callable[[int, int, int], int]:
    """What the clock tells, at a time in ns, and of the counter, if its first reading by the clock
    takes so many ticks, all of them behind the reading itself.
    """
    source = tmp_path / "pace.c"
    source.write_text(SOURCE)
    headers = [f"-I{ROOT / floor / 'native'}" for floor in ("shm_broadcast", "device_comm")]
    path = compile_library(source, tmp_path / "pace.so", "-std=gnu11", "-D_GNU_SOURCE", *headers)
    function = ctypes.CDLL(path).told
    function.argtypes, function.restype = [ctypes.c_uint64] * 3, ctypes.c_uint64
    return cast("Callable[[int, int, int], int]", function)


@pytest.mark.parametrize("jump", [HOUR, 6 * SECOND, -HOUR])
def test_a_counter_that_jumps_as_when_a_virtual_machine_was_suspended_does_not_stop_the_clock(
    jump: int, told: Callable[[int, int, int], int]
) -> None:
    begin, ticks, jumped = 5 * SECOND, 10 * HOUR, 0
    for after in range(0, 100 * MS, MS // 2):
        jumped = jump if after >= 45 * MS else 0
        now = told(begin + after, ticks + 2 * after + jumped, 0)
        assert abs(now - begin - after) <= MS


@pytest.mark.parametrize("slow", [60, 900, 1500])
def test_a_slow_look_at_the_clock_does_not_shift_what_the_counter_tells(
    slow: int, told: Callable[[int, int, int], int]
) -> None:
    """As behind a switch of processes, when nothing of the clock is in the caches."""
    begin, ticks = 5 * SECOND, 10 * HOUR
    off = []
    for after in range(0, 100 * MS, MS // 5):
        now = told(begin + after, ticks + 2 * after, slow)
        off.append(now - begin - after)
    # Half of what each further reading takes: 40 ticks of half a ns.
    assert min(off) >= -10
