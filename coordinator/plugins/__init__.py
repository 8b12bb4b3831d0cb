"""Install this library in other engines, without a change to their code.

    coordinator.plugins.vllm      for  vLLM      by an entry point of its plug-ins
    coordinator.plugins.sglang    for  SGLang    by an entry point of its plug-ins

Both do nothing unless the environment variable ``GROUP_COORDINATOR`` is set.
"""
