"""One break of the code for each promise, and the tests that must fail with it.

The texts stand here as data; `python -m tests.mutants` applies each to a copy of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A break of one promise.

    Attributes:
        promise: its row in GUARANTEES.md, or the rule of `shm_broadcast.layout`.
        file: the file to change, from the root of the repository.
        old: a text that occurs once in it.
        new: what stands there instead.
        tests: of these at least one must fail.
    """

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


_HERE = "tests/shm_broadcast"
_STOPPED_ELSEWHERE = (
    "tests/server/test_pool_hosts.py::test_only_a_stopped_worker_on_another_host_is_named"
)
_SEALED = "tests/coordinator/test_secret.py"
_OTHER_HOSTS = "tests/shm_broadcast/test_other_hosts.py::test_a_process_of_another_host"
_LARGE = "tests/device_comm/test_shm_faults.py"
_EXCHANGE = "tests/coordinator/test_exchange.py"
_DECODER = "tests/server/test_decoder_model.py"
_DIVERGE = "tests/coordinator/test_divergence.py::test_ranks_that_diverge_get_both_operations"

MUTANTS = (
    Mutant(
        "F5 a large collective ends at its deadline",
        "device_comm/native/steps.c",
        "#define AT_ONCE (16 << 20)",
        "#define AT_ONCE UINT64_MAX",
        (f"{_LARGE}::test_a_deadline_that_passes_while_much_is_moved_ends_the_group",),
    ),
    Mutant(
        "F5 a large message ends at its deadline",
        "device_comm/native/pipe.c",
        "uint64_t until = smaller(x.total, received + PIPE_AT_ONCE_BYTES);",
        "uint64_t until = x.total;",
        (f"{_LARGE}::test_a_deadline_that_passes_while_much_is_moved_ends_the_group[recv]",),
    ),
    Mutant(
        "F5 what is ready all the time ends at its deadline",
        "shm_broadcast/executor.py",
        "over = deadline.expired or self.board.aborted is not None",
        "over = False",
        (f"{_LARGE}::test_a_deadline_that_passes_while_much_is_moved_ends_the_group",),
    ),
    Mutant(
        "Q1 a killed peer is named",
        "shm_broadcast/state/table.py",
        'self.state(member) in ("lost", "closed")',
        'self.state(member) == "closed"',
        (f"{_HERE}/test_queue_shutdown.py::test_every_wait_ends",),
    ),
    Mutant(
        "Q1 a slow reader's arrears are told",
        "shm_broadcast/queue/writer.py",
        "detail=lambda: _backlog(self._board, ring.behind()),",
        "detail=str,",
        (
            f"{_HERE}/test_queue_deadlines.py::"
            "test_an_enqueue_that_timed_out_names_the_slow_readers_and_their_arrears",
        ),
    ),
    Mutant(
        "Q1 every operation is stamped",
        "shm_broadcast/native/ring.c",
        "    if (begins) {",
        "    if (begins && false) {",
        (f"{_HERE}/test_ring.py::test_a_small_message_is_progress_and_an_operation",),
    ),
    Mutant(
        "Q2 no wake-up is lost",
        "shm_broadcast/eventcount.py",
        "words.sleep_on(self.offset, seen,",
        "words.sleep_on(self.offset, words.load32(self.offset),",
        (f"{_HERE}/test_waits.py::test_a_change_between_the_last_check_and_the_sleep_is_not_lost",),
    ),
    Mutant(
        "Q2 a dropped wake-up costs 50 ms",
        "shm_broadcast/eventcount.py",
        "SLICE_SECONDS: Final = 0.04",
        "SLICE_SECONDS: Final = 0.4",
        (
            f"{_HERE}/test_queue_deadlines.py::"
            "test_with_every_wake_up_dropped_a_message_is_still_seen_within_50_ms",
        ),
    ),
    Mutant(
        "Q3 a reader that raises gives its space back",
        "shm_broadcast/queue/reader.py",
        "                        finally:\n                            self._lock.owner_lock.adopt()",  # noqa: E501
        "                        except StopIteration:\n                            self._lock.owner_lock.adopt()",  # noqa: E501
        (f"{_HERE}/test_queue.py::test_acquire_read_gives_the_space_back_when_the_block_raises",),
    ),
    Mutant(
        "Q3 what cannot be decoded raises one error",
        "shm_broadcast/codec.py",
        "loads(main, buffers=buffers)\n        except Exception as error:",
        "loads(main, buffers=buffers)\n        except KeyError as error:",
        (
            f"{_HERE}/test_queue.py::"
            "test_thousands_of_undecodable_messages_leave_the_capacity_unchanged",
        ),
    ),
    Mutant(
        "Q4, rule 1: written before it is published",
        "shm_broadcast/native/long_messages.c",
        "        copy_out_of(b, &self->way, tried, record + RECORD_HEADER, header.size);\n",
        "        gc_store64(self->ring, RING_PUBLISHED, position + stride);\n"
        "        copy_out_of(b, &self->way, tried, record + RECORD_HEADER, header.size);\n",
        (f"{_HERE}/test_queue.py::test_checksummed_messages",),
    ),
    Mutant(
        "Q4, rule 2: a long message's records, too",
        "shm_broadcast/native/long_messages.c",
        "            copy_into(b, record + RECORD_HEADER + table, header.size - table);\n",
        "            gc_store64(self->ring, self->own_line + READER_CONSUMED,\n"
        "                       position + record_stride(header.size));\n"
        "            copy_into(b, record + RECORD_HEADER + table, header.size - table);\n",
        (
            f"{_HERE}/test_queue_interrupts.py::test_a_record_is_given_back_when_it_has_been_copied_out",
        ),
    ),
    Mutant(
        "Q4 no message is put together from two",
        "shm_broadcast/native/long_messages.c",
        "            took_some = true;\n",
        "",
        (
            f"{_HERE}/test_queue_interrupts.py::test_a_message_after_one_of_which_only_the_sizes_came",
        ),
    ),
    Mutant(
        "Q4 what is out is not cancelled",
        "shm_broadcast/ring/writer.py",
        "            elif not whole:\n",
        "            else:\n",
        (
            f"{_HERE}/test_queue_interrupts.py::test_a_writer_that_is_interrupted_cancels_only_what_is_not_out",
        ),
    ),
    Mutant(
        "Q4, rule 2: nothing unread is overwritten",
        "shm_broadcast/native/ring.c",
        "    return position + need - gate <= self->capacity;",
        "    return position + need - gate <= 2 * self->capacity;",
        (f"{_HERE}/test_ring.py::test_there_is_always_room_to_cancel",),
    ),
    Mutant(
        "Q5 a block is not written while a reader uses it",
        "shm_broadcast/ring/buffers.py",
        "if words.load64(line) == block.generation:",
        "if words.load64(line) <= block.generation:",
        (f"{_HERE}/test_buffers.py::test_a_block_is_not_written_while_one_reader_holds_it",),
    ),
    Mutant(
        "Q6 a dequeue that timed out keeps what it has",
        "shm_broadcast/ring/reader.py",
        "                return finished\n        return None\n",
        "                return finished\n        self.unfinished = None\n        return None\n",
        (
            f"{_HERE}/test_queue_deadlines.py::test_a_dequeue_that_timed_out_amid_fragments_goes_on_with_them",
        ),
    ),
    Mutant(
        "Q6 there is always room to cancel",
        "shm_broadcast/native/ring.h",
        "#define RESERVED_FOR_CANCEL RECORD_ALIGN",
        "#define RESERVED_FOR_CANCEL 0",
        (f"{_HERE}/test_ring.py::test_there_is_always_room_to_cancel",),
    ),
    Mutant(
        "Q7 a message of any size streams through",
        "shm_broadcast/ring/writer.py",
        "if self.total <= largest:",
        "if self.total:",
        (
            f"{_HERE}/test_queue_deadlines.py::test_a_dequeue_that_timed_out_amid_fragments_goes_on_with_them",
        ),
    ),
    Mutant(
        "Q8 too little memory is an error with both numbers",
        "shm_broadcast/segment.py",
        "        _require_free(size)\n",
        "        pass\n",
        (f"{_HERE}/test_segment.py::test_too_little_memory_is_an_error_with_both_numbers",),
    ),
    Mutant(
        "Q9 the footprint is a function of the arguments",
        "shm_broadcast/queue/handle.py",
        "return min(wanted, DEFAULT_CAPACITY)",
        "return wanted",
        (f"{_HERE}/test_queue.py::test_the_footprint_is_a_function_of_the_arguments",),
    ),
    Mutant(
        "Q10 a pid that was used again is not the process",
        "shm_broadcast/process.py",
        "if ProcessId.of(process.pid) == process:",
        "if ProcessId.of(process.pid).pid == process.pid:",
        (f"{_HERE}/test_processes.py::test_a_pid_that_was_used_again_is_not_the_process",),
    ),
    Mutant(
        "Q10 no descriptor is left",
        "shm_broadcast/segment.py",
        "weakref.finalize(self, os.close, fd)",
        "weakref.finalize(self, int, fd)",
        (f"{_HERE}/test_segment.py::test_no_descriptor_is_left",),
    ),
    Mutant(
        "Q10 a respawned reader goes on where the dead one stopped",
        "shm_broadcast/ring/reader.py",
        "if self._position() == layout.LEFT:",
        "if self._position() != layout.LEFT + 1:",
        (
            f"{_HERE}/test_queue_shutdown.py::test_a_successor_of_a_dead_reader_continues_where_it_stopped",
        ),
    ),
    Mutant(
        "Q11 every reader that sleeps is woken",
        "shm_broadcast/native/atomics.h",
        "    if (first != NULL) gc_futex_wake_all(base, *first);\n",
        "",
        (f"{_HERE}/test_ring.py::test_a_message_wakes_all_readers_that_sleep",),
    ),
    Mutant(
        "Q11 an idle reader sleeps",
        "shm_broadcast/eventcount.py",
        "deadline.remaining(next(slices)))",
        "deadline.remaining(min(next(slices), 0.0001)))",
        (
            f"{_HERE}/test_queue_deadlines.py::"
            "test_an_idle_reader_takes_less_than_half_a_percent_of_a_core",
        ),
    ),
    Mutant(
        "Q12 who has no key on the list is not admitted",
        "shm_broadcast/net/keys.py",
        "return public_key in self._ranks",
        "return True",
        (f"{_HERE}/test_remote_intruders.py::test_a_key_that_is_not_on_the_list_is_refused",),
    ),
    Mutant(
        "Q12 a frame beyond the limit ends its connection",
        "shm_broadcast/net/endpoint.py",
        "self._zmq.maxmsgsize = frame_bytes + _FRAME_SLACK",
        "self._zmq.maxmsgsize = -1",
        (f"{_HERE}/test_remote_intruders.py::test_malformed_frames_from_a_reader_name_it",),
    ),
    Mutant(
        "Q13 one address is bound",
        "shm_broadcast/net/endpoint.py",
        """server.bind(f"tcp://{host}:{port or '*'}")""",
        """server.bind(f"tcp://*:{port or '*'}")""",
        (f"{_HERE}/test_remote.py::test_a_writer_listens_on_its_one_address_only",),
    ),
    Mutant(
        "N1 whoever binds lets the system choose the port",
        "shm_broadcast/net/endpoint.py",
        """server.bind(f"tcp://{host}:{port or '*'}")""",
        'server.bind(f"tcp://{host}:29517")',
        (f"{_HERE}/test_remote.py::test_writers_never_collide",),
    ),
    Mutant(
        "N1 long parts are joined",
        "shm_broadcast/net/protocol.py",
        "if len(frame) < FRAME_BYTES:",
        "if len(frame) <= FRAME_BYTES:",
        ("tests/shm_broadcast/test_remote_wire.py::test_a_part_ends_with_a_short_frame",),
    ),
    Mutant(
        "N2 the binder picks an address of its own",
        "coordinator/stores.py",
        "if error.errno != errno.EADDRNOTAVAIL:",
        "if error.errno:",
        ("tests/coordinator/test_bootstrap.py::test_an_address_that_is_translated_on_the_way",),
    ),
    Mutant(
        "N3 readers are reached by IPv6",
        "shm_broadcast/net/writer.py",
        "ipv6=address.version == 6",
        "ipv6=False",
        (f"{_HERE}/test_remote.py::test_messages_cross_hosts",),
    ),
    Mutant(
        "R6 a group of one has process groups of one",
        "coordinator/context.py",
        "return self.cpu()",
        "return None",
        (
            "tests/coordinator/test_group_of_one.py::test_a_sum_in_a_group_of_one_is_over_its_member",
        ),
    ),
    Mutant(
        "R1 ranks in different calls do not use each other's data",
        "device_comm/native/direct.c",
        "uint32_t call = comm_call(self);",
        "uint32_t call = 0;",
        ("tests/device_comm/test_shm_divergence.py::test_ranks_in_different_calls_do_not_meet",),
    ),
    Mutant(
        "R1 ranks that differ about sizes do not use each other's data",
        "device_comm/native/comm.c",
        "if (contradicts(self) < s->n) return false;",
        "",
        (
            "tests/device_comm/test_shm_steps.py::"
            "test_ranks_that_differ_about_any_sizes_use_no_data",
        ),
    ),
    Mutant(
        "R1 payloads go on in the rings where those of the plan before have ended",
        "device_comm/native/steps.c",
        "    if (in_rings(s)) s->place = place_of(s, s->begun + 1);",
        "",
        ("tests/device_comm/test_shm_steps.py::test_a_root_may_run_two_steps_ahead_and_no_more",),
    ),
    Mutant(
        "R1 a rank that has nothing to give is not an operation ahead",
        "device_comm/verbs/runner.py",
        "if not self.backend.capabilities.detects_divergence and operation.moves_nothing:",
        "if operation.moves_nothing:",
        (f"{_DIVERGE}[shared memory]",),
    ),
    Mutant(
        "R1 ranks agree on the dimension",
        "device_comm/shm/signature.py",
        "operation.peer if verb in ROOTED else operation.dim,",
        "operation.peer,",
        (f"{_DIVERGE}[torch]",),
    ),
    Mutant(
        "R1 a message without elements is a message",
        "device_comm/shm/transfers.py",
        "            return self._send_empty()",
        "            return True",
        (
            "tests/device_comm/test_shm_pipes.py::"
            "test_a_message_without_elements_is_not_taken_for_the_next_one",
        ),
    ),
    Mutant(
        "R1 a forked child takes nothing that is its parent's",
        "shm_broadcast/process.py",
        "        inherited.after_fork_in_child()",
        "        pass",
        (
            "tests/coordinator/test_group.py::"
            "test_a_forked_child_takes_no_part_and_its_parent_goes_on",
        ),
    ),
    Mutant(
        "R1 no answer holds another call's data, whatever the transport",
        "server/calls/pending_call.py",
        "difference = first_divergence(self.begun)",
        "difference = None if self.begun else first_divergence(self.begun)",
        ("tests/server/test_pool_divergence.py::test_calls_do_not_meet",),
    ),
    Mutant(
        "R1 ranks that differ in a dtype alone get no answer, whatever the transport",
        "device_comm/shm/signature.py",
        "        0 if dtype is None else DTYPE_CODES.get(dtype, 0),",
        "        0,",
        (
            "tests/server/test_pool_divergence.py::test_a_slip_over_torch_is_never_answered",
            "tests/server/test_pool_errors.py::"
            "test_a_collective_of_another_kind_is_named_with_the_odd_rank",
        ),
    ),
    Mutant(
        "F7 calls that the workers had are not made again unasked",
        "server/calls/pending_call.py",
        "if self.done or not self.retry or",
        "if self.done or",
        ("tests/server/test_call_table.py::test_a_restart_fails_all_calls_without_retry",),
    ),
    Mutant(
        "F7 queued calls fail with the generation for which they were accepted",
        "server/calls/call_table.py",
        "self.ended is None) and call.take_back()):",
        "self.ended is None) and (not call.number or call.take_back())):",
        (
            "tests/server/test_pool_restart.py::"
            "test_queued_calls_fail_with_the_workers_that_they_were_accepted_for",
        ),
    ),
    Mutant(
        "F7 calls that wait move to another replica only if they may be made again",
        "server/replicas.py",
        "call.move = self._move if call.retry else None",
        "call.move = self._move",
        (
            "tests/server/test_replicas.py::"
            "test_while_none_works_calls_that_may_move_wait_for_the_first_that_does",
        ),
    ),
    Mutant(
        "F7 calls that may be made again outlive what their neighbour breaks",
        "server/calls/call_table.py",
        "if not failed.consequence and not call.retry:",
        "if not failed.consequence:",
        (
            "tests/server/test_call_table.py::"
            "test_the_error_of_a_call_with_retry_waits_for_the_calls_before_it",
        ),
    ),
    Mutant(
        "F7 a pool that is restarted keeps the workers that leave",
        "server/driver/worker_processes.py",
        "if not (keep and worker.detached)])",
        "if not (keep and worker.detached and False)])",
        (
            "tests/server/test_pool_restart.py::test_workers_that_can_be_restored_keep_what_they_hold",
        ),
    ),
    Mutant(
        "R5 the readers on other hosts outlive those on this one",
        "shm_broadcast/queue/writer.py",
        "            with suppress(_NoReadersError):\n",
        "            with suppress(StopIteration):\n",
        (
            f"{_HERE}/test_queue_mixed_readers.py::"
            "test_one_kind_of_reader_leaves_while_the_writer_waits_amid_a_message",
        ),
    ),
    Mutant(
        "R5 the readers on this host outlive those on others",
        "shm_broadcast/queue/writer.py",
        "        if ring is not None and not ring.has_no_readers():\n",
        "        if ring and not ring.has_no_readers() and not (remote and remote.has_no_readers()):\n",  # noqa: E501
        (
            f"{_HERE}/test_queue_mixed_readers.py::"
            "test_readers_leave_in_any_order_and_the_others_go_on",
        ),
    ),
    Mutant(
        "R5 a message reaches all that are left or none",
        "shm_broadcast/net/writer.py",
        "            self._messages += 1\n",
        "            self._messages += 1\n            self._require_readers(operation)\n",
        (
            f"{_HERE}/test_queue_mixed_readers.py::"
            "test_a_message_at_which_a_reader_is_found_lost_still_reaches_all_others",
        ),
    ),
    Mutant(
        "S1 what is forged is not unpickled",
        "coordinator/messages/wire.py",
        "if not hmac.compare_digest(code, self._code(about, payload)):",
        "if not code:",
        ("tests/coordinator/test_seal.py::test_forged_changed_and_repeated_frames_are_refused",),
    ),
    Mutant(
        "S1 what was sent before is not taken again",
        "coordinator/messages/wire.py",
        "if number != due:",
        "if number < 0:",
        ("tests/coordinator/test_seal.py::test_forged_changed_and_repeated_frames_are_refused",),
    ),
    Mutant(
        "S1 without a secret nothing is unpickled between hosts",
        "coordinator/messages/wire.py",
        "return MessageCodec(pickles=False, called=exchange.called, token=token, in_calls=in_calls)",  # noqa: E501
        "return MessageCodec(called=exchange.called, token=token, in_calls=in_calls)",
        ("tests/coordinator/test_seal.py::test_what_travels_between_hosts",),
    ),
    Mutant(
        "S1 a refusal is no value",
        "coordinator/messages/wire.py",
        "if kind == Kind.REFUSED:",
        "if kind == 0:",
        ("tests/coordinator/test_messages.py::test_every_kind_of_message_arrives",),
    ),
    Mutant(
        "D4 what was begun over sockets goes on in the order it was asked for",
        "device_comm/torch_backend.py",
        "            if before is not None:\n                before.join()\n",
        "",
        ("tests/coordinator/test_messages.py::test_messages_go_on_in_the_background",),
    ),
    Mutant(
        "D4 what was begun through shared memory goes on to its end",
        "device_comm/shm/transfers.py",
        "if tensor is None and self._following is not None:",
        "if tensor is None and self._following is not None and not self._total:",
        ("tests/coordinator/test_messages.py::test_messages_go_on_in_the_background",),
    ),
    Mutant(
        "D4 a small asynchronous send needs no receive, over sockets too",
        "coordinator/messages/transport.py",
        "                if works is None or (copies and comm is cpu):",
        "                if works is None or (copies and comm is not cpu):",
        ("tests/coordinator/test_messages.py::test_messages_go_on_in_the_background",),
    ),
    Mutant(
        "D5 what a blocking send cannot hand over is copied",
        "coordinator/messages/transport.py",
        "comm.isend(x.clone() if copy else x, dst)",
        "comm.isend(x, dst)",
        ("tests/coordinator/test_messages.py::test_every_kind_of_message_arrives",),
    ),
    Mutant(
        "R3 a member that died on another host is named",
        "shm_broadcast/state/table.py",
        "or self.remote.gone(member):",
        "or self.remote.gone(-1):",
        ("tests/coordinator/test_hosts.py::test_a_killed_member_is_named_on_all_hosts",),
    ),
    Mutant(
        "R3 the first failure reaches all hosts",
        "coordinator/remote_boards.py",
        "if board.aborted is None:",
        "if board.aborted is not None:",
        ("tests/coordinator/test_hosts.py::test_an_abort_reaches_all_hosts_with_its_cause",),
    ),
    Mutant(
        "R3 a stopped process does not silence its host",
        "coordinator/hosts.py",
        "if wanted > self._done or age > _DUE_SECONDS * 1e9:",
        "if wanted > self._done or self._board.member == self._members[0]:",
        ("tests/coordinator/test_hosts.py::test_a_stopped_member_does_not_silence_its_host",),
    ),
    Mutant(
        "R3 who has called something else is found out later",
        "device_comm/divergence.py",
        "if ours == theirs.digest(last):",
        "if ours or last:",
        ("tests/coordinator/test_divergence.py::test_ranks_that_have_diverged_get_an_error_soon",),
    ),
    Mutant(
        "R3 who has not is not blamed for what is too long ago to be known",
        "device_comm/call_number.py",
        "return word & _U32 if word >> 32 == number & _U32 else None",
        "return word & _U32",
        ("tests/device_comm/test_divergence.py::test_a_log_too_far_behind_shows_no_difference",),
    ),
    Mutant(
        "R3 groups of one name are not compared with each other",
        "coordinator/messages/wire.py",
        'token = blake2b(b"".join(nonces), digest_size=_TOKEN_BYTES).digest()',
        "token = exchange.name.encode()",
        ("tests/coordinator/test_divergence.py::test_ranks_that_have_not_diverged_get_no_error",),
    ),
    Mutant(
        "R3 who has come to a collective is not late for it",
        "device_comm/divergence.py",
        "if theirs is None or CollectiveLog(bytearray(theirs.log)).count < number:",
        "if theirs is None or theirs.group:",
        ("tests/coordinator/test_hosts.py::test_a_deadline_lists_the_late_ranks_alone",),
    ),
    Mutant(
        "S2 a process that another user has started is not opened",
        "shm_broadcast/segment.py",
        "if set(_user_ids(process)) != {me}:",
        "if me not in _user_ids(process):",
        ("tests/shm_broadcast/test_segment.py::test_another_users_segment_is_not_opened",),
    ),
    Mutant(
        "S2 memory of another user is not opened",
        "shm_broadcast/segment.py",
        "if os.stat(name, dir_fd=process).st_uid != me:",
        "if os.stat(name, dir_fd=process).st_uid < 0:",
        ("tests/shm_broadcast/test_segment.py::test_another_users_segment_is_not_opened",),
    ),
    Mutant(
        "S3 with a secret, members seal what they write into an open store",
        "coordinator/rendezvous.py",
        "if secret is None or isinstance(behind_prefixes(exchange.store), SealedStore):",
        "if secret is None or exchange.size > 1:",
        (f"{_SEALED}::test_the_first_values_are_open_and_all_others_sealed",),
    ),
    Mutant(
        "S3 a value of another process is refused",
        "coordinator/stores.py",
        "if not hmac.compare_digest(mac, sealed[_SALT_BYTES:begin]):",
        "if len(mac) != len(sealed[_SALT_BYTES:begin]):",
        (f"{_SEALED}::test_a_value_of_another_process_is_a_typed_error",),
    ),
    Mutant(
        "S3 a sealed value belongs to its key",
        "coordinator/stores.py",
        "(salt, len(named), named, value)",
        '(salt, 0, b"", value)',
        (f"{_SEALED}::test_a_value_of_another_process_is_a_typed_error[of another key]",),
    ),
    Mutant(
        "S3 each member contributes to the key",
        "coordinator/rendezvous.py",
        'sealed = SealedStore(exchange.store, secret, b"".join(nonces))',
        "sealed = SealedStore(exchange.store, secret)",
        (f"{_SEALED}::test_a_value_of_an_earlier_job_is_refused",),
    ),
    Mutant(
        "S4 a pool on one host opens no socket with an address",
        "coordinator/context.py",
        "over = below = build.shm(wire)",
        "over = below = build.shm(wire)\n            groups.cpu(exchange.deadline)",
        ("tests/server/test_pool_groups.py::test_a_pool_on_the_cpu_opens_no_socket",),
    ),
    Mutant(
        "O1 a wait is said to whoever looks on",
        "shm_broadcast/state/board.py",
        "elif self._published is not None:",
        "elif self._closed and self._published is not None:",
        ("tests/server/test_snapshot.py::test_a_wait_is_published_while_it_lasts",),
    ),
    Mutant(
        "O1 a wait is taken back, however it ends",
        "shm_broadcast/state/board.py",
        "            if began and self._published is not None:",
        "            if began and self._closed and self._published is not None:",
        (
            "tests/server/test_snapshot.py::test_a_wait_that_fails_is_taken_back",
            "tests/server/test_snapshot.py::test_a_wait_is_published_while_it_lasts",
        ),
    ),
    Mutant(
        "O1 a background thread's wait holds nobody up",
        "shm_broadcast/executor.py",
        "NEVER, self._name, self._missing, spin=0, shown=tuple",
        "NEVER, self._name, self._missing, spin=0",
        ("tests/shm_broadcast/test_executor.py::test_a_task_in_the_background_is_not_shown",),
    ),
    Mutant(
        "O2 a program's own signal is left to it",
        "shm_broadcast/state/stacks.py",
        "if catches(os.getpid(), STACK_SIGNAL) and not _written_to:",
        "if os.getpid() < 0:",
        ("tests/server/test_snapshot.py::test_a_program_keeps_the_signal_that_it_uses_itself",),
    ),
    Mutant(
        "O2 a signal is sent only to who catches it",
        "server/inspection/diagnosis.py",
        "if catches(pid, STACK_SIGNAL):",
        "if pid:",
        (
            "tests/server/test_snapshot.py::test_a_process_that_does_not_catch_the_signal_does_not_get_it",
        ),
    ),
    Mutant(
        "O2 a busy process survives that its stack is read",
        "shm_broadcast/state/stacks.py",
        "file=descriptor, all_threads=False",
        "file=descriptor, all_threads=True",
        ("tests/server/test_snapshot.py::test_a_busy_process_writes_its_stack_again_and_again",),
    ),
    Mutant(
        "O3 who waits for nobody is to blame",
        "server/inspection/diagnosis.py",
        "if each.waited_by and not each.waits_for",
        "if each.waited_by",
        ("tests/server/test_diagnosis.py::test_a_chain_leads_to_its_end",),
    ),
    Mutant(
        "O3 who waits for a process that cannot go on is not to blame",
        "server/inspection/diagnosis.py",
        "and not nodes[name].problem",
        "and name",
        ("tests/server/test_diagnosis.py::test_the_processes_that_hold_up_others_come_first",),
    ),
    Mutant(
        "O3 workers are called by their pools",
        "server/inspection/diagnosis.py",
        "named = board.is_pool and pools.count(board.name) == 1",
        "named = False",
        ("tests/server/test_diagnosis.py::test_ranks_are_called_by_their_pools_or_boards",),
    ),
    Mutant(
        "O3 what other hosts see is asked for",
        "server/driver/worker_processes.py",
        "self._seen_elsewhere(deadline)))",
        "()))",
        (_STOPPED_ELSEWHERE,),
    ),
    Mutant(
        "O3 a stack comes whole from a process that had no core meanwhile",
        "shm_broadcast/state/stacks.py",
        "(ran is None or ran - self._ran > _WRITING_NS)",
        "True",
        (
            "tests/server/test_snapshot.py"
            "::test_a_stack_is_whole_when_its_process_has_run_and_written_no_more",
        ),
    ),
    Mutant(
        "O3 a process on another host is no other one of the same pid",
        "server/inspection/diagnosis.py",
        "process = member.status.host, member.status.pid",
        'process = "", member.status.pid',
        (f"{_OTHER_HOSTS}_may_have_the_pid_of_one_here",),
    ),
    Mutant(
        "O4 what is not finished is left out",
        "server/inspection/snapshot.py",
        "if not known:",
        "if not whole:",
        ("tests/server/test_snapshot.py::test_a_board_that_is_not_finished_is_left_out",),
    ),
    Mutant(
        "O5 what a member did is kept until it is overwritten, and not longer",
        "shm_broadcast/state/flight_recorder.py",
        "first = max(sequence() + 2 - kept, 1)",
        "first = 1",
        (f"{_HERE}/test_history.py::test_the_latest_operations_are_kept",),
    ),
    Mutant(
        "O5 an operation ends once, and in its own entry",
        "shm_broadcast/native/history.h",
        "entry->sequence != sequence || entry->end != 0",
        "false",
        (f"{_HERE}/test_history.py::test_the_end_of_an_operation_without_an_entry_is_dropped",),
    ),
    Mutant(
        "O5 what goes on in the background ends when it is done",
        "device_comm/shm/collectives.py",
        "operation.background, operation.ended",
        "operation.background, None",
        (
            "tests/device_comm/test_recorder.py::test_background_operations_are_recorded_until_they_end",
        ),
    ),
    Mutant(
        "H1 a host that is not heard of is lost",
        "server/hosts/link.py",
        "if silence > self._silence:",
        "if silence > 1e9:",
        ("tests/server/test_host_losses.py::test_a_cut_cable_is_named_on_both_hosts",),
    ),
    Mutant(
        "H2 what differs between hosts is found before they work together",
        "server/hosts/link.py",
        "if name in there and there[name] != value:",
        "if name not in there:",
        ("tests/server/test_hosts_meet.py::test_hosts_that_differ_both_say_in_what",),
    ),
    Mutant(
        "H2 so is how many hosts they think there are",
        "server/hosts/place.py",
        'return {"nnodes": str(self.nnodes), **self.facts}',
        "return {**self.facts}",
        ("tests/server/test_hosts_meet.py::test_hosts_that_differ_both_say_in_what[nnodes]",),
    ),
    Mutant(
        "H3 nobody takes the place of a host that lives",
        "server/hosts/link.py",
        "elif known.received_at > pending.received_at:",
        "elif False:",
        (
            "tests/server/test_host_links.py"
            "::test_another_process_is_refused_while_the_first_one_speaks",
        ),
    ),
    Mutant(
        "H4 the workers of a lost host count as ended",
        "server/hosts/remote_hosts.py",
        "                self._workers[rank].end(why)",
        "                pass",
        (
            "tests/server/test_host_losses.py"
            "::test_a_killed_supervisor_is_named_and_its_workers_end",
        ),
    ),
    Mutant(
        "E1 who fails in a set-up tells why",
        "coordinator/rendezvous.py",
        "            self.abort(error)\n            if self.rank == self.keeper",
        "            if self.rank == self.keeper",
        (f"{_EXCHANGE}::test_a_member_that_fails_in_a_set_up_is_the_cause_on_all",),
    ),
    Mutant(
        "E1 who fails in a set-up and keeps the store stays until that is read",
        "coordinator/rendezvous.py",
        "time.sleep(_READ_SECONDS)",
        "pass",
        (
            "tests/coordinator/test_bootstrap.py"
            "::test_why_the_one_that_hosts_the_store_gives_up_is_told_to_the_others",
        ),
    ),
    Mutant(
        "G1 a step that is padded writes nobody else's keys",
        "server/workers/decoder/decoder_model.py",
        "padded = [*rows, *[rows[-1]] * lacking]",
        "padded = [*rows, *[rows[0]] * lacking]",
        (f"{_DECODER}::test_steps_of_fixed_shapes_find_the_same_tokens",),
    ),
    Mutant(
        "G1 nor sees more than its own",
        "server/workers/decoder/decoder_model.py",
        "(self._every <= self._places[:, None])",
        "(self._every <= self._places[:, None] + 1)",
        (f"{_DECODER}::test_steps_of_fixed_shapes_find_the_same_tokens",),
    ),
    Mutant(
        "G1 nor what an ended group has left",
        "server/workers/decoder/decoder_worker.py",
        "cache.clear(wipe=True)",
        "cache.clear()",
        (f"{_DECODER}::test_steps_of_fixed_shapes_see_nothing_that_an_ended_group_left",),
    ),
)
