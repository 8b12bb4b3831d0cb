/* The ring and its eventcounts under total store order: 1 writer, 2 readers. See README.md.
 *
 * Spin interleaves steps but knows no store buffers, so they are here: a plain store goes into the
 * FIFO buffer of its processor and reaches memory at any later time; a fence, and every atomic
 * read-modify-write, waits for the own buffer to be empty. No process loads a word of which it
 * has a store in its buffer (it keeps such words in a local variable), so loads read memory.
 *
 * A waiter sleeps in the kernel without any time limit. So a wake-up that is lost leaves a
 * process asleep for ever, which spin reports as an invalid end state. The limits of real waits
 * (slices) are only there once a process was killed, and end only when nothing else can happen.
 *
 * Scenarios: plain traffic; -DABORT: any of the three may abort and leave between two messages;
 * -DDEATHS: one of the three is killed at any step. The other defines break the protocol, in one
 * place each. check.py knows them all. */

#define READERS  2
#define RECORD   2 /* cells of a record; all hold the number of its message */

#ifndef CELLS
#define CELLS    3 /* capacity of the ring: every other record wraps */
#endif
#ifndef MESSAGES
#define MESSAGES 3
#endif

#define WRITER   0 /* processes; reader r is process r + 1 */
#define PROCESSES 3

/* Words that are stored plainly: the ring's cells, then these. */
#define PUBLISHED   CELLS
#define CONSUMED(r) (CELLS + 1 + (r))

byte memory[CELLS + 1 + READERS];
chan buffer[PROCESSES] = [RECORD + 2] of { byte, byte };

/* Words that are only changed by atomic read-modify-writes. */
byte sleepers[PROCESSES];
bool abort_word;

/* Whether a process's eventcount differs from the value that the process saw last. All that is ever
 * asked of the counter (2^32 rings within one look are left out). */
bool rung[PROCESSES];

/* The kernel's side. */
bool asleep[PROCESSES];
bool dead[PROCESSES];
bool killed;

proctype store_buffers() {
    byte address, value;
end:
    do
    :: atomic { buffer[0] ? address, value -> memory[address] = value; address = 0; value = 0 }
    :: atomic { buffer[1] ? address, value -> memory[address] = value; address = 0; value = 0 }
    :: atomic { buffer[2] ? address, value -> memory[address] = value; address = 0; value = 0 }
    od
}

#define store(where, what) buffer[me] ! where, what /* gc_store64, release */
#define fence empty(buffer[me])                     /* gc_fence */

#ifdef DEATHS
#define step if :: skip :: atomic { !killed -> killed = true; dead[me] = true; goto gone } fi
#else
#define step skip
#endif

#ifdef ABORT
#define may_fail if :: skip :: abort_all(); goto gone fi
#else
#define may_fail skip
#endif

/* gc_notify_after_fence: wake process `who` if it sleeps, or is about to. */
inline ring(who) {
    step;
    if
    :: sleepers[who] > 0 ->
        step;
#ifndef WAKE_WITHOUT_ADD
        atomic { fence -> rung[who] = true };
        step;
#endif
        asleep[who] = false
    :: else
    fi
}

/* Words.sleep_on: the kernel compares and goes to sleep in one step, or not at all. */
inline sleep_on_own_doorbell() {
    step;
    atomic {
        if
        :: !rung[me] -> asleep[me] = true
        :: else
        fi
    };
#ifdef DEATHS
    if
    :: !asleep[me]
    :: atomic { timeout && killed && !slice_over -> asleep[me] = false; slice_over = true }
    fi
#else
    !asleep[me]
#endif
}

/* Doorbell.wait, first half: announce, look at the eventcount; the predicate comes after. */
inline announce() {
    step;
#ifndef ANNOUNCE_AFTER_PREDICATE
    atomic { fence -> sleepers[me]++ }
#endif
}

inline look_at_doorbell() {
    step;
#ifndef DOORBELL_AFTER_PREDICATE
    rung[me] = false /* seen = load32(eventcount) */
#endif
}

