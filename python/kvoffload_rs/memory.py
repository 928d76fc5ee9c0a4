"""How much memory this process may use at most: a static figure, the same in all processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryLimit:
    """An upper bound for memory.

    Attributes:
        bytes: the bound.
        source: where it comes from, in words.
    """

    bytes: int
    source: str


def machine_memory() -> MemoryLimit | None:
    """The machine's memory or the tightest control group's limit, whichever is less.

    Free memory is not looked at: it changes, and the processes of an engine must agree.

    Returns:
        The bound, or None if it cannot be read.
    """
    from kvoffload_rs import _core

    try:
        return MemoryLimit(*_core.machine_memory())
    except OSError:
        return None
