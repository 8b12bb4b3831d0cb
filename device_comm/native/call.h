/* The call that a thread carries out: device_comm/call_number.py says what for. */
#ifndef GC_CALL_H
#define GC_CALL_H

#include <stdint.h>

/* 0 in a thread that carries out none. */
extern _Thread_local uint32_t the_call;

#endif
