"""Collectives on CUDA devices of one host, by kernels that reach into each other's memory."""
