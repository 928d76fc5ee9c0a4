"""The vLLM side: a spec, a manager and a worker for vLLM's own `OffloadingConnector`.

`spec_module_path="kvoffload_rs.vllm"` finds `KvOffloadSpec` here. It is loaded on first use, so
that the plugin, which vLLM loads in every process, stays light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvoffload_rs.vllm.spec import KvOffloadSpec

__all__ = ["KvOffloadSpec"]


def __getattr__(name: str) -> Any:
    if name == "KvOffloadSpec":
        from kvoffload_rs.vllm.spec import KvOffloadSpec

        return KvOffloadSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
