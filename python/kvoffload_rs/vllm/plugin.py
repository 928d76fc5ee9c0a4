"""Entry point of `vllm.general_plugins`: makes `KvOffloadSpec` known to vLLM by name.

vLLM calls `register` in each of its processes, whether offloading is wanted or not. So it hands
over strings only, loads neither the compiled module nor torch, and never raises.

vLLM's factory module imports torch. In a vLLM process torch is there before any plugin runs
(`import vllm` loads it), and the factory then costs some milliseconds. Where torch is not loaded,
this is no vLLM process that could use the name, and nothing is done.
"""

from __future__ import annotations

import logging
import sys

SPEC_NAME = "KvOffloadSpec"
SPEC_MODULE = "kvoffload_rs.vllm.spec"
_FACTORY = "vllm.v1.kv_offload.factory"

# Below vLLM's own logger, which is the one that has a handler.
logger = logging.getLogger("vllm.kvoffload_rs")


def register() -> None:
    """Registers the spec's name, once per process; every failure is logged and swallowed."""
    try:
        _register_spec()
    except Exception:
        # Another vLLM than this package knows. `spec_module_path` still works, and an engine that
        # does not offload must not notice.
        logger.debug("kvoffload: %s could not be registered", SPEC_NAME, exc_info=True)


def _register_spec() -> None:
    if _FACTORY not in sys.modules and "torch" not in sys.modules:
        logger.debug("kvoffload: no vLLM in this process, nothing registered")
        return
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # The factory raises for a name it has. It has ours after a second call, which vLLM allows.
    if SPEC_NAME not in getattr(OffloadingSpecFactory, "_registry", {}):
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)
