"""Memory of this process's children, which with tensor parallelism are the ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

REGION = "memfd:kvoffload"


def children() -> list[int]:
    """Processes that this one started, and those that they started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # The name before it may hold anything, but for the last parenthesis.
                after_name = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(after_name[1])
    found, new = [], [os.getpid()]
    while new:
        new = [process for process, parent in parents.items() if parent in new]
        found += new
    return sorted(found)


def host_memory(processes: list[int]) -> dict[str, float]:
    """What processes use together, in MiB.

    Returns:
        `pss_mib`: all of it, where shared pages count once; `region_mib`: of these, the pages of
        regions that ranks share; `region_ranks`: the processes that have mapped one.
    """
    total = region = ranks = 0
    for process in processes:
        with contextlib.suppress(OSError):
            total += sum(_pss(Path(f"/proc/{process}/smaps_rollup"), everything=True))
            shared = _pss(Path(f"/proc/{process}/smaps"), everything=False)
            region += sum(shared)
            ranks += bool(shared)
    return {
        "pss_mib": round(total / 1024, 1),
        "region_mib": round(region / 1024, 1),
        "region_ranks": ranks,
    }


def _pss(file: Path, *, everything: bool) -> list[int]:
    """KiB of each mapping: of all, or of shared regions."""
    sizes, chosen = [], everything
    for line in file.read_text().splitlines():
        key = line.split(maxsplit=1)[0]
        if not key.endswith(":"):
            chosen = everything or REGION in line
        elif key == "Pss:" and chosen:
            sizes.append(int(line.split()[1]))
    return sizes
