"""KV-cache offloading for vLLM with a Rust core.

Importing this package loads neither the compiled module nor torch, numpy, vLLM or CUDA: vLLM
imports it in every one of its processes, to find the plugin. `Manager`, `HostWorker`, `Request`,
`slot_bytes` and `build_info` load the compiled module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvoffload_rs.errors import (
    CapacityError,
    ConfigError,
    EngineClosedError,
    InvalidJobError,
    KeyNotReadyError,
    KvOffloadError,
    StaleHandleError,
    TransferError,
    TransferTimeoutError,
    VerifyError,
    WorkerExistsError,
)

if TYPE_CHECKING:
    from kvoffload_rs._core import HostWorker, Manager, Request, build_info, slot_bytes

__all__ = [
    "CapacityError",
    "ConfigError",
    "EngineClosedError",
    "HostWorker",
    "InvalidJobError",
    "KeyNotReadyError",
    "KvOffloadError",
    "Manager",
    "Request",
    "StaleHandleError",
    "TransferError",
    "TransferTimeoutError",
    "VerifyError",
    "WorkerExistsError",
    "__version__",
    "build_info",
    "slot_bytes",
]

_FROM_CORE = frozenset({"HostWorker", "Manager", "Request", "build_info", "slot_bytes"})


def __getattr__(name: str) -> Any:
    if name in _FROM_CORE:
        from kvoffload_rs import _core

        return getattr(_core, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("kvoffload-rs")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
