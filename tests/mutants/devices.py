"""Breaks of what is promised of memory that devices share, and of graphs that are compiled."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant

_WINDOWS = "tests/device_comm/cuda/test_nccl.py"
_NORMS = "tests/coordinator/test_compile.py"
_SWITCHES = "tests/device_comm/cuda/test_symmetric_comm.py"
_SWITCH = f"{_SWITCHES}::test_the_switch_adds_the_numbers_of_all_ranks"
_CALLS = "tests/device_comm/cuda/test_cupy_driver.py"
_LINKS = "tests/coordinator/test_cuda_candidates.py"

WINDOWS = (
    Mutant(
        "D verbs: NCCL offers every verb",
        "device_comm/cuda/nccl/core.py",
        '        "gather",\n        "scatter",\n',
        '        "gather",\n',
        ("tests/device_comm/cuda/test_nccl.py::test_table",),
    ),
    Mutant(
        "D windows: they stay until the device is done",
        "device_comm/cuda/nccl/core.py",
        "over = bool(self._handle.windows) and not self._passed()",
        "over = False",
        (f"{_WINDOWS}::test_a_window_stays_until_the_device_is_done",),
    ),
    Mutant(
        "D windows: they end before their communicator",
        "device_comm/cuda/nccl/core.py",
        "self._library.window_deregister(comm, window)",
        "pass",
        (f"{_WINDOWS}::test_a_window_stays_until_the_device_is_done",),
    ),
    Mutant(
        "D windows: their memory is freed after an abort",
        "device_comm/cuda/nccl/core.py",
        "free=ended and self._passed()",
        "free=False",
        (f"{_WINDOWS}::test_an_abort_frees_memory_that_the_device_does_not_use",),
    ),
    Mutant(
        "D windows: input and result lie in it, apart",
        "device_comm/cuda/nccl/nccl_backend.py",
        "operation.replace(given, taken)",
        "operation.replace(given, given)",
        (f"{_WINDOWS}::test_sums_are_made_in_the_window",),
    ),
    Mutant(
        "D windows: what NCCL refuses is no reason to wait for others",
        "device_comm/cuda/nccl/library.py",
        'NcclUnavailableError("NCCL makes no window of these devices\' memory")',
        'NcclError("ncclCommWindowRegister", NcclResult.SUCCESS, "no window")',
        (f"{_WINDOWS}::test_windows_are_offered_on_all_ranks_or_none",),
    ),
    Mutant(
        "D windows: who uses them on another stream waits",
        "device_comm/cuda/symmetric_backend.py",
        "last.mark().stream_wait()",
        "pass",
        (
            "tests/device_comm/cuda/test_symmetric_comm.py::test_sums_on_another_stream_wait_for_the_last_one",
        ),
    ),
)

SWITCH = (
    Mutant(
        "D switch: it adds what was given now",
        "device_comm/cuda/symmetric_backend.py",
        "given[: source.numel()].copy_(source.view(-1))",
        "pass",
        (_SWITCH,),
    ),
    Mutant(
        "D switch: the result begins where the memory does",
        "device_comm/cuda/symmetric_backend.py",
        "taken[: output.numel()]",
        "taken[-output.numel() :]",
        (_SWITCH,),
    ),
    Mutant(
        "D switch: it is given whole cells",
        "device_comm/cuda/symmetric_backend.py",
        "padded = -(-source.nbytes // _ALIGN) * _ALIGN",
        "padded = source.nbytes",
        (_SWITCH,),
    ),
    Mutant(
        "D switch: no more than there is memory for",
        "device_comm/cuda/symmetric_backend.py",
        " or source.nbytes > self.limit",
        "",
        (f"{_SWITCHES}::test_other_sums_are_refused_before_a_rank_waits",),
    ),
)

LAUNCHES = (
    Mutant(
        "D launches: in the context of their device",
        "device_comm/native/launch.c",
        "if (result || *before == cuda->context) return result;",
        "return result;",
        (f"{_CALLS}::test_a_launch_is_in_the_context_of_its_device",),
    ),
    Mutant(
        "D launches: the thread's own context is put back",
        "device_comm/native/launch.c",
        "return before == cuda->context ? 0 : cuda->set_current(before);",
        "return before == NULL;",
        (f"{_CALLS}::test_a_launch_is_in_the_context_of_its_device",),
    ),
    Mutant(
        "D launches: what the driver refuses is raised",
        "device_comm/native/launch.c",
        "if (result) return report(cuda, self->name, result);",
        "",
        (f"{_CALLS}::test_an_error_of_the_driver_is_raised",),
    ),
    Mutant(
        "D launches: other threads run while one waits for room",
        "device_comm/native/launch.c",
        "stream,\n                                     arguments, NULL);",
        "stream, arguments, ({ Py_BLOCK_THREADS NULL; }));\n        Py_UNBLOCK_THREADS",
        (f"{_CALLS}::test_other_threads_run_while_a_launch_waits_for_room",),
    ),
    Mutant(
        "D launches: a norm is what it norms",
        "device_comm/cuda/ipc/planner.py",
        "None if operation.norm is None else _marks(operation.norm),",
        "",
        (
            "tests/device_comm/cuda/test_planner.py::test_the_same_call_is_planned_once_another_anew",
        ),
    ),
)

CHOICES = (
    Mutant(
        "D choices: a table is of these kernels",
        "coordinator/cuda_candidates.py",
        'version=f"{__version__}, kernels {kernels}"',
        'version=f"{__version__}"',
        (f"{_LINKS}::test_other_kernels_another_version_or_mps_need_another_table",),
    ),
    Mutant(
        "D choices: with MPS it is another one",
        "coordinator/cuda_candidates.py",
        "{', MPS' if _mps_runs() else ''}",
        "",
        (f"{_LINKS}::test_other_kernels_another_version_or_mps_need_another_table",),
    ),
    Mutant(
        "D choices: on a shared device the host takes part",
        "coordinator/cuda_candidates.py",
        "    if devices < n:\n        candidates.append",
        "    if devices > n:\n        candidates.append",
        (f"{_LINKS}::test_on_a_shared_device_the_way_through_the_host_takes_part",),
    ),
    Mutant(
        "D choices: measured in the type of models",
        "device_comm/measuring.py",
        "_DTYPE: Final = torch.bfloat16",
        "_DTYPE: Final = torch.float32",
        ("tests/device_comm/test_selection.py::test_measured_is_in_the_type_that_models_have",),
    ),
)

COMPILED = (
    Mutant(
        "D compiled norms: only of groups with the kernel",
        "coordinator/norm_patterns.py",
        'compile_ops.has_norms(values["group"], x.dtype)\n        and ',
        "",
        (f"{_NORMS}::test_sums_of_other_groups_and_dtypes_stay",),
    ),
    Mutant(
        "D compiled norms: in float32",
        "coordinator/norm_patterns.py",
        "all(_dtype(node) == torch.float32 for node in match.nodes if node.target is _MEAN)",
        "True",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: of the last dimension",
        "coordinator/norm_patterns.py",
        '[dim % x.dim() for dim in values["dims"]] == [x.dim() - 1]',
        "True",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: the weight is there before the sum",
        "coordinator/norm_patterns.py",
        "nodes[2] < _kept(match)",
        "True",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: the sum is not used again",
        "coordinator/norm_patterns.py",
        "_wider(total, 1)",
        "_wider(total)",
        (f"{_NORMS}::test_what_is_something_else_stays",),
    ),
    Mutant(
        "D compiled norms: the compiler's cache knows the groups",
        "coordinator/norm_patterns.py",
        "return code, compile_ops.norms_by_group()",
        "return code",
        (f"{_NORMS}::test_the_compilers_cache_knows_the_groups",),
    ),
)

DEVICE_MUTANTS = (*WINDOWS, *SWITCH, *LAUNCHES, *CHOICES, *COMPILED)
