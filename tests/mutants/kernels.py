"""Breaks of each promise of the CUDA kernels; these run on threads of the host in tests."""

from __future__ import annotations

from tests.mutants.catalogue import Mutant

_KERNELS = "device_comm/cuda/kernels"
_CUDA = "tests/device_comm/cuda"
_RACES = (f"{_CUDA}/test_kernel_races.py::test_there_are_no_races",)
_RESULTS = (f"{_CUDA}/test_kernel_results.py::test_all_reduce",)
_EDGES = (
    f"{_CUDA}/test_kernel_results.py::test_all_reduce",
    f"{_CUDA}/test_kernel_results.py::test_all_gather_and_all_to_all",
    f"{_CUDA}/test_kernel_protocol.py::test_messages_of_all_sizes_between_all_ranks",
)
_EPOCHS = (f"{_CUDA}/test_kernel_protocol.py::test_an_epoch_ends_with_the_last_block",)
_AHEAD = (f"{_CUDA}/test_kernel_protocol.py::test_a_rank_at_the_end_has_been_at_the_start",)
_TABLES = (f"{_CUDA}/test_kernel_protocol.py::test_a_kernel_ends_when_no_peer_reads_its_source",)
_AHEAD_OF_RECEIVES = (
    f"{_CUDA}/test_kernel_protocol.py::test_sends_that_fit_into_a_channel_need_no_receive",
)
_WORDS = (
    f"{_CUDA}/test_kernel_protocol.py::test_a_cell_counts_when_all_its_words_are_of_the_epoch",
)
_WIPES = (f"{_CUDA}/test_kernel_protocol.py::test_no_packet_lives_to_see_its_epoch_again",)
_NORMS = (f"{_CUDA}/test_kernel_results.py::test_sums_are_added_to_the_residual_and_normed",)
_FAULTS = f"{_CUDA}/test_kernel_protocol.py"
_MISSING = (f"{_FAULTS}::test_a_missing_rank_is_named",)
_LATE = (f"{_FAULTS}::test_a_late_rank_gets_no_number_and_a_record",)
_ABORTS = (f"{_FAULTS}::test_the_host_aborts_all_ranks",)

MEETINGS = (
    Mutant(
        "K meetings: all of the block have come before it reads",
        f"{_KERNELS}/meeting.cuh",
        "return all_of_block(met);",
        "return met;",
        _RACES,
    ),
    Mutant(
        "K meetings: stagings alternate",
        f"{_KERNELS}/meeting.cuh",
        "(epoch_ & 1) * group_",
        "0 * group_",
        _RACES,
    ),
    Mutant(
        "K meetings: none begins in a group that gave up",
        f"{_KERNELS}/meeting.cuh",
        "begins_(!is_given_up(group, {group.rank, PHASE_START, epoch_}))",
        "begins_(true)",
        _LATE,
    ),
    Mutant(
        "K meetings: who has come to the start is not at the end",
        f"{_KERNELS}/meeting.cuh",
        "u64 number = 2 * epoch_ + phase;",
        "u64 number = 2 * epoch_;",
        (f"{_FAULTS}::test_a_rank_that_stops_midway_is_named",),
    ),
    Mutant(
        "K meetings: who is ahead has come",
        f"{_KERNELS}/meeting.cuh",
        "theirs.load(memory_order_acquire) >= number",
        "theirs.load(memory_order_acquire) == number",
        _AHEAD,
    ),
    Mutant(
        "K meetings: each block meets its own",
        f"{_KERNELS}/meeting.cuh",
        "REGION_FLAGS + (block() * MAX_RANKS + from)",
        "REGION_FLAGS + (0 * MAX_RANKS + from)",
        _EPOCHS,
    ),
    Mutant(
        "K epochs: an epoch ends with the last block",
        f"{_KERNELS}/group.cuh",
        "        tickets.store(0, memory_order_relaxed);\n",
        "",
        _EPOCHS,
    ),
    Mutant(
        "K epochs: no block but the last ends an epoch",
        f"{_KERNELS}/group.cuh",
        "if (tickets.fetch_add(1, memory_order_acq_rel) + 1 < blocks()) return;",
        "tickets.fetch_add(1, memory_order_acq_rel);",
        _EPOCHS,
    ),
    Mutant(
        "K tables: nobody reads a reduced source when the kernel has ended",
        f"{_KERNELS}/staged.cuh",
        "nullptr);\n        if (job.table) whole = meeting.meet(PHASE_END);",
        "nullptr);",
        _TABLES,
    ),
    Mutant(
        "K tables: nobody reads a moved source when the kernel has ended",
        f"{_KERNELS}/staged.cuh",
        "        });\n        if (job.table) whole = meeting.meet(PHASE_END);",
        "        });",
        _TABLES,
    ),
    Mutant(
        "K tables: each rank has its own entry",
        f"{_KERNELS}/staged.cuh",
        "job.table[rank]",
        "job.table[0]",
        _TABLES,
    ),
)

