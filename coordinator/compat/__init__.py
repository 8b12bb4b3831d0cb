"""Provide the names and calls of other engines over `coordinator`: change one import.

    coordinator.compat.vllm      for  vllm.distributed
    coordinator.compat.sglang    for  sglang.srt.distributed

Each package mirrors the module names of one engine. Only `coordinator.plugins` imports this
package.
"""
