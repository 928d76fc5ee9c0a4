"""The vLLM side: a connector, and a spec for vLLM's own `OffloadingConnector`.

`kv_connector_module_path="kvoffload_rs.vllm"` finds `KvOffloadConnector` here, and
`spec_module_path="kvoffload_rs.vllm"` finds `KvOffloadSpec`. Both are loaded on first use, so that
the plugin, which vLLM loads in every process, stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload_rs.vllm.connector import KvOffloadConnector
    from kvoffload_rs.vllm.spec import KvOffloadSpec

__all__ = ["KvOffloadConnector", "KvOffloadSpec"]


def __getattr__(name: str) -> Any:
    if name == "KvOffloadSpec":
        from kvoffload_rs.vllm.spec import KvOffloadSpec

        return KvOffloadSpec
    if name == "KvOffloadConnector":
        from kvoffload_rs.vllm.connector import KvOffloadConnector

        return KvOffloadConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