RESULTS = (
    Mutant(
        "K sums: the ranks' numbers in their order",
        f"{_KERNELS}/staged.cuh",
        "if (r < n) total.add(job.op, cells[c][r]);",
        "if (r < n) total.add(job.op, cells[c][n - r]);",
        _RESULTS,
    ),
    Mutant(
        "K sums: all ranks from the same first one",
        f"{_KERNELS}/staged.cuh",
        "source(job, meeting, r < n ? r : 0)",
        "source(job, meeting, r < n ? rank_after(job.group, r) : 0)",
        _RESULTS,
    ),
    Mutant(
        "K sums: what is not a number stays so",
        f"{_KERNELS}/numbers.cuh",
        "is_less(b, a) || b != b ? b : a",
        "is_less(b, a) ? b : a",
        _RESULTS,
    ),
    Mutant(
        "K sums: packets of all ranks count",
        f"{_KERNELS}/packets.cuh",
        "if (first + k < ranks) total.add(job.op, cells[k]);",
        "if (first + k + 1 < ranks) total.add(job.op, cells[k]);",
        _RESULTS,
    ),
    Mutant(
        "K bounds: the last cell of a copy",
        f"{_KERNELS}/cells.cuh",
        "copy_cell(c.to + i * CELL, c.from + i * CELL, least(c.size - i * CELL, CELL));",
        "copy_cell(c.to + i * CELL, c.from + i * CELL, CELL);",
        _EDGES,
    ),
    Mutant(
        "K bounds: the last cell of several copies",
        f"{_KERNELS}/cells.cuh",
        "copy_cell(c.to + at, c.from + at, least(c.size - at, CELL));",
        "copy_cell(c.to + at, c.from + at, CELL);",
        _EDGES,
    ),
    Mutant(
        "K bounds: the last cell of a reduction",
        f"{_KERNELS}/numbers.cuh",
        "        if (at < size)\n            *reinterpret_cast<Bits *>(to + at)",
        "        *reinterpret_cast<Bits *>(to + at)",
        _EDGES,
    ),
    Mutant(
        "K bounds: the last chunk of a message",
        f"{_KERNELS}/transfer.cuh",
        "least(left_, group.slot_bytes)",
        "group.slot_bytes",
        _EDGES,
    ),
)

CHANNELS = (
    Mutant(
        "K channels: filled with release",
        f"{_KERNELS}/transfer.cuh",
        ".store(count_, memory_order_release)",
        ".store(count_, memory_order_relaxed)",
        _RACES,
    ),
    Mutant(
        "K channels: loaded with acquire",
        f"{_KERNELS}/transfer.cuh",
        "theirs.load(memory_order_acquire)",
        "theirs.load(memory_order_relaxed)",
        _RACES,
    ),
    Mutant(
        "K channels: no slot is overwritten",
        f"{_KERNELS}/transfer.cuh",
        "(puts_ ? SLOTS : 0) > count_",
        "(puts_ ? SLOTS + 1 : 0) > count_",
        _RACES,
    ),
    Mutant(
        "K channels: a slot is given up when all threads are done with it",
        f"{_KERNELS}/transfer.cuh",
        "        sync_block();\n        if (ready) line.advance();",
        "        if (ready) line.advance();",
        _RACES,
    ),
    Mutant(
        "K channels: the slots of a lane alternate",
        f"{_KERNELS}/transfer.cuh",
        "(block() * SLOTS + count_ % SLOTS)",
        "(block() * SLOTS)",
        _RACES,
    ),
    Mutant(
        "K channels: each lane has its own slots",
        f"{_KERNELS}/transfer.cuh",
        "(block() * SLOTS + count_ % SLOTS)",
        "(count_ % SLOTS)",
        _AHEAD_OF_RECEIVES,
    ),
    Mutant(
        "K channels: collectives use no slots of messages",
        f"{_KERNELS}/transfer.cuh",
        "job_.channel_set * group.world_size + from;",
        "from;",
        (
            f"{_CUDA}/test_kernel_protocol.py::test_a_message_is_not_taken_for_a_part_of_a_collective",
        ),
    ),
)

