"""Provide `vllm.distributed.device_communicators`, without the transports of single vendors."""
