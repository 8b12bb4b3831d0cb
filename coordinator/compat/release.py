"""Giving memory back once all groups are closed."""

import gc

import torch


def release_memory(*, shutdown_ray: bool) -> None:
    """Collect garbage and empty the GPU's cache.

    Args:
        shutdown_ray: shut Ray down as well, if this process uses it.
    """
    if shutdown_ray:
        import ray  # noqa: PLC0415 - an optional dependency

        ray.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