PACKETS = (
    Mutant(
        "K packets: all words are of the epoch",
        f"{_KERNELS}/packets.cuh",
        "return packed.first.low >> 32 == tag_ && ",
        "return ",
        _WORDS,
    ),
    Mutant(
        "K packets: the cells of all ranks have come",
        f"{_KERNELS}/packets.cuh",
        "if (is_peer(first + k) && !is_tagged(cells[k])) missing = first + k;",
        "if (k == 0 && is_peer(first) && !is_tagged(cells[0])) missing = first;",
        _WORDS,
    ),
    Mutant(
        "K packets: areas alternate",
        f"{_KERNELS}/packets.cuh",
        "u64 area = (epoch_ & 1) *",
        "u64 area = 0 *",
        (f"{_CUDA}/test_kernel_protocol.py::test_a_peer_may_be_one_epoch_ahead",),
    ),
    Mutant(
        "K packets: halves lie in planes",
        f"{_KERNELS}/packets.cuh",
        "cell * CELL;\n    }\n\n    DEVICE void store",
        "cell * 2 * CELL;\n    }\n\n    DEVICE void store",
        (f"{_CUDA}/test_kernel_protocol.py::test_halves_of_all_cells_lie_side_by_side",),
    ),
    Mutant(
        "K packets: no epoch is 0",
        f"{_KERNELS}/packets.cuh",
        "tag_(static_cast<u32>(epoch_) ? static_cast<u32>(epoch_) : 1u << 31)",
        "tag_(static_cast<u32>(epoch_))",
        (f"{_CUDA}/test_kernel_protocol.py::test_what_a_region_is_filled_with_is_of_no_epoch",),
    ),
    Mutant(
        "K packets: no word lives too long",
        f"{_KERNELS}/packets.cuh",
        "packets.wipe(from.size);",
        "",
        _WIPES,
    ),
    Mutant(
        "K packets: both halves of a cell are wiped",
        f"{_KERNELS}/packets.cuh",
        "            store(group_.rank, r, cell, {});",
        "            store_relaxed(place(group_.rank, r, cell), {});",
        _WIPES,
    ),
    Mutant(
        "K packets: no cell that is used is wiped",
        f"{_KERNELS}/packets.cuh",
        "            if (cell * CELL < used_bytes) return;\n",
        "            (void)used_bytes;\n",
        _WIPES,
    ),
)

NORMS = (
    Mutant(
        "K faults: what is not reduced is no number",
        f"{_KERNELS}/cells.cuh",
        "job.takes[r].address[at] = static_cast<char>(0xff);",
        ";",
        (f"{_CUDA}/test_kernel_protocol.py::test_a_missing_rank_is_named",),
    ),
    Mutant(
        "K faults: what was not received is no number",
        f"{_KERNELS}/transfer.cuh",
        "if (any_of_block(failed)) return poison(job, share_of_block());",
        "if (any_of_block(failed)) return;",
        (f"{_CUDA}/test_kernel_protocol.py::test_a_missing_rank_is_named",),
    ),
    Mutant(
        "K norms: all threads have squared their numbers",
        f"{_KERNELS}/norm.cuh",
        "if (!all_of_block(whole)) {",
        "if (!whole) {",
        _RACES,
    ),
    Mutant(
        "K norms: all partial sums are there",
        f"{_KERNELS}/norm.cuh",
        "    sync_block();\n    const u32 count",
        "    const u32 count",
        _RACES,
    ),
    Mutant(
        "K norms: each row has the same weights",
        f"{_KERNELS}/norm.cuh",
        "weight.address + (at - begin * CELL)",
        "weight.address + at",
        _NORMS,
    ),
    Mutant(
        "K norms: the residual is added",
        f"{_KERNELS}/norm.cuh",
        "total.add(OP_SUM, load_cell<Number>(residual + at, CELL));",
        "total.add(OP_SUM, mine);",
        _NORMS,
    ),
)

FAULTS = (
    Mutant(
        "K aborts: who gives up tells everybody",
        f"{_KERNELS}/patience.cuh",
        "r < group.world_size; r++)\n            word64",
        "r < 1; r++)\n            word64",
        _LATE,
    ),
    Mutant(
        "K aborts: the error record is written once",
        f"{_KERNELS}/patience.cuh",
        "if (own32(group, REGION_CLAIMED).exchange(1, memory_order_relaxed)) return;",
        "own32(group, REGION_CLAIMED).exchange(1, memory_order_relaxed);",
        (f"{_FAULTS}::test_a_group_that_gave_up_ends_all_that_waits",),
    ),
    Mutant(
        "K aborts: who waits sees that another one gave up",
        f"{_KERNELS}/patience.cuh",
        "        if (is_given_up(group, cause)) return false;\n        u64 now",
        "        u64 now",
        _MISSING,
    ),
    Mutant(
        "K timeouts: a limit of 0 is none",
        f"{_KERNELS}/patience.cuh",
        "group.timeout_ns == 0 || now - began_",
        "now - began_",
        _ABORTS,
    ),
    Mutant(
        "K timeouts: the limit is in nanoseconds",
        f"{_KERNELS}/patience.cuh",
        "now - began_ < group.timeout_ns",
        "now - began_ < 100 * group.timeout_ns",
        _MISSING,
    ),
    Mutant(
        "K timeouts: the culprit is the one that is waited for",
        f"{_KERNELS}/meeting.cuh",
        "await(r, number, {r, phase, epoch_})",
        "await(r, number, {group_.rank, phase, epoch_})",
        _MISSING,
    ),
)

KERNEL_MUTANTS = (*MEETINGS, *RESULTS, *CHANNELS, *PACKETS, *NORMS, *FAULTS)
