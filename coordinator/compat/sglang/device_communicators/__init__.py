"""`sglang.srt.distributed.device_communicators`: what of it is not one vendor's transport."""
