"""Collectives and messages through shared memory: see `device_comm.shm.shm_backend`."""