/* Doorbell.wait, second half: the predicate was false. */
inline sleep() {
#ifdef ANNOUNCE_AFTER_PREDICATE
    atomic { fence -> sleepers[me]++ };
#endif
#ifdef DOORBELL_AFTER_PREDICATE
    rung[me] = false;
#endif
    sleep_on_own_doorbell()
#ifdef ANNOUNCE_AFTER_PREDICATE
    ; atomic { fence -> sleepers[me]-- }
#endif
}

inline withdraw() {
    step;
#ifndef ANNOUNCE_AFTER_PREDICATE
    atomic { fence -> sleepers[me]-- }
#endif
}

/* Board.abort: the word by compare-and-swap, then every eventcount. */
inline abort_all() {
    atomic { fence -> abort_word = true };
    ring(0);
    ring(1);
    ring(2)
}

#ifdef IGNORE_ABORT
#define aborted false
#else
#define aborted abort_word
#endif

/* RingWriter.has_room: one load of each reader's position, which may be old. */
inline load_gate() {
    step;
    gate = memory[CONSUMED(0)];
    step;
    atomic {
        if
        :: memory[CONSUMED(1)] < gate -> gate = memory[CONSUMED(1)]
        :: else
        fi
    }
}

#ifdef CAPACITY_OFF_BY_ONE
#define has_room (position + RECORD <= gate + CELLS + 1)
#else
#define has_room (position + RECORD <= gate + CELLS)
#endif

inline write_bytes() {
    step;
    store(position % CELLS, message);
    step;
    store((position + 1) % CELLS, message)
}

proctype writer() {
    byte me = WRITER, message = 1, position, gate;
    bool slice_over;

    do
    :: message > MESSAGES -> break
    :: else ->
        may_fail;
        if
        :: has_room
        :: else -> load_gate()
        fi;
        if
        :: has_room
        :: else ->
            announce();
            do
            :: look_at_doorbell();
                load_gate();
                if
                :: has_room -> break
                :: else
                fi;
                step;
                if
                :: aborted -> goto leave
                :: else
                fi;
#if defined(DEATHS) && !defined(IGNORE_DEATHS)
                step;
                if
                :: dead[1] || dead[2] -> withdraw(); abort_all(); goto gone
                :: else
                fi;
#endif
                sleep()
            od;
            slice_over = false;
            withdraw()
        fi;
#ifdef PUBLISH_BEFORE_BYTES
        step;
        store(PUBLISHED, position + RECORD);
        write_bytes();
#else
        write_bytes();
        step;
        store(PUBLISHED, position + RECORD);
#endif
        position = position + RECORD;
        message++;
        step;
#ifndef NO_FENCE_AFTER_PUBLISH
        fence;
#endif
        ring(1);
        ring(2)
    od;
    goto gone;
leave:
    withdraw();
gone:
    skip
}

inline copy_out() {
    step;
    copy = memory[position % CELLS];
    assert(copy == message);
    step;
    copy = memory[(position + 1) % CELLS];
    assert(copy == message);
    copy = 0
}

proctype reader(byte me) {
    byte message = 1, position, copy;
    bool slice_over;

    do
    :: message > MESSAGES -> break
    :: else ->
        may_fail;
        step;
        if
        :: memory[PUBLISHED] != position
        :: else ->
            announce();
            do
            :: look_at_doorbell();
                step;
                if
                :: memory[PUBLISHED] != position -> break
                :: else
                fi;
                step;
                if
                :: aborted -> goto leave
                :: else
                fi;
#if defined(DEATHS) && !defined(IGNORE_DEATHS)
                step;
                if
                :: dead[WRITER] -> withdraw(); abort_all(); goto gone
                :: else
                fi;
#endif
                sleep()
            od;
            slice_over = false;
            withdraw()
        fi;
#ifdef CONSUME_BEFORE_COPY
        step;
        store(CONSUMED(me - 1), position + RECORD);
        copy_out();
#else
        copy_out();
        step;
        store(CONSUMED(me - 1), position + RECORD);
#endif
        position = position + RECORD;
        message++;
        step;
#ifndef NO_FENCE_AFTER_CONSUME
        fence;
#endif
        ring(WRITER)
    od;
    goto gone;
leave:
    withdraw();
gone:
    skip
}

init {
    atomic {
        run store_buffers();
        run writer();
        run reader(1);
        run reader(2)
    }
}
