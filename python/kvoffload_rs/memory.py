"""How much memory this process may use at most: a static figure, the same in all processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MemoryLimit:
    """An upper bound for memory.

    Attributes:
        bytes: the bound.
        source: where it comes from, in words.
    """

    bytes: int
    source: str


def machine_memory(root: Path = Path("/")) -> MemoryLimit | None:
    """The machine's memory or the control group's limit, whichever is less.

    Free memory is not looked at: it changes, and the processes of an engine must agree.

    Args:
        root: where `proc` and `sys` are; for tests.

    Returns:
        The bound, or None if neither can be read.
    """
    limits = [*_total(root), *_cgroup_limits(root)]
    return min(limits, key=lambda limit: limit.bytes, default=None)


def _total(root: Path) -> list[MemoryLimit]:
    for line in _lines(root / "proc/meminfo"):
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name == "MemTotal" and fields and fields[0].isdigit():
            return [MemoryLimit(int(fields[0]) * 1024, "the machine's memory")]
    return []


def _cgroup_limits(root: Path) -> list[MemoryLimit]:
    """Limits of this process's groups and of all groups above, versions 1 and 2."""
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container, the path is often one of the host's that is not mounted here; the
        # groups above it, at least the topmost, are then the container's own.
        group = mount / path.strip("/")
        while True:
            file = group / name
            for text in _lines(file)[:1]:
                # "max", or for version 1 a number beyond any memory, means no limit.
                if text.strip().isdigit():
                    limits.append(MemoryLimit(int(text), f"the limit in {file}"))
            if group == mount:
                break
            group = group.parent
    return limits


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
