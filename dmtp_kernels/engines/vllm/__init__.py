"""DMTP in vLLM: a plugin that adds the speculative method `dmtp`, and ops of this library inside vLLM's own DFlash.

README.md beside this file says how to switch it on and what it replaces.
"""


def register() -> None:
    """Entry point of `vllm.general_plugins`; vLLM calls it in each of its processes."""
    from dmtp_kernels.engines.vllm.plugin import install

    install()
