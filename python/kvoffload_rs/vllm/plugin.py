"""Entry point of `vllm.general_plugins`: makes our spec and our connector known to vLLM by name.

vLLM calls `register` in each of its processes, whether offloading is wanted or not. So it hands
over strings only, loads neither the compiled module nor torch, and never raises.

vLLM's factory modules import torch. In a vLLM process torch is there before any plugin runs
(`import vllm` loads it), and the factories then cost some milliseconds. Where torch is not loaded,
this is no vLLM process that could use the names, and nothing is done.
"""

from __future__ import annotations

import logging
import sys

SPEC_NAME = "KvOffloadSpec"
SPEC_MODULE = "kvoffload_rs.vllm.spec"
CONNECTOR_NAME = "KvOffloadConnector"
CONNECTOR_MODULE = "kvoffload_rs.vllm.connector"
_FACTORIES = ("vllm.v1.kv_offload.factory", "vllm.distributed.kv_transfer.kv_connector.factory")

# Below vLLM's own logger, which is the one that has a handler.
logger = logging.getLogger("vllm.kvoffload_rs")


def register() -> None:
    """Registers both names, once per process; every failure is logged and swallowed."""
    if "torch" not in sys.modules and not any(name in sys.modules for name in _FACTORIES):
        logger.debug("kvoffload: no vLLM in this process, nothing registered")
        return
    for name, register_one in (
        (SPEC_NAME, _register_spec),
        (CONNECTOR_NAME, _register_connector),
    ):
        try:
            register_one()
        except Exception:
            # Another vLLM than this package knows. The module paths still work, and an engine that
            # does not offload must not notice.
            logger.debug("kvoffload: %s could not be registered", name, exc_info=True)


def _register_spec() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory

    # The factory raises for a name it has. It has ours after a second call, which vLLM allows.
    if SPEC_NAME not in getattr(OffloadingSpecFactory, "_registry", {}):
        OffloadingSpecFactory.register_spec(SPEC_NAME, SPEC_MODULE, SPEC_NAME)


def _register_connector() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in getattr(KVConnectorFactory, "_registry", {}):
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
