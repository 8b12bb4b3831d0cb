"""The names and calls of other engines' copies of this layer, over our own.

Each package mirrors the module names of one engine, so that one import is changed:

    coordinator.compat.vllm      for  vllm.distributed
    coordinator.compat.sglang    for  sglang.srt.distributed

Nothing of ours imports from here but `coordinator.plugins`, which puts it inside these engines.
"""
