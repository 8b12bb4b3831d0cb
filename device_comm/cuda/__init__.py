"""Backends for CUDA devices: kernels over CUDA IPC, NCCL, and torch's symmetric memory."""
