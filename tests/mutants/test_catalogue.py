"""Every mutant still applies: its text stands once in its file, it can be loaded, and its tests are
there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.devices import DEVICE_MUTANTS
from tests.mutants.fuzzed import FUZZED_MUTANTS
from tests.mutants.kernels import KERNEL_MUTANTS

ROOT = Path(__file__).parents[2]
ALL = (*MUTANTS, *KERNEL_MUTANTS, *DEVICE_MUTANTS, *FUZZED_MUTANTS)
PROMISES = (
    {f"Q{number}" for number in range(1, 14)} | {f"N{number}" for number in range(1, 4)} | {"R5"}
)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.promise)
def test_a_mutant_applies(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    if mutant.file.endswith(".py"):  # what cannot be loaded would fail any test
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert mutant.tests
    for test in mutant.tests:
        file, *_, name = test.split("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_every_promise_of_the_ground_floor_has_a_mutant() -> None:
    assert {mutant.promise.split()[0].rstrip(",") for mutant in MUTANTS} >= PROMISES
