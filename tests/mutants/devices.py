"""Breaks of what is promised of memory that devices share, and of graphs that are compiled."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant

_WINDOWS = "tests/device_comm/cuda/test_nccl_window.py"
_NORMS = "tests/coordinator/test_norm_pass.py"

WINDOWS = (
    Mutant(
        "D windows: they stay until the device is done",
        "device_comm/cuda/nccl/core.py",
        "over = bool(self._handle.windows) and not self._passed()",
        "over = False",
        (f"{_WINDOWS}::test_a_window_stays_until_the_device_is_done",),
    ),
    Mutant(
        "D windows: they end before their communicator",
        "device_comm/cuda/nccl/shared_handle.py",
        "self._library.window_deregister(comm, window)",
        "pass",
        (f"{_WINDOWS}::test_a_window_stays_until_the_device_is_done",),
    ),
    Mutant(
        "D windows: their memory is freed after an abort",
        "device_comm/cuda/nccl/core.py",
        "free=ended and self._passed()",
        "free=False",
        (f"{_WINDOWS}::test_an_abort_leaves_no_memory_behind_but_what_the_device_may_use",),
    ),
    Mutant(
        "D windows: input and result lie in it, apart",
        "device_comm/cuda/nccl/nccl_window.py",
        "operation.instead(given, taken)",
        "operation.instead(given, given)",
        (f"{_WINDOWS}::test_sums_are_made_in_the_window",),
    ),
    Mutant(
        "D windows: what NCCL refuses is no reason to wait for others",
        "device_comm/cuda/nccl/library.py",
        'NcclUnavailableError("NCCL makes no window of these devices\' memory")',
        'NcclError("ncclCommWindowRegister", Result.SUCCESS, "no window")',
        (f"{_WINDOWS}::test_it_is_offered_on_all_ranks_or_on_none",),
    ),
    Mutant(
        "D windows: who uses them on another stream waits",
        "device_comm/cuda/staging.py",
        "last.mark().follow()",
        "pass",
        ("tests/device_comm/cuda/test_staging.py::test_streams_take_turns",),
    ),
)

COMPILED = (
    Mutant(
        "D compiled norms: only of groups with the kernel",
        "coordinator/compiling/norm_patterns.py",
        'compile_ops.has_norms(given["group"], x.dtype)\n        and ',
        "",
        (f"{_NORMS}::test_other_groups_and_dtypes_stay",),
    ),
    Mutant(
        "D compiled norms: in float32",
        "coordinator/compiling/norm_patterns.py",
        "all(_dtype(node) == torch.float32 for node in match.nodes if node.target is _MEAN)",
        "True",
        (f"{_NORMS}::test_narrow_numbers_that_are_normed_as_they_are_stay",),
    ),
    Mutant(
        "D compiled norms: of the last dimension",
        "coordinator/compiling/norm_patterns.py",
        '[dim % x.dim() for dim in given["dims"]] == [x.dim() - 1]',
        "True",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: the weight is there before the sum",
        "coordinator/compiling/norm_patterns.py",
        "nodes[2] < _kept(match)",
        "True",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: the sum is not used again",
        "coordinator/compiling/norm_patterns.py",
        "_wider(total, 1)",
        "_wider(total)",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: the compiler's cache knows the groups",
        "coordinator/compiling/norm_patterns.py",
        "return code, compile_ops.norms_by_group()",
        "return code",
        (f"{_NORMS}::test_the_compilers_cache_knows_the_groups",),
    ),
)

DEVICE_MUTANTS = (*WINDOWS, *COMPILED)
