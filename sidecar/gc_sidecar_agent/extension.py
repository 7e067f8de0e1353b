"""vLLM's worker extension, for those who load no plugin: `--worker-extension-cls
gc_sidecar_agent.extension.GcWorkerExtension`. It covers the workers only; the plugin covers every process.
"""

from __future__ import annotations

from gc_sidecar_agent.plugin import register

# vLLM imports this module in each worker right before it makes the worker, so the same hooks as the plugin's
# are in time there. They carry the method; a user's own extension may therefore derive from this class.
register()


class GcWorkerExtension:
    """Empty on purpose: vLLM refuses an extension with any attribute that the worker class has already."""
