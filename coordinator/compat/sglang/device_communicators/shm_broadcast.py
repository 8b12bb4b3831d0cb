"""Provide SGLang's message queue: vLLM's, which has all of its calls."""

from coordinator.compat.vllm.device_communicators.shm_broadcast import Handle, MessageQueue

__all__ = ["Handle", "MessageQueue"]
