"""Breaks that random programs, moves, faults and damaged messages have to find by themselves."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant

_FUZZ = "tests/fuzz/test_fuzz.py"
_PROGRAMS = f"{_FUZZ}::test_random_programs_give_what_the_oracle_does"
_FAULTS = f"{_FUZZ}::test_all_ranks_find_the_fault_of_one_and_no_other"
_LAYOUTS = f"{_FUZZ}::test_any_layout_goes_to_any_other"
_SOCKETS = f"{_FUZZ}::test_bytes_from_a_socket_are_understood_or_refused"

FUZZED_MUTANTS = (
    Mutant(
        "F1 generations: a slot is not written while someone reads it",
        "device_comm/native/steps.c",
        "    return least + BUFFERS >= step;",
        "    return true;",
        (f"{_PROGRAMS}[shm-3]",),
    ),
    Mutant(
        "F2 ordering: data is read when it has arrived",
        "device_comm/native/steps.c",
        "            if (s->plan.awaits[s->met]) return block(s, step, false);",
        "            if (s->plan.awaits[s->met] == 2) return block(s, step, false);",
        (f"{_PROGRAMS}[shm-3]",),
    ),
    Mutant(
        "F3 sizes: the last chunk is shorter",
        "device_comm/native/steps.c",
        "    s->chunks = chunk == 0 ? 1 : (s->plan.length + chunk - 1) / chunk;",
        "    s->chunks = chunk == 0 ? 1 : s->plan.length / chunk;",
        (f"{_PROGRAMS}[shm-4]",),
    ),
    Mutant(
        "F4 slicing: pieces along an inner dimension",
        "device_comm/verbs/checks.py",
        "count, x.numel() // (outer * count)).transpose(0, 1))",
        "count, x.numel() // (outer * count)))",
        (f"{_PROGRAMS}[shm-4]",),
    ),
    Mutant(
        "F5 sizes: shares of different sizes",
        "device_comm/verbs/checks.py",
        "    return tuple(count * row for count in rows)",
        "    return tuple(max(rows) * row for _ in rows)",
        (f"{_PROGRAMS}[shm-3]",),
    ),
    Mutant(
        "F6 agreement: who does something else is found out",
        "device_comm/native/steps.c",
        "memcmp(theirs, s->plan.signature, SIGNATURE_COMPARED) == 0 &&",
        "memcmp(theirs, s->plan.signature, 1) == 0 &&",
        (f"{_FAULTS}[slip]",),
    ),
    Mutant(
        "F7 liveness: who died is named",
        "shm_broadcast/state/table.py",
        'self.state(member) in ("lost", "closed")',
        'self.state(member) == "closed"',
        (f"{_FAULTS}[kill]",),
    ),
    Mutant(
        "F8 what a worker writes that is no message is said to be none",
        "server/control/channel.py",
        "        except UNDECODABLE as error:",
        "        except RecursionError as error:",
        (f"{_SOCKETS}[control]",),
    ),
    Mutant(
        "F10 layouts: a dimension that is cut in other places goes there",
        "coordinator/layout/redistribute.py",
        "recut(x, source.dim, group, before, after)",
        "recut(x, source.dim, group, before, before)",
        (
            f"{_LAYOUTS}[4]",
            "tests/coordinator/layout/test_redistribute.py::test_tensors_are_redistributed_on_a_mesh[2]",
        ),
    ),
)
