"""Every error that kvoffload-rs raises, under one base class.

An error says what went wrong, names the field, the job or the slot it is about, and says what to
do. The compiled module raises these same classes.
"""

from __future__ import annotations

from typing import Any


class KvOffloadError(Exception):
    """Base class of all errors of this package.

    Attributes:
        field: the setting or argument the error is about.
        value: the value that was given for it.
        hint: what to do about it.
        job: id of the transfer job concerned.
        slot: number of the host slot concerned.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        hint: str | None = None,
        job: int | None = None,
        slot: int | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.hint = hint
        self.job = job
        self.slot = slot

    def __str__(self) -> str:
        message = super().__str__()
        if not self.hint:
            return message
        return f"{message.rstrip('.')}. {self.hint}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own __reduce__ would lose the keyword-only arguments: engine processes send
        # errors to each other by pickle.
        details = {
            "field": self.field,
            "value": self.value,
            "hint": self.hint,
            "job": self.job,
            "slot": self.slot,
        }
        return _rebuild, (type(self), self.args[0], details)


def _rebuild(kind: type[KvOffloadError], message: str, details: dict[str, Any]) -> KvOffloadError:
    """Makes the error again after pickling."""
    return kind(message, **details)


class ConfigError(KvOffloadError):
    """A setting is wrong, unknown or not supported."""


class CapacityError(ConfigError):
    """The host memory asked for holds no slot, or is more than the machine has."""


class InvalidJobError(KvOffloadError):
    """A job names unknown slots, blocks or groups, or its id is in use. Nothing was submitted."""


class StaleHandleError(KvOffloadError):
    """A pin was released that is not held. Nothing was changed."""


class RequestError(KvOffloadError):
    """The engine named a request that is not known, or twice, or described it in another shape."""


class KeyNotReadyError(KvOffloadError):
    """A load asked for a key that is absent or still being written. Nothing was pinned."""


class TransferError(KvOffloadError):
    """A copy failed, so its bytes did not arrive."""


class TransferTimeoutError(TransferError):
    """A transfer was not over at its deadline. Its slots stay reserved until it is."""


class VerifyError(TransferError):
    """The bytes in a slot are not the bytes that were stored there."""


class WorkerExistsError(KvOffloadError):
    """This process already has a worker for the same engine and rank."""


class CudaUnavailableError(KvOffloadError):
    """There is no CUDA driver or device to use, or the driver is too old."""


class EngineClosedError(KvOffloadError):
    """The worker was shut down, or its CUDA context was lost."""


__all__ = [
    "CapacityError",
    "ConfigError",
    "CudaUnavailableError",
    "EngineClosedError",
    "InvalidJobError",
    "KeyNotReadyError",
    "KvOffloadError",
    "RequestError",
    "StaleHandleError",
    "TransferError",
    "TransferTimeoutError",
    "VerifyError",
    "WorkerExistsError",
]
