"""What draftline adds to vLLM: DSpark on the CPU runner, hidden states from CPU machines, threads set from outside.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). On an accelerator vLLM's own DSpark
is used and nothing is touched.
"""

from __future__ import annotations


def register() -> None:
    """Let vLLM's CPU runner accept `method: dspark`. Does nothing on an accelerator; safe to call twice."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from draftline.vllm_plugin import patches

    patches.apply()
