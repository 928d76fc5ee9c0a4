"""The GPU, torch and the compiled module: all that the benchmark needs, or one error."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from kvoffload_rs import errors

CudaUnavailable: type[errors.KvOffloadError] = getattr(
    errors, "CudaUnavailableError", errors.ConfigError
)
"""Raised where there is no usable GPU."""


class Device(NamedTuple):
    """What the measurements run with."""

    torch: Any
    core: Any
    number: int

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return str(self.torch.cuda.get_device_name(self.number))


def open_device(index: int) -> Device:
    """Load torch and the compiled module and check that both can use the GPU.

    Raises:
        CudaUnavailableError: one of them is missing or has no GPU; the message says which.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise _unavailable(f"torch cannot be imported ({error})") from error
    try:
        core = importlib.import_module("kvoffload_rs._core")
    except ImportError as error:
        raise _unavailable(f"the compiled module cannot be imported ({error})") from error
    if not hasattr(core, "CudaWorker"):
        raise _unavailable("this build of kvoffload-rs has no CUDA backend")
    if not core.cuda_available():
        raise _unavailable(core.cuda_unavailable_reason() or "the driver cannot be used")
    if not torch.cuda.is_available():
        raise _unavailable(f"torch {torch.__version__} has no usable GPU")
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise errors.ConfigError(
            f"--device is {index}, and there are {count} GPUs",
            field="device",
            value=index,
            hint=f"Use a number from 0 to {count - 1}.",
        )
    return Device(torch, core, index)


def _unavailable(reason: str) -> errors.KvOffloadError:
    return CudaUnavailable(
        f"no GPU to measure: {reason}",
        field="device",
        hint="The benchmark needs an NVIDIA GPU with its driver, and torch with CUDA.",
    )
