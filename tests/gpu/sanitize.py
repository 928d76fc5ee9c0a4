"""Every way through the staging kernel, to be run under NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py

Fragments of many sizes and alignments are stored and loaded on the staged path, and all bytes are
compared. A machine without a GPU ends it with status 77, as skipped tests do elsewhere.
"""

from __future__ import annotations

import sys

from gpu_kit import Rig, unavailable

#: Vectors of 16, 4 and 1 bytes; parts that end early; fragments that are cut.
PAGES = [2, 4, 16, 100, 1000, 4096, 4097, 4112, 65_536, 65_540, 200_001]


def main() -> int:
    """Store, load and compare."""
    reason = unavailable()
    if reason:
        print(f"skipped: {reason}")
        return 77
    with Rig([PAGES], path="staged", padding=16) as rig:
        rig.done(rig.store(range(12), range(12)))
        rig.done(rig.load(range(12), range(20, 32)))
        rig.check()
        staged = rig.core.stats()["staged_jobs"]
    print(f"bytes are right; {staged} staged jobs")
    return 0 if staged == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
