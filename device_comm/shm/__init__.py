"""The parts of `device_comm.shm_comm`: collectives and messages through shared memory."""
