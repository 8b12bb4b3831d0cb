"""One break for each promise of the CUDA kernels; these run on threads of the host in tests."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant

_KERNELS = "device_comm/cuda/kernels"
_CUDA = "tests/device_comm/cuda"

KERNEL_MUTANTS = (
    Mutant(
        "K meetings: all of the block have come before it reads",
        f"{_KERNELS}/meeting.cuh",
        "return all_of_block(met);",
        "return met;",
        (f"{_CUDA}/test_kernel_races.py::test_there_are_no_races",),
    ),
    Mutant(
        "K meetings: stagings alternate",
        f"{_KERNELS}/meeting.cuh",
        "(epoch_ & 1) * group_",
        "0 * group_",
        (f"{_CUDA}/test_kernel_races.py::test_there_are_no_races",),
    ),
    Mutant(
        "K meetings: none begins in a group that gave up",
        f"{_KERNELS}/meeting.cuh",
        "begins_(!is_given_up(group, {group.rank, PHASE_START, epoch_}))",
        "begins_(true)",
        (
            f"{_CUDA}/test_kernel_faults.py::test_a_rank_that_comes_late_gets_what_was_meant_for_it_or_learns_why_not",
        ),
    ),
    Mutant(
        "K channels: filled with release",
        f"{_KERNELS}/transfer.cuh",
        ".store(count_, memory_order_release)",
        ".store(count_, memory_order_relaxed)",
        (f"{_CUDA}/test_kernel_races.py::test_there_are_no_races",),
    ),
    Mutant(
        "K channels: loaded with acquire",
        f"{_KERNELS}/transfer.cuh",
        "theirs.load(memory_order_acquire)",
        "theirs.load(memory_order_relaxed)",
        (f"{_CUDA}/test_kernel_races.py::test_there_are_no_races",),
    ),
    Mutant(
        "K channels: no slot is overwritten",
        f"{_KERNELS}/transfer.cuh",
        "(puts_ ? SLOTS : 0) > count_",
        "(puts_ ? SLOTS + 1 : 0) > count_",
        (f"{_CUDA}/test_kernel_races.py::test_there_are_no_races",),
    ),
    Mutant(
        "K packets: all words are of the epoch",
        f"{_KERNELS}/packets.cuh",
        "return packed.first.low >> 32 == tag_ && ",
        "return ",
        (
            f"{_CUDA}/test_kernel_packets.py::test_a_cell_counts_when_all_its_words_are_of_the_epoch",
        ),
    ),
    Mutant(
        "K packets: areas alternate",
        f"{_KERNELS}/packets.cuh",
        "u64 area = (epoch_ & 1) *",
        "u64 area = 0 *",
        (f"{_CUDA}/test_kernel_packets.py::test_a_peer_may_be_one_epoch_ahead",),
    ),
    Mutant(
        "K packets: no epoch is 0",
        f"{_KERNELS}/packets.cuh",
        "tag_(static_cast<u32>(epoch_) ? static_cast<u32>(epoch_) : 1u << 31)",
        "tag_(static_cast<u32>(epoch_))",
        (f"{_CUDA}/test_kernel_packets.py::test_what_a_region_is_filled_with_is_of_no_epoch",),
    ),
    Mutant(
        "K packets: no word lives too long",
        f"{_KERNELS}/packets.cuh",
        "packets.wipe(from.size);",
        "",
        (f"{_CUDA}/test_kernel_packets.py::test_no_packet_lives_to_see_its_epoch_again",),
    ),
    Mutant(
        "K epochs: an epoch ends with the last block",
        f"{_KERNELS}/group.cuh",
        "    tickets.store(0, memory_order_relaxed);\n",
        "",
        (f"{_CUDA}/test_kernel_protocol.py::test_an_epoch_ends_with_the_last_block",),
    ),
    Mutant(
        "K tables: nobody reads a source when the kernel has ended",
        f"{_KERNELS}/staged.cuh",
        "        reduce_cells<Number>(job, meeting, job.takes[0], nullptr);\n        if (job.table) meeting.meet(PHASE_END);",  # noqa: E501
        "        reduce_cells<Number>(job, meeting, job.takes[0], nullptr);",
        (f"{_CUDA}/test_kernel_protocol.py::test_sources_read_where_they_are",),
    ),
)
