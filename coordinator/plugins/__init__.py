"""What puts this layer inside other engines as they are, without a change to their code.

Each package is for one engine:

    coordinator.plugins.vllm      for  vLLM      by an entry point of its plug-ins
    coordinator.plugins.sglang    for  SGLang    by an entry point of its plug-ins

Both do nothing until the environment variable ``GROUP_COORDINATOR`` is set.
"""
