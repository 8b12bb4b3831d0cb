"""The CUDA IPC backend: its kernels access the device memory of the other ranks on the host."""
