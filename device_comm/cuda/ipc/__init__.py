"""The CUDA IPC backend, whose kernels access the memory of all devices of a host."""
