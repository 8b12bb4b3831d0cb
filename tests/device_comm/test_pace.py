"""The clock that is read by the processor's counter, with both of them made up."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest

from tests.device_comm.cuda.fake_library import COMPILER, compile_library

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="no such counter"),
]

ROOT = Path(__file__).parents[2]
SOURCE = """
#include "atomics.h"
static uint64_t the_ns, the_ticks;
#define gc_now_ns() the_ns
#define __builtin_ia32_rdtsc() the_ticks
#include "pace.h"
static gc_pace pace;
uint64_t told(uint64_t ns, uint64_t ticks) {
    the_ns = ns;
    the_ticks = ticks;
    return gc_pace_now(&pace);
}
"""
SECOND, MS = 1_000_000_000, 1_000_000
HOUR = 3600 * SECOND


@pytest.mark.parametrize("jump", [HOUR, 6 * SECOND, -HOUR])
def test_a_counter_that_jumps_as_when_a_virtual_machine_was_suspended_does_not_stop_the_clock(
    jump: int, tmp_path: Path
) -> None:
    source = tmp_path / "pace.c"
    source.write_text(SOURCE)
    headers = [f"-I{ROOT / floor / 'native'}" for floor in ("shm_broadcast", "device_comm")]
    path = compile_library(source, tmp_path / "pace.so", "-std=gnu11", "-D_GNU_SOURCE", *headers)
    told = ctypes.CDLL(path).told
    told.argtypes, told.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_uint64

    begin, ticks, jumped = 5 * SECOND, 10 * HOUR, 0
    for after in range(0, 100 * MS, MS // 2):
        jumped = jump if after >= 45 * MS else 0
        now = told(begin + after, ticks + 2 * after + jumped)
        assert abs(now - begin - after) <= MS
