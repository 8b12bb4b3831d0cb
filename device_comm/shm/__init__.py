"""The parts of `device_comm.shm.shm_backend`: collectives and messages through shared memory."""
