"""The NCCL backend."""
