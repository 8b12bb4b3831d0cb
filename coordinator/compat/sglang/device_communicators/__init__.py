"""Provide `sglang.srt.distributed.device_communicators`, without transports of single vendors."""
